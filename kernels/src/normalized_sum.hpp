// Residual sum and norm of rows in one pass, and what the norm becomes as the input of an INT8 product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.hpp"

namespace bei {

// Row r is the sum y = rows * row_sizes[r] + row_bias + residual. Its norm is (y - mean) / deviation * weight + bias, where
// the mean is 0 unless `is_centred`, and the deviation sqrt(mean((y - mean)^2) + epsilon). All of it is FP32, and depends on
// that row alone.
//
// Codes, if wanted, are z = norm * factors as 8-bit integers: z / size * 127 to the nearest (ties to even), where the size is
// max |z|, at least LEAST_SIZE (rounding.hpp). Where there is a `scale`, they are z / scale from -128 to 127.
struct NormalizedSum {
    Element element;         // of rows, residual, sum and norm
    const void *rows, *residual;  // [num_rows, width]
    const float *row_sizes;  // [num_rows]; null: 1
    const float *row_bias;   // [width]; read with row_sizes alone
    size_t width;
    bool is_centred;
    float epsilon;
    const float *weight, *bias;  // [width]
    void *sum;               // [num_rows, width]; null: not wanted
    void *norm;              // [num_rows, width]
    const float *factors;    // [width]; null: no codes
    float scale;             // 0: each row has a size
    int8_t *codes;           // [num_rows, width]
    float *sizes;            // [num_rows], where there is no scale
};

void normalize_sums(const NormalizedSum &, size_t first, size_t end);

}  // namespace bei
