"""Calibration of the drafter's confidence head: a temperature and an offset for each drafted position.

The head says how likely each drafted token of a block is accepted if those before it were; products along the block
say how likely it survives. A server that decides by them how much to verify needs them to be true on average.

The head was trained for the rule that judges token by token. Where blocks are judged as a whole, drafts survive longer
than it says. A temperature only moves probabilities to or from one half, so each position has an offset too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from deepinfer_jax.errors import InputError

CONFIDENCE_FILE = "confidence.json"
"""Where a calibration lies, beside the checkpoint."""

VERSION = 2
"""Of the file's format."""

BINS = 10
"""Equal widths of [0, 1]."""

LIMITS = (1 / 8, 8.0)
"""Between which a temperature is searched."""

OFFSET_LIMIT = 8.0
"""An offset is at most this, up or down."""

# Steps of 2.2 %. Each starts from the offset of the one before, so they ascend.
_GRID = 2.0 ** (np.arange(-96, 97) / 32)

Labels = Literal["sampled", "analytic"]
"""What counts as survival of position k, where those before it were accepted: `sampled`, whether it was accepted (1 or
0); `analytic`, how probable that was before it was drafted. Both have the same mean, `analytic` less noise."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What makes probabilities of confidence logits: sigmoid(logit / temperature + offset) at each position.

    Attributes:
        temperatures: Divisors, above 0.
        offsets: As many; what is added after dividing.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]

    @classmethod
    def none(cls, positions: int) -> Scaling:
        """The head as it is."""
        return cls((1.0,) * positions, (0.0,) * positions)


class Outcomes(NamedTuple):
    """What verification said of N drafted blocks of n tokens.

    Attributes:
        confidence: float[N, n] logits of the confidence head.
        accepted: int[N, n]: 1 accepted, 0 rejected, -1 not verified after a rejection, -2 after a draft that would have
            ended the text. These say nothing, whatever became of that draft: to leave out only the blocks in which it
            was accepted would leave out survivors alone.
        analytic: float[N, n]: the probability that a draft is accepted after those before it, known before it is drawn;
            nan where not verified.
    """

    confidence: np.ndarray
    accepted: np.ndarray
    analytic: np.ndarray

    @classmethod
    def join(cls, parts: Iterable[Outcomes]) -> Outcomes:
        """Several, one after the other. Raises InputError for none."""
        parts = list(parts)
        if not parts:
            raise InputError("outcomes: found no prompts, expected at least one")
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class Position(NamedTuple):
    """One position of the block over all rounds that verified it. Means are nan without such a round.

    Attributes:
        verified: Rounds.
        confidence: Mean of the head's probability.
        acceptance: Share that was accepted.
        analytic: Mean of the analytic acceptance.
    """

    verified: int
    confidence: float
    acceptance: float
    analytic: float


class Bin(NamedTuple):
    """Rounds whose prediction falls into one bin: how many, and the means of prediction and label."""

    rounds: int
    predicted: float
    label: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Temperatures and offsets of a confidence head, and how well they do on prompts that they were not fitted on.

    Attributes:
        temperatures, offsets: Of each position, as in `Scaling`.
        ece_before, ece_after: Expected calibration error of survival at each position, of the head as it is and with
            these, on the held-back rounds.
        overall_before, overall_after: Their means, weighted by `counts`.
        counts: Held-back labels of each position.
        fitted: Rounds that temperatures and offsets were fitted on.
        labels: What survival was measured by.
        sampling_temperature: At which the outcomes were drawn. Acceptance depends on it.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    overall_before: float
    overall_after: float
    counts: tuple[int, ...]
    fitted: int
    labels: Labels
    sampling_temperature: float

    @property
    def scaling(self) -> Scaling:
        """What `calibrated` needs."""
        return Scaling(self.temperatures, self.offsets)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the version of the format."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that `load_calibration` reads; an existing one is replaced when the new one is whole. Raises
        InputError when it cannot be written."""
        path = Path(path)
        part = path.with_name(path.name + ".part")
        try:
            part.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from None
        finally:
            part.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------- measuring


def calibrated(logits: Any, scaling: Scaling) -> Any:
    """Probabilities [..., n] that each drafted token is accepted if those before it were.

    Args:
        logits: [..., n] of the confidence head: a numpy or a JAX array, traced or not.
    """
    xp = logits.__array_namespace__()
    temperatures, offsets = (
        xp.asarray(np.asarray(x), dtype=logits.dtype).reshape((1,) * (logits.ndim - 1) + (-1,))
        for x in (scaling.temperatures, scaling.offsets)
    )
    return _sigmoid(logits / temperatures + offsets)


def _sigmoid(x: Any) -> Any:
    """By tanh, which cannot overflow."""
    return (x.__array_namespace__().tanh(x / 2) + 1) / 2


def survival(outcomes: Outcomes, labels: Labels = "sampled") -> np.ndarray:
    """float[N, n]: survival of each position, in [0, 1]; nan beyond a draft that would have ended the text."""
    out = np.where(outcomes.accepted == -2, np.nan, outcomes.accepted == 1)
    return out if labels == "sampled" else np.where(outcomes.accepted >= 0, outcomes.analytic, out)


def reliability(predicted: np.ndarray, label: np.ndarray) -> list[Bin]:
    """The bins of [0, 1] that hold predictions, ascending."""
    count, sums, labels = (np.bincount(_place(predicted), w, BINS) for w in (np.ones(len(label)), predicted, label))
    return [Bin(int(n), float(p / n), float(y / n)) for n, p, y in zip(count, sums, labels, strict=True) if n]


def expected_calibration_error(predicted: np.ndarray, label: np.ndarray) -> float:
    """Mean of |mean prediction - mean label| over `BINS` bins of equal width, weighted by their predictions (Guo et al.
    2017; DeepSpec's evaluation measures the same). nan without any."""
    if not len(predicted):
        return math.nan
    return float(np.abs(np.bincount(_place(predicted), predicted - label, BINS)).sum() / len(predicted))


def _place(predicted: np.ndarray) -> np.ndarray:
    """Number of the bin of each prediction."""
    return np.minimum((predicted * BINS).astype(int), BINS - 1)


def by_position(outcomes: Outcomes) -> list[Position]:
    """What happened at each position."""
    confidence = calibrated(outcomes.confidence, Scaling.none(outcomes.confidence.shape[1]))
    rows = []
    for k in range(outcomes.accepted.shape[1]):
        seen = outcomes.accepted[:, k] >= 0
        values = (confidence[seen, k], outcomes.accepted[seen, k], outcomes.analytic[seen, k])
        rows.append(Position(int(seen.sum()), *(float(v.mean()) if seen.any() else math.nan for v in values)))
    return rows


def errors(outcomes: Outcomes, scaling: Scaling, labels: Labels = "sampled") -> tuple[float, ...]:
    """Expected calibration error of survival at each position."""
    positions = range(outcomes.confidence.shape[1])
    return tuple(expected_calibration_error(*_pairs(outcomes, scaling, labels, k)) for k in positions)


def _pairs(outcomes: Outcomes, scaling: Scaling, labels: Labels, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Predicted survival of position k and its labels, where they are known."""
    predicted = np.cumprod(calibrated(outcomes.confidence.astype(np.float64), scaling), axis=1)[:, k]
    label = survival(outcomes, labels)[:, k]
    known = ~np.isnan(label)
    return predicted[known], label[known]


# ------------------------------------------------------------------------------------------- fitting


def fit_scaling(outcomes: Outcomes, labels: Labels = "sampled") -> Scaling:
    """Sequential scaling (DSpark, section 3.2.1, there by temperatures alone): position by position, the temperature
    with which the product up to there has the least squared error against survival; those before it stay as they were
    found. With each temperature goes the offset that makes the mean prediction the mean label. The head as it is stands
    to choice too, and of equal errors the smallest change wins.

    The calibration error itself sees no more than bins: where all predictions share one, the offset alone makes it 0 at
    any temperature, so it cannot choose.
    """
    label = survival(outcomes, labels)
    logits = outcomes.confidence.astype(np.float64)
    before, found = np.ones(len(logits)), []
    for k in range(logits.shape[1]):
        known = ~np.isnan(label[:, k])
        seen = before[known], logits[known, k], label[known, k]
        temperature, offset = _fit(*seen) if known.any() else (1.0, 0.0)
        found.append((temperature, offset))
        before *= _sigmoid(logits[:, k] / temperature + offset)
    return Scaling(*zip(*found, strict=True))


def _fit(before: np.ndarray, logits: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    """Temperature and offset of a position, from what the product before it predicts."""

    def cost(candidate: tuple[float, float]) -> tuple[float, float, float]:
        temperature, offset = candidate
        error = float(np.mean(np.square(before * _sigmoid(logits / temperature + offset) - label)))
        # Errors that differ in their last digits are equal.
        return round(error, 12), abs(math.log(temperature)), abs(offset)

    # One temperature per step, so that a grid over many rounds needs no more memory than they do.
    candidates, offset = [(1.0, 0.0)], 0.0
    for temperature in _GRID.tolist():
        offset = _offset(before, logits / temperature, float(label.mean()), offset)
        candidates.append((temperature, offset))
    return min(candidates, key=cost)


def _offset(before: np.ndarray, logits: np.ndarray, wanted: float, start: float) -> float:
    """The offset with which before * sigmoid(logits + offset) has the wanted mean, by Newton's method between points
    that are known to be too low and too high; the nearer limit where none has it."""
    low, high, offset = -math.inf, math.inf, start
    for _ in range(100):
        p = _sigmoid(logits + offset)
        each = before * p
        excess, slope = float(each.mean()) - wanted, float((each * (1 - p)).mean())
        low, high = (low, offset) if excess > 0 else (offset, high)
        following = min(max(offset - excess / max(slope, sys.float_info.min), -OFFSET_LIMIT), OFFSET_LIMIT)
        # After a last step this small no other would be seen. At a limit there is none to take.
        if abs(following - offset) < 1e-7:
            return following
        offset = following if low < following < high else (low + high) / 2
    return offset


def calibrate(
    fit: Outcomes, held_back: Outcomes, *, labels: Labels = "sampled", sampling_temperature: float = 1.0
) -> Calibration:
    """Fit temperatures and offsets on some outcomes and measure them on others.

    Raises:
        InputError: A position without a label in either.
    """
    for name, part in (("fit", fit), ("held-back", held_back)):
        known = (~np.isnan(survival(part, labels))).sum(axis=0)
        if not known.all():
            raise InputError(
                f"calibration: found {', '.join(map(str, known))} outcomes of the {len(known)} positions of the {name} "
                "prompts, expected at least 1 each: use more prompts, or more tokens"
            )
    scaling = fit_scaling(fit, labels)
    before = errors(held_back, Scaling.none(len(known)), labels)
    after = errors(held_back, scaling, labels)
    return Calibration(
        temperatures=scaling.temperatures,
        offsets=scaling.offsets,
        ece_before=before,
        ece_after=after,
        overall_before=float(np.average(before, weights=known)),
        overall_after=float(np.average(after, weights=known)),
        counts=tuple(known.tolist()),
        fitted=len(fit.accepted),
        labels=labels,
        sampling_temperature=float(sampling_temperature),
    )


def split(count: int, held_back: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the prompts to fit on and of those to hold back, drawn without an order of theirs.

    Raises:
        InputError: A share that leaves one of both empty.
    """
    if not 0 < held_back < 1:
        raise InputError(f"held-back: found {held_back!r}, expected a share above 0 and below 1")
    if count < 2:
        raise InputError(f"prompts: found {count}, expected at least 2: one to fit on and one to hold back")
    order = np.random.default_rng(seed).permutation(count).tolist()
    held = min(count - 1, max(1, round(count * held_back)))
    return sorted(order[held:]), sorted(order[:held])


# -------------------------------------------------------------------------------------------- files


def load_calibration(path: str | os.PathLike[str], *, block_size: int | None = None) -> Calibration:
    """Read a file that `Calibration.save` wrote.

    Args:
        path: The file, or a directory with a `confidence.json`.
        block_size: `dspark_block_size` of the drafter that it is for.

    Raises:
        InputError: Naming every field that is wrong, with what was found and expected.
    """
    path = Path(path)
    path = path / CONFIDENCE_FILE if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict) or "version" not in values:
        raise InputError(f"{path}: expected an object with a version, as `deepinfer-jax calibrate` writes it")
    version = values.pop("version")
    if version != VERSION:
        raise InputError(f"{path}: version: found {version!r}, expected {VERSION}")
    faults = list(_faults(values, block_size))
    if faults:
        raise InputError(f"{path}: not a calibration", faults)
    checked: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Calibration(**checked)


def _faults(values: dict[str, Any], block_size: int | None) -> Iterable[str]:
    known = [field.name for field in dataclasses.fields(Calibration)]
    yield from (f"{name}: unknown" for name in values if name not in known)
    yield from (f"{name}: missing" for name in known if name not in values)
    temperatures = values.get("temperatures")
    size = block_size or (len(temperatures) if isinstance(temperatures, list) else 0)
    rules = {
        "temperatures": (_number(0, math.inf, open_low=True), "numbers above 0"),
        "offsets": (_number(-math.inf, math.inf), "finite numbers"),
        "ece_before": (_number(0, 1), "numbers from 0 to 1"),
        "ece_after": (_number(0, 1), "numbers from 0 to 1"),
        "counts": (lambda v: _is_whole(v) and v > 0, "whole numbers of at least 1"),
        "overall_before": (_number(0, 1), "a number from 0 to 1"),
        "overall_after": (_number(0, 1), "a number from 0 to 1"),
        "fitted": (lambda v: _is_whole(v) and v > 0, "a whole number of at least 1"),
        "labels": (lambda v: v in get_args(Labels), f"one of {', '.join(get_args(Labels))}"),
        "sampling_temperature": (_number(0, math.inf), "a number of at least 0"),
    }
    for name, (rule, expected) in rules.items():
        value = values.get(name)
        if name in ("temperatures", "offsets", "ece_before", "ece_after", "counts"):
            good = isinstance(value, list) and len(value) == max(size, 1) and all(map(rule, value))
            expected = f"a list of {max(size, 1)} {expected}"
        else:
            good = rule(value)
        if name in values and not good:
            yield f"{name}: found {value!r}, expected {expected}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(low: float, high: float, *, open_low: bool = False) -> Any:
    def rule(value: Any) -> bool:
        # Not math.isfinite, which raises for a whole number that no float can hold.
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        return number and low <= value <= high and not (open_low and value == low)

    return rule


# ------------------------------------------------------------------------------------------ diagram


def figure_class() -> Any:
    """matplotlib's Figure. Raises InputError where it is not installed, so that a long run can find out first."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "diagram: matplotlib is not installed: pip install matplotlib, or do without (--no-diagram)"
        ) from None
    return Figure


def draw_reliability(
    path: str | os.PathLike[str], outcomes: Outcomes, scaling: Scaling, labels: Labels = "sampled"
) -> None:
    """Write a reliability diagram (PNG) of survival: before and after calibration, a line per position.

    Raises:
        InputError: Without matplotlib, or when the file cannot be written.
    """
    figure = figure_class()(figsize=(10, 5.4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    panels[0].set_ylabel("share that survived")
    unchanged = Scaling.none(outcomes.confidence.shape[1])
    for axes, title, used in zip(panels, ("before", "after"), (unchanged, scaling), strict=True):
        axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1)
        for k, error in enumerate(errors(outcomes, used, labels)):
            bins = reliability(*_pairs(outcomes, used, labels, k))
            x, y = [b.predicted for b in bins], [b.label for b in bins]
            (line,) = axes.plot(x, y, linewidth=1.2, label=f"position {k + 1}, ECE {error:.1%}")
            # Areas say how many rounds stand behind a point.
            total = sum(b.rounds for b in bins)
            axes.scatter(x, y, s=[8 + 150 * b.rounds / total for b in bins], color=line.get_color())
        axes.set(title=f"{title} calibration", xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.legend(loc="upper left", fontsize=8)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
