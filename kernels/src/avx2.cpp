// Compiled with -mavx2 -mfma. BF16 is computed in FP32.
#define BEI_LANES 8
#define BEI_ROWS 5
#include "kernel.hpp"
#include "kernels.hpp"

namespace bei::avx2 {
void f32(const PackedAttention &attention, const Part &part) { attend<F32>(attention, part); }
void bf16(const PackedAttention &attention, const Part &part) { attend<BF16>(attention, part); }
}  // namespace bei::avx2
