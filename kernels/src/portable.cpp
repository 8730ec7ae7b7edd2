// For any CPU: vectors of 16 bytes, as SSE2 and NEON have them.
#define BEI_LANES 4
#define BEI_ROWS 4
#include "kernel.hpp"
#include "kernels.hpp"

namespace bei::portable {
void f32(const PackedAttention &attention, const Part &part) { attend<F32>(attention, part); }
void bf16(const PackedAttention &attention, const Part &part) { attend<BF16>(attention, part); }
}  // namespace bei::portable
