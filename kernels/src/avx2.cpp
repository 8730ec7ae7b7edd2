// Compiled with -mavx2 -mfma. BF16 is computed in FP32.
#define BEI_LANES 8
#define BEI_ROWS 5
#include "kernel.hpp"
#include "kernels.hpp"

namespace bei::avx2 {
void f32(const PackedAttention &it, const Part *first, const Part *end) { attend<F32>(it, first, end); }
void bf16(const PackedAttention &it, const Part *first, const Part *end) { attend<BF16>(it, first, end); }
}  // namespace bei::avx2
