// What both kernels share: where a thread stands, and how it loads and stores its channels of a row.
#pragma once

#include <type_traits>

#include "tuning.h"
#include "types.h"

typedef std::true_type True;
typedef std::false_type False;

struct Shape {
    int64_t x_batch_stride, x_token_stride;  // in elements; a channel's stride is 1
    int L, D;
    int strips;  // of channels
    int groups;  // of kWaves · kTokens tokens
    int64_t first_b = 0;  // the sequence that this launch begins with
};

// The part of the tensors that a wave owns: tokens start to end of sequence b, kLanes·V channels.
struct Place {
    int strip, start, end;
    int64_t b, piece;

    __device__ Place(const Shape& shape, int waves, int tokens) {
        const unsigned of_launch = blockIdx.x / shape.strips;
        strip = blockIdx.x % shape.strips;
        piece = shape.first_b * shape.groups + of_launch;
        b = shape.first_b + of_launch / shape.groups;
        const int64_t begin = (int64_t(of_launch % shape.groups) * waves + uniform(threadIdx.y)) * tokens;
        start = int(begin < shape.L ? begin : shape.L);
        end = start + tokens < shape.L ? start + tokens : shape.L;
    }
};

// Kernels with seq_idx also keep ids, so they may use the registers of one block more.
constexpr int fewer_with_ids(int blocks, bool seq) { return seq && blocks > 1 ? blocks - 1 : blocks; }

// V values as they are in memory, moved in one access.
template <int BYTES>
struct alignas(BYTES) Words {
    uint32_t word[BYTES / 4];
};

// The V neighbouring channels of a thread. V = 1 for any D and any alignment; otherwise D, the strides and the pointers
// are multiples of V, so that a thread has all its channels or none.
template <class T, int V>
struct Channels {
    typedef std::conditional_t<V == 1, T, Words<V * sizeof(T)>> Raw;
    int first;
    unsigned offset;  // in bytes, 32 bits: added to a row's address, which is the same for the whole wave

    __device__ explicit Channels(int strip)
        : first((strip * kLanes + int(threadIdx.x)) * V), offset(first * sizeof(T)) {}

    __device__ Raw load(const T* row) const {
        return *reinterpret_cast<const Raw*>(reinterpret_cast<const char*>(row) + offset);
    }
    __device__ static void unpack(const Raw& raw, float (&values)[V]) {
        if constexpr (V == 1) {
            values[0] = to_float(raw);
        } else {
#pragma unroll
            for (int i = 0; i < V; i++) {
                if constexpr (sizeof(T) == 4) {
                    values[i] = same_bits<float>(raw.word[i]);
                } else {
                    values[i] = to_float(T{uint16_t(raw.word[i / 2] >> (i % 2 * 16))});
                }
            }
        }
    }
    __device__ void store(T* row, const float (&values)[V]) const {
        Raw raw;
        if constexpr (V == 1) {
            raw = from_float<T>(values[0]);
        } else {
#pragma unroll
            for (int i = 0; i < int(sizeof(Raw) / 4); i++) {
                if constexpr (sizeof(T) == 4) {
                    raw.word[i] = same_bits<uint32_t>(values[i]);
                } else {
                    raw.word[i] = pack<T>(values[2 * i], values[2 * i + 1]);
                }
            }
        }
        *reinterpret_cast<Raw*>(reinterpret_cast<char*>(row) + offset) = raw;
    }
};

// weight[c, k] and bias[c] of channels c and up; no bias is 0.
template <int W, int V>
__device__ inline void load_weights(const float* weight, const float* bias, int64_t c, float (&w)[W][V],
                                    float (&of_bias)[V]) {
#pragma unroll
    for (int i = 0; i < V; i++) {
        of_bias[i] = bias ? bias[c + i] : 0.0f;
#pragma unroll
        for (int k = 0; k < W; k++) w[k][i] = weight[(c + i) * W + k];
    }
}

// x[b, t] where t may be before 0: there the initial state, or zeros.
template <int S, class T, int V>
__device__ inline void load_past(const Channels<T, V>& channels, const T* x, const T* initial_state, const Shape& shape,
                                 int64_t b, int t, float (&values)[V]) {
    if (t >= 0) {
        channels.unpack(channels.load(x + b * shape.x_batch_stride + t * shape.x_token_stride), values);
    } else if (initial_state) {
        channels.unpack(channels.load(initial_state + (b * S + t + S) * shape.D), values);
    } else {
#pragma unroll
        for (int i = 0; i < V; i++) values[i] = 0.0f;
    }
}

// All rows of a step and the W−1 before it are of one sequence, and not padding: no tap has to be tested.
template <int N>
__device__ inline bool one_sequence(const int (&id)[N]) {
    bool same = id[0] >= 0;
#pragma unroll
    for (int r = 1; r < N; r++) same = same && id[r] == id[0];
    return same;
}
