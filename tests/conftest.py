"""Settings shared by all tests: strict numerics, eight CPU devices, compiled functions kept on disk."""

import gc
import os
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest

import deepinfer_jax as dj

ROOT = Path(__file__).resolve().parent.parent

# A silent broadcast between ranks is how a wrong axis order hides.
jax.config.update("jax_numpy_rank_promotion", "raise")

# The workers keep every core busy, and a program that is not cut into parts for several threads takes less of them.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1".strip()

# Must come before the first use of a device, hence at import time.
jax.config.update("jax_num_cpu_devices", 8)

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

# The first example of a property may include a compilation, so time per example says nothing.
hypothesis.settings.register_profile("deepinfer_jax", deadline=None, print_blob=True)
hypothesis.settings.load_profile("deepinfer_jax")


_QUICK = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--optimized", action="store_true", help="Compile every test's programs as users get them.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compilation is nearly all of the tests' time, and LLVM's optimisations are nearly half of that. They change
    which products and sums are contracted, not the operations or their order. Tests marked `optimized` compile as
    users do, and with `--optimized` all of them do.
    """
    quick = item.get_closest_marker("optimized") is None and not item.config.getoption("--optimized")
    if quick != item.config.stash.get(_QUICK, False):
        item.config.stash[_QUICK] = quick
        jax.config.update("jax_disable_most_optimizations", quick)
        jax.clear_caches()


_MOST_MAPS = 35_000
"""Of the 65,530 memory maps that Linux gives a process; compiled programs take hundreds each, and the next one that
does not fit ends the process."""


@pytest.fixture(autouse=True)
def _few_programs():
    """Drops compiled programs before there are too many; those needed again come from the cache on disk."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of golden data and small checkpoints."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def tiny(data_dir: Path) -> dj.LLM:
    """The tiny checkpoint in float32, eight slots: what most tests of generation share, programs included."""
    return dj.LLM(data_dir / "v41_tiny", numerics="fp32", max_length=256, steps=4, chunk=64, progress=False)


@pytest.fixture(scope="session")
def ragged() -> list[list[int]]:
    """Fifty prompts of many lengths, the image and noise ids left out."""
    rng = np.random.default_rng(17)
    return [rng.integers(2, 126, length).tolist() for length in rng.integers(1, 90, 50)]
