#!/usr/bin/env bash
# Measures local conversion of full-size Qwen3-30B-A3B layers on one GPU, as a fraction of a plain device copy (about a
# minute). From the repository's root:
#
#     benchmarks/gpu/reshard_one_gpu.sh [OUTPUT_FOLDER]
#
# PYTHON names the interpreter, whose environment has hybridrl's dependencies (torch, numpy, pyyaml).
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${1:-outputs/reshard_one_gpu}"
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device is visible"'
for layers in 4 16; do
    "$python" benchmarks/gpu/reshard_one_gpu.py --layers "$layers" --json "$out/layers_$layers.json"
done
