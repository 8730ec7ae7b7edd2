// Chooses by the CPU that runs, not by the one that compiled.
#include <array>
#include <vector>

#include "kernels.hpp"

namespace bei {
namespace {

std::vector<NamedKernel> found(Element element) {
    const bool wide = element == Element::f32;
    std::vector<NamedKernel> kernels;
#ifdef __x86_64__
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!wide && has_avx512 && __builtin_cpu_supports("avx512bf16"))
        kernels.push_back({"avx512_bf16", avx512_bf16::bf16});
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
