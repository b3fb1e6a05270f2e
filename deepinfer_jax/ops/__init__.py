"""Operations of a V4.1 step: one file per op, the `jnp` code defines it.

The model calls these and nothing else that is heavy. Backends with custom calls stand beside the reference.
"""
