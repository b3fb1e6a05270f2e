"""The command line. Every command exits with 2 on bad input."""

from __future__ import annotations

import typer

from deepinfer_jax.cli import chat, checks, devices, drafts, generate, verify

app = typer.Typer(
    help="DeepSeek-V4.1-Flash as pure JAX functions.", no_args_is_help=True, pretty_exceptions_enable=False
)
for command in (
    generate.generate,
    chat.chat,
    checks.inspect,
    checks.compare,
    drafts.acceptance,
    drafts.calibrate,
    verify.verify,
    devices.devices,
):
    app.command()(command)

__all__ = ["app"]
