#!/usr/bin/env bash
# Lint, types and every test that this machine can run: ./run_tests.sh [options of pytest]
set -euo pipefail
cd "$(dirname "$0")"
. scripts/venv.sh
make_venv test
ruff check .
ruff format --check .
mypy
# A selection of tests may leave one of the two runs without any, which pytest reports as 5.
ran() { local code=$?; [ "$code" -eq 0 ] || { [ "$code" -eq 5 ] && [ "$#" -gt 0 ]; }; }
# Triton decides once per process whether it compiles or interprets, so there are two runs.
pytest -n auto --timeout 600 -m "not interpreted" "$@" || ran "$@"
TRITON_INTERPRET=1 pytest -n auto --timeout 600 -m interpreted "$@" || ran "$@"
