#!/usr/bin/env bash
# Builds the custom calls for the GPU of this machine, tests and times them. Needs Python 3.12 with jax[cuda13], pytest and the
# project's dependencies, nvcc, CMake, ninja and pybind11; makes no virtual environment.
#   scripts/test_cuda.sh [FOLDER]      results go there; default build/cuda
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-build/cuda}
mkdir -p "$folder"
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d '. ')
cmake -S . -B build/cuda -G Ninja -DDEEPINFER_CUDA=ON "-DDEEPINFER_CUDA_ARCHITECTURES=${arch}a" \
  -DPython_EXECUTABLE="$(command -v python3)" >/dev/null
cmake --build build/cuda
cp build/cuda/_custom_calls*.so deepinfer_jax/
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
tests=(tests/ops/test_finish_rows.py tests/ops/test_moe_kernels.py tests/ops/test_custom_call.py)
python3 -m deepinfer_jax.cli devices
failed=0
python3 -m pytest -q -n 0 -rs "${tests[@]}" || failed=1
python3 scripts/bench_ops.py --backend cuda --copy-bytes $((1 << 31)) --json "$folder/bench_ops.json" \
  --picture "$folder/bench_ops.png" | tee "$folder/bench_ops.md" || failed=1
if command -v compute-sanitizer >/dev/null; then
  compute-sanitizer --error-exitcode 1 python3 -m pytest -q -n 0 -k "cuda and not every" "${tests[@]}" || failed=1
else
  echo 'compute-sanitizer is not here: not run'
fi
exit "$failed"
