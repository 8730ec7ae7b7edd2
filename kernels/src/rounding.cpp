// Loops over a row, whose values stay in the first cache between them.
#include "rounding.hpp"

#include <vector>

#include "loops.hpp"

namespace bei {
namespace {

BEI_INLINE float gelu(float x) {
    float y = x < -GELU_BOUND ? -GELU_BOUND : x;
    y = y > GELU_BOUND ? GELU_BOUND : y;
    const float square = y * y;
    constexpr int last = sizeof GELU_POLYNOMIAL / sizeof *GELU_POLYNOMIAL - 1;
    float sum = GELU_POLYNOMIAL[last];
#pragma GCC unroll 16
    for (int i = last; i-- > 0;) sum = sum * square + GELU_POLYNOMIAL[i];
    return x * (0.5f + y * sum);
}

// GELU of row r, or the row, into `values`.
template <class Input, bool HasGelu>
BEI_INLINE void activate(const RowRounding &it, size_t r, float *__restrict values) {
    const Input *__restrict row = static_cast<const Input *>(it.rows) + r * it.width;
    const float *__restrict bias = it.bias;
    const float size = HasGelu && it.row_sizes ? it.row_sizes[r] : 1.0f;
    if (HasGelu && bias)
        for_columns(it.width, [&](size_t i, size_t) __attribute__((always_inline)) {
            values[i] = gelu(wide(row[i]) * size + bias[i]);
        });
    else
        for_columns(it.width, [&](size_t i, size_t) __attribute__((always_inline)) {
            values[i] = HasGelu ? gelu(wide(row[i]) * size) : wide(row[i]);
        });
}

template <class Input, bool IsUnsigned, bool HasGelu>
BEI_INLINE void round_row(const RowRounding &it, size_t r, float *__restrict values) {
    activate<Input, HasGelu>(it, r, values);
    const float *__restrict factors = it.factors;
    const float least = it.least;
    int32_t largest[LANES] = {};
    for_columns(it.width, [&](size_t i, size_t lane) __attribute__((always_inline)) {
        const float above = values[i] - least;
        values[i] = (IsUnsigned && above < 0.0f ? 0.0f : above) * factors[i];
        largest[lane] = larger(largest[lane], size_of(values[i]));
    });
    const float size = largest_of(largest, LEAST_SIZE);
    it.sizes[r] = size;
    const float factor = (IsUnsigned ? 255.0f : 127.0f) / size;
    uint8_t *__restrict codes = static_cast<uint8_t *>(it.codes) + r * it.width;
    for_columns(it.width, [&](size_t i, size_t) __attribute__((always_inline)) {
        codes[i] = nearest_code(values[i] * factor);
    });
}

template <class Input, bool IsUnsigned, bool HasGelu>
BEI_INLINE void round_rows_of(const RowRounding &it, size_t first, size_t end) {
    std::vector<float> values(it.width);
    for (size_t r = first; r < end; ++r) round_row<Input, IsUnsigned, HasGelu>(it, r, values.data());
}

template <class Input>
BEI_INLINE void round_all(const RowRounding &it, size_t first, size_t end) {
    if (it.has_gelu)
        it.is_unsigned ? round_rows_of<Input, true, true>(it, first, end) : round_rows_of<Input, false, true>(it, first, end);
    else
        it.is_unsigned ? round_rows_of<Input, true, false>(it, first, end)
                       : round_rows_of<Input, false, false>(it, first, end);
}

}  // namespace

BEI_CLONES void round_rows(const RowRounding &it, size_t first, size_t end) {
    it.element == Element::f32 ? round_all<float>(it, first, end) : round_all<uint16_t>(it, first, end);
}

}  // namespace bei
