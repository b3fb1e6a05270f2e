"""Temperatures and offsets of the head are found where they are known, and judged on what they were not fitted on."""

import builtins
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.calibration import (
    CONFIDENCE_FILE,
    OFFSET_LIMIT,
    Calibration,
    Outcomes,
    Scaling,
    by_position,
    calibrate,
    calibrated,
    draw_reliability,
    errors,
    expected_calibration_error,
    fit_scaling,
    load_calibration,
    reliability,
    split,
    survival,
)

NAN = math.nan
TRUE = Scaling((1.6, 2.2, 1.0, 0.7, 1.3), (0.0, 0.4, -0.3, 0.6, 1.0))


def of(*temperatures):
    """A scaling without offsets."""
    return Scaling(temperatures, (0.0,) * len(temperatures))


def drawn(rounds, scaling, seed=0, end=0.02, mean=3.0):
    """Outcomes of a head that is right once its logits are scaled. Some texts end in a block."""
    rng = np.random.default_rng(seed)
    n = len(scaling.temperatures)
    logits = rng.normal(mean, 2.0, (rounds, n))
    p = logistic(logits, scaling)
    taken, ends = rng.random((rounds, n)) < p, rng.random((rounds, n)) < end
    verified, beyond = before(~taken), before(ends)
    accepted = np.where(~beyond, -2, np.where(verified, taken, -1))
    return Outcomes(logits.astype(np.float32), accepted, np.where(accepted >= 0, p, np.nan))


def logistic(logits, scaling):
    return 1 / (1 + np.exp(-logits / np.array(scaling.temperatures) - np.array(scaling.offsets)))


def before(events):
    """Where none of a block's events has happened yet, before each position."""
    return np.cumsum(events, axis=1) - events == 0


@pytest.fixture(scope="module")
def plenty():
    return drawn(40_000, TRUE), drawn(40_000, TRUE, seed=1)


# ---------------------------------------------------------------------------------------------- fitting


@pytest.mark.parametrize("labels", ["sampled", "analytic"])
def test_the_true_temperatures_and_offsets_are_found(plenty, labels):
    found = fit_scaling(plenty[0], labels)
    # A step of the grid is 2.2 %; the rest is the noise of 40,000 blocks, of which fewer and fewer survive.
    for k, allowed in enumerate((0.05, 0.05, 0.1, 0.2, 0.2)):
        assert abs(math.log(found.temperatures[k] / TRUE.temperatures[k])) < allowed, (found, TRUE)
        # An offset trades with the temperature: at the middle of the logits both move a probability alike.
        assert abs(found.offsets[k] - TRUE.offsets[k]) < 3 * allowed, (found, TRUE)


@pytest.mark.parametrize("labels", ["sampled", "analytic"])
@pytest.mark.parametrize("offset", [-1.0, 0.5, 1.5])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.6])
def test_a_true_offset_is_found_with_its_temperature(temperature, offset, labels):
    # Logits around 0, so that probabilities are in every bin.
    found = fit_scaling(drawn(40_000, Scaling((temperature,), (offset,)), mean=0.0), labels)
    assert abs(math.log(found.temperatures[0] / temperature)) < 0.05, found
    assert abs(found.offsets[0] - offset) < 0.05, found


def whole(count=4000, temperatures=(0.5, 2**0.25, 1.0, 0.25, 4.0), offsets=(0.5, -0.8, 1.2, -0.4, 0.3)):
    """Outcomes without noise: labels are the true survival of whole blocks."""
    true = Scaling(temperatures, offsets)
    logits = np.random.default_rng(0).normal(1, 2, (count, len(offsets)))
    return Outcomes(logits, np.ones(logits.shape, int), np.cumprod(logistic(logits, true), axis=1)), true


def test_without_noise_temperatures_and_offsets_of_a_whole_block_are_found_exactly():
    outcomes, true = whole()
    found = fit_scaling(outcomes, "analytic")
    assert found.temperatures == true.temperatures
    np.testing.assert_allclose(found.offsets, true.offsets, atol=1e-6)


@pytest.mark.parametrize("labels", ["sampled", "analytic"])
def test_with_an_offset_mean_prediction_and_mean_label_agree(labels):
    # Far from true, and with enough blocks that survive, so that no position stays as it is or stops at a limit.
    few = drawn(3000, Scaling((0.5, 3.0, 2.0), (1.0, -1.0, 1.5)), seed=4, mean=0.0)
    found, label = fit_scaling(few, labels), survival(few, labels)
    for k, predicted in enumerate(np.cumprod(calibrated(few.confidence.astype(float), found), axis=1).T):
        known = ~np.isnan(label[:, k])
        assert found.offsets[k] != 0
        assert predicted[known].mean() == pytest.approx(label[known, k].mean(), abs=1e-9)


def test_no_temperature_does_what_an_offset_does():
    """The control: the same head with the best temperature alone stays wrong."""
    low = Scaling((1.0,), (-1.5,))
    fit, held = drawn(40_000, low), drawn(40_000, low, seed=1)
    assert errors(held, fit_scaling(fit))[0] < 0.01
    assert min(errors(held, of(t))[0] for t in 2.0 ** np.linspace(-3, 3, 97)) > 0.03


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("true", [0.5, 1.0, 2**0.25, 4.0])
def test_without_noise_a_temperature_of_the_grid_is_found_exactly(place, true):
    """Labels are the true probabilities, and the positions before are sure."""
    logits = np.full((2000, 3), 60.0)
    logits[:, place] = np.random.default_rng(0).normal(1, 2, 2000)
    p = 1 / (1 + np.exp(-logits / np.where(np.arange(3) == place, true, 1.0)))
    exact = Outcomes(logits, np.ones((2000, 3), int), p)
    assert fit_scaling(exact, "analytic").temperatures[place] == true


@pytest.mark.parametrize("labels", ["sampled", "analytic"])
def test_held_back_rounds_are_better_calibrated_after_than_before(plenty, labels):
    made = calibrate(*plenty, labels=labels, sampling_temperature=0.7)
    assert made.overall_after < 0.01 < 0.03 < made.overall_before
    for k in range(5):
        assert made.ece_after[k] < made.ece_before[k]
    assert made.counts == tuple((~np.isnan(survival(plenty[1]))).sum(axis=0).tolist())
    assert (made.fitted, made.labels, made.sampling_temperature) == (40_000, labels, 0.7)
    assert made.overall_after == pytest.approx(np.average(made.ece_after, weights=made.counts))


def test_what_is_calibrated_stays_as_it_is():
    made = calibrate(drawn(40_000, Scaling.none(3)), drawn(40_000, Scaling.none(3), seed=1))
    assert all(abs(math.log(t)) < 0.15 for t in made.temperatures)
    assert made.overall_before < 0.01


def test_the_temperatures_of_another_head_would_not_do(plenty):
    """The control: calibration error sees temperatures that are wrong."""
    other = Scaling(tuple(2 * t for t in TRUE.temperatures), TRUE.offsets)
    assert min(errors(plenty[1], other)) > 2 * max(errors(plenty[1], TRUE))


def test_positions_are_fitted_one_after_the_other(plenty):
    """A block cut off behind a position gives the same temperatures up to there."""
    short = Outcomes(*(x[:, :2] for x in plenty[0]))
    whole = fit_scaling(plenty[0])
    assert fit_scaling(short) == Scaling(whole.temperatures[:2], whole.offsets[:2])


def test_equal_errors_choose_the_temperature_nearest_to_one():
    # Confidences of one half are one half at every temperature.
    even = Outcomes(np.zeros((50, 2), np.float32), np.zeros((50, 2), int), np.zeros((50, 2)))
    assert fit_scaling(even).temperatures == (1.0, 1.0)


def test_of_equal_errors_the_smallest_change_wins():
    # The same prediction for every block can be made true at every temperature, but for its last digits.
    same = Outcomes(np.full((50, 1), 1.7), np.repeat([1, 0], [33, 17])[:, None], np.zeros((50, 1)))
    found = fit_scaling(same)
    assert found.temperatures == (1.0,)
    assert found.offsets == pytest.approx([math.log(33 / 17) - 1.7])


def test_a_head_that_is_true_stays_exactly_as_it_is():
    outcomes, none = whole(temperatures=(1.0,) * 3, offsets=(0.0,) * 3)
    assert fit_scaling(outcomes, "analytic") == none == Scaling.none(3)


def test_an_offset_goes_no_further_than_its_limit():
    never, always = (Outcomes(np.zeros((50, 1)), np.full((50, 1), a), np.zeros((50, 1))) for a in (0, 1))
    assert fit_scaling(never) == Scaling((1.0,), (-OFFSET_LIMIT,))
    assert fit_scaling(always) == Scaling((1.0,), (OFFSET_LIMIT,))
    sure = Outcomes(np.full((50, 2), 800.0), np.ones((50, 2), int), np.ones((50, 2)))
    assert fit_scaling(sure) == Scaling.none(2)


def test_a_position_without_labels_stays_as_it_is(plenty):
    few = Outcomes(*(x[:500] for x in plenty[0]))
    found = fit_scaling(few._replace(accepted=np.where(np.arange(5) > 2, -2, few.accepted)))
    assert (found.temperatures[3:], found.offsets[3:]) == ((1.0, 1.0), (0.0, 0.0))


def squared_error(outcomes, scaling):
    """Of the first position."""
    predicted, label = calibrated(outcomes.confidence.astype(float), scaling)[:, 0], survival(outcomes)[:, 0]
    return np.nanmean((predicted - label) ** 2)


def test_the_first_position_never_gets_worse_on_what_it_was_fitted_on():
    for seed in range(5):
        few = drawn(30, of(0.5, 3.0), seed=seed)
        assert squared_error(few, fit_scaling(few)) <= squared_error(few, Scaling.none(2))
    # So few rounds of a head that is true that an offset for their mean alone would be worse for some.
    for seed in range(60):
        few = drawn(8, Scaling.none(1), seed=seed, mean=0.0)
        assert squared_error(few, fit_scaling(few)) <= squared_error(few, Scaling.none(1))


def test_a_head_that_is_nearly_sure_keeps_telling_blocks_apart():
    """Nearly all predictions share a bin, so that the calibration error would be content with a constant."""
    found = fit_scaling(drawn(40_000, Scaling((1.0,), (1.5,))))
    assert abs(math.log(found.temperatures[0])) < 0.2 and abs(found.offsets[0] - 1.5) < 0.3


# ---------------------------------------------------------------------------------------------- measuring

SMALL = Outcomes(
    np.array([[2.0, 0.0], [1.0, -1.0], [0.5, 3.0], [0.0, 1.0]], np.float32),
    np.array([[1, 1], [1, 0], [0, -1], [1, -2]]),
    np.array([[0.9, 0.6], [0.8, 0.3], [0.4, NAN], [0.7, NAN]]),
)


def test_survival_is_lost_by_a_rejection_and_unknown_after_a_drafted_end():
    np.testing.assert_array_equal(survival(SMALL), [[1, 1], [1, 0], [0, 0], [1, NAN]])
    np.testing.assert_array_equal(survival(SMALL, "analytic"), [[0.9, 0.6], [0.8, 0.3], [0.4, 0], [0.7, NAN]])


def test_positions_are_summed_up_over_the_rounds_that_verified_them():
    first, second = by_position(SMALL)
    assert (first.verified, second.verified) == (4, 2)
    assert (first.acceptance, second.acceptance) == (0.75, 0.5)
    assert (first.analytic, second.analytic) == pytest.approx((0.7, 0.45))
    assert second.confidence == pytest.approx((0.5 + 1 / (1 + math.e)) / 2)
    none = by_position(Outcomes(*(x[:0] for x in SMALL)))
    assert none[0].verified == 0 and math.isnan(none[0].acceptance)


def test_the_error_is_that_of_ten_bins_of_equal_width():
    predicted = np.array([0.05, 0.01, 0.95, 0.91, 1.0, 0.5])
    label = np.array([0.0, 1.0, 1.0, 1.0, 0.0, 0.5])
    # By hand: |0.06 - 1| + |2.86 - 2| + 0, over 6.
    assert expected_calibration_error(predicted, label) == pytest.approx((0.94 + 0.86) / 6)
    assert [b.rounds for b in reliability(predicted, label)] == [2, 1, 3]
    assert reliability(predicted, label)[2].label == pytest.approx(2 / 3)
    assert math.isnan(expected_calibration_error(predicted[:0], label[:0]))


def test_calibrated_is_the_logistic_function_of_the_scaled_logit():
    logits = np.array([[[-200.0, 0.0], [3.0, 700.0]]], np.float32)
    scaling = Scaling((2.0, 4.0), (0.5, 0.0))
    want = [[[1 / (1 + math.exp(99.5)), 0.5], [1 / (1 + math.exp(-2)), 1]]]
    np.testing.assert_allclose(calibrated(logits, scaling), want, atol=1e-6)
    # The same in a program, on the device.
    on_device = jax.jit(lambda x: calibrated(x, scaling))(jnp.asarray(logits))
    np.testing.assert_allclose(on_device, want, atol=1e-6)
    assert calibrated(logits, scaling).dtype == on_device.dtype == np.float32


def test_prompts_are_split_by_the_seed_alone_and_none_is_in_both():
    fit, held = split(11, 0.5, 3)
    assert sorted(fit + held) == list(range(11)) and abs(len(fit) - len(held)) == 1
    assert split(11, 0.5, 3) == (fit, held) != split(11, 0.5, 4)
    assert [len(part) for part in split(2, 0.01, 0)] == [1, 1] == [len(part) for part in split(2, 0.99, 0)]
    assert len(split(100, 0.2, 0)[1]) == 20
    with pytest.raises(dj.DeepInferError, match="prompts: found 1, expected at least 2"):
        split(1, 0.5, 0)
    for share in (0, 1, -0.1):
        with pytest.raises(dj.DeepInferError, match=rf"held-back: found {share}, expected a share above 0"):
            split(9, share, 0)


def test_a_position_without_outcomes_is_an_error(plenty):
    ended = plenty[0]._replace(accepted=np.where(np.arange(5) > 2, -2, 1) * np.ones((40_000, 1), int))
    with pytest.raises(
        dj.DeepInferError, match="found 40000, 40000, 40000, 0, 0 outcomes of the 5 positions of the held"
    ):
        calibrate(plenty[0], ended)
    with pytest.raises(dj.DeepInferError, match="found no prompts"):
        Outcomes.join([])


# -------------------------------------------------------------------------------------------------- files


@pytest.fixture
def made():
    return Calibration(
        (1.5, 2.0), (0.5, -0.25), (0.04, 0.05), (0.01, 0.02), 0.045, 0.015, (100, 90), 110, "sampled", 1.0
    )


def test_a_saved_calibration_is_read_back(made, tmp_path):
    made.save(tmp_path / CONFIDENCE_FILE)
    assert load_calibration(tmp_path) == load_calibration(tmp_path / CONFIDENCE_FILE, block_size=2) == made
    assert json.loads((tmp_path / CONFIDENCE_FILE).read_text())["version"] == 2
    assert [p.name for p in tmp_path.iterdir()] == [CONFIDENCE_FILE]
    with pytest.raises(dj.DeepInferError, match="No such file or directory"):
        made.save(tmp_path / "nowhere" / "x.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 1}, "version: found 1, expected 2"),
        ({"temperatures": [1.5, 0]}, r"temperatures: found \[1.5, 0\], expected a list of 2 numbers above 0"),
        ({"temperatures": [1.5, "2"]}, "temperatures: found .*expected a list of 2 numbers"),
        ({"temperatures": []}, r"temperatures: found \[\], expected a list of 1"),
        ({"temperatures": 1.5}, "temperatures: found 1.5, expected a list"),
        ({"temperatures": [NAN, 1]}, "temperatures: found"),
        ({"offsets": [0.5]}, r"offsets: found \[0.5\], expected a list of 2 finite numbers"),
        ({"offsets": [0.5, math.inf]}, "offsets: found"),
        ({"offsets": [0.5, NAN]}, "offsets: found"),
        ({"offsets": [0.5, "0"]}, "offsets: found"),
        ({"offsets": [True, 0]}, "offsets: found"),
        ({"offsets": [0, -(10**400)]}, "offsets: found"),
        ({"offsets": 0.5}, "offsets: found 0.5, expected a list"),
        ({"offsets": ...}, "offsets: missing"),
        ({"ece_after": [0.1]}, r"ece_after: found \[0.1\], expected a list of 2 numbers from 0 to 1"),
        ({"ece_before": [0.1, 1.5]}, "ece_before: found"),
        ({"counts": [10, 0]}, r"counts: found \[10, 0\], expected a list of 2 whole numbers of at least 1"),
        ({"counts": [10, True]}, "counts: found"),
        ({"overall_after": None}, "overall_after: found None, expected a number from 0 to 1"),
        ({"fitted": 1.5}, "fitted: found 1.5, expected a whole number"),
        ({"labels": "hard"}, "labels: found 'hard', expected one of sampled, analytic"),
        ({"sampling_temperature": -1}, "sampling_temperature: found -1, expected a number of at least 0"),
        ({"extra": 1}, "extra: unknown"),
        ({"fitted": ...}, "fitted: missing"),
    ],
)
def test_a_file_with_a_fault_names_it(made, tmp_path, changes, said):
    values = {**made.to_dict(), **changes}
    file = tmp_path / CONFIDENCE_FILE
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    with pytest.raises(dj.DeepInferError, match=said) as error:
        load_calibration(tmp_path)
    assert str(file) in str(error.value)


def test_a_calibration_of_another_drafter_is_refused(made, tmp_path):
    made.save(tmp_path / "c.json")
    with pytest.raises(dj.DeepInferError, match=r"temperatures: found \[1.5, 2.0\], expected a list of 5 numbers"):
        load_calibration(tmp_path / "c.json", block_size=5)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"{", "not JSON"), (b"\xff", "not JSON"), (b"[]", "expected an object with a version"), (None, "No such file")],
)
def test_what_is_no_calibration_is_named(tmp_path, content, said):
    file = tmp_path / "c.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(dj.DeepInferError, match=f"c.json: {said}"):
        load_calibration(file)


# ------------------------------------------------------------------------------------------------ diagram


def test_the_diagram_is_a_picture(plenty, tmp_path):
    draw_reliability(tmp_path / "c.png", Outcomes(*(x[:500] for x in plenty[1])), TRUE)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(dj.DeepInferError, match="No such file or directory"):
        draw_reliability(tmp_path / "nowhere" / "c.png", SMALL, Scaling.none(2))


def test_without_matplotlib_the_diagram_says_what_is_missing(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(dj.DeepInferError, match="matplotlib is not installed: pip install matplotlib"):
        draw_reliability(tmp_path / "c.png", SMALL, Scaling.none(2))


def test_a_calibration_cannot_be_changed(made):
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.fitted = 1
