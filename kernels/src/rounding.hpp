// Rows rounded to 8-bit integers, each with the size of its own largest value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.hpp"

namespace bei {

// Row r becomes y = (x - least) * factors, its size max |y|, and codes y / size times the largest code, to the nearest
// (ties to even). Codes are from 0 to 255 where there is a least value, smaller ones counting as it, else from -127 to
// 127.
struct RowRounding {
    Element element;
    const void *rows;      // [num_rows, width]
    size_t width;
    const float *factors;  // [width]
    bool is_unsigned;
    float least;           // of unsigned codes; else 0
    void *codes;           // [num_rows, width]
    float *sizes;          // [num_rows], at least LEAST_SIZE
};

constexpr float LEAST_SIZE = 1e-6f;

void round_rows(const RowRounding &, size_t first, size_t end);

}  // namespace bei
