#define LEVEL level_neon
#define LEVEL_ISA "neon"
#define LEVEL_SUPPORTED has_dotprod()
#include <sys/auxv.h>
namespace {
bool has_dotprod() {
#if defined(__linux__) && defined(HWCAP_ASIMDDP)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return true;
#endif
}
}  // namespace
#include "kernels/levels/level.inl"
