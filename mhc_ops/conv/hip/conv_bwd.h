// g[t] = dy[t]                                     without activation
//      = dy[t] · σ(z)·(1 + z·(1 − σ(z)))           SiLU, z recomputed as in the forward
// dx[t] = Σ_k weight[k] · g[t + (W−1−k)]
// dweight[k] = Σ_{b,t} g[t] · x[t − (W−1−k)]       dbias = Σ_{b,t} g[t]
//
// As in the forward, a wave owns 64·V channels and walks kTokens rows with the last W−1 rows of x and of g in
// registers. At row t all of g that dx[t − (W−1)] needs is there; the walk therefore goes W−1 rows beyond the wave's
// own tokens, where g is made but not summed. The waves of a block add up their sums in shared memory, one after
// another, and write one piece [W + 1, D]; a second kernel adds the pieces. Always in the same order, so always the
// same bits.
#pragma once

#include "walk.h"

template <class T, bool SEQ>  // at most 4 with ids: 8 of 16 bits spill
constexpr int kBackwardChannels = sizeof(T) == 4                       ? MHC_CONV_BWD_CHANNELS_32
                                  : SEQ && MHC_CONV_BWD_CHANNELS_16 > 4 ? 4
                                                                        : MHC_CONV_BWD_CHANNELS_16;
template <class T>
constexpr int kBackwardRows = sizeof(T) == 4 ? MHC_CONV_BWD_ROWS_32 : MHC_CONV_BWD_ROWS_16;
constexpr int kBackwardWaves = MHC_CONV_BWD_WAVES;
constexpr int kBackwardTokens = MHC_CONV_BWD_TOKENS;

// The tokens of one wave: writes their dx (and dinitial_state, which is dx at times before 0), adds to dweight and
// dbias.
template <class T, int W, bool SILU, bool SEQ, int V>
__device__ inline void walk_back(const T* __restrict__ x, const float* __restrict__ weight,
                                 const float* __restrict__ bias, const int* __restrict__ seq_idx,
                                 const T* __restrict__ initial_state, const T* __restrict__ dy,
                                 const T* __restrict__ dfinal_state, T* __restrict__ dx, T* __restrict__ dinitial_state,
                                 const Shape& shape, const Place& place, const Channels<T, V>& channels,
                                 float (&dweight)[W][V], float (&dbias)[V]) {
    constexpr int S = W - 1, ROWS = kBackwardRows<T>;
    const int start = place.start, end = place.end, L = shape.L;
    const int last = (end + S < L ? end + S : L) - 1;  // the last row that is read
    const int64_t b = place.b;
    const T* x_b = x + b * shape.x_batch_stride;
    const T* dy_b = dy + b * L * shape.D;
    T* dx_b = dx + b * L * shape.D;
    const int* id_b = SEQ ? seq_idx + b * L : nullptr;
    float w[W][V], of_bias[V];
    load_weights<W>(weight, bias, channels.first, w, of_bias);

    // Row r of a step is window[S + r] and g[S + r]; the S rows before the step come first. So do their ids.
    float window[S + ROWS][V], g[S + ROWS][V];
    int id[S + ROWS];
    typename Channels<T, V>::Raw x_ahead[ROWS], dy_ahead[ROWS];
    int id_ahead[ROWS];
    auto fetch = [&](int r, int t, bool clamp) {
        if (clamp) t = t < last ? t : last;
        x_ahead[r] = channels.load(x_b + t * shape.x_token_stride);
        dy_ahead[r] = channels.load(dy_b + int64_t(t) * shape.D);
        if constexpr (SEQ) id_ahead[r] = id_b[t];
    };
#pragma unroll
    for (int r = 0; r < ROWS; r++) fetch(r, start + r, true);
#pragma unroll
    for (int r = 0; r < S; r++) {
        const int t = start - S + r;
        load_past<S>(channels, x, initial_state, shape, b, t, window[r]);
        if constexpr (SEQ) id[r] = id_b[t < 0 ? 0 : t];  // a state is of the sequence of token 0
#pragma unroll
        for (int i = 0; i < V; i++) g[r][i] = 0.0f;  // tokens whose dx another wave computes
    }

    // MASKED: the step is the first or one of the last of a walk, or crosses into another sequence.
    auto step = [&](int first, auto masked) {
        constexpr bool MASKED = decltype(masked)::value;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int t = first + r, back = t - S;
            channels.unpack(x_ahead[r], window[S + r]);
            channels.unpack(dy_ahead[r], g[S + r]);
            fetch(r, t + ROWS, MASKED);
            issue_loads();
            auto counts = [&](int token, int tap) { return !(SEQ && MASKED) || id[r + token] == id[r + tap]; };
            const bool live = !MASKED || (t < L && !(SEQ && id[r + S] < 0));
            float out[V];
#pragma unroll
            for (int i = 0; i < V; i++) {
                if constexpr (SILU) {
                    float z = of_bias[i];
#pragma unroll
                    for (int k = 0; k < W; k++) z += w[k][i] * (counts(S, k) ? window[r + k][i] : 0.0f);
                    const float s = sigmoid(z);
                    g[r + S][i] *= s * (1.0f + z * (1.0f - s));
                }
                if (!live) g[r + S][i] = 0.0f;
                float sum = 0.0f;
#pragma unroll
                for (int k = 0; k < W; k++) sum += w[k][i] * (counts(S - k, 0) ? g[r + S - k][i] : 0.0f);
                out[i] = sum;
            }
            if (!MASKED || (t < end && live)) {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    dbias[i] += g[r + S][i];
#pragma unroll
                    for (int k = 0; k < W; k++)
                        dweight[k][i] += g[r + S][i] * (counts(S, k) ? window[r + k][i] : 0.0f);
                }
            }
            if constexpr (MASKED) {
                // final_state[s] was x[L − S + s], or the initial state at times before 0.
                if (dfinal_state && back >= L - S && back < L) {
                    float more[V];
                    channels.unpack(channels.load(dfinal_state + (b * S + back - (L - S)) * shape.D), more);
#pragma unroll
                    for (int i = 0; i < V; i++) out[i] += more[i];
                }
                if (dinitial_state && start == 0 && back < 0)
                    channels.store(dinitial_state + (b * S + back + S) * shape.D, out);
            }
            if (!MASKED || (back >= start && back < end)) channels.store(dx_b + int64_t(back) * shape.D, out);
        }
#pragma unroll
        for (int r = 0; r < S; r++) {
            if constexpr (SEQ) id[r] = id[ROWS + r];
#pragma unroll
            for (int i = 0; i < V; i++) {
                window[r][i] = window[ROWS + r][i];
                g[r][i] = g[ROWS + r][i];
            }
        }
    };
    auto is_whole = [&](int first) {
        if constexpr (SEQ) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) id[S + r] = id_ahead[r];
            if (!one_sequence(id)) return false;
        }
        return first >= start + S && first + ROWS <= end && first + 2 * ROWS <= last + 1;
    };

    // Whole steps in a loop of their own: what is on its way to a register is never moved, which would wait for it.
    for (int first = start; first < end + S; first += ROWS) {
        for (; is_whole(first); first += ROWS) step(first, False());
        if (first < end + S) step(first, True());
    }
}

template <class T, int W, bool SILU, bool SEQ, int V>
__global__ void __launch_bounds__(kLanes* kBackwardWaves, fewer_with_ids(MHC_CONV_BWD_BLOCKS, SEQ))
    conv_bwd_kernel(const T* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
                    const int* __restrict__ seq_idx, const T* __restrict__ initial_state, const T* __restrict__ dy,
                    const T* __restrict__ dfinal_state, T* __restrict__ dx, T* __restrict__ dinitial_state,
                    float* __restrict__ pieces, Shape shape) {
    const Place place(shape, kBackwardWaves, kBackwardTokens);
    const Channels<T, V> channels(place.strip);
    const bool in_row = channels.first < shape.D;

    float dweight[W][V], dbias[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
        dbias[i] = 0.0f;
#pragma unroll
        for (int k = 0; k < W; k++) dweight[k][i] = 0.0f;
    }
    // Threads without tokens or channels sum nothing, and meet the others at the barriers.
    if (place.start < place.end && in_row)
        walk_back<T, W, SILU, SEQ, V>(x, weight, bias, seq_idx, initial_state, dy, dfinal_state, dx, dinitial_state,
                                      shape, place, channels, dweight, dbias);

    __shared__ float sums[W + 1][V][kLanes];
    const int lane = threadIdx.x;
#pragma unroll 1
    for (int wave = 0; wave < kBackwardWaves; wave++) {
        if (int(threadIdx.y) == wave) {
#pragma unroll
            for (int k = 0; k <= W; k++) {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    const float own = k < W ? dweight[k < W ? k : 0][i] : dbias[i];
                    const float sum = wave == 0 ? own : sums[k][i][lane] + own;
                    sums[k][i][lane] = sum;
                    if (wave == kBackwardWaves - 1 && in_row)
                        pieces[(place.piece * (W + 1) + k) * shape.D + channels.first + i] = sum;
                }
            }
        }
        __syncthreads();
    }
}

// dweight[c, k] = Σ_piece pieces[piece, k, c], dbias[c] = Σ_piece pieces[piece, W, c]: kSumParts interleaved sums per
// column, added up in order.
constexpr int kSumColumns = 32, kSumParts = 8;

template <int W>
__global__ void __launch_bounds__(kSumColumns* kSumParts)
    conv_sum_kernel(const float* __restrict__ pieces, float* __restrict__ dweight, float* __restrict__ dbias,
                    int64_t count, int D) {
    __shared__ float parts[kSumParts][kSumColumns];
    const int64_t columns = int64_t(W + 1) * D;
    const int64_t column = int64_t(blockIdx.x) * kSumColumns + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int64_t piece = threadIdx.y; piece < count; piece += kSumParts) sum += pieces[piece * columns + column];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
        for (int part = 1; part < kSumParts; part++) sum += parts[part][threadIdx.x];
        const int k = column / D;
        const int c = column % D;
        if (k < W) {
            dweight[int64_t(c) * W + k] = sum;
        } else if (dbias) {
            dbias[c] = sum;
        }
    }
}
