// One case of the test program: its inputs, and what should come out of them, by plain loops in fp64.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "conv.h"

enum Mode { kPlain, kPacked, kPadded, kStates, kPackedWithState };
inline bool has_seq_idx(Mode mode) { return mode == kPacked || mode == kPadded || mode == kPackedWithState; }
inline bool has_initial_state(Mode mode) { return mode == kStates || mode == kPackedWithState; }

struct Case {
    std::string name;
    int64_t B, D, L, W;
    bool bias, silu;
    ConvType type = kConvFloat;
    Mode mode = kPlain;
    int64_t gap = 0;  // x is cut out of rows that are longer by this
};

typedef std::vector<double> Values;

// Everything is kept in fp64; inputs have been rounded to the case's type by the caller.
struct Inputs {
    Values x, weight, bias, dy, initial_state, dfinal_state;
    std::vector<int32_t> seq_idx;
};

struct Outputs {
    Values y, final_state, dx, dweight, dbias, dinitial_state;
};

template <class Round>
Inputs make_inputs(const Case& c, Round round) {
    std::mt19937 random(1234);
    std::normal_distribution<double> normal;
    auto fill = [&](Values& values, int64_t count, double scale) {
        for (int64_t i = 0; i < count; i++) values.push_back(round(scale * normal(random)));
    };
    Inputs in;
    const int64_t S = c.W - 1;
    fill(in.x, c.B * c.L * c.D, 1.0);
    fill(in.dy, c.B * c.L * c.D, 1.0);
    for (int64_t i = 0; i < c.D * c.W; i++) in.weight.push_back(float(0.5 * normal(random)));
    if (c.bias)
        for (int64_t i = 0; i < c.D; i++) in.bias.push_back(float(normal(random)));
    if (has_initial_state(c.mode)) fill(in.initial_state, c.B * S * c.D, 1.0);
    if (c.mode == kStates) fill(in.dfinal_state, c.B * S * c.D, 1.0);
    if (has_seq_idx(c.mode)) {
        // Runs of 1 to 40 tokens; every third run is padding, with NaN in it, where the case asks for that.
        for (int64_t b = 0; b < c.B; b++) {
            int32_t id = 0;
            for (int64_t t = 0; t < c.L; id++) {
                const bool padding = c.mode == kPadded && id % 3 == 2;
                for (int64_t run = 1 + random() % 40; run > 0 && t < c.L; run--, t++) {
                    in.seq_idx.push_back(padding ? -1 : id);
                    for (int64_t d = 0; padding && d < c.D; d++)
                        in.x[(b * c.L + t) * c.D + d] = in.dy[(b * c.L + t) * c.D + d] = NAN;
                }
            }
        }
    }
    return in;
}

inline Outputs truth(const Case& c, const Inputs& in) {
    const int64_t B = c.B, L = c.L, D = c.D, W = c.W, S = W - 1;
    const bool states = !in.initial_state.empty(), final = !in.dfinal_state.empty(), packed = !in.seq_idx.empty();
    Outputs out;
    out.y.assign(B * L * D, 0.0);
    out.dx.assign(B * L * D, 0.0);
    out.dweight.assign(D * W, 0.0);
    out.dbias.assign(c.bias ? D : 0, 0.0);
    out.final_state.assign(final ? B * S * D : 0, 0.0);
    out.dinitial_state.assign(states ? B * S * D : 0, 0.0);
    for (int64_t b = 0; b < B; b++) {
        auto at = [&](int64_t t, int64_t d) { return (b * L + t) * D + d; };
        auto state = [&](int64_t t, int64_t d) { return (b * S + t + S) * D + d; };  // of time t < 0
        auto counts = [&](int64_t t, int64_t tap) {
            if (tap < 0 && !states) return false;
            return !packed || in.seq_idx[b * L + t] == in.seq_idx[b * L + (tap < 0 ? 0 : tap)];
        };
        for (int64_t t = 0; t < L; t++) {
            if (packed && in.seq_idx[b * L + t] < 0) continue;
            for (int64_t d = 0; d < D; d++) {
                double z = c.bias ? in.bias[d] : 0.0;
                for (int64_t k = 0; k < W; k++) {
                    const int64_t tap = t - (S - k);
                    if (counts(t, tap))
                        z += in.weight[d * W + k] * (tap < 0 ? in.initial_state[state(tap, d)] : in.x[at(tap, d)]);
                }
                const double s = 1.0 / (1.0 + std::exp(-z));
                out.y[at(t, d)] = c.silu ? z * s : z;
                const double g = in.dy[at(t, d)] * (c.silu ? s * (1.0 + z * (1.0 - s)) : 1.0);
                if (c.bias) out.dbias[d] += g;
                for (int64_t k = 0; k < W; k++) {
                    const int64_t tap = t - (S - k);
                    if (!counts(t, tap)) continue;
                    (tap < 0 ? out.dinitial_state[state(tap, d)] : out.dx[at(tap, d)]) += in.weight[d * W + k] * g;
                    out.dweight[d * W + k] += g * (tap < 0 ? in.initial_state[state(tap, d)] : in.x[at(tap, d)]);
                }
            }
        }
        for (int64_t s = 0; final && s < S; s++) {
            const int64_t t = L - S + s;
            for (int64_t d = 0; d < D; d++) {
                out.final_state[(b * S + s) * D + d] = t < 0 ? in.initial_state[state(t, d)] : in.x[at(t, d)];
                (t < 0 ? out.dinitial_state[state(t, d)] : out.dx[at(t, d)]) += in.dfinal_state[(b * S + s) * D + d];
            }
        }
    }
    return out;
}
