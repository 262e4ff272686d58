// Memory of kernels' operands: aligned, zeroed where it is new, reused.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "forward/linear.h"

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

// Rows of floats, each with room up to the next multiple of 16.
class RowBuffer {
  public:
    void need(int rows, int width) {
        ld_ = round_up(width, TILE);
        memory_.need(size_t(rows) * ld_);
    }
    float* row(int index) const { return memory_.get() + size_t(index) * ld_; }
    int ld() const { return ld_; }
    // Where a linear writes its results in place of what is there.
    LinearOut out(float alpha = 1.0f) const { return {memory_.get(), nullptr, ld_, alpha}; }

  private:
    Buffer<float> memory_;
    int ld_ = 0;
};

// `count` rows from the first one on, of inputs that have room for all in so many orders.
inline Inputs rows_of(const Inputs& all, int first, int count, int orders) {
    Inputs x = all;
    const ptrdiff_t before = ptrdiff_t(orders) * first;
    x.codes.data += before * all.codes.stretches();
    x.floats.x += before * all.floats.stride;
    x.codes.rows = x.codes.stride = x.floats.rows = count;
    return x;
}

// Memory for the rows of any linear's inputs.
class InputBuffer {
  public:
    // A view of `rows` rows of `k` inputs, with room for them in so many orders. Views share their
    // memory; a later call may move it.
    Inputs view(int rows, int k, int orders = 1) {
        const int padded = round_up(k, TILE);
        const size_t count = size_t(orders) * rows * (round_up(k, STRETCH) / STRETCH);
        return {{codes_.need(count), rows, k, rows},
                {floats_.need(size_t(orders) * rows * padded), rows, k, padded}};
    }

  private:
    Buffer<QuantStretch> codes_;
    Buffer<float> floats_;
};

}  // namespace paceline
