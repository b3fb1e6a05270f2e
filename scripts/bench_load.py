"""Measures how much host memory reading a checkpoint takes beside its result, and how fast it is.

Writes a checkpoint of one real-width layer (random bytes, `--experts` of the 384 experts), reads it in a fresh
process per piece size, and prints the peak of the process above its size before reading plus the result.

    python scripts/bench_load.py [--experts 48] [--directory DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.reader import THREADS, load_params
from deepinfer_jax.checkpoint.safetensors import DTYPES
from deepinfer_jax.checkpoint.safetensors_writer import LazyTensor, write_checkpoint_files
from deepinfer_jax.checkpoint.table import tensor_table
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layer_slice import slice_layers

RUNTIME_MIB = 200
"""What the runtime takes for the programs that place pieces, and the allocator keeps, whatever the piece size."""


def make_config(experts: int) -> ModelConfig:
    """Layer 3 of the released model with fewer experts."""
    config = slice_layers(ModelConfig.named("deepseek_v41_flash"), 3, 3)
    return dataclasses.replace(config, text_config=dataclasses.replace(config.text_config, n_routed_experts=experts))


def write(directory: Path, config: ModelConfig) -> None:
    """A checkpoint of random finite bytes."""
    rng = np.random.default_rng(0)

    def tensor(dtype: np.dtype, shape: tuple[int, ...]) -> LazyTensor:
        count = int(np.prod(shape)) * dtype.itemsize
        return LazyTensor(
            dtype, shape, lambda: rng.integers(0, 56, count, np.uint8, endpoint=True).view(dtype).reshape(shape)
        )

    specs = tensor_table(config)
    write_checkpoint_files(directory, {s.name: tensor(DTYPES[s.dtype], s.shape) for s in specs}, 1 << 30)
    (directory / "config.json").write_text(json.dumps(config.to_dict()))


def memory(field: str) -> int:
    """Bytes that Linux counts for this process: `VmRSS` now, `VmHWM` at most. (The peak of `getrusage` survives an
    exec, so it would be the parent's.)"""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def child(directory: str, piece_mib: int) -> None:
    """Read once and print [result bytes, peak growth in bytes, seconds]."""
    import jax

    config = ModelConfig.from_file(directory)
    jax.block_until_ready(jax.numpy.zeros(1))
    before = memory("VmRSS")
    start = time.perf_counter()
    params = load_params(directory, config, progress=False, piece_bytes=piece_mib << 20)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(json.dumps([size, memory("VmHWM") - before, seconds]))


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--directory", type=Path, help="where to put the checkpoint; default: a temporary folder")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], int(arguments.child[1]))
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        write(Path(folder), make_config(arguments.experts))
        print(f"{'piece':>8} {'result':>10} {'beside it':>10} {'bound':>10} {'rate':>10}")
        for piece in (4, 16, 64, 256):
            command = [sys.executable, __file__, "--child", folder, str(piece)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            size, growth, seconds = json.loads(out)
            bound = (2 * THREADS + 2) * piece + RUNTIME_MIB
            print(
                f"{piece:>4} MiB {size / 2**20:>6.0f} MiB {(growth - size) / 2**20:>6.0f} MiB {bound:>6} MiB "
                f"{size / 2**30 / seconds:>5.2f} GiB/s"
            )


if __name__ == "__main__":
    main()
