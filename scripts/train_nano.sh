#!/usr/bin/env bash
# The whole recipe of checkpoints/nano: data, training, figures. Training wants one GPU; the data stage wants Debian's packages.
#   scripts/train_nano.sh [OPTIONS OF scripts.nano.train]
# Data that are there already are used as they are, so that they can be made on another machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env train
cd "$repo"
python -m scripts.nano.prepare --out build/nano
python -m scripts.nano.train --data build/nano --out build/nano/run "$@"
python -m scripts.nano.draw build/nano/run
python -m scripts.nano.measure build/nano/run/checkpoint --data build/nano
