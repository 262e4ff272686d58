// Linears as Python objects, for bind/linear.cpp and for whoever takes them as arguments.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "forward/linear.h"

namespace paceline {

// Python's Linear. The weights stay in the caller's arrays, which may be read-only maps of a file and
// need not be aligned; biases are padded copies, and orders are copies, which nobody can change any
// more after they were checked.
struct LinearObject {
    Linear linear;
    std::vector<std::vector<float>> biases;             // of each part
    std::vector<std::vector<int32_t>> orders;           // of each part that has one
    std::vector<nanobind::ndarray<nanobind::ro>> data;  // keeps the arrays alive
    size_t nbytes = 0;                                  // of weights, biases and orders
};

// A linear behind a Python object; raises TypeError for another one. The object
// must outlive the reference.
inline const Linear& linear_of(nanobind::handle object) {
    return nanobind::cast<const LinearObject&>(object).linear;
}

}  // namespace paceline
