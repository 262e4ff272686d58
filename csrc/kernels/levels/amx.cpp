#define LEVEL level_amx
#define LEVEL_ISA "amx"
#define LEVEL_SUPPORTED has_amx()
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
namespace {
// CPUID leaf 7, EDX bits 24 (tiles) and 25 (8-bit products). Linux hands out the registers' 8 KiB
// per thread to processes that ask for them, once for all their threads.
bool has_amx() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2)
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 3) == 3 &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
}  // namespace
#include "kernels/levels/level.inl"
