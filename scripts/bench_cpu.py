"""Decodes a small released-format checkpoint on the CPU, here and in mlx-vlm, and prints how much faster it is here.

    python scripts/bench_cpu.py [CHECKPOINT] [--numerics released,fp32] [--rounds 3] [--steps 8,32] [--chunk 256,1024]

Three cases, greedy, with a KV cache: tokens per second of decoding at batch 1 and at batch 8 (128 new tokens after
32), and prompt tokens per second up to the first token of a prompt of 1,000. Decoding is what comes after the first
token. Every case has run before it is timed, so that it is compiled; then the engines take turns, and a ratio is one
of two neighbours in time. The exit code is 1 if a ratio's median is below its bar: 1, 2 and 1.

The numerics of both sides are the same: `released` has bfloat16 activations, and FP8 and FP4 round trips of linear
inputs and cached rows; `fp32_all` the round trips with float32 activations; `bf16` and `fp32` no round trips. FP8 and
FP4 weights are expanded in memory on both sides. Where several values of --steps, --expand or --chunk are given, the
combination with the best geometric mean over the cases is taken; mlx-vlm's prefill step is the best of several, too.

mlx-vlm runs in a venv of its own (--other-venv), which is made if it is not there. It cannot take a text-only
checkpoint as it is, nor bfloat16 experts on a CPU; what `_bench_mlx.py` does about it is printed. The Linux wheel of
mlx brings the reference BLAS; a second copy of the engine has the OpenBLAS of its opencv wheel loaded before it.
Ratios are to the faster of the two. Times from a shared machine vary, ratios less so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

import deepinfer_jax as dj
from deepinfer_jax.checkpoint.reader import default_expand
from deepinfer_jax.cli.common import keep_compiled
from deepinfer_jax.text.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[1]
DRIVER = ROOT / "scripts" / "_bench_mlx.py"
TEXT = ROOT / "docs" / "5-guide.md"
MLX_VLM, MLX = "0.7.10", "0.32.4"
MLX_CHUNKS = (2048, 512, 128, 32, 8)
"""Prefill steps to try; the first is mlx-vlm's default."""
SHORT, LONG, BATCH = 32, 1000, 8
MAX_LENGTH = 1024
NUMERICS = {
    "released": dj.Numerics.named("released"),
    "bf16": dj.Numerics("bfloat16", kv_round_trip=False, linear_round_trip=False),
    "fp32_all": dj.Numerics.named("fp32_all"),
    "fp32": dj.Numerics.named("fp32"),
}


class Timing(NamedTuple):
    """Seconds to the first token of every prompt and to the last token, and the tokens of each prompt."""

    first: float
    whole: float
    ids: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured, and how many times faster than the other engine it has to be."""

    name: str
    prompts: list[list[int]]
    new: int
    bar: float

    def speed(self, timing: Timing) -> float:
        """Tokens per second: of the prompt if only one is generated, else of those after the first."""
        if self.new == 1:
            return sum(map(len, self.prompts)) / timing.first
        return len(self.prompts) * (self.new - 1) / (timing.whole - timing.first)


class Engine(Protocol):
    """One of those that take turns."""

    name: str

    def run(self, numerics: str, case: Case) -> Timing: ...


class Ours:
    """`LLM` with one set of options."""

    name = "deepinfer_jax"

    def __init__(self, checkpoint: str, numerics: str, options: dict[str, Any]):
        self.options = options
        self.llm = dj.LLM(
            checkpoint,
            numerics=NUMERICS[numerics],
            max_length=MAX_LENGTH,
            batch_size=BATCH,
            progress=False,
            **options,
        )

    def run(self, numerics: str, case: Case) -> Timing:
        """The first token is timed in runs of its own, since a dispatch gives several: the quickest of three, because
        anything that disturbs such a short run would count as time that decoding did not take."""
        if case.new == 1:
            first, ids = self._timed(case, 1)
            return Timing(first, first, ids)
        first = min(self._timed(case, 1)[0] for _ in range(3))
        return Timing(first, *self._timed(case, case.new))

    def _timed(self, case: Case, new: int) -> tuple[float, list[list[int]]]:
        sampling = dj.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(case.prompts, sampling)
        return time.perf_counter() - start, [list(o.outputs[0].token_ids) for o in outputs]


class Theirs:
    """mlx-vlm in a process of its own."""

    def __init__(self, name: str, python: Path, checkpoint: str, preload: Path | None):
        self.name = name
        self.chunks: dict[tuple[str, str], int] = {}
        env = os.environ | {"HF_HUB_OFFLINE": "1"} | ({"LD_PRELOAD": str(preload)} if preload else {})
        command = [str(python), str(DRIVER), checkpoint]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.about = self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; its message stands above. Removing its venv has it made anew.")
        return json.loads(line)

    def _ask(self, numerics: str, case: Case, chunk: int) -> Timing:
        assert self.process.stdin is not None
        request = {"numerics": numerics, "prompts": case.prompts, "new": case.new, "chunk": chunk}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Timing(**self._read())

    def run(self, numerics: str, case: Case) -> Timing:
        """With the prefill step that was best when a prefill case came first; others have its default."""
        key = numerics, case.name
        if key not in self.chunks:
            tried = {MLX_CHUNKS[0]: 0.0}
            if case.new == 1:
                # The first one is tried again when everything is loaded and compiled.
                tried = {c: self._ask(numerics, case, c).first for c in (*MLX_CHUNKS, MLX_CHUNKS[0])}
            self.chunks[key] = min(tried, key=lambda c: tried[c])
        return self._ask(numerics, case, self.chunks[key])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---------------------------------------------------------------------------------- the other engine's venv


def other_python(venv: Path) -> Path:
    """Python of the other engine's venv, which is made unless it holds the pinned version already."""
    python = venv / "bin" / "python"
    if not list(venv.glob(f"lib/python3*/site-packages/mlx_vlm-{MLX_VLM}.dist-info")):
        packages = [f"mlx-vlm=={MLX_VLM}", f"mlx[cpu]=={MLX}" if sys.platform == "linux" else f"mlx=={MLX}"]
        print(
            f"{venv} has no mlx-vlm {MLX_VLM}: making it with {' and '.join(packages)} (once, a few minutes)",
            flush=True,
        )
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def openblas(venv: Path) -> Path | None:
    """The OpenBLAS that the venv holds by chance."""
    return next(iter(venv.glob("lib/python3*/site-packages/opencv_python.libs/libopenblas*.so")), None)


@contextlib.contextmanager
def others(venv: Path, checkpoint: str) -> Iterator[list[Theirs]]:
    """mlx-vlm as it is installed, and with OpenBLAS where that can be had."""
    python, blas = other_python(venv), openblas(venv) if sys.platform == "linux" else None
    engines = [Theirs("mlx-vlm", python, checkpoint, None)]
    if blas is not None:
        engines.append(Theirs("mlx-vlm+OpenBLAS", python, checkpoint, blas))
    try:
        yield engines
    finally:
        for engine in engines:
            engine.close()


# ------------------------------------------------------------------------------------------- measuring


def make_cases(checkpoint: str, new: int) -> list[Case]:
    """Prompts are pieces of the guide in the checkpoint's own tokens, each after the token that begins a text."""
    config = dj.ModelConfig.from_file(checkpoint)
    tokenizer = TextTokenizer.from_directory(checkpoint, bos_token_id=config.bos_token_id)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    start = [] if config.bos_token_id is None else [config.bos_token_id]
    ids = ids[len(start) :] if ids[: len(start)] == start else ids

    def piece(length: int, number: int) -> list[int]:
        body = length - len(start)
        cut = ids[number * body : (number + 1) * body]
        if len(cut) < body:
            raise SystemExit(f"{TEXT}: {len(ids)} tokens are too few")
        return [*start, *cut]

    return [
        Case("decode, batch 1", [piece(SHORT, 0)], new, 1.0),
        Case(f"decode, batch {BATCH}", [piece(SHORT, i) for i in range(BATCH)], new, 2.0),
        Case(f"prefill, {LONG:,} tokens", [piece(LONG, 0)], 1, 1.0),
    ]


def best_ours(checkpoint: str, numerics: str, cases: Sequence[Case], choices: dict[str, list[Any]]) -> Ours:
    """Our engine, every case compiled, with the best of the options."""
    tried: list[tuple[float, Ours]] = []
    options = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    for some in options:
        if some["expand"] == "default":
            some["expand"] = default_expand(dj.ModelConfig.from_file(checkpoint), NUMERICS[numerics])
        ours = Ours(checkpoint, numerics, some)
        for case in cases:
            ours.run(numerics, case)
        if len(options) == 1:
            return ours
        speeds = [max(case.speed(ours.run(numerics, case)) for _ in range(2)) for case in cases]
        tried.append((float(np.exp(np.mean(np.log(speeds)))), ours))
        print(f"  tried {some}: {', '.join(f'{s:,.0f}' for s in speeds)} tokens/s", flush=True)
    return max(tried, key=lambda t: t[0])[1]


def spread(values: Sequence[float], form: str) -> str:
    """Median (least to most)."""
    low, middle, high = (format(v, form) for v in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def equal_tokens(a: list[list[int]], b: list[list[int]]) -> list[int]:
    """How many leading tokens of each prompt's continuation are equal."""
    return [
        next((i for i, (x, y) in enumerate(zip(p, q, strict=True)) if x != y), len(p))
        for p, q in zip(a, b, strict=True)
    ]


def measure(numerics: str, case: Case, engines: Sequence[Engine], rounds: int) -> bool:
    """Print one line per engine and the ratio; whether it clears its bar."""
    for engine in engines:
        engine.run(numerics, case)
    timings: dict[str, list[Timing]] = {engine.name: [] for engine in engines}
    for _ in range(rounds):
        for engine in engines:
            timings[engine.name].append(engine.run(numerics, case))
    speeds = {name: [case.speed(t) for t in of] for name, of in timings.items()}
    ours, *rest = speeds.values()
    ratios = [o / max(t) for o, *t in zip(ours, *rest, strict=True)]
    met = statistics.median(ratios) >= case.bar
    print(f"  {case.name}")
    for name, values in speeds.items():
        print(f"    {name:18} {spread(values, ',.0f'):>28} tokens/s")
    print(f"    {'ratio':18} {spread(ratios, '.1f'):>28}, bar {case.bar:g}: {'met' if met else 'MISSED'}")
    mine, theirs = (timings[engine.name][-1].ids for engine in engines[:2])
    print(
        f"    equal leading tokens, ours and mlx-vlm's: {', '.join(map(str, equal_tokens(mine, theirs)))}", flush=True
    )
    return met


def main() -> int:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="checkpoints/nano")
    parser.add_argument("--numerics", default="released,fp32", help=f"some of {', '.join(NUMERICS)}")
    parser.add_argument("--rounds", type=int, default=3, help="times that the engines take turns")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate per prompt")
    parser.add_argument("--steps", default="32", help="tokens per dispatch, for instance 8,32")
    parser.add_argument("--chunk", default="256", help="tokens of a prefill call, for instance 256,1024")
    parser.add_argument("--expand", default="default", help="default, none, bfloat16 or float32; several by commas")
    parser.add_argument("--other-venv", type=Path, default=ROOT / "build" / "mlx-venv", help="where mlx-vlm is or goes")
    args = parser.parse_args()
    if not Path(args.checkpoint, "config.json").exists():
        parser.error(f"{args.checkpoint} is no checkpoint directory")

    jax.config.update("jax_platforms", "cpu")
    keep_compiled(None)
    choices: dict[str, list[Any]] = {
        "steps": [int(v) for v in args.steps.split(",")],
        "chunk": [int(v) for v in args.chunk.split(",")],
        "expand": args.expand.split(","),
    }
    cases = make_cases(args.checkpoint, args.new)
    with others(args.other_venv, args.checkpoint) as theirs:
        versions = ", ".join(f"{k} {v}" for k, v in theirs[0].about["versions"].items())
        print(f"{args.checkpoint}, {time.strftime('%Y-%m-%d')}, {cpu()}")
        print(f"deepinfer_jax on jax {jax.__version__}; {versions} ({theirs[0].about['device']})")
        for change in theirs[0].about["changes"]:
            print(f"for mlx-vlm: {change}")
        met = True
        for numerics in args.numerics.split(","):
            print(f"{numerics}: {NUMERICS[numerics]}", flush=True)
            ours = best_ours(args.checkpoint, numerics, cases, choices)
            print(f"  our options: {', '.join(f'{k}={v}' for k, v in ours.options.items())}")
            for case in cases:
                met &= measure(numerics, case, [ours, *theirs], args.rounds)
            steps = {engine.name: engine.chunks[numerics, cases[-1].name] for engine in theirs}
            print(f"  prefill steps: {', '.join(f'{name} {step}' for name, step in steps.items())}")
    return 0 if met else 1


def cpu() -> str:
    """Name of the CPU and how many of its threads this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {threads} threads"


if __name__ == "__main__":
    sys.exit(main())
