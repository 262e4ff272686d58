// Linears as Python objects, for bind_linear.cpp and for whoever takes them as arguments.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "linear.h"
#include "thread_pool.h"

namespace paceline {

// Base of Python's Int8Linear and Int4Linear: a function that is bound with a parameter of type
// `const LinearObject&` takes either. The weights stay in the caller's array, which may be a
// read-only map of a file and need not be aligned; scale and bias are padded copies.
struct LinearObject {
    Linear linear;
    std::vector<float> scale, bias;
    nanobind::ndarray<nanobind::ro> data;  // keeps the array alive
    size_t nbytes = 0;                     // of weights, scales and bias
};

// A linear behind a Python object of either class; raises TypeError for another one. The object
// must outlive the reference.
inline const Linear& linear_of(nanobind::handle object) {
    return nanobind::cast<const LinearObject&>(object).linear;
}

// All tiles, by the pool's threads. Not within `pool().each`.
inline void run_linear(const Linear& linear, const QuantRows& x, const LinearOut& out) {
    constexpr int PIECES_PER_THREAD = 4;  // evens out threads that are disturbed
    const int tiles = linear.tiles();
    const int piece = (tiles - 1) / (pool().size() * PIECES_PER_THREAD) + 1;
    pool().each((tiles + piece - 1) / piece, [&](int i, int) {
        const int begin = i * piece;
        linear.run(x, out, begin, begin + piece < tiles ? begin + piece : tiles);
    });
}

}  // namespace paceline
