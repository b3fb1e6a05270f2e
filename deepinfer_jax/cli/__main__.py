"""`python -m deepinfer_jax.cli`."""

from deepinfer_jax.cli import app

app()
