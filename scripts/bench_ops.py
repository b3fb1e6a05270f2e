"""Each op with a custom call at the sizes of the released model: time, bytes, share of the copy bandwidth.

    python scripts/bench_ops.py [--backend cuda] [--batch 1,16,64,256] [--json FILE] [--picture FILE]

A program makes many calls of an op on inputs of their own, as a step does; its time is divided by their number. The
bandwidth of a copy, and the least call there is, are measured in the same run. Bytes are what must be read and written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.formats import quantize_weight, row_bytes
from deepinfer_jax.kernels import Backend, Kernels
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.custom_call import unavailable
from deepinfer_jax.ops.finish_rows import finish_rows
from deepinfer_jax.ops.linear import quantized_linear
from deepinfer_jax.ops.moe import choose_experts, expert_activation
from deepinfer_jax.ops.rows import RowLayout

RANDOM = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Case:
    """An op at one size.

    Attributes:
        call: (backend, *arrays) -> arrays.
        inputs: Fresh arrays for one call.
        bytes: Read and written by one call.
    """

    op: str
    name: str
    call: Callable[..., Any]
    inputs: Callable[[], tuple]
    bytes: int


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random activations."""
    return jnp.asarray(RANDOM.standard_normal(shape, np.float32), dtype)


def finish_case(tokens: int, width: int, rope: int, fmt: Any) -> Case:
    """Norm, rotation, packing and write of `tokens` rows."""
    layout, stored = RowLayout(width, fmt, jnp.bfloat16), row_bytes(fmt, width)

    def inputs() -> tuple:
        table = (jnp.ones((tokens, rope // 2)), jnp.zeros((tokens, rope // 2)))
        index = jnp.asarray(RANDOM.permutation(tokens), jnp.int32)
        return normal(tokens, width), jnp.ones(width), table, index, jnp.zeros((tokens, stored), jnp.uint8)

    def call(backend: Backend, x: jax.Array, weight: jax.Array, table: Any, index: jax.Array, pool: jax.Array) -> Any:
        return finish_rows(x, weight, table, layout, 1e-6, index, pool, backend=backend)

    size = tokens * (2 * width + 4 * rope + 4 + 2 * stored)
    return Case("finish_rows", f"{fmt} rows of {width}", call, inputs, size)


def gate_case(tokens: int) -> Case:
    """The choice of 6 of 384 experts, without the product before it."""
    bias = jnp.zeros((1, 384))

    def call(backend: Backend, logits: jax.Array) -> Any:
        return choose_experts(logits, bias, top_k=6, scale=2.5, backend=backend)

    return Case("gate", "6 of 384", call, lambda: (normal(tokens, 384, dtype=jnp.float32),), tokens * (4 * 384 + 48))


def swiglu_case(tokens: int) -> Case:
    """The activations of six experts a token."""
    rows, width = 6 * tokens, 2304

    def call(backend: Backend, gate_up: jax.Array, weight: jax.Array) -> Any:
        kernels = Kernels(swiglu=backend)
        return expert_activation(gate_up, weight, 10.0, dataclasses.replace(Numerics(), kernels=kernels))

    size = rows * (4 * width + row_bytes("fp8", width) + 4)
    return Case("swiglu", f"{rows} rows of {width}", call, lambda: (normal(rows, 2 * width), jnp.ones(rows)), size)


def linear_case(tokens: int) -> Case:
    """One FP8 projection, 1,792 x 5,120."""
    w = quantize_weight(normal(1792, 5120, dtype=jnp.float32), "fp8_block")

    def call(backend: Backend, x: jax.Array) -> Any:
        return quantized_linear(x, w, dataclasses.replace(Numerics(), kernels=Kernels(linear=backend)))

    size = w.record.size + tokens * 2 * (5120 + 1792)
    return Case("linear", "FP8 1792 x 5120", call, lambda: (normal(tokens, 5120),), size)


def cases(tokens: int) -> list[Case]:
    """All ops for a batch of so many tokens."""
    return [
        finish_case(tokens, 512, 64, "fp8"),
        finish_case(tokens, 512, 64, "fp4_e4m3"),
        finish_case(tokens, 128, 64, "fp4_e8m0"),
        gate_case(tokens),
        swiglu_case(tokens),
        linear_case(tokens),
    ]


def seconds(step: Callable, arguments: Any, repeats: int) -> float:
    """Median time of a compiled step."""
    for _ in range(2):
        jax.block_until_ready(step(arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def per_call(case: Case, backend: Backend, calls: int, repeats: int) -> float:
    """Time of one call among `calls` in a program."""
    arguments = [case.inputs() for _ in range(calls)]
    step = jax.jit(lambda inputs: [case.call(backend, *one) for one in inputs])
    return seconds(step, arguments, repeats) / calls


def copy_bandwidth(size: int, repeats: int) -> float:
    """Bytes per second, read and written, of adding 1 to an array."""
    x = jnp.zeros(size // 4, jnp.float32)
    return 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x, repeats)


def picture(rows: list[dict[str, Any]], bandwidth: float, file: Path) -> None:
    """Bytes against time, with the line of the copy bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5))
    for op in dict.fromkeys(row["op"] for row in rows):
        points = sorted((row["bytes"], row["us"]) for row in rows if row["op"] == op)
        axes.loglog(*zip(*points, strict=True), "o", label=op)
    sizes = np.array([min(row["bytes"] for row in rows), max(row["bytes"] for row in rows)])
    axes.loglog(sizes, sizes / bandwidth * 1e6, label="copy bandwidth")
    axes.set(xlabel="bytes of a call", ylabel="microseconds")
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", default="1,16,64,256")
    parser.add_argument("--calls", type=int, default=20, help="calls in a program")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--copy-bytes", type=int, default=1 << 28)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    bandwidth = copy_bandwidth(args.copy_bytes, args.repeats)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    print(
        "| op | batch | us | bytes | share of copy bandwidth | reference, us |\n| --- | --- | --- | --- | --- | --- |"
    )
    rows = []
    for batch in map(int, args.batch.split(",")):
        for case in cases(batch):
            if unavailable(args.backend, case.op) is not None:
                continue
            time_us, reference_us = (
                1e6 * per_call(case, backend, args.calls, args.repeats) for backend in (args.backend, "reference")
            )
            share = case.bytes / (time_us * 1e-6) / bandwidth
            rows.append({"op": case.op, "case": case.name, "batch": batch, "us": time_us, "bytes": case.bytes,
                         "share": share, "reference_us": reference_us})  # fmt: skip
            cells = (f"{case.op}, {case.name}", batch, f"{time_us:.1f}", f"{case.bytes:,}", f"{share:.2f}")
            print("|", *(f"{cell} |" for cell in (*cells, f"{reference_us:.1f}")), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"copy": bandwidth, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if args.picture:
        picture(rows, bandwidth, args.picture)


if __name__ == "__main__":
    main()
