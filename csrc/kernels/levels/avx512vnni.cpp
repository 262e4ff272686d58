#define LEVEL level_avx512vnni
#define LEVEL_ISA "avx512vnni"
#define LEVEL_SUPPORTED (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && \
                         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && \
                         __builtin_cpu_supports("avx512vnni"))
#include "kernels/levels/level.inl"
