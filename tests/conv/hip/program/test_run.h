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
T stored(double value) {
    return from_float<T>(float(value));
}
template <>
inline int32_t stored<int32_t>(double value) {
    return int32_t(value);
}

// Memory of the device. What is not written is NaN in every type: an element never written must show.
template <class T>
class Buffer {
  public:
    explicit Buffer(int64_t count) : count_(count) {
        if (count == 0) return;
        CHECK(hipMalloc(&data_, count * sizeof(T)));
        CHECK(hipMemset(data_, 0xff, count * sizeof(T)));
    }
    explicit Buffer(const Values& values) : Buffer(int64_t(values.size())) {
        std::vector<T> rows;
        for (double value : values) rows.push_back(stored<T>(value));
        if (count_) CHECK(hipMemcpy(data_, rows.data(), count_ * sizeof(T), hipMemcpyHostToDevice));
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (data_) CHECK(hipFree(data_));
    }
    T* get() const { return data_; }  // null where there is nothing
    Values take() const {
        std::vector<T> values(count_);
        if (count_) CHECK(hipMemcpy(values.data(), data_, count_ * sizeof(T), hipMemcpyDeviceToHost));
        Values wide;
        for (T value : values) wide.push_back(to_float(value));
        return wide;
    }

  private:
    int64_t count_;
    T* data_ = nullptr;
};

template <class T>
struct Device {
    Case c;
    const int64_t elements, first, last;
    Buffer<T> x, dy, initial_state, dfinal_state;
    Buffer<float> weight, bias, workspace{conv_workspace(c.B, c.L, c.D, c.W)};
    Buffer<int32_t> seq_idx;
    Buffer<T> y{elements}, final_state{last}, dx{elements}, dinitial_state{first};
    Buffer<float> dweight{c.D * c.W}, dbias{c.bias ? c.D : 0};

    Device(const Case& c, const Inputs& in)
        : c(c), elements(c.B * c.L * c.D), first(in.initial_state.size()), last(in.dfinal_state.size()),
          x(in.x), dy(in.dy), initial_state(in.initial_state), dfinal_state(in.dfinal_state),
          weight(in.weight), bias(in.bias), seq_idx(in.seq_idx) {}
    template <class Call>
    Call call() const {
        Call call = {};
        call.x = x.get(), call.weight = weight.get(), call.bias = bias.get(), call.seq_idx = seq_idx.get();
        call.initial_state = initial_state.get();
        call.B = c.B, call.L = c.L, call.D = c.D, call.W = c.W;
        call.x_token_stride = c.D, call.x_batch_stride = c.L * c.D;
        call.type = c.type, call.silu = c.silu;
        return call;
    }
    void forward() {
        ConvForward call = this->call<ConvForward>();
        call.y = y.get(), call.final_state = final_state.get();
        require(conv_forward(&call, nullptr), "conv_forward");
    }
    void backward() {
        ConvBackward call = this->call<ConvBackward>();
        call.dy = dy.get(), call.dfinal_state = dfinal_state.get(), call.workspace = workspace.get();
        call.dx = dx.get(), call.dweight = dweight.get(), call.dbias = dbias.get();
        call.dinitial_state = dinitial_state.get();
        require(conv_backward(&call, nullptr), "conv_backward");
    }
    Outputs run() {
        forward();
        backward();
        CHECK(hipDeviceSynchronize());
        return {dx.take(), dweight.take(), dbias.take(), y.take(), final_state.take(), dinitial_state.take()};
    }
};

// Calls run(T()) with the type of a case.
template <class Run>
auto with_type(ConvType type, Run run) {
    if (type == kConvHalf) return run(Half());
    if (type == kConvBf16) return run(Bf16());
    return run(float());
}
