#!/usr/bin/env bash
# Runs the whole forward pass on the tiny checkpoint, compares it with stored results of an independent implementation, and
# generates with it.
# Arguments go to `deepinfer-jax compare`: scripts/demo.sh --chunk 5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env
cd "$repo"
deepinfer-jax inspect tests/data/v41_tiny
printf '\nDeepSeek-V4.1-Flash, tiny checkpoint: this forward pass against an independent implementation\n\n'
deepinfer-jax compare tests/data/v41_tiny "$@"
printf '\nGenerating with it (its weights are random, so its words are too)\n\n'
exec deepinfer-jax generate tests/data/v41_tiny "w3 W4 w5" --n 3 --max-tokens 12 --max-length 256 --seed 7
