// Which level's kernels run: the best one that the CPU has, or the one that is asked for.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kernels/kernels.h"

namespace paceline {

// The build names the levels that it compiles, the best first.
extern const Kernels PACELINE_LEVELS;

namespace {

const Kernels* const levels[] = {PACELINE_LEVEL_POINTERS};

const Kernels* find(const char* isa) {
    for (const Kernels* level : levels) {
        if (std::strcmp(level->isa, isa) == 0) {
            return level;
        }
    }
    return nullptr;
}

const Kernels* first_supported() {
    const char* asked = std::getenv("PACELINE_CPU_ISA");
    const Kernels* level = asked ? find(asked) : nullptr;
    if (level && level->supported()) {
        return level;
    }
    for (const Kernels* each : levels) {
        if (each->supported()) {
            return each;
        }
    }
    return &level_plain;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* level = chosen.load(std::memory_order_acquire);
    if (!level) {
        level = first_supported();
        chosen.store(level, std::memory_order_release);
    }
    return *level;
}

const Kernels* const* all_levels(int* count) {
    *count = static_cast<int>(sizeof levels / sizeof levels[0]);
    return levels;
}

bool set_level(const char* isa) {
    const Kernels* level = find(isa);
    if (!level || !level->supported()) {
        return false;
    }
    chosen.store(level, std::memory_order_release);
    return true;
}

bool find_activation(const char* name, Activation* found) {
    static const char* const NAMES[] = {"silu",  "gelu_tanh", "gelu",
                                        "relu2", "xielu",     "clamped_swiglu"};  // as in the enum
    for (int i = 0; i < 6; ++i) {
        if (std::strcmp(name, NAMES[i]) == 0) {
            *found = static_cast<Activation>(i);
            return true;
        }
    }
    return false;
}

}  // namespace paceline
