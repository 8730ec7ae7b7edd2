// For any CPU: vectors of 16 bytes, as SSE2 and NEON have them.
#define BEI_LANES 4
#define BEI_ROWS 4
#include "kernel.hpp"
#include "kernels.hpp"

namespace bei::portable {
void f32(const PackedAttention &it, const Part *first, const Part *end) { attend<F32>(it, first, end); }
void bf16(const PackedAttention &it, const Part *first, const Part *end) { attend<BF16>(it, first, end); }
}  // namespace bei::portable
