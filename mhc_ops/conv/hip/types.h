// How a row of channels is stored and how its values become fp32 and back, rounded once, to nearest even.
#pragma once

#include "platform.h"

struct Half {
    uint16_t bits;
};
struct Bf16 {
    uint16_t bits;
};

template <class To, class From>
__host__ __device__ inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a view of the same bits");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

__host__ __device__ inline float to_float(float value) { return value; }
__host__ __device__ inline float to_float(Bf16 value) { return same_bits<float>(uint32_t(value.bits) << 16); }
__host__ __device__ inline float to_float(Half value) {
#if defined(__CUDACC__) && !defined(__HIP__)
    return __half2float(same_bits<__half>(value));
#else
    return same_bits<_Float16>(value);
#endif
}

template <class T>
__host__ __device__ inline T from_float(float value);
template <>
__host__ __device__ inline float from_float<float>(float value) {
    return value;
}
template <>
__host__ __device__ inline Half from_float<Half>(float value) {
#if defined(__CUDACC__) && !defined(__HIP__)
    return same_bits<Half>(__float2half_rn(value));
#else
    return same_bits<Half>(static_cast<_Float16>(value));
#endif
}
template <>
__host__ __device__ inline Bf16 from_float<Bf16>(float value) {
#if defined(__HIP_DEVICE_COMPILE__)
    return same_bits<Bf16>(static_cast<__bf16>(value));
#elif defined(__CUDA_ARCH__)
    return same_bits<Bf16>(__float2bfloat16_rn(value));
#else
    const uint32_t bits = same_bits<uint32_t>(value);
    if (value != value) return Bf16{0x7fc0};
    return Bf16{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}

// Two neighbouring channels in one word, the first in its low half; NVIDIA has one instruction for both.
template <class T>
__device__ inline uint32_t pack(float low, float high) {
    return from_float<T>(low).bits | uint32_t(from_float<T>(high).bits) << 16;
}
#if defined(__CUDACC__) && !defined(__HIP__)
template <>
__device__ inline uint32_t pack<Bf16>(float low, float high) {
    return same_bits<uint32_t>(__floats2bfloat162_rn(low, high));
}
template <>
__device__ inline uint32_t pack<Half>(float low, float high) {
    return same_bits<uint32_t>(__floats2half2_rn(low, high));
}
#endif
