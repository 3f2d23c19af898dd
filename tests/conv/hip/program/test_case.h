// One case of the test program: its inputs, and what should come out of them, by plain loops in fp64.
#pragma once

#include <array>
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
};

typedef std::vector<double> Values;

// Everything is kept in fp64; inputs have been rounded to the case's type by the caller.
struct Inputs {
    Values x, weight, bias, dy, seq_idx, initial_state, dfinal_state;
};

enum Result { kDx, kDweight, kDbias, kY, kFinalState, kDinitialState, kResults };
const char* const kResultNames[] = {"dx", "dweight", "dbias", "y", "final_state", "dinitial_state"};
typedef std::array<Values, kResults> Outputs;

template <class Round>
Inputs make_inputs(const Case& c, Round round) {
    std::mt19937 random(1234);
    std::normal_distribution<double> normal;
    auto to_float = [](double value) { return double(float(value)); };
    auto fill = [&](Values& values, int64_t count, double scale, auto rounded) {
        for (int64_t i = 0; i < count; i++) values.push_back(rounded(scale * normal(random)));
    };
    Inputs in;
    const int64_t elements = c.B * c.L * c.D, state = c.B * (c.W - 1) * c.D;
    fill(in.x, elements, 1.0, round);
    fill(in.dy, elements, 1.0, round);
    fill(in.weight, c.D * c.W, 0.5, to_float);
    fill(in.bias, c.bias ? c.D : 0, 1.0, to_float);
    fill(in.initial_state, has_initial_state(c.mode) ? state : 0, 1.0, round);
    fill(in.dfinal_state, c.mode == kStates ? state : 0, 1.0, round);
    // Runs of 1 to 40 tokens; every third run is padding, with NaN in it, where the case asks for that.
    for (int64_t b = 0; has_seq_idx(c.mode) && b < c.B; b++) {
        for (int64_t t = 0, id = 0; t < c.L; id++) {
            const bool padding = c.mode == kPadded && id % 3 == 2;
            for (int64_t run = 1 + random() % 40; run > 0 && t < c.L; run--, t++) {
                in.seq_idx.push_back(padding ? -1 : id);
                for (int64_t d = 0; padding && d < c.D; d++)
                    in.x[(b * c.L + t) * c.D + d] = in.dy[(b * c.L + t) * c.D + d] = NAN;
            }
        }
    }
    return in;
}

inline Outputs truth(const Case& c, const Inputs& in) {
    const int64_t B = c.B, L = c.L, D = c.D, W = c.W, S = W - 1, elements = B * L * D;
    const bool states = !in.initial_state.empty(), packed = !in.seq_idx.empty();
    const size_t sizes[] = {size_t(elements), in.weight.size(),       in.bias.size(),
                            size_t(elements), in.dfinal_state.size(), in.initial_state.size()};
    Outputs out;
    for (int i = 0; i < kResults; i++) out[i].assign(sizes[i], 0.0);
    for (int64_t b = 0; b < B; b++) {
        auto at = [&](int64_t t, int64_t d) { return (b * L + t) * D + d; };
        auto state = [&](int64_t t, int64_t d) { return (b * S + t + S) * D + d; };  // of time t < 0
        auto input = [&](int64_t t, int64_t d) { return t < 0 ? in.initial_state[state(t, d)] : in.x[at(t, d)]; };
        auto gradient = [&](int64_t t, int64_t d) -> double& {
            return t < 0 ? out[kDinitialState][state(t, d)] : out[kDx][at(t, d)];
        };
        auto counts = [&](int64_t t, int64_t tap) {
            if (tap < 0 && !states) return false;
            return !packed || in.seq_idx[b * L + t] == in.seq_idx[b * L + (tap < 0 ? 0 : tap)];
        };
        for (int64_t t = 0; t < L; t++) {
            if (packed && in.seq_idx[b * L + t] < 0) continue;
            for (int64_t d = 0; d < D; d++) {
                double z = c.bias ? in.bias[d] : 0.0;
                for (int64_t k = 0; k < W; k++)
                    if (counts(t, t - S + k)) z += in.weight[d * W + k] * input(t - S + k, d);
                const double s = 1.0 / (1.0 + std::exp(-z));
                out[kY][at(t, d)] = c.silu ? z * s : z;
                const double g = in.dy[at(t, d)] * (c.silu ? s * (1.0 + z * (1.0 - s)) : 1.0);
                if (c.bias) out[kDbias][d] += g;
                for (int64_t k = 0; k < W; k++) {
                    if (!counts(t, t - S + k)) continue;
                    gradient(t - S + k, d) += in.weight[d * W + k] * g;
                    out[kDweight][d * W + k] += g * input(t - S + k, d);
                }
            }
        }
        for (int64_t t = -S; !in.dfinal_state.empty() && t < 0; t++) {
            for (int64_t d = 0; d < D; d++) {
                out[kFinalState][state(t, d)] = input(L + t, d);
                gradient(L + t, d) += in.dfinal_state[state(t, d)];
            }
        }
    }
    return out;
}
