// z[b, t, c] = bias[c] + Σ_k weight[c, k] · x[b, t − (W−1−k), c]          y = z or z·σ(z)
//
// A wave owns 64·V channels and walks kTokens rows. The last W−1 rows stay in registers, so that every element is
// loaded once; the rows of the next steps are already on their way. No shared memory, no barriers.
#pragma once

#include "walk.h"

template <class T>
constexpr int kForwardChannels = sizeof(T) == 4 ? MHC_CONV_FWD_CHANNELS_32 : MHC_CONV_FWD_CHANNELS_16;
template <class T>
constexpr int kForwardRows = sizeof(T) == 4 ? MHC_CONV_FWD_ROWS_32 : MHC_CONV_FWD_ROWS_16;
constexpr int kForwardWaves = MHC_CONV_FWD_WAVES;
constexpr int kForwardTokens = MHC_CONV_FWD_TOKENS;

template <class T, int W, bool SILU, bool SEQ, int V>
__global__ void __launch_bounds__(kLanes* kForwardWaves, fewer_with_ids(MHC_CONV_FWD_BLOCKS, SEQ))
    conv_fwd_kernel(const T* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
                    const int* __restrict__ seq_idx, const T* __restrict__ initial_state, T* __restrict__ y,
                    T* __restrict__ final_state, Shape shape) {
    constexpr int S = W - 1, ROWS = kForwardRows<T>;
    const Place place(shape, kForwardWaves, kForwardTokens);
    const Channels<T, V> channels(place.strip);
    const int start = place.start, end = place.end;
    if (start == end || channels.first >= shape.D) return;  // there is no barrier ahead

    const int64_t b = place.b;
    const T* x_b = x + b * shape.x_batch_stride;
    T* y_b = y + b * shape.L * shape.D;
    const int* id_b = SEQ ? seq_idx + b * shape.L : nullptr;
    float w[W][V], of_bias[V];
    load_weights<W>(weight, bias, channels.first, w, of_bias);

    // Row r of a step is window[S + r]; the S rows before the step come first. So do their ids.
    float window[S + ROWS][V];
    int id[S + ROWS];
    typename Channels<T, V>::Raw ahead[ROWS];
    int id_ahead[ROWS];
    auto fetch = [&](int r, int t, bool clamp) {
        if (clamp) t = t < end ? t : end - 1;
        ahead[r] = channels.load(x_b + t * shape.x_token_stride);
        if constexpr (SEQ) id_ahead[r] = id_b[t];
    };
#pragma unroll
    for (int r = 0; r < ROWS; r++) fetch(r, start + r, true);
#pragma unroll
    for (int r = 0; r < S; r++) {
        const int t = start - S + r;
        load_past<S>(channels, x, initial_state, shape, b, t, window[r]);
        if constexpr (SEQ) id[r] = id_b[t < 0 ? 0 : t];  // a state is of the sequence of token 0
    }

    // MASKED: the step or the fetch for the next one reaches past the last token, or it crosses into another sequence.
    auto step = [&](int first, auto masked) {
        constexpr bool MASKED = decltype(masked)::value;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int t = first + r;
            channels.unpack(ahead[r], window[S + r]);
            fetch(r, t + ROWS, MASKED);
            issue_loads();
            float out[V];
#pragma unroll
            for (int i = 0; i < V; i++) {
                float z = of_bias[i];
#pragma unroll
                for (int k = 0; k < W; k++) {
                    const bool counts = !(SEQ && MASKED) || id[r + k] == id[r + S];
                    z += w[k][i] * (counts ? window[r + k][i] : 0.0f);
                }
                out[i] = SILU ? z * sigmoid(z) : z;
                if (SEQ && MASKED && id[r + S] < 0) out[i] = 0.0f;
            }
            if (!MASKED || t < end) channels.store(y_b + int64_t(t) * shape.D, out);
        }
#pragma unroll
        for (int r = 0; r < S; r++) {
            if constexpr (SEQ) id[r] = id[ROWS + r];
#pragma unroll
            for (int i = 0; i < V; i++) window[r][i] = window[ROWS + r][i];
        }
    };
    auto is_whole = [&](int first) {
        if constexpr (SEQ) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) id[S + r] = id_ahead[r];
            if (!one_sequence(id)) return false;
        }
        return first + 2 * ROWS <= end;
    };

    // Whole steps in a loop of their own: what is on its way to a register is never moved, which would wait for it.
    for (int first = start; first < end; first += ROWS) {
        for (; is_whole(first); first += ROWS) step(first, False());
        if (first < end) step(first, True());
    }

    // final_state[s] = x[L − S + s], the initial state shifting in where L < S: copied, not rounded again.
    if (final_state && end == shape.L) {
#pragma unroll
        for (int s = 0; s < S; s++) {
            float row[V];
            load_past<S>(channels, x, initial_state, shape, b, shape.L - S + s, row);
            channels.store(final_state + (b * S + s) * shape.D, row);
        }
    }
}
