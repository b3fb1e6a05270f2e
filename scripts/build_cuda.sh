#!/usr/bin/env bash
# Compiles every CUDA kernel for sm_90a and sm_100a, links the module and loads it; with cuobjdump it also checks that both
# architectures are in it. Needs nvcc and no GPU.
#   scripts/build_cuda.sh [FOLDER]      default build/cuda
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env test
cd "$repo"
folder=${1:-build/cuda}
python -m pip install --quiet --disable-pip-version-check pybind11
cmake -S . -B "$folder" -G Ninja -DDEEPINFER_CUDA=ON -DPython_EXECUTABLE="$(command -v python)" >/dev/null
cmake --build "$folder"
module=$(echo "$folder"/_custom_calls*.so)
PYTHONPATH=$folder python - <<'END'
import _custom_calls as module

ops = {platform: sorted(op for op, p, _ in module.targets() if p == platform) for platform in ("cpu", "CUDA")}
print("cpu:", *ops["cpu"])
print("CUDA:", *ops["CUDA"])
print(module.cuda())
END
# Every kernel file must have code for both.
command -v cuobjdump >/dev/null || { printf 'built %s; cuobjdump is not here to look into it\n' "$module"; exit; }
for source in kernels_cuda/*.cu; do
  object=$(find "$folder" -name "$(basename "$source").o")
  for arch in sm_90a sm_100a; do
    cuobjdump --list-elf "$object" | grep -q "$arch" || { printf 'error: %s has no code for %s\n' "$source" "$arch" >&2; exit 1; }
  done
done
printf 'built %s for sm_90a and sm_100a\n' "$module"
