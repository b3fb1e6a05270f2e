#!/usr/bin/env bash
# Runs the whole forward pass on the tiny checkpoint, compares it with stored results of an independent implementation, then
# writes, chats and drafts with the small trained one.
# Arguments go to `deepinfer-jax compare`: scripts/demo.sh --chunk 5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env
cd "$repo"
demo="$(mktemp -d)"
trap 'rm -rf "$demo"' EXIT
deepinfer-jax inspect tests/data/v41_tiny
printf '\nDeepSeek-V4.1-Flash, tiny checkpoint: this forward pass against an independent implementation\n\n'
deepinfer-jax compare tests/data/v41_tiny "$@"
printf '\nA small trained checkpoint in the same format: text that goes on\n\n'
deepinfer-jax generate checkpoints/nano "And the LORD spake unto Moses, saying," --temperature 0.7 --seed 1 --max-tokens 60
printf '\nA question\n\n'
deepinfer-jax chat checkpoints/nano "What does the word melancholy mean?" --temperature 0 --max-tokens 60
printf '\nIts drafts: how many tokens a forward pass gives\n\n'
head -n 14 tests/data/nano_heldout.jsonl > "$demo/prompts.jsonl"
deepinfer-jax acceptance checkpoints/nano "$demo/prompts.jsonl" --max-tokens 32 --batch-size 14
