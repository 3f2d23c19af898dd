// Test program of the channel-last conv kernels: channellast_test [0 all | 1 accuracy | 2 performance].
// Exits with 0 when everything passed, 1 when something failed, 2 when a call went wrong.
#include <algorithm>

#include "test_run.h"

namespace {

#if defined(MHC_CONV_ONLY_WIDTH_4)
const std::vector<int64_t> kWidths = {4};
#else
const std::vector<int64_t> kWidths = {2, 3, 4};
#endif
#if defined(MHC_CONV_ONLY_FP32)
const std::vector<ConvType> kTypes = {kConvFloat};
#elif defined(MHC_CONV_WITHOUT_FP16)
const std::vector<ConvType> kTypes = {kConvFloat, kConvBf16};
#else
const std::vector<ConvType> kTypes = {kConvFloat, kConvHalf, kConvBf16};
#endif
constexpr bool kOnCpu = MHC_OPS_PLATFORM[1] == 'P';
const char* const kTypeNames[] = {"fp32", "fp16", "bf16"};
const char* const kModeNames[] = {"", ", seq_idx", ", seq_idx with padding", ", states", ", seq_idx and state"};

std::vector<Case> presets() {
    return {
        {"Tiny", 1, 32, 64, 4, true, false},      {"Small", 2, 64, 256, 4, true, false},
        {"Medium", 4, 64, 512, 4, true, false},   {"Large", 4, 64, 1024, 4, true, false},
        {"No Bias", 2, 64, 256, 4, false, false}, {"With SiLU", 2, 64, 256, 4, true, true},
    };
}

std::vector<Case> more_cases() {
    std::vector<Case> cases;
    for (ConvType type : kTypes) {
        for (int64_t W : kWidths) {
            for (Mode mode : {kPlain, kPacked, kPadded, kStates, kPackedWithState}) {
                cases.push_back({"vectors", 1, 320, 140, W, true, true, type, mode});
                cases.push_back({"one by one", 2, 65, 140, W, true, false, type, mode});
                cases.push_back({"no bias", 1, 64, 70, W, false, mode == kPadded, type, mode});
            }
            for (int64_t L : {1, 2, 3, 4, 5}) {
                cases.push_back({"short", 2, 24, L, W, true, true, type, kStates});
                cases.push_back({"short", 1, 7, L, W, true, false, type, kStates});
                cases.push_back({"short", 1, 8, L, W, true, true, type});
            }
        }
        for (int64_t D : {1, 7, 65, 4097}) cases.push_back({"odd D", 1, D, D < 4000 ? 40 : 6, 4, true, true, type});
        cases.push_back({"many ranges", 2, 72, 777, 4, true, true, type});
        cases.push_back({"many ranges", 1, 9, 1029, 4, true, true, type, kPadded});
    }
    return cases;
}

// |got − want| ≤ one rounding of the output's type + 1e-5 of the tensor's root mean square, for sums in fp32.
struct Difference {
    double most = 0.0;
    int64_t errors = 0;
};
Difference compare(const Values& got, const Values& want, ConvType type) {
    const double rounding = type == kConvBf16 ? 0x1p-8 : type == kConvHalf ? 0x1p-11 : 0x1p-24;
    double squares = 0.0;
    for (double value : want) squares += value * value;
    const double floor =
        1e-5 * std::sqrt(squares / std::max<size_t>(want.size(), 1)) + (type == kConvHalf ? 0x1p-25 : 0);
    Difference difference;
    for (size_t i = 0; i < want.size(); i++) {
        const double off = std::fabs(got[i] - want[i]);
        if (!(off <= difference.most)) difference.most = off;  // NaN too
        if (!(off <= rounding * std::fabs(want[i]) + floor)) difference.errors++;
    }
    return difference;
}

bool passes(const Case& c, bool quiet) {
    return with_type(c.type, [&](auto type) {
        typedef decltype(type) T;
        const Inputs in = make_inputs(c, [](double value) { return double(to_float(stored<T>(value))); });
        const Outputs want = truth(c, in), got = Device<T>(c, in).run();
        Difference differences[kResults];
        bool passed = true;
        for (int i = 0; i < kResults; i++) {
            differences[i] = compare(got[i], want[i], i == kDweight || i == kDbias ? kConvFloat : c.type);
            passed = passed && differences[i].errors == 0;
        }
        if (quiet && passed) return true;
        std::printf("%s: batch=%lld, dim=%lld, seqlen=%lld, width=%lld, bias=%s, silu=%s, %s%s\n", c.name.c_str(),
                    (long long)c.B, (long long)c.D, (long long)c.L, (long long)c.W, c.bias ? "yes" : "no",
                    c.silu ? "yes" : "no", kTypeNames[c.type], kModeNames[c.mode]);
        for (int i = 0; i < kResults; i++)
            if (!want[i].empty())
                std::printf("  %s: max_diff=%.3e, errors=%lld/%lld\n", kResultNames[i], differences[i].most,
                            (long long)differences[i].errors, (long long)want[i].size());
        std::printf("  Status: %s\n", passed ? "PASSED" : "FAILED");
        return passed;
    });
}

__global__ void nothing() {}

// The error of an earlier launch is not blamed on these.
void survive_an_older_error() {
    const Case c = presets().front();
    Device<float> device(c, make_inputs(c, [](double value) { return value; }));
    auto fail = [] { hipLaunchKernelGGL(nothing, dim3(1), dim3(4096), 0, nullptr); };  // no GPU has such blocks
    fail();
    device.forward();
    fail();
    device.backward();
    CHECK(hipDeviceSynchronize());
}

bool all_pass(const char* name, const std::vector<Case>& cases, bool quiet) {
    size_t passed = 0;
    for (const Case& c : cases) passed += passes(c, quiet);
    std::printf("%s: %zu / %zu PASSED\n", name, passed, cases.size());
    return passed == cases.size();
}

bool accuracy() {
    survive_an_older_error();
    const bool passed = all_pass("Accuracy Summary", presets(), false);
    return all_pass("More cases", more_cases(), true) && passed;
}

struct Times {
    double mean, least;
};
template <class Run>
Times measure(Run run) {
    const int warm_up = kOnCpu ? 1 : 10, count = kOnCpu ? 3 : 100;
    for (int i = 0; i < warm_up; i++) run();
    hipEvent_t start, stop;
    CHECK(hipEventCreate(&start));
    CHECK(hipEventCreate(&stop));
    Times times = {0.0, INFINITY};
    for (int i = 0; i < count; i++) {
        float ms;
        CHECK(hipEventRecord(start, nullptr));
        run();
        CHECK(hipEventRecord(stop, nullptr));
        CHECK(hipEventSynchronize(stop));
        CHECK(hipEventElapsedTime(&ms, start, stop));
        times.mean += ms / count;
        times.least = std::min(times.least, double(ms));
    }
    CHECK(hipEventDestroy(start));
    CHECK(hipEventDestroy(stop));
    return times;
}

// Forward: read x, write y. Backward: read x and dout, write dx. Plus weights and their gradients. Beside it a copy on
// the device that reads and writes the same number of bytes together.
template <class T>
void performance_of(Device<T>& device, bool backward) {
    const Case& c = device.c;
    const int64_t weights = sizeof(float) * c.D * (c.W + c.bias);
    const int64_t elements = c.B * c.L * c.D * sizeof(T);
    const int64_t bytes = backward ? 3 * elements + 2 * weights : 2 * elements + weights;
    Buffer<char> from(bytes / 2), to(bytes / 2);
    const Times copy =
        measure([&] { CHECK(hipMemcpyAsync(to.get(), from.get(), bytes / 2, hipMemcpyDeviceToDevice, nullptr)); });
    const Times times = measure([&] { backward ? device.backward() : device.forward(); });
    char name[96];
    std::snprintf(name, sizeof(name), "%s %lldx%lldx%lld W=%lld %s%s %s", c.name.c_str(), (long long)c.B,
                  (long long)c.L, (long long)c.D, (long long)c.W, kTypeNames[c.type], c.silu ? " silu" : "",
                  backward ? "bwd" : "fwd");
    std::printf("%-44s %9.4f %9.4f %10.1f %9.4f %8.1f%%\n", name, times.mean, times.least, bytes / times.mean * 1e-6,
                copy.mean, 100.0 * copy.mean / times.mean);
    std::fflush(stdout);
}

// Values around 0 that repeat: hundreds of millions of normal ones would take longer to make than to measure.
void repeat(Values& values, int64_t count) {
    const int64_t period = 1 << 16;
    std::mt19937 random(1);
    values.resize(count);
    for (int64_t i = 0; i < count; i++)
        values[i] = i < period ? double(random()) / random.max() - 0.5 : values[i - period];
}

void performance() {
    std::vector<Case> cases = presets();
    for (ConvType type : kTypes) {
        if (type == kConvHalf) continue;  // as bf16
        const int64_t B = kOnCpu ? 1 : 8, L = kOnCpu ? 256 : 4096, D = kOnCpu ? 512 : 4096;
        cases.push_back({kOnCpu ? "Larger" : "Full", B, D, L, 4, true, false, type});
    }
    std::printf("%-44s %9s %9s %10s %9s %9s\n", "Configuration", "Mean(ms)", "Min(ms)", "BW(GB/s)", "Copy(ms)",
                "of copy");
    for (size_t i = 0; i < cases.size(); i++)
        with_type(cases[i].type, [&](auto type) {
            const Case& c = cases[i];
            Case one_row = c;
            one_row.B = one_row.L = 1;
            Inputs in = make_inputs(one_row, [](double value) { return value; });
            for (Values* values : {&in.x, &in.dy}) repeat(*values, c.B * c.L * c.D);
            Device<decltype(type)> device(c, in);
            for (bool silu : {c.silu, true}) {
                device.c.silu = silu;
                for (bool backward : {false, true}) performance_of(device, backward);
                if (i < presets().size()) break;  // those say themselves whether they have SiLU
            }
        });
}

}  // namespace

int main(int count, char** arguments) {
    const std::string mode = count > 1 ? arguments[1] : "0";
    if (count > 2 || (mode != "0" && mode != "1" && mode != "2")) {
        std::fprintf(stderr, "usage: %s [0 all | 1 accuracy | 2 performance]\n", arguments[0]);
        return 2;
    }
    std::printf("Channel-last causal conv1d, %s build\n", MHC_OPS_PLATFORM);
    const bool passed = mode == "2" || accuracy();
    if (mode != "1") performance();
    return passed ? 0 : 1;
}
