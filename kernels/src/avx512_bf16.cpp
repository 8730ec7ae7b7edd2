// Compiled with -mavx512bf16 as well: products of pairs of BF16, added in FP32.
#include <immintrin.h>
#define BEI_LANES 16
#define BEI_ROWS 8
#define BEI_BF16_DOT
#include "kernel.hpp"
#include "kernels.hpp"

namespace bei::avx512_bf16 {
void bf16(const PackedAttention &it, const Part *first, const Part *end) { attend<BF16Pairs>(it, first, end); }
}  // namespace bei::avx512_bf16
