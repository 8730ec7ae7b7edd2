// Chooses by the CPU that runs, not by the one that compiled.
#include <array>
#include <vector>

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.hpp"

namespace bei {
namespace {

#ifdef __x86_64__
// True if the CPU multiplies tiles of BF16 and the system lets this process use them: Linux keeps tiles for a process only
// once it has asked, and refuses where it does not know them or a thread's stack for signals would be too small for them.
bool may_use_tiles() {
    constexpr unsigned BF16_TILES = 1u << 22, TILES = 1u << 24;
    constexpr long REQUEST_STATE = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    return edx & TILES && edx & BF16_TILES && syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}
#endif

std::vector<NamedKernel> found(Element element) {
    const bool wide = element == Element::f32;
    std::vector<NamedKernel> kernels;
#ifdef __x86_64__
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
    if (!wide && has_bf16 && may_use_tiles()) kernels.push_back({"amx_bf16", amx_bf16::bf16});
    if (!wide && has_bf16) kernels.push_back({"avx512_bf16", avx512_bf16::bf16});
    if (has_avx512) kernels.push_back({"avx512", wide ? avx512::f32 : avx512::bf16});
    if (has_avx2) kernels.push_back({"avx2", wide ? avx2::f32 : avx2::bf16});
#endif
    kernels.push_back({"portable", wide ? portable::f32 : portable::bf16});
    return kernels;
}

}  // namespace

const NamedKernel *kernels_of(Element element, size_t &count) {
    static const std::array<std::vector<NamedKernel>, 2> all = {found(Element::f32), found(Element::bf16)};
    const auto &kernels = all[element == Element::bf16];
    count = kernels.size();
    return kernels.data();
}

}  // namespace bei
