"""Settings of every test: strict promotion, eight virtual devices, a compile cache that outlives the run."""

from pathlib import Path

import jax
import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent

# A missing axis must be an error, not a broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Every program is kept, however small: most of a run's time is compilation.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

# The first example of a property may compile; a deadline would call that a failure.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the golden checkpoints."""
    return Path(__file__).parent / "data"
