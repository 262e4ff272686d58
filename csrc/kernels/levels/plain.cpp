#define LEVEL level_plain
#define LEVEL_ISA "plain"
#define LEVEL_SUPPORTED true
// Uses no intrinsics at all: what runs where nothing better was built.
#define PACELINE_PLAIN
#include "kernels/levels/level.inl"
