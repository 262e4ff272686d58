#define LEVEL level_sse2
#define LEVEL_ISA "sse2"
#define LEVEL_SUPPORTED true
#include "kernels/levels/level.inl"
