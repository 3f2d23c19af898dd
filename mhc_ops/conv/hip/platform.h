// The one place that knows which compiler reads the kernels: hipcc or clang for AMD, nvcc for NVIDIA, or any C++17
// compiler for a CPU. Everything else is written in HIP.
#pragma once

#include <cstdint>

#if defined(__HIP__) || defined(__HIPCC__)
#include <hip/hip_runtime.h>
#define MHC_OPS_PLATFORM "HIP"
#elif defined(__CUDACC__)
#include "cuda_as_hip.h"
#define MHC_OPS_PLATFORM "CUDA"
#else
#include "cpu_as_hip.h"
#define MHC_OPS_PLATFORM "CPU"
#endif

// A value that is the same in all lanes of a wave, said so that it and what follows from it stay in scalar registers.
__device__ inline int uniform(int value) {
#if defined(__HIP_DEVICE_COMPILE__)
    return __builtin_amdgcn_readfirstlane(value);
#elif defined(__CUDA_ARCH__)
    return __shfl_sync(~0u, value, 0);
#else
    return value;
#endif
}

// Loads that stand before this are issued before what follows. Left alone, LLVM moves them down to where their rows are
// used, to save registers, and they are no longer on their way in time.
__device__ inline void issue_loads() {
#if defined(__HIP_DEVICE_COMPILE__)
    __builtin_amdgcn_sched_barrier(0);
#endif
}

// σ(z) = 1 / (1 + exp(−z)) by the device's own exponential and reciprocal, each good to about 2 units in the last
// place. What they flush to zero on NVIDIA is below 1e-37.
__device__ inline float sigmoid(float z) {
#if defined(__HIP_DEVICE_COMPILE__)
    return __builtin_amdgcn_rcpf(1.0f + __expf(-z));
#elif defined(__CUDA_ARCH__)
    constexpr float kLog2E = 1.44269504f;
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-kLog2E * z));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
#else
    return 1.0f / (1.0f + expf(-z));
#endif
}
