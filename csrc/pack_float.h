// Float weights into the tiles of kernels.h, bit by bit as they are. Knows no Python.
#pragma once

#include <cstddef>

namespace paceline {

// Elements of a packed weight of n outputs and k inputs.
size_t float_elements(int n, int k);

// Takes [n, k] row by row and fills the whole packed array, padding included, by the pool's threads.
// T is an unsigned integer of the element's size.
template <typename T> void pack_float(const T* rows, int n, int k, T* tiles);

}  // namespace paceline
