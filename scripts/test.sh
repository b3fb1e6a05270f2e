#!/usr/bin/env bash
# Runs the tests; arguments go to pytest, paths relative to the repository root: scripts/test.sh tests/test_config.py -n 0
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env test
cd "$repo"
exec python -m pytest "$@"
