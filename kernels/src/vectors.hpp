// Vectors of BEI_LANES floats, and elements packed into 32-bit units: a float, or with BEI_BF16_DOT two neighbouring
// bfloat16, whose products one instruction adds up. Included by one file for each instruction set.
#pragma once

#ifdef BEI_BF16_DOT
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace {

constexpr int64_t LANES = BEI_LANES;
constexpr float LOWEST_EXPONENT = -87.0f;  // below it exp is 0
constexpr float NONE = -std::numeric_limits<float>::infinity();  // the score of a key that is not seen

using Unit = uint32_t;
typedef float Floats __attribute__((vector_size(4 * BEI_LANES)));
typedef Unit Units __attribute__((vector_size(4 * BEI_LANES)));
typedef int32_t Indices __attribute__((vector_size(4 * BEI_LANES)));

template <class Vector>
inline Vector load(const void *from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector>
inline void store(void *to, Vector vector) {
    std::memcpy(to, &vector, sizeof vector);
}

inline int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// Elements, and how they become units. `per_unit`: neighbouring elements in one.
struct F32 {
    using Stored = float;
    static constexpr int per_unit = 1;
    static float wide(Stored value) { return value; }
    static Stored narrow(float value) { return value; }
};

struct BF16 {
    using Stored = uint16_t;
    static constexpr int per_unit = 1;
    static float wide(Stored value) {
        const uint32_t bits = uint32_t(value) << 16;
        float found;
        std::memcpy(&found, &bits, sizeof found);
        return found;
    }
    static Stored narrow(float value) {  // to the nearest, ties to even; NaN stays NaN
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        const uint32_t up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return Stored((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : up);
    }
};

struct BF16Pairs : BF16 {
    static constexpr int per_unit = 2;
};

// sum + units * others, lane by lane; pairs: both products of a lane.
template <class E>
inline Floats dot(Floats sum, Units units, Units others) {
#ifdef BEI_BF16_DOT
    if constexpr (E::per_unit == 2) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)units, (__m512bh)others);
#endif
    return sum + (Floats)units * (Floats)others;
}

#ifdef BEI_BF16_DOT
// The next units of a row that has `left` elements more, up to LANES; what they lack is 0.
inline Units pairs(const uint16_t *row, int64_t left) {
    if (left >= 2 * LANES) return load<Units>(row);
    return left > 0 ? (Units)_mm512_maskz_loadu_epi16((1u << left) - 1, row) : Units{};
}

// Element i of both rows as one unit: those of the first half of the rows, and of the second.
inline std::pair<Units, Units> zipped_rows(Units row, Units next) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // as the 16 bytes that are zipped at a time lie
    const __m512i a = _mm512_permutexvar_epi64(order, (__m512i)row), b = _mm512_permutexvar_epi64(order, (__m512i)next);
    return {(Units)_mm512_unpacklo_epi16(a, b), (Units)_mm512_unpackhi_epi16(a, b)};
}

inline void store_bf16(void *to, Floats values) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)values);
    std::memcpy(to, &narrow, sizeof narrow);
}
#endif

// exp(x) for x <= 0, relative error 2e-7: 2^n * 2^f, the latter by its series.
inline Floats exp_of(Floats x) {
    constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const auto is_zero = x < LOWEST_EXPONENT;
    x = is_zero ? Floats{} + LOWEST_EXPONENT : x;
    const Floats power = x * 1.44269504f;
    const Floats shifted = power + ROUNDING;
    const Floats f = power - (shifted - ROUNDING);
    Floats p = f * 1.54035304e-4f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    return is_zero ? Floats{} : (Floats)((Units)p + ((Units)shifted << 23));
}

template <int64_t Distance, size_t... I>
inline Floats rotated(Floats vector, std::index_sequence<I...>) {
    return __builtin_shufflevector(vector, vector, ((I + Distance) % LANES)...);
}

// All lanes reduced to one, by halves.
template <class Reduce, int64_t Distance = LANES / 2>
inline float across(Floats vector, Reduce reduce) {
    if constexpr (Distance == 0) {
        return vector[0];
    } else {
        const Floats other = rotated<Distance>(vector, std::make_index_sequence<LANES>{});
        return across<Reduce, Distance / 2>(reduce(vector, other), reduce);
    }
}

template <size_t... I>
inline Indices counted(std::index_sequence<I...>) {
    return Indices{I...};
}

// A call of memcpy would cost as much as the few vectors of a row.
inline void copy_bytes(const void *from, int64_t size, void *to) {
    int64_t at = 0;
    for (; at + int64_t(sizeof(Units)) <= size; at += sizeof(Units))
        store(static_cast<char *>(to) + at, load<Units>(static_cast<const char *>(from) + at));
    for (; at < size; at += sizeof(Unit))
        store(static_cast<char *>(to) + at, load<Unit>(static_cast<const char *>(from) + at));
}

// A row of `width` elements as units; of pairs whole vectors, and what the last one lacks is 0.
template <class E>
inline void row_to_units(const typename E::Stored *row, int64_t width, Unit *units) {
    if constexpr (E::per_unit == 2) {
        for (int64_t i = 0; i < width; i += 2 * LANES) store(units + i / 2, pairs(row + i, width - i));
    } else if constexpr (sizeof *row == sizeof *units) {
        copy_bytes(row, width * sizeof *row, units);
    } else {
        for (int64_t i = 0; i < width; ++i) {
            const float value = E::wide(row[i]);
            std::memcpy(units + i, &value, sizeof value);
        }
    }
}

template <size_t From, size_t... I>
inline Units zipped(Units a, Units b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, (From + I / 2 + I % 2 * LANES)...);
}

// `rows` [LANES] transposed: each pass interleaves the first half with the second.
inline void transpose(Units *rows) {
    constexpr auto lanes = std::make_index_sequence<LANES>{};
    for (int64_t pass = 1; pass < LANES; pass *= 2) {
        Units next[LANES];
        for (int64_t i = 0; i < LANES / 2; ++i) {
            next[2 * i] = zipped<0>(rows[i], rows[i + LANES / 2], lanes);
            next[2 * i + 1] = zipped<LANES / 2>(rows[i], rows[i + LANES / 2], lanes);
        }
        for (int64_t i = 0; i < LANES; ++i) rows[i] = next[i];
    }
}

}  // namespace
