// The kernel on tiles with its tiles in memory, for CPUs that have none: src/amx_bf16.cpp as it stands, whose instructions
// are functions here. Compiled like it, so it runs where AVX-512 BF16 does.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

uint32_t tiles[8][16][16];  // one thread's: the fuzz has no other

float of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

void load_tile(int tile, const void *from, size_t stride) {
    for (size_t r = 0; r < 16; ++r) std::memcpy(tiles[tile][r], static_cast<const char *>(from) + r * stride, 64);
}

void store_tile(int tile, void *to, size_t stride) {
    for (size_t r = 0; r < 16; ++r) std::memcpy(static_cast<char *>(to) + r * stride, tiles[tile][r], 64);
}

void multiply_tiles(int sums, int left, int right) {
    for (size_t r = 0; r < 16; ++r)
        for (size_t unit = 0; unit < 16; ++unit)
            for (size_t column = 0; column < 16; ++column) {
                const uint32_t a = tiles[left][r][unit], b = tiles[right][unit][column];
                float sum = of_bits(tiles[sums][r][column]);
                sum += of_bits(a << 16) * of_bits(b << 16);
                sum += of_bits(a & 0xffff0000u) * of_bits(b & 0xffff0000u);
                std::memcpy(&tiles[sums][r][column], &sum, sizeof sum);
            }
}

}  // namespace

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadd load_tile
#define _tile_stored store_tile
#define _tile_zero(tile) std::memset(tiles[tile], 0, sizeof tiles[tile])
#define _tile_dpbf16ps multiply_tiles
#define _tile_loadconfig(palette) static_cast<void>(palette)
#define _tile_release() static_cast<void>(0)
#define amx_bf16 emulated_amx_bf16
#include "../src/amx_bf16.cpp"
