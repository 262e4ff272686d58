// Numpy's arrays as arguments of bindings, and how an argument is refused.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <string>
#include <utility>

namespace paceline {

template <typename T, size_t N>
using Array = nanobind::ndarray<T, nanobind::ndim<N>, nanobind::c_contig, nanobind::device::cpu>;
using Rows = Array<const float, 2>;
using Vector = Array<const float, 1>;

// A Python object as an owner that C++ code may let go of on any thread.
inline std::shared_ptr<const void> kept(nanobind::object object) {
    return {new nanobind::object(std::move(object)), [](nanobind::object* owned) {
                const nanobind::gil_scoped_acquire locked;
                delete owned;
            }};
}

inline void require(bool condition, const std::string& message) {
    if (!condition) {
        throw nanobind::value_error(message.c_str());
    }
}

}  // namespace paceline
