// Runs the kernels of one case on the device.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "test_case.h"
#include "types.h"

inline void require(const char* error, const char* what) {
    if (error == nullptr) return;
    std::fprintf(stderr, "%s: %s\n", what, error);
    std::exit(2);
}
#define CHECK(call)                                                             \
    do {                                                                        \
        const hipError_t code = (call);                                         \
        require(code == hipSuccess ? nullptr : hipGetErrorString(code), #call); \
    } while (false)

template <class T>
class Buffer {
  public:
    explicit Buffer(int64_t count) : count_(count) {
        if (count == 0) return;
        CHECK(hipMalloc(&data_, count * sizeof(T)));
        CHECK(hipMemset(data_, 0xff, count * sizeof(T)));  // NaN in every type: an element never written must show
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (data_) CHECK(hipFree(data_));
    }
    T* get() const { return data_; }  // null where there is nothing
    void put(const std::vector<T>& values) {
        if (count_) CHECK(hipMemcpy(data_, values.data(), count_ * sizeof(T), hipMemcpyHostToDevice));
    }
    std::vector<T> take() const {
        std::vector<T> values(count_);
        if (count_) CHECK(hipMemcpy(values.data(), data_, count_ * sizeof(T), hipMemcpyDeviceToHost));
        return values;
    }

  private:
    int64_t count_;
    T* data_ = nullptr;
};

template <class T>
std::vector<T> narrow(const Values& values) {
    std::vector<T> narrowed;
    narrowed.reserve(values.size());
    for (double value : values) narrowed.push_back(from_float<T>(float(value)));
    return narrowed;
}
template <class T>
Values widen(const std::vector<T>& values) {
    Values wide;
    wide.reserve(values.size());
    for (T value : values) wide.push_back(to_float(value));
    return wide;
}

template <class T>
struct Device {
    Case c;
    const int64_t rows = c.B * c.L, stride = c.D + c.gap, state = c.B * (c.W - 1) * c.D;
    const int64_t first = has_initial_state(c.mode) ? state : 0, last = c.mode == kStates ? state : 0;
    Buffer<T> x{rows * stride}, dy{rows * c.D}, initial_state{first}, dfinal_state{last};
    Buffer<float> weight{c.D * c.W}, bias{c.bias ? c.D : 0}, workspace{conv_workspace(c.B, c.L, c.D, c.W)};
    Buffer<int32_t> seq_idx{has_seq_idx(c.mode) ? rows : 0};
    Buffer<T> y{rows * c.D}, final_state{last}, dx{rows * c.D}, dinitial_state{first};
    Buffer<float> dweight{c.D * c.W}, dbias{c.bias ? c.D : 0};

    Device(const Case& c_, const Inputs& in) : c(c_) {
        std::vector<T> values = narrow<T>(in.x), wide(rows * stride, from_float<T>(NAN));
        for (int64_t row = 0; row < rows; row++)
            std::copy(&values[row * c.D], &values[row * c.D] + c.D, &wide[row * stride]);
        x.put(wide);
        dy.put(narrow<T>(in.dy));
        initial_state.put(narrow<T>(in.initial_state));
        dfinal_state.put(narrow<T>(in.dfinal_state));
        weight.put(narrow<float>(in.weight));
        bias.put(narrow<float>(in.bias));
        seq_idx.put(in.seq_idx);
    }
    void forward() {
        ConvForward call = {};
        call.x = x.get(), call.weight = weight.get(), call.bias = bias.get(), call.seq_idx = seq_idx.get();
        call.initial_state = initial_state.get(), call.y = y.get(), call.final_state = final_state.get();
        call.B = c.B, call.L = c.L, call.D = c.D, call.W = c.W;
        call.x_batch_stride = c.L * stride, call.x_token_stride = stride;
        call.type = c.type, call.silu = c.silu;
        require(conv_forward(&call, nullptr), "conv_forward");
    }
    void backward() {
        ConvBackward call = {};
        call.x = x.get(), call.weight = weight.get(), call.bias = bias.get(), call.seq_idx = seq_idx.get();
        call.initial_state = initial_state.get(), call.dy = dy.get(), call.dfinal_state = dfinal_state.get();
        call.dx = dx.get(), call.dweight = dweight.get(), call.dbias = dbias.get();
        call.dinitial_state = dinitial_state.get(), call.workspace = workspace.get();
        call.B = c.B, call.L = c.L, call.D = c.D, call.W = c.W;
        call.x_batch_stride = c.L * stride, call.x_token_stride = stride;
        call.type = c.type, call.silu = c.silu;
        require(conv_backward(&call, nullptr), "conv_backward");
    }
    Outputs run() {
        forward();
        backward();
        CHECK(hipDeviceSynchronize());
        return {widen(y.take()),       widen(final_state.take()), widen(dx.take()),
                widen(dweight.take()), widen(dbias.take()),       widen(dinitial_state.take())};
    }
};

// Calls run(T()) with the type of a case.
template <class Run>
auto with_type(ConvType type, Run run) {
    if (type == kConvHalf) return run(Half());
    if (type == kConvBf16) return run(Bf16());
    return run(float());
}
