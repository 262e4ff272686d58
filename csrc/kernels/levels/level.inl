// Assembles the table of one level. A level's source file defines LEVEL (the name of the table),
// LEVEL_ISA (its text) and LEVEL_SUPPORTED (an expression), and is compiled with its own flags.
// With PACELINE_ASK_HOST it is a program instead, which ends with 0 where the level runs.
#if defined(PACELINE_ASK_HOST)
int main() { return LEVEL_SUPPORTED ? 0 : 1; }
#else
#include "kernels/kernels.h"
#include "kernels/simd.h"

#include "kernels/mathematics.inl"
#include "kernels/rows.inl"
#include "kernels/linear_blocks.inl"
#include "kernels/unpack.inl"
#include "kernels/products.inl"
#include "kernels/linear_quantised.inl"
#include "kernels/linear_float.inl"
#include "kernels/attention.inl"
#include "kernels/sampler.inl"
#include "kernels/recurrent.inl"

#if defined(PACELINE_EMULATED)  // see CMakeLists.txt
#undef LEVEL_SUPPORTED
#define LEVEL_SUPPORTED true
#endif

namespace paceline {
namespace {
bool supported() { return LEVEL_SUPPORTED; }
}  // namespace

extern const Kernels LEVEL;
const Kernels LEVEL = {
    LEVEL_ISA,   supported,       linear_blocks,     linear_float,       quantize,  rms_norm,
    layer_norm,  gated,           activate,          softcap,            vector_exp, vector_tanh,
    vector_erf,  vector_softplus, gather_blocks,     gather_float,       rotary_kv, attend,
    merge,       &sampler_kernels, &recurrent_kernels,
};
}  // namespace paceline
#endif
