// Chooses the kernel for a call and launches it.
#include "conv.h"
#include "conv_bwd.h"
#include "conv_fwd.h"

namespace {

template <int N>
using Int = std::integral_constant<int, N>;

constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// HIP counts the threads of a launch in 32 bits. Tests set a lower limit.
#ifndef MHC_CONV_THREADS_OF_LAUNCH
#define MHC_CONV_THREADS_OF_LAUNCH (1ll << 32)
#endif
constexpr int64_t kThreadsOfLaunch = MHC_CONV_THREADS_OF_LAUNCH;
constexpr int64_t kMostChannels = 1 << 26;
constexpr int64_t sum_blocks(int W, int64_t D) { return divide_up((W + 1) * D, kSumColumns); }
static_assert(sum_blocks(4, kMostChannels) * kSumColumns * kSumParts < 1ll << 32, "the sums are one launch");

// Calls run(T, W, SILU, SEQ) with values of types that say which. The defines leave kernels out, to compile faster.
template <class Run>
const char* dispatch(int32_t type, int64_t W, bool silu, bool seq, Run run) {
    auto with_seq = [&](auto t, auto w, auto s) { return seq ? run(t, w, s, True()) : run(t, w, s, False()); };
    auto with_silu = [&](auto t, auto w) { return silu ? with_seq(t, w, True()) : with_seq(t, w, False()); };
    auto with_width = [&](auto t) -> const char* {
        switch (W) {
#if !defined(MHC_CONV_ONLY_WIDTH_4)
            case 2: return with_silu(t, Int<2>());
            case 3: return with_silu(t, Int<3>());
#endif
            case 4: return with_silu(t, Int<4>());
        }
        return "this build has no kernel for this width";
    };
#if defined(MHC_CONV_ONLY_FP32)
    if (type == kConvFloat) return with_width(float());
#elif defined(MHC_CONV_ONLY_BF16)
    if (type == kConvBf16) return with_width(Bf16());
#else
    switch (type) {
        case kConvFloat: return with_width(float());
#if !defined(MHC_CONV_WITHOUT_FP16)
        case kConvHalf: return with_width(Half());
#endif
        case kConvBf16: return with_width(Bf16());
    }
#endif
    return "this build has no kernel for this type";
}

// D, the strides and every pointer that there is allow accesses of V channels.
template <class T, class Call, class... Pointers>
bool allows_vectors(int V, const Call& call, Pointers... pointers) {
    const int64_t sizes = call.D | call.x_batch_stride | call.x_token_stride;
    const uintptr_t addresses = (reinterpret_cast<uintptr_t>(pointers) | ...);
    return sizes % V == 0 && addresses % (V * sizeof(T)) == 0;
}

template <class Call>
Shape shape_of(const Call& call, int V, int waves, int tokens) {
    Shape shape;
    shape.x_batch_stride = call.x_batch_stride;
    shape.x_token_stride = call.x_token_stride;
    shape.L = int(call.L);
    shape.D = int(call.D);
    shape.strips = int(divide_up(call.D, kLanes * V));
    shape.groups = int(divide_up(call.L, waves * tokens));
    return shape;
}

const char* check(int64_t B, int64_t L, int64_t D) {
    if (B < 1 || L < 1 || D < 1) return "B, L and D must be at least 1";
    if (L > 1 << 30 || D > kMostChannels) return "L must be at most 2^30 and D at most 2^26";
    return nullptr;
}

template <class Launch>
const char* error_of(Launch launch) {
    (void)hipGetLastError();  // an earlier launch may have left one
    launch();
    const hipError_t error = hipGetLastError();
    return error == hipSuccess ? nullptr : hipGetErrorString(error);
}

// Calls launch(grid, shape) for all B sequences, as many at a time as a launch can have threads for.
template <class Launch>
const char* launch_in_parts(Shape shape, int64_t B, dim3 block, Launch launch) {
    const int64_t blocks = int64_t(shape.groups) * shape.strips;  // of one sequence
    const int64_t most = (kThreadsOfLaunch - 1) / (block.x * block.y) / blocks;
    if (most == 0) return "a sequence has more tokens and channels than a launch can have threads for";
    for (shape.first_b = 0; shape.first_b < B; shape.first_b += most) {
        const int64_t sequences = B - shape.first_b < most ? B - shape.first_b : most;
        if (const char* error = error_of([&] { launch(dim3(sequences * blocks), shape); })) return error;
    }
    return nullptr;
}

}  // namespace

extern "C" int64_t conv_workspace(int64_t B, int64_t L, int64_t D, int64_t W) {
    return B * divide_up(L, kBackwardWaves * kBackwardTokens) * (W + 1) * D;
}

extern "C" const char* conv_forward(const ConvForward* arguments, void* stream_) {
    const ConvForward& call = *arguments;
    const hipStream_t stream = static_cast<hipStream_t>(stream_);
    if (const char* error = check(call.B, call.L, call.D)) return error;
    return dispatch(call.type, call.W, call.silu, call.seq_idx, [&](auto type, auto width, auto silu, auto seq) {
        typedef decltype(type) T;
        constexpr int kMost = kForwardChannels<T>;
        auto run = [&](auto channels) {
            constexpr int V = decltype(channels)::value;
            const Shape shape = shape_of(call, V, kForwardWaves, kForwardTokens);
            const dim3 block(kLanes, kForwardWaves);
            return launch_in_parts(shape, call.B, block, [&](dim3 grid, const Shape& part) {
                hipLaunchKernelGGL(
                    (conv_fwd_kernel<T, decltype(width)::value, decltype(silu)::value, decltype(seq)::value, V>), grid,
                    block, 0, stream, static_cast<const T*>(call.x), call.weight, call.bias, call.seq_idx,
                    static_cast<const T*>(call.initial_state), static_cast<T*>(call.y),
                    static_cast<T*>(call.final_state), part);
            });
        };
        const bool vector = allows_vectors<T>(kMost, call, call.x, call.initial_state, call.y, call.final_state);
        return vector ? run(Int<kMost>()) : run(Int<1>());
    });
}

extern "C" const char* conv_backward(const ConvBackward* arguments, void* stream_) {
    const ConvBackward& call = *arguments;
    const hipStream_t stream = static_cast<hipStream_t>(stream_);
    if (const char* error = check(call.B, call.L, call.D)) return error;
    return dispatch(call.type, call.W, call.silu, call.seq_idx, [&](auto type, auto width, auto silu, auto seq) {
        typedef decltype(type) T;
        constexpr int W = decltype(width)::value, kMost = kBackwardChannels<T, decltype(seq)::value>;
        auto run = [&](auto channels) -> const char* {
            constexpr int V = decltype(channels)::value;
            const Shape shape = shape_of(call, V, kBackwardWaves, kBackwardTokens);
            const dim3 block(kLanes, kBackwardWaves);
            const char* error = launch_in_parts(shape, call.B, block, [&](dim3 grid, const Shape& part) {
                hipLaunchKernelGGL((conv_bwd_kernel<T, W, decltype(silu)::value, decltype(seq)::value, V>), grid, block,
                                   0, stream, static_cast<const T*>(call.x), call.weight, call.bias, call.seq_idx,
                                   static_cast<const T*>(call.initial_state), static_cast<const T*>(call.dy),
                                   static_cast<const T*>(call.dfinal_state), static_cast<T*>(call.dx),
                                   static_cast<T*>(call.dinitial_state), call.workspace, part);
            });
            if (error) return error;
            return error_of([&] {
                hipLaunchKernelGGL((conv_sum_kernel<W>), dim3(sum_blocks(W, call.D)), dim3(kSumColumns, kSumParts), 0,
                                   stream, static_cast<const float*>(call.workspace), call.dweight, call.dbias,
                                   call.B * shape.groups, shape.D);
            });
        };
        const bool vector = allows_vectors<T>(kMost, call, call.x, call.initial_state, call.dy, call.dfinal_state,
                                              call.dx, call.dinitial_state);
        return vector ? run(Int<kMost>()) : run(Int<1>());
    });
}
