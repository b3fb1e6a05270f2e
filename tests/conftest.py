"""Settings shared by all tests: strict numerics, eight CPU devices, compiled functions kept on disk."""

from pathlib import Path

import hypothesis
import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent

# A silent broadcast between ranks is how a wrong axis order hides.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Must come before the first use of a device, hence at import time.
jax.config.update("jax_num_cpu_devices", 8)

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

# The first example of a property may include a compilation, so time per example says nothing.
hypothesis.settings.register_profile("deepinfer_jax", deadline=None, print_blob=True)
hypothesis.settings.load_profile("deepinfer_jax")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of golden data and small checkpoints."""
    return ROOT / "tests" / "data"
