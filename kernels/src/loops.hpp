// For loops that compilers vectorize: a copy of them for each instruction set, and elements as floats.
#pragma once

#include <cstdint>
#include <cstring>

// Of a function and what is inlined into it: the loader takes the copy of this CPU.
#if defined(__x86_64__) && defined(__linux__)
#define BEI_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BEI_CLONES
#endif
#define BEI_INLINE inline __attribute__((always_inline))

namespace bei {

BEI_INLINE float wide(float value) { return value; }
BEI_INLINE float wide(uint16_t bf16) {
    const uint32_t bits = uint32_t(bf16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

BEI_INLINE void narrow(float value, float *to) { *to = value; }
BEI_INLINE void narrow(float value, uint16_t *to) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *to = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : up);
}

// The low eight bits of the integer nearest to a number below 2^22, ties to even.
BEI_INLINE uint8_t nearest_code(float value) {
    const float shifted = value + 12582912.0f;  // 1.5 * 2^23: it leaves the integer in the low bits of the sum
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    return uint8_t(bits);
}

}  // namespace bei
