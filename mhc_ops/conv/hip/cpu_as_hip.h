// Stands in for HIP on a CPU: blocks run one after another, the threads of a block are fibers, __syncthreads() switches
// to the next one. What it has is what the kernels use: indices, shared memory, barriers, and the runtime calls of the
// test program. There are no shuffles and no atomics, because no kernel here has any.
//
// It is stricter than a GPU in one thing: a thread that leaves the kernel while others wait at a barrier ends the
// program. Define MHC_OPS_CPU_REVERSED to run the threads of a block in the opposite order between barriers; a kernel
// whose result depends on that order has a race.
#pragma once

#include <ucontext.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MHC_OPS_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define MHC_OPS_ASAN 1
#endif
#if defined(MHC_OPS_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __launch_bounds__(...)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

constexpr size_t kStackBytes = 256 * 1024;

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(kStackBytes);
    dim3 thread;
    bool done = true;
    void* fake_stack = nullptr;  // AddressSanitizer's, kept while the fiber does not run
};

struct Scheduler {
    ucontext_t context;
    void* fake_stack = nullptr;
    const void* stack_bottom = nullptr;
    size_t stack_size = 0;
    std::vector<Fiber> fibers;
    Fiber* running = nullptr;
    std::function<void()> kernel;
};
inline thread_local Scheduler scheduler;

// AddressSanitizer has to know which stack is in use. A null `fake_stack` says that the stack left will not come back.
inline void before_switch(void** fake_stack, const void* bottom, size_t size) {
#if defined(MHC_OPS_ASAN)
    __sanitizer_start_switch_fiber(fake_stack, bottom, size);
#else
    (void)fake_stack, (void)bottom, (void)size;
#endif
}
inline void after_switch(void* fake_stack, const void** bottom, size_t* size) {
#if defined(MHC_OPS_ASAN)
    __sanitizer_finish_switch_fiber(fake_stack, bottom, size);
#else
    (void)fake_stack, (void)bottom, (void)size;
#endif
}

inline void enter_fiber() {
    Scheduler& s = scheduler;
    after_switch(nullptr, &s.stack_bottom, &s.stack_size);
    s.kernel();
    s.running->done = true;
    before_switch(nullptr, s.stack_bottom, s.stack_size);
    setcontext(&s.context);
}

// Back to the scheduler until all threads of the block are here.
inline void barrier() {
    Scheduler& s = scheduler;
    Fiber& self = *s.running;
    before_switch(&self.fake_stack, s.stack_bottom, s.stack_size);
    swapcontext(&self.context, &s.context);
    after_switch(self.fake_stack, &s.stack_bottom, &s.stack_size);
}

inline void resume(Fiber& fiber) {
    Scheduler& s = scheduler;
    s.running = &fiber;
    threadIdx = fiber.thread;
    before_switch(&s.fake_stack, fiber.stack.data(), fiber.stack.size());
    swapcontext(&s.context, &fiber.context);
    after_switch(s.fake_stack, nullptr, nullptr);
}

inline void run_block(dim3 block) {
    Scheduler& s = scheduler;
    const size_t count = size_t(block.x) * block.y * block.z;
    if (s.fibers.size() < count) s.fibers.resize(count);
    for (size_t i = 0; i < count; i++) {
        Fiber& fiber = s.fibers[i];
        fiber.thread = dim3(i % block.x, i / block.x % block.y, i / block.x / block.y);
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter_fiber, 0);
    }
    for (size_t done = 0; done < count;) {
        for (size_t i = 0; i < count; i++) {
#if defined(MHC_OPS_CPU_REVERSED)
            Fiber& fiber = s.fibers[count - 1 - i];
#else
            Fiber& fiber = s.fibers[i];
#endif
            resume(fiber);
            done += fiber.done;
        }
        if (done != 0 && done != count) {
            std::fprintf(stderr, "cpu_as_hip: %zu of %zu threads left the kernel before a barrier\n", done, count);
            std::abort();
        }
    }
}

}  // namespace on_cpu

inline void __syncthreads() { on_cpu::barrier(); }

typedef int hipError_t;
typedef void* hipStream_t;
constexpr hipError_t hipSuccess = 0, hipErrorInvalidConfiguration = 9;

// A GPU refuses the same launches. Tests set a lower limit.
#ifndef MHC_OPS_CPU_THREADS_OF_LAUNCH
#define MHC_OPS_CPU_THREADS_OF_LAUNCH (1ull << 32)
#endif
namespace on_cpu {
constexpr uint64_t kThreadsOfBlock = 1024;
inline thread_local hipError_t last_error = hipSuccess;
}  // namespace on_cpu
inline hipError_t hipGetLastError() { return std::exchange(on_cpu::last_error, hipSuccess); }
inline const char* hipGetErrorString(hipError_t error) {
    return error == hipErrorInvalidConfiguration ? "invalid configuration argument" : "out of memory";
}

template <class Kernel, class... Arguments>
void hipLaunchKernelGGL(Kernel kernel, dim3 grid, dim3 block, unsigned, hipStream_t, Arguments... arguments) {
    const uint64_t threads = uint64_t(block.x) * block.y * block.z;
    if (threads > on_cpu::kThreadsOfBlock || threads * grid.x * grid.y * grid.z >= MHC_OPS_CPU_THREADS_OF_LAUNCH) {
        on_cpu::last_error = hipErrorInvalidConfiguration;
        return;
    }
    gridDim = grid;
    blockDim = block;
    on_cpu::scheduler.kernel = [&] { kernel(arguments...); };
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = dim3(x, y, z);
                on_cpu::run_block(block);
            }
    on_cpu::scheduler.kernel = nullptr;
}

enum hipMemcpyKind { hipMemcpyHostToDevice, hipMemcpyDeviceToHost, hipMemcpyDeviceToDevice };
inline hipError_t hipDeviceSynchronize() { return hipSuccess; }
template <class T>
hipError_t hipMalloc(T** pointer, size_t bytes) {
    void* block = nullptr;
    const int error = posix_memalign(&block, 256, bytes);  // aligned as by a GPU, and not a byte longer than asked for
    *pointer = static_cast<T*>(block);
    return error;
}
inline hipError_t hipFree(void* pointer) { return std::free(pointer), hipSuccess; }
inline hipError_t hipMemset(void* to, int value, size_t bytes) { return std::memset(to, value, bytes), hipSuccess; }
inline hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind) {
    return std::memcpy(to, from, bytes), hipSuccess;
}
inline hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t) {
    return hipMemcpy(to, from, bytes, kind);
}

typedef std::chrono::steady_clock::time_point* hipEvent_t;
inline hipError_t hipEventCreate(hipEvent_t* event) {
    return *event = new std::chrono::steady_clock::time_point, hipSuccess;
}
inline hipError_t hipEventDestroy(hipEvent_t event) { return delete event, hipSuccess; }
inline hipError_t hipEventRecord(hipEvent_t event, hipStream_t) {
    return *event = std::chrono::steady_clock::now(), hipSuccess;
}
inline hipError_t hipEventSynchronize(hipEvent_t) { return hipSuccess; }
inline hipError_t hipEventElapsedTime(float* ms, hipEvent_t start, hipEvent_t stop) {
    return *ms = std::chrono::duration<float, std::milli>(*stop - *start).count(), hipSuccess;
}
