# Sourced by the other scripts, with the wanted extras as arguments:  . "$(dirname "$0")/_env.sh" test dev
# Makes .venv in the repository root, installs the package there, and sets $root and $python.
# Fast (well under a second) when nothing changed since the last time.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python

# Another environment's settings must not leak into ours.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

_usable() { # a program that runs, is Python >= 3.12, and can make environments
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12)); ' >/dev/null 2>&1 &&
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

_find_python() {
  local candidate
  # A name on PATH may be a shim of a version manager that refuses to run: only running it tells.
  for candidate in python3.12 python3.13 python3.14 python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3; do
    if command -v "$candidate" >/dev/null 2>&1 && _usable "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

_make_venv() {
  local base
  if [ -x "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    return 0
  fi
  if ! base=$(_find_python); then
    echo "error: no Python >= 3.12 with venv found: looked for python3.12, python3.13, python3.14 and python3 on PATH" \
      "and in ${PYENV_ROOT:-$HOME/.pyenv}/versions" >&2
    return 1
  fi
  echo "making .venv with $base" >&2
  "$base" -m venv --clear "$root/.venv"
}

_install() {
  local extras key stamp
  extras=$(IFS=,; echo "$*")
  stamp=$root/.venv/.deepinfer_jax-${extras:-base}
  # The path is part of the key: a copied or moved folder would otherwise import the package of the old one.
  key=$({ cat "$root/pyproject.toml"; echo "$extras $root"; "$python" -VV; } | cksum)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
    return 0
  fi
  rm -f "$stamp"
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null || return 1
  echo "installing deepinfer-jax${extras:+[$extras]} into .venv" >&2
  (cd "$root" && "$python" -m pip install --quiet -e ".${extras:+[$extras]}") || return 1
  echo "$key" >"$stamp"
}

_make_venv || exit 1
_install "$@" || { echo "error: installing the package failed, see above" >&2; exit 1; }
