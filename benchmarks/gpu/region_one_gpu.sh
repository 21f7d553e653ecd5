#!/usr/bin/env bash
# Checks and times address-stable regions on one GPU (about a minute). From the repository's root:
#
#     benchmarks/gpu/region_one_gpu.sh [OUTPUT_FOLDER]
#
# PYTHON names the interpreter, whose environment has hybridrl's dependencies. Without a CUDA device the same checks run
# on the CPU's regions, graphs apart.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${1:-outputs/region_one_gpu}"
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    sizes="1024 16384"
else
    sizes="64 256"
fi
for size in $sizes; do
    "$python" benchmarks/gpu/region_one_gpu.py --mib "$size" --json "$out/mib_$size.json"
done
