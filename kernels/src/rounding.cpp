// Two loops over a row, in parts that stay in registers.
#include "rounding.hpp"

#include "loops.hpp"

namespace bei {
namespace {

constexpr size_t LANES = 64;

// y of `count` columns from `from` on, into `to`.
template <class Input, bool IsUnsigned>
BEI_INLINE void scale(const Input *__restrict row, const float *__restrict factors,
                      float least, size_t count, float *__restrict to) {
    for (size_t i = 0; i < count; ++i) {
        const float above = wide(row[i]) - least;
        to[i] = (IsUnsigned && above < 0.0f ? 0.0f : above) * factors[i];
    }
}

template <class Input, bool IsUnsigned>
BEI_INLINE void round_row(const RowRounding &it, size_t r) {
    const Input *row = static_cast<const Input *>(it.rows) + r * it.width;
    uint8_t *codes = static_cast<uint8_t *>(it.codes) + r * it.width;
    float values[LANES], largest[LANES];
    for (float &one : largest) one = LEAST_SIZE;
    for (size_t i = 0; i < it.width; i += LANES) {
        const size_t count = it.width - i < LANES ? it.width - i : LANES;
        scale<Input, IsUnsigned>(row + i, it.factors + i, it.least, count, values);
        for (size_t lane = 0; lane < count; ++lane) {
            const float size = __builtin_fabsf(values[lane]);
            largest[lane] = largest[lane] < size ? size : largest[lane];
        }
    }
    float size = LEAST_SIZE;
    for (float one : largest) size = size < one ? one : size;
    it.sizes[r] = size;
    const float factor = (IsUnsigned ? 255.0f : 127.0f) / size;
    for (size_t i = 0; i < it.width; i += LANES) {
        const size_t count = it.width - i < LANES ? it.width - i : LANES;
        scale<Input, IsUnsigned>(row + i, it.factors + i, it.least, count, values);
        uint8_t *__restrict to = codes + i;
        for (size_t lane = 0; lane < count; ++lane) to[lane] = nearest_code(values[lane] * factor);
    }
}

template <class Input, bool IsUnsigned>
BEI_INLINE void round_all(const RowRounding &it, size_t first, size_t end) {
    for (size_t r = first; r < end; ++r) round_row<Input, IsUnsigned>(it, r);
}

}  // namespace

BEI_CLONES void round_rows(const RowRounding &it, size_t first, size_t end) {
    if (it.element == Element::f32)
        it.is_unsigned ? round_all<float, true>(it, first, end) : round_all<float, false>(it, first, end);
    else
        it.is_unsigned ? round_all<uint16_t, true>(it, first, end) : round_all<uint16_t, false>(it, first, end);
}

}  // namespace bei
