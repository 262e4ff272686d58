#define LEVEL level_avxvnni
#define LEVEL_ISA "avxvnni"
#define LEVEL_SUPPORTED has_avxvnni()
#include <cpuid.h>
namespace {
// CPUID leaf 7, subleaf 1, EAX bit 4. The compiler's own test does not know the name everywhere.
bool has_avxvnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
}  // namespace
#include "kernels/levels/level.inl"
