"""DeepSeek-V4.1-Flash: Flax modules that describe weights and computation. `v41.py` is the forward pass."""
