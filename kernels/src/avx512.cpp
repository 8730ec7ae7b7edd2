// Compiled with -mavx512f and its kin. BF16 is computed in FP32.
#define BEI_LANES 16
#define BEI_ROWS 8
#include "kernel.hpp"
#include "kernels.hpp"

namespace bei::avx512 {
void f32(const PackedAttention &attention, const Part &part) { attend<F32>(attention, part); }
void bf16(const PackedAttention &attention, const Part &part) { attend<BF16>(attention, part); }
}  // namespace bei::avx512
