#!/bin/sh
# gcc 12: a kernel that fills an AMX tile configuration loads one without row sizes, which faults.
#
# LDTILECFG reads 64 bytes, but the intrinsic _tile_loadconfig of gcc 12 tells the compiler that the
# instruction reads one pointer, eight bytes. Where the compiler sees the configuration being filled,
# at -O2, it drops the stores of the row sizes, which lie behind those, and the processor faults.
# _tile_loadd names no memory at all. What helps is an empty
# asm volatile("" : : "r"(pointer) : "memory") before the intrinsic.
# Nothing is run, only compiled, so that the processor does not matter.
set -eu
command -v gcc-12 >/dev/null || { echo "install Debian's gcc-12 first"; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/tiles.c" <<'SOURCE'
#include <immintrin.h>
#include <stdint.h>

struct config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

void load(uint16_t row_bytes, uint8_t rows) {
    struct config config = {.palette = 1};
    config.row_bytes[0] = row_bytes;
    config.rows[0] = rows;
#ifdef DECLARED
    __asm__ volatile("" : : "r"(&config) : "memory");
#endif
    _tile_loadconfig(&config);
}
SOURCE
gcc-12 --version | head -n 1
row_sizes() { # how often the first argument, a row size, is stored
    gcc-12 -O2 -mamx-tile "$@" -S -o - "$folder/tiles.c" | grep -cE 'movw[[:space:]]+%di,' || true
}
plain=$(row_sizes) declared=$(row_sizes -DDECLARED)
echo "stores of the row size: $plain; with the memory declared: $declared"
if [ "$plain" -eq 0 ] && [ "$declared" -gt 0 ]; then
    echo "as described"
else
    echo CHANGED
    exit 1
fi
