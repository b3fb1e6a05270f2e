#!/usr/bin/env bash
# Runs the whole forward pass on the tiny checkpoint and compares it with stored results of an independent implementation.
# Arguments go to `deepinfer-jax compare`: scripts/demo.sh --chunk 5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env
cd "$repo"
deepinfer-jax inspect tests/data/v41_tiny
printf '\nDeepSeek-V4.1-Flash, tiny checkpoint: this forward pass against an independent implementation\n\n'
exec deepinfer-jax compare tests/data/v41_tiny "$@"
