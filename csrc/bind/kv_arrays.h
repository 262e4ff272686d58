// Keys and values as numpy holds them: which type an array's elements are, and what its sizes mean.
#pragma once

#include <nanobind/ndarray.h>

#include "kernels/kernels.h"

namespace paceline {

using KvArray = nanobind::ndarray<nanobind::c_contig, nanobind::device::cpu>;

// The type of both arrays; numpy knows no bfloat16, whose bits it holds as uint16.
inline KvType kv_type(nanobind::dlpack::dtype k, nanobind::dlpack::dtype v) {
    if (k != v) {
        throw nanobind::value_error("k and v have different element types");
    }
    if (k.code == static_cast<uint8_t>(nanobind::dlpack::dtype_code::Float) && k.bits == 16) {
        return KvType::float16;
    }
    if (k == nanobind::dtype<uint16_t>()) {
        return KvType::bfloat16;
    }
    if (k == nanobind::dtype<int8_t>()) {
        return KvType::int8;
    }
    if (k != nanobind::dtype<float>()) {
        throw nanobind::value_error(
            "k and v are neither float32, float16, uint16 (bfloat16 bits) nor int8");
    }
    return KvType::float32;
}

// The dimensions of a key of so many elements; none has two sizes.
inline int head_dim_of(KvType type, size_t elements) {
    const int count = static_cast<int>(elements), group = KV_GROUP + 2;
    return type == KvType::int8 ? count - 2 * ((count + group - 1) / group) : count;
}

}  // namespace paceline
