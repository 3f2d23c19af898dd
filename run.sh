#!/usr/bin/env bash
# Compare every operator with fp64 on this machine: ./run.sh [options of `mhc-ops check`]
set -euo pipefail
cd "$(dirname "$0")"
. scripts/venv.sh
make_venv check
mhc-ops info
mhc-ops check "$@"
