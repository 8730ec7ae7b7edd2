// Rows rounded to 8-bit integers, each with the size of its own largest value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.hpp"

namespace bei {

// Row r becomes y = (f(x) - least) * factors, its size max |y|, and codes y / size times the largest code, to the nearest
// (ties to even). Codes are from 0 to 255 where there is a least value, smaller ones counting as it, else from -127 to
// 127. f is the identity, or with `has_gelu` GELU(x * row_sizes[r] + bias).
struct RowRounding {
    Element element;
    const void *rows;      // [num_rows, width]
    size_t width;
    const float *factors;  // [width]
    bool is_unsigned;
    float least;           // of unsigned codes; else 0
    bool has_gelu;
    const float *row_sizes;  // [num_rows]; null: 1. Read with GELU alone, as the next
    const float *bias;       // [width]; null: 0
    void *codes;           // [num_rows, width]
    float *sizes;          // [num_rows], at least LEAST_SIZE
};

constexpr float LEAST_SIZE = 1e-6f;

// GELU(x) = x * (1 / 2 + y * P(y^2)), y being x between -GELU_BOUND and GELU_BOUND: off by 4e-5 at most.
constexpr float GELU_BOUND = 4.4f;
constexpr float GELU_POLYNOMIAL[] = {0.39876184f,   -0.06607687f,  0.0096433144f,  -0.001055081f, 8.430799e-05f,
                                     -4.726331e-06f, 1.7416701e-07f, -3.7565213e-09f, 3.572501e-11f};

void round_rows(const RowRounding &, size_t first, size_t end);

}  // namespace bei
