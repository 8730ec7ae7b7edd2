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

// Sums and maxima of a row are gathered in so many lanes.
constexpr size_t LANES = 64;

// body(column, lane) for all columns of a row. Whole blocks have loops of a known length.
template <class Body>
BEI_INLINE void for_columns(size_t width, Body body) {
    size_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (size_t lane = 0; lane < LANES; ++lane) body(i + lane, lane);
    for (size_t lane = 0; lane < width - i; ++lane) body(i + lane, lane);
}

// One after the other each would wait for the one before it.
template <class T, class Combine>
BEI_INLINE T combined(const T *lanes, Combine combine) {
    T halves[LANES];
    for (size_t lane = 0; lane < LANES; ++lane) halves[lane] = lanes[lane];
#pragma GCC unroll 8
    for (size_t half = LANES / 2; half; half /= 2)
        for (size_t lane = 0; lane < half; ++lane) halves[lane] = combine(halves[lane], halves[lane + half]);
    return halves[0];
}

BEI_INLINE float total(const float *lanes) {
    return combined(lanes, [](float one, float other) __attribute__((always_inline)) { return one + other; });
}

// The bits of a number without its sign: in their order numbers have theirs, and NaN is above all.
BEI_INLINE int32_t size_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & 0x7fffffff;
}

BEI_INLINE int32_t larger(int32_t one, int32_t other) { return one < other ? other : one; }

// The largest of the sizes in `lanes`, and not less than `least`; NaN where there is one.
BEI_INLINE float largest_of(const int32_t *lanes, float least) {
    const int32_t bits = larger(size_of(least), combined(lanes, [](int32_t one, int32_t other)
        __attribute__((always_inline)) { return larger(one, other); }));
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    return largest;
}

}  // namespace bei
