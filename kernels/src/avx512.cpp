// Compiled with -mavx512f and its kin. BF16 is computed in FP32.
#define BEI_LANES 16
#define BEI_ROWS 8
#include "kernel.hpp"
#include "kernels.hpp"

namespace bei::avx512 {
void f32(const PackedAttention &it, const Part *first, const Part *end) { attend<F32>(it, first, end); }
void bf16(const PackedAttention &it, const Part *first, const Part *end) { attend<BF16>(it, first, end); }
}  // namespace bei::avx512
