# Sourced by the scripts beside it, and by .ci/run:
#
#   source "$repo/scripts/_env.sh"
#   prepare_env [EXTRA[,EXTRA...]]
#
# prepare_env makes .venv in the repository root, installs the project there (editable, with the extras) and puts it first
# on PATH. When nothing changed since the last time it does neither, in a fraction of a second.

# cd prints where it went when an exported CDPATH chose the folder.
repo=$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Version of an interpreter; fails if it does not start (a pyenv shim may be on PATH and still refuse).
_python_version() {
  "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' </dev/null 2>/dev/null
}

_python_is_usable() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12)); ' >/dev/null 2>&1
}

# Prints the first Python >= 3.12 that can make a venv; otherwise says on stderr what there was.
_find_python() {
  local candidate version found=""
  for candidate in python3.12 python3.13 python3.14 python3 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python3; do
    version=$(_python_version "$candidate") || continue
    if ! _python_is_usable "$candidate"; then
      found+="  $candidate is $version"$'\n'
    elif ! "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      found+="  $candidate is $version, but lacks the venv or the ensurepip module"$'\n'
    else
      printf '%s\n' "$candidate"
      return
    fi
  done
  [[ -n $found ]] || found=$'  no Python at all\n'
  printf 'error: deepinfer-jax needs Python 3.12 or newer, with its venv module. Found:\n%s' "$found" >&2
  return 1
}

prepare_env() {
  local extras=${1:-} venv=$repo/.venv base key stamp quiet=--quiet config=()
  local python=$venv/bin/python

  # Another environment's settings must not leak into ours.
  unset PYTHONHOME PYTHONPATH
  export PIP_USER=0

  if ! _python_is_usable "$python"; then
    base=$(_find_python) || return 1
    printf 'Making .venv with %s\n' "$base"
    "$base" -m venv --clear "$venv" || return 1
  fi

  # CUDA kernels take minutes to compile, so they are built where a GPU is meant to be used.
  [[ ,$extras, == *,cuda13,* ]] || config+=(-C cmake.define.DEEPINFER_CUDA=OFF)
  # The repository's path is part of the key because an editable install points at it.
  key=$("$python" -c 'import hashlib, pathlib, sys
repo = pathlib.Path(sys.argv[1])
files = [repo / "pyproject.toml", repo / "CMakeLists.txt", *sorted(repo.glob("ffi/**/*.*"))]
text = b"".join(file.read_bytes() for file in files) + repr((sys.argv[1:], sys.version)).encode()
print(hashlib.sha256(text).hexdigest())' "$repo" "$extras") || return 1
  stamp=$venv/.installed-${extras:-base}
  if [[ ! -f $stamp || $(<"$stamp") != "$key" ]]; then
    printf 'Installing deepinfer-jax%s into .venv (a few minutes the first time)\n' "${extras:+[$extras]}"
    rm -f "$stamp" # an interrupted installation is not a finished one
    if [[ -t 1 ]]; then quiet=; fi
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null || return 1
    "$python" -m pip install --disable-pip-version-check ${quiet:+"$quiet"} "${config[@]}" -e "$repo${extras:+[$extras]}" || return 1
    printf '%s\n' "$key" >"$stamp"
  fi

  export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
}
