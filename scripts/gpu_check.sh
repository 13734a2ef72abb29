#!/usr/bin/env bash
# What only a GPU can show, in at most 8 minutes on one: packed trees under FlexAttention against SDPA, training
# in bfloat16, and the learner's tokens per second. One line a check; the exit code is 1 if one failed.
#
#   bash scripts/gpu_check.sh [--device cpu]      PYTHON=… chooses the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || python=python3
exec timeout 480 "$python" -m benchmarks.gpu_check "$@"
