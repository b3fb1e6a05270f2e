#!/usr/bin/env bash
# Runs the tests; arguments go to pytest, paths relative to the repository root:  scripts/test.sh -n 0 -k rollback
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh" test
cd "$root"
exec "$python" -m pytest "$@"
