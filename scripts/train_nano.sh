#!/usr/bin/env bash
# The whole recipe of checkpoints/nano: data, training, figures. Training wants one GPU; the data stage wants Debian's packages.
#   scripts/train_nano.sh
# Data that are there already are used as they are, so that they can be made on another machine; training that was
# interrupted goes on. The checkpoint of an earlier run stays if build/nano/run is moved away first.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env train
cd "$repo"
run=build/nano/run
prompts=build/nano/heldout_prompts.jsonl
python -m scripts.nano.prepare --out build/nano
python -m scripts.nano.train layers --data build/nano --out $run
python -m scripts.nano.own_text $run/checkpoint --data build/nano
python -m scripts.nano.train drafter --data build/nano --out $run
python -m scripts.nano.measure $run/checkpoint --data build/nano
python -m scripts.nano.prompts $prompts --data build/nano
python -m deepinfer_jax.cli acceptance $run/checkpoint $prompts --batch-size 28
python -m deepinfer_jax.cli calibrate $run/checkpoint $prompts --batch-size 28
python -m scripts.nano.draw $run
