#!/usr/bin/env bash
# Compile the kernels with another triton than the pinned one: scripts/other_triton.sh 3.6.0 [options of pytest]
# That triton has a folder of its own; .venv keeps the pinned one.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv test
version=$1
shift
into=.venv/triton-$version
[ -d "$into" ] || pip install --quiet --no-deps --target "$into" "triton==$version"
export PYTHONPATH=$into OMP_NUM_THREADS=1
pytest -n auto tests/mhc/triton/test_compile.py tests/mhc/triton/test_boundary_bwd.py tests/mhc/triton/test_few_tokens.py \
    tests/conv/triton/test_conv_compile.py tests/core/test_driver.py "$@"
TRITON_INTERPRET=1 pytest -n auto -m interpreted tests/mhc/triton/test_boundary_{fwd,bwd}.py "$@"
