// Loops that compilers vectorize, as in rounding.cpp. What a row is summed to stays in the first cache between them.
#include "normalized_sum.hpp"

#include <cmath>
#include <vector>

#include "loops.hpp"
#include "rounding.hpp"

namespace bei {
namespace {

// The sums of row r into `values`; their total.
template <class T, bool IsScaled>
BEI_INLINE float add_up(const NormalizedSum &it, size_t r, float *__restrict values) {
    const T *__restrict row = static_cast<const T *>(it.rows) + r * it.width;
    const T *__restrict residual = static_cast<const T *>(it.residual) + r * it.width;
    const float *__restrict row_bias = it.row_bias;
    const float size = IsScaled ? it.row_sizes[r] : 1.0f;
    float totals[LANES] = {};
    for_columns(it.width, [&](size_t i, size_t lane) __attribute__((always_inline)) {
        const float product = IsScaled ? wide(row[i]) * size + row_bias[i] : wide(row[i]);
        const float sum = product + wide(residual[i]);
        values[i] = sum;
        totals[lane] += sum;
    });
    return total(totals);
}

template <class T>
BEI_INLINE void store_all(const float *__restrict values, size_t width, T *__restrict to) {
    for_columns(width, [&](size_t i, size_t) __attribute__((always_inline)) { narrow(values[i], to + i); });
}

BEI_INLINE float squares(const float *__restrict values, size_t width, float mean) {
    float totals[LANES] = {};
    for_columns(width, [&](size_t i, size_t lane) __attribute__((always_inline)) {
        const float distance = values[i] - mean;
        totals[lane] += distance * distance;
    });
    return total(totals);
}

// The codes of row r, whose norm is `values`.
BEI_INLINE void round_row(const NormalizedSum &it, size_t r, float *__restrict values) {
    const float *__restrict factors = it.factors;
    int8_t *__restrict codes = it.codes + r * it.width;
    float factor;
    if (it.scale > 0.0f) {
        for_columns(it.width, [&](size_t i, size_t) __attribute__((always_inline)) { values[i] *= factors[i]; });
        factor = 1.0f / it.scale;
    } else {
        int32_t largest[LANES] = {};
        for_columns(it.width, [&](size_t i, size_t lane) __attribute__((always_inline)) {
            values[i] *= factors[i];
            largest[lane] = larger(largest[lane], size_of(values[i]));
        });
        const float size = largest_of(largest, LEAST_SIZE);
        it.sizes[r] = size;
        factor = 127.0f / size;
    }
    for_columns(it.width, [&](size_t i, size_t) __attribute__((always_inline)) {
        float code = values[i] * factor;
        code = code < -128.0f ? -128.0f : code;
        code = code > 127.0f ? 127.0f : code;
        codes[i] = int8_t(nearest_code(code));
    });
}

template <class T, bool IsScaled>
BEI_INLINE void normalize_row(const NormalizedSum &it, size_t r, float *__restrict values) {
    const float sum = add_up<T, IsScaled>(it, r, values);
    if (it.sum) store_all(values, it.width, static_cast<T *>(it.sum) + r * it.width);
    const float mean = it.is_centred ? sum / float(it.width) : 0.0f;
    const float factor = 1.0f / std::sqrt(squares(values, it.width, mean) / float(it.width) + it.epsilon);
    const float *__restrict weight = it.weight, *__restrict bias = it.bias;
    T *__restrict norm = static_cast<T *>(it.norm) + r * it.width;
    for_columns(it.width, [&](size_t i, size_t) __attribute__((always_inline)) {
        const float value = (values[i] - mean) * factor * weight[i] + bias[i];
        values[i] = value;
        narrow(value, norm + i);
    });
    if (it.factors) round_row(it, r, values);
}

template <class T>
BEI_INLINE void normalize_all(const NormalizedSum &it, size_t first, size_t end) {
    std::vector<float> values(it.width);
    if (it.row_sizes)
        for (size_t r = first; r < end; ++r) normalize_row<T, true>(it, r, values.data());
    else
        for (size_t r = first; r < end; ++r) normalize_row<T, false>(it, r, values.data());
}

}  // namespace

BEI_CLONES void normalize_sums(const NormalizedSum &it, size_t first, size_t end) {
    it.element == Element::f32 ? normalize_all<float>(it, first, end) : normalize_all<uint16_t>(it, first, end);
}

}  // namespace bei
