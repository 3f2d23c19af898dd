#!/usr/bin/env bash
# Lint, types and every test that this machine can run: ./run_tests.sh [options of pytest]
# INSTALL_CLANG=1 ./run_tests.sh first installs clang-22 and lld-22 from Debian's packages (as root), which compile the
# HIP kernels for AMD GPUs; without them those tests are skipped.
set -euo pipefail
cd "$(dirname "$0")"
. scripts/venv.sh
make_venv test
if [ "${INSTALL_CLANG:-}" = 1 ] && ! command -v clang++-22 >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq clang-22 lld-22; } >/dev/null ||
        echo "clang-22 could not be installed: the HIP kernels are not compiled for AMD GPUs" >&2
fi
ruff check .
ruff format --check .
mypy
# A selection of tests may leave one of the two runs without any, which pytest reports as 5.
ran() { local code=$?; [ "$code" -eq 0 ] || { [ "$code" -eq 5 ] && [ "$#" -gt 0 ]; }; }
# Triton decides once per process whether it compiles or interprets, so there are two runs.
pytest -n auto --timeout 600 -m "not interpreted" "$@" || ran "$@"
TRITON_INTERPRET=1 pytest -n auto --timeout 600 -m interpreted "$@" || ran "$@"
