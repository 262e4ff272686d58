#define LEVEL level_avx2
#define LEVEL_ISA "avx2"
#define LEVEL_SUPPORTED (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#include "kernels/levels/level.inl"
