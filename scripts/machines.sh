#!/usr/bin/env bash
# Run the tests that a CPU could decide as on other machines: scripts/machines.sh [options of pytest]
# They are those of the quick run that compare bits or sums; what is compiled for GPUs is the same everywhere. A row below
# is a machine: which kernels OpenBLAS (numpy), torch, MKL and oneDNN take, threads, the base seed of all cases, locale and
# hash seed. Machines that this CPU cannot play are named and left out.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv test

avx512="AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
#        machine   needs    OpenBLAS  torch   MKL        oneDNN      threads seed locale hash
machines=(
        "prescott  sse3     Prescott  default COMPATIBLE SSE41       1       0    C      0"
        "haswell   avx2     Haswell   avx2    AVX2       AVX2        2       7    C.utf8 1"
        "zen       avx2     Zen       avx2    AUTO       DEFAULT     1       0    POSIX  2"
        "skylakex  avx512bw SkylakeX  avx512  AVX512     AVX512_CORE 1       7    C      3"
)
tests=(
    tests/core/test_interpreter.py tests/conv/test_conv_backends.py tests/conv/test_conv_reference.py
    tests/conv/test_conv_modules.py
    tests/conv/triton/test_conv_kernels.py tests/mhc/test_kernel_bits.py tests/mhc/test_kernels.py
    tests/mhc/test_reference.py tests/mhc/test_sinkhorn.py tests/mhc/test_stack.py tests/mhc/test_sublayers.py
    tests/mhc/triton/test_boundary_fwd.py tests/mhc/triton/test_boundary_bwd.py tests/mhc/triton/test_few_tokens.py
    tests/mhc/triton/test_pre.py
    tests/compat tests/distributed/test_context_parallel.py tests/distributed/test_sharding.py
    tests/measure/test_accuracy.py tests/measure/test_fuzz.py tests/test_convert.py
)
compiled="compile or spills or machine_code"

has() { [ "$1" = sse3 ] || grep -qsw "$1" /proc/cpuinfo; }

cores=$(nproc) table=() failed=0
for row in "${machines[@]}"; do
    read -r name needs blas aten mkl onednn threads seed locale hash <<<"$row"
    if ! has "$needs"; then
        table+=("$name: not run, this CPU has no $needs")
        continue
    fi
    lacks=
    [ "$needs" = avx512bw ] || lacks=$avx512
    [ "$needs" != sse3 ] || lacks="$lacks AVX2 FMA3"
    for interpreted in 0 1; do
        marked="not interpreted" begin=$SECONDS code=0
        [ "$interpreted" = 0 ] || marked=interpreted
        env OPENBLAS_CORETYPE="$blas" ATEN_CPU_CAPABILITY="$aten" MKL_CBWR="$mkl" ONEDNN_MAX_CPU_ISA="$onednn" \
            NPY_DISABLE_CPU_FEATURES="$lacks" OMP_NUM_THREADS="$threads" MHC_OPS_SEED="$seed" LC_ALL="$locale" \
            PYTHONHASHSEED="$hash" TRITON_INTERPRET="$interpreted" \
            pytest -q -n "$(((cores + threads - 1) / threads))" --timeout 900 \
            -m "$marked and not thorough and not gpu" -k "not ($compiled)" "${tests[@]}" "$@" || code=$?
        [ "$code" -eq 0 ] || failed=1
        table+=("$name: $marked: exit $code in $((SECONDS - begin)) s")
    done
done
printf '%s\n' "${table[@]}"
exit "$failed"
