// The C interface of the kernels. Both calls return null, or what went wrong; they launch on `stream` and do not wait.
//
// Channels are contiguous everywhere. x has free batch and token strides (in elements); y, dy, dx are [B, L, D]
// contiguous; states [B, W−1, D], seq_idx [B, L] int32, weight [D, W] fp32, bias [D] fp32. What is optional may be
// null: bias, seq_idx, initial_state (with seq_idx that of the sequence of token 0), final_state and dfinal_state (not
// with seq_idx), dbias, dinitial_state. B, L and D are at least 1, W is 2 to 4. `workspace` holds conv_workspace(...)
// floats.
#pragma once

#include <cstdint>

enum ConvType : int32_t { kConvFloat = 0, kConvHalf = 1, kConvBf16 = 2 };

struct ConvForward {
    const void* x;
    const float *weight, *bias;
    const int32_t* seq_idx;
    const void* initial_state;
    void *y, *final_state;
    int64_t B, L, D, W, x_batch_stride, x_token_stride;
    int32_t type, silu;
};

struct ConvBackward {
    const void* x;
    const float *weight, *bias;
    const int32_t* seq_idx;
    const void *initial_state, *dy, *dfinal_state;
    void* dx;
    float *dweight, *dbias;
    void* dinitial_state;
    float* workspace;
    int64_t B, L, D, W, x_batch_stride, x_token_stride;
    int32_t type, silu;
};

extern "C" {
const char* conv_forward(const ConvForward* call, void* stream);
const char* conv_backward(const ConvBackward* call, void* stream);
int64_t conv_workspace(int64_t B, int64_t L, int64_t D, int64_t W);  // in floats
}
