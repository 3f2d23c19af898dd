// How a row of channels is stored and how its values become fp32 and back, rounded once, to nearest even.
#pragma once

#include <cmath>

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
#if defined(__HIP_DEVICE_COMPILE__)
    return same_bits<_Float16>(value);
#elif defined(__CUDA_ARCH__)
    return __half2float(same_bits<__half>(value));
#else  // not every host compiler has a 16-bit float
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
    if (rest >= 0x7c00) return same_bits<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    const float magnitude = rest < 0x400 ? rest * 0x1p-24f : same_bits<float>((rest << 13) + (112u << 23));
    return sign ? -magnitude : magnitude;
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
#if defined(__HIP_DEVICE_COMPILE__)
    return same_bits<Half>(static_cast<_Float16>(value));
#elif defined(__CUDA_ARCH__)
    return same_bits<Half>(__float2half_rn(value));
#else
    const uint32_t bits = same_bits<uint32_t>(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    uint32_t half = 0x7c00;  // from 65520 on
    if (value != value) {
        half = 0x7e00;
    } else if (rest < 113u << 23) {  // below 2^-14: the last bit is worth 2^-24
        half = uint32_t(std::nearbyint(same_bits<float>(rest) * 0x1p24f));
    } else if (rest < 0x477ff000) {
        half = (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13;
    }
    return Half{uint16_t(sign | half)};
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
