#!/usr/bin/env bash
# Lint, types and tests: ./run_tests.sh [--all] [options of pytest]
# Without --all: every op, backend, command and adapter, in minutes. With it: also the tests marked `thorough`.
# Every step runs, whatever failed before it; the exit code is 0 only if none did.
# INSTALL_CLANG=1 ./run_tests.sh first installs clang-22 and lld-22 from Debian's packages (as root or with sudo), which
# compile the HIP kernels for AMD GPUs; without them those tests are skipped.
set -euo pipefail
cd "$(dirname "$0")"
. scripts/venv.sh
selected=" and not thorough"
if [ "${1:-}" = --all ]; then
    selected=
    shift
fi
make_venv test
if [ "${INSTALL_CLANG:-}" = 1 ] && ! command -v clang++-22 >/dev/null; then
    as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
    { "${as_root[@]}" apt-get update -qq && "${as_root[@]}" apt-get install -y -qq clang-22 lld-22; } >/dev/null ||
        echo "clang-22 could not be installed: the HIP kernels are not compiled for AMD GPUs" >&2
fi
trap 'exit 130' INT # Ctrl-C ends all steps, not one

failed=()
check() { "$@" || failed+=("$*"); }

# A selection may leave one of the two runs without any test, which pytest reports as 5; but not both.
empty=0
tests() {
    local marked=$1$selected code=0
    shift
    # A thread each: workers that take all cores each wait for one another, up to 40 times as long.
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} pytest -n auto --dist worksteal --timeout 900 -m "$marked" "$@" || code=$?
    if [ "$code" -eq 5 ] && [ "$#" -gt 0 ]; then
        empty=$((empty + 1))
    elif [ "$code" -ne 0 ]; then
        failed+=("pytest -m $marked")
    fi
}

check ruff check .
check ruff format --check .
check mypy
# Triton decides once per process whether it compiles or interprets, so there are two runs.
tests "not interpreted" "$@"
TRITON_INTERPRET=1 tests interpreted "$@"
[ "$empty" -lt 2 ] || failed+=("no test is selected by $*")

[ "${#failed[@]}" -eq 0 ] && exit
printf 'failed:%s\n' "$(printf ' %s;' "${failed[@]}")" >&2
exit 1
