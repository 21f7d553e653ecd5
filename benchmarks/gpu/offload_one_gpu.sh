#!/usr/bin/env bash
# Moves optimizer state off one GPU and back, against a pinned copy and Megatron's own way, and fails where a target is
# missed (a minute; 16 GiB of GPU memory twice over, 48 GiB of host memory). From the repository's root:
#
#     benchmarks/gpu/offload_one_gpu.sh [OUTPUT_FOLDER]
#
# PYTHON names the interpreter, whose environment has hybridrl's dependencies (torch, numpy, megatron-core).
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${1:-outputs/offload_one_gpu}"
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device is visible"'
"$python" benchmarks/gpu/offload_one_gpu.py --json "$out/cycles.json"
"$python" benchmarks/offload.py --check --json "$out/offload.json"
