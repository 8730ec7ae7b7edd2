// What each file of an instruction set defines.
#pragma once

#include "attention.hpp"

namespace bei {

namespace portable {
void f32(const PackedAttention &, const Part *, const Part *);
void bf16(const PackedAttention &, const Part *, const Part *);
}  // namespace portable

#ifdef __x86_64__
namespace avx2 {
void f32(const PackedAttention &, const Part *, const Part *);
void bf16(const PackedAttention &, const Part *, const Part *);
}  // namespace avx2

namespace avx512 {
void f32(const PackedAttention &, const Part *, const Part *);
void bf16(const PackedAttention &, const Part *, const Part *);
}  // namespace avx512

namespace avx512_bf16 {
void bf16(const PackedAttention &, const Part *, const Part *);
}

namespace amx_bf16 {
void bf16(const PackedAttention &, const Part *, const Part *);
}
#endif

}  // namespace bei
