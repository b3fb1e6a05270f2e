#!/usr/bin/env bash
# Runs the forward pass of the tiny checkpoint and compares it with outputs of an independent implementation.
# Arguments go to `deepinfer-jax compare`:  scripts/demo.sh --chunk 5
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$root"
echo "== DeepSeek-V4.1-Flash, tiny random weights: deepinfer-jax compare tests/data/v41_tiny $*"
exec "$root/.venv/bin/deepinfer-jax" compare tests/data/v41_tiny "$@"
