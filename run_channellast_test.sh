#!/usr/bin/env bash
# Build the channel-last conv kernels with their test program for this machine's device, and run it.
# CONV_FLAGS holds further options of the compiler, e.g. CONV_FLAGS="-DMHC_CONV_BWD_ROWS_16=8".
set -euo pipefail

usage() {
    echo "usage: $(basename "$0") [--all | --accuracy | -a | --performance | -p | --help | -h]"
    echo "Builds with hipcc where there is one, else with nvcc where there is an NVIDIA GPU, else for the CPU."
    echo "Exits non-zero when anything fails. CONV_TARGET=hip, cuda or cpu chooses the build."
    echo "KEEP=FOLDER leaves the program, channellast_test, in that folder."
}

mode=0
[ $# -le 1 ] || { usage >&2; exit 2; }
case "${1:---all}" in
    --all) mode=0 ;;
    --accuracy | -a) mode=1 ;;
    --performance | -p) mode=2 ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac

root=$(cd "$(dirname "$0")" && pwd)
source=$root/mhc_ops/conv/hip
kfd=${KFD:-/dev/kfd} # there with every AMD GPU that computes
has() { command -v "$1" >/dev/null 2>&1; }
target=${CONV_TARGET:-}
if [ -z "$target" ]; then
    if sh "$source/find_hipcc.sh" >/dev/null 2>&1; then
        target=hip
    elif has nvcc && has nvidia-smi && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        target=cuda
    elif [ -e "$kfd" ]; then
        sh "$source/find_hipcc.sh" || true
        echo "There is an AMD GPU ($kfd): set ROCM_PATH to the folder of ROCm, or CONV_TARGET=cpu to build for the CPU." >&2
        exit 2
    else
        target=cpu
    fi
fi

read -ra flags <<<"${CONV_FLAGS:-}"
. "$source/flags.sh" # CPU_FLAGS, CUDA_FLAGS, HIP_FLAGS: words
case "$target" in
    hip)
        hipcc=$(sh "$source/find_hipcc.sh") || exit 2
        arch=$(PATH="$PATH:$(dirname "$hipcc")" rocminfo 2>/dev/null | grep -om1 'gfx[0-9a-f]*' || true)
        [ -n "$arch" ] || { echo "rocminfo names no GPU" >&2; exit 2; }
        build=("$hipcc" $HIP_FLAGS "--offload-arch=$arch")
        ;;
    cuda)
        arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
        build=(nvcc $CUDA_FLAGS "-arch=sm_$arch")
        ;;
    cpu) build=("${CXX:-c++}" $CPU_FLAGS) ;;
    *) echo "CONV_TARGET must be hip, cuda or cpu, got $target" >&2; exit 2 ;;
esac

if [ -n "${KEEP:-}" ]; then
    mkdir -p "$KEEP"
    folder=$KEEP
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
program=$folder/channellast_test
echo "Building for $target: ${build[*]} ${flags[*]:-}"
"${build[@]}" ${flags[@]+"${flags[@]}"} "-I$source" "$root/tests/conv/hip/program/channellast_test.cpp" \
    "$source/conv.hip" -o "$program"
"$program" "$mode"
