// Memory of kernels' operands: aligned, zeroed where it is new, reused.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "linear.h"

namespace paceline {

// Cache-line aligned, zeroed, grows, never shrinks.
template <typename T> class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t count) { need(count); }

    T* need(size_t count) {
        if (count > size_) {
            const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
            memory_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
            if (!memory_) {
                throw std::bad_alloc();
            }
            std::memset(memory_.get(), 0, bytes);
            size_ = count;
        }
        return memory_.get();
    }
    T* get() const { return memory_.get(); }
    size_t size() const { return size_; }

  private:
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> memory_;
    size_t size_ = 0;
};

// Memory for the rows of any linear's inputs.
class InputBuffer {
  public:
    // A view of `rows` rows of `k` inputs. Views share their memory; a later call may move it.
    Inputs view(int rows, int k) {
        const int stride = round_up(k, K_MULTIPLE), padded = round_up(k, TILE);
        const size_t count = size_t(rows), stretches = count * (stride / STRETCH);
        return {{q_.need(count * stride), scale_.need(stretches), sum_.need(stretches),
                 half_sum_.need(2 * stretches), start_.need(stretches),
                 half_start_.need(2 * stretches), rows, k, stride},
                {floats_.need(count * padded), rows, k, padded}};
    }

  private:
    Buffer<int8_t> q_;
    Buffer<float> scale_, sum_, half_sum_, floats_;
    Buffer<int32_t> start_, half_start_;
};

}  // namespace paceline
