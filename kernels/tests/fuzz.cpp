// Random attentions through every kernel of this CPU, and random roundings, sums and norms, against plain loops in double
// precision.
//
//     fuzz [SEED] [COUNT]
//
// Buffers have exactly the size that is read or written, so that AddressSanitizer sees a step beyond them. What is wrong
// is printed with its seed, and the exit code is 1.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "../src/attention.hpp"
#include "../src/normalized_sum.hpp"
#include "../src/rounding.hpp"

#ifdef __x86_64__
namespace bei::emulated_amx_bf16 {
void bf16(const PackedAttention &, const Part *, const Part *);
}
#endif

namespace {

using bei::Element;
using bei::PackedAttention;

struct Case {
    PackedAttention attention{};
    std::vector<int32_t> starts, key_lens, shared_starts, shared_rows;
    std::vector<float> biases;
    std::vector<float> queries, keys, values;  // as they are after rounding
    int64_t num_tokens = 0;

    int64_t num_shared(size_t sequence) const {
        return shared_starts.empty() ? 0 : shared_starts[sequence + 1] - shared_starts[sequence];
    }

    // The row of the token at `position` of a sequence.
    int64_t row(size_t sequence, int64_t position) const {
        const int64_t own = position - num_shared(sequence);
        return own < 0 ? shared_rows[shared_starts[sequence] + position] : starts[sequence] + own;
    }
};

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// The larger of two errors, NaN the largest.
double worse(double one, double other) { return std::isnan(one) || one > other ? one : other; }

float rounded(float value, Element element) {
    if (element == Element::f32) return value;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

Case made(std::mt19937 &random, Element element) {
    auto among = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
    std::normal_distribution<float> normal;
    Case it;
    auto &a = it.attention;
    a.element = element;
    a.num_kv_heads = among(1, 3);
    a.num_heads = a.num_kv_heads * among(1, 3);
    const int64_t widths[] = {1, 7, 16, 26, 32, 48, 64, 80, 128};
    a.head_dim = widths[among(0, 8)];
    a.num_sequences = among(1, 5);
    const int64_t longest[] = {3, 40, 150, 700};
    const int64_t most = longest[among(0, 3)];
    it.starts.push_back(0);
    const bool shares = among(0, 1);
    if (shares) it.shared_starts.push_back(0);
    for (size_t i = 0; i < a.num_sequences; ++i) {
        const int64_t num_shared = shares ? among(0, most) : 0, length = among(shares ? 0 : 1, most);
        it.num_tokens += length;
        it.starts.push_back(int32_t(it.num_tokens));
        if (shares) it.shared_starts.push_back(int32_t(it.shared_starts.back() + num_shared));
        it.key_lens.push_back(int32_t(among(0, num_shared + length)));
    }
    if (it.num_tokens == 0) return made(random, element);
    for (int64_t i = shares ? it.shared_starts.back() : 0; i > 0; --i)
        it.shared_rows.push_back(int32_t(among(0, it.num_tokens - 1)));
    a.causal = among(0, 2) == 0;
    a.window = among(0, 2) ? -1 : among(0, 50);
    a.softcap = among(0, 3) ? 0.0f : 5.0f;
    if (among(0, 1)) it.key_lens.clear();
    a.reach = (shares ? 2 : 1) * most - 1;
    if (among(0, 2) == 0)
        for (size_t i = 0; i < a.num_heads * (2 * a.reach + 1); ++i) it.biases.push_back(normal(random));
    a.query_stride = a.num_heads * a.head_dim + among(0, 5);
    a.key_stride = a.num_kv_heads * a.head_dim + among(0, 5);
    a.value_stride = a.num_kv_heads * a.head_dim + among(0, 5);
    const float scale = 3.0f / std::sqrt(float(a.head_dim));
    auto fill = [&](std::vector<float> &to, size_t stride, float factor) {
        to.resize(it.num_tokens * stride);
        for (float &value : to) value = rounded(normal(random) * factor, element);
    };
    fill(it.queries, a.query_stride, scale);
    fill(it.keys, a.key_stride, 1.0f);
    fill(it.values, a.value_stride, 1.0f);
    if (among(0, 3) == 0) {  // NaN in a query or a key; kernels look at the last of so many keys in other ways
        const bool is_query = among(0, 1);
        const int64_t token = among(0, it.num_tokens - 1), last = token | (among(0, 1) ? 15 : 255);
        const int64_t row = among(0, 1) && last < it.num_tokens ? last : token;
        const int64_t column = among(0, (is_query ? a.num_heads : a.num_kv_heads) * a.head_dim - 1);
        (is_query ? it.queries : it.keys)[row * (is_query ? a.query_stride : a.key_stride) + column] = NOT_A_NUMBER;
    }
    a.starts = it.starts.data();
    a.key_lens = it.key_lens.empty() ? nullptr : it.key_lens.data();
    a.biases = it.biases.empty() ? nullptr : it.biases.data();
    if (shares) a.shared_starts = it.shared_starts.data(), a.shared_rows = it.shared_rows.data();
    return it;
}

std::vector<double> expected(const Case &it) {
    const auto &a = it.attention;
    std::vector<double> context(it.num_tokens * a.num_heads * a.head_dim);
    for (size_t s = 0; s < a.num_sequences; ++s) {
        const int64_t first = it.num_shared(s), end = first + it.starts[s + 1] - it.starts[s];
        const int64_t num_keys = a.key_lens ? a.key_lens[s] : end;
        for (size_t head = 0; head < a.num_heads; ++head) {
            const size_t kv_head = head / (a.num_heads / a.num_kv_heads);
            for (int64_t i = first; i < end; ++i) {
                const int64_t query = it.row(s, i);
                double *out = &context[(query * a.num_heads + head) * a.head_dim], sum = 0;
                std::vector<double> scores(num_keys, -std::numeric_limits<double>::infinity());
                double most = -std::numeric_limits<double>::infinity();
                for (int64_t j = 0; j < num_keys; ++j) {
                    if ((a.causal && j > i) || (a.window >= 0 && std::abs(i - j) > a.window)) continue;
                    double score = 0;
                    for (size_t d = 0; d < a.head_dim; ++d)
                        score += double(it.queries[query * a.query_stride + head * a.head_dim + d]) *
                                 it.keys[it.row(s, j) * a.key_stride + kv_head * a.head_dim + d];
                    if (a.softcap != 0.0f) score = a.softcap * std::tanh(score / a.softcap);
                    if (a.biases) score += a.biases[head * (2 * a.reach + 1) + a.reach + j - i];
                    scores[j] = score;
                    most = std::max(most, score);
                }
                for (double &score : scores) sum += score = std::isinf(score) ? 0.0 : std::exp(score - most);
                for (int64_t j = 0; j < num_keys; ++j)
                    for (size_t d = 0; sum != 0 && d < a.head_dim; ++d)
                        out[d] += scores[j] / sum * it.values[it.row(s, j) * a.value_stride + kv_head * a.head_dim + d];
            }
        }
    }
    return context;
}

std::vector<uint16_t> narrow(const std::vector<float> &values) {
    std::vector<uint16_t> found;
    for (const float &value : values) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        found.push_back(uint16_t(bits >> 16));
    }
    return found;
}

// True for each token whose sequence has NaN in a key, whether its query sees that or not.
std::vector<bool> beside_nan(const Case &it) {
    const auto &a = it.attention;
    std::vector<bool> found(it.num_tokens);
    for (size_t s = 0; s < a.num_sequences; ++s) {
        const int64_t end = it.num_shared(s) + it.starts[s + 1] - it.starts[s];
        bool is_spoilt = false;
        for (int64_t j = 0; j < end; ++j) {
            const float *key = &it.keys[it.row(s, j) * a.key_stride];
            is_spoilt = is_spoilt || std::any_of(key, key + a.key_stride, [](float one) { return std::isnan(one); });
        }
        std::fill(found.begin() + it.starts[s], found.begin() + it.starts[s + 1], is_spoilt);
    }
    return found;
}

// `has_tiles`: scores of keys that a query does not see begin as -inf, and are NaN if such a key is: that may spread in its
// sequence, where it is seen.
double largest_error(const Case &it, bei::Kernel kernel, const std::vector<double> &context, bool has_tiles) {
    const std::vector<bool> may_spread = has_tiles ? beside_nan(it) : std::vector<bool>(it.num_tokens);
    PackedAttention a = it.attention;
    const auto queries = narrow(it.queries), keys = narrow(it.keys), values = narrow(it.values);
    const bool is_wide = a.element == Element::f32;
    a.queries = is_wide ? static_cast<const void *>(it.queries.data()) : queries.data();
    a.keys = is_wide ? static_cast<const void *>(it.keys.data()) : keys.data();
    a.values = is_wide ? static_cast<const void *>(it.values.data()) : values.data();
    std::vector<float> wide(is_wide ? context.size() : 0);
    std::vector<uint16_t> half(is_wide ? 0 : context.size());
    a.context = is_wide ? static_cast<void *>(wide.data()) : half.data();
    std::vector<bei::Part> parts;
    for (size_t s = 0; s < a.num_sequences; ++s)
        for (size_t head = 0; head < a.num_heads; ++head)
            for (int64_t first = 0; first < it.starts[s + 1] - it.starts[s]; first += bei::QUERIES_OF_A_PART)
                parts.push_back({s, head, first});
    kernel(a, parts.data(), parts.data() + parts.size());
    double most = 0;
    for (size_t i = 0; i < context.size(); ++i) {
        float value;
        const uint32_t bits = is_wide ? 0 : uint32_t(half[i]) << 16;
        std::memcpy(&value, is_wide ? static_cast<const void *>(&wide[i]) : &bits, sizeof value);
        const bool is_nan = std::isnan(context[i]) || may_spread[i / (a.num_heads * a.head_dim)];
        const double error = std::isnan(value) && is_nan ? 0.0 : std::abs(value - context[i]);
        most = worse(most, error);
    }
    return most;
}

// A random rounding of rows.
struct RoundingCase {
    bei::RowRounding of{};
    std::vector<float> rows, row_sizes, bias, factors;
    std::vector<uint16_t> half;
    size_t num_rows = 0;

    // What of row r and column i is to be rounded, in double precision.
    double value(size_t r, size_t i) const {
        double x = rows[r * of.width + i];
        if (of.has_gelu) {
            if (of.row_sizes) x = x * row_sizes[r] + bias[i];
            x = x / 2 * std::erfc(-x / std::sqrt(2.0));
        }
        const double above = x - of.least;
        return (of.is_unsigned ? std::max(above, 0.0) : above) * factors[i];
    }
};

RoundingCase made_rounding(std::mt19937 &random, Element element) {
    auto among = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
    std::normal_distribution<float> normal;
    RoundingCase it;
    it.num_rows = among(1, 40);
    it.of.element = element, it.of.width = among(1, 300), it.of.is_unsigned = among(0, 1), it.of.has_gelu = among(0, 1);
    it.of.least = it.of.is_unsigned ? -0.17f : 0.0f;
    const bool is_zero = among(0, 9) == 0;
    auto fill = [&](std::vector<float> &to, size_t size, auto one) {
        for (size_t i = 0; i < size; ++i) to.push_back(one());
    };
    fill(it.rows, it.num_rows * it.of.width, [&] { return is_zero ? 0.0f : rounded(2 * normal(random), element); });
    fill(it.factors, it.of.width, [&] { return std::exp(normal(random)); });
    if (it.of.has_gelu && among(0, 1)) {
        fill(it.row_sizes, it.num_rows, [&] { return std::exp(normal(random) / 4); });
        fill(it.bias, it.of.width, [&] { return normal(random); });
    }
    if (among(0, 3) == 0) it.rows[among(0, it.rows.size() - 1)] = NOT_A_NUMBER;
    it.half = narrow(it.rows);
    return it;
}

// The largest distance of a code, and of a size relative to it, from what they are in double precision. Half a code is
// the rounding itself. What GELU may be off by does not count.
double largest_distance(const RoundingCase &it) {
    constexpr double GELU_ERROR = 5e-5;
    bei::RowRounding a = it.of;
    std::vector<uint8_t> codes(it.rows.size());
    std::vector<float> sizes(it.num_rows);
    a.rows = a.element == Element::f32 ? static_cast<const void *>(it.rows.data()) : it.half.data();
    if (!it.row_sizes.empty()) a.row_sizes = it.row_sizes.data(), a.bias = it.bias.data();
    a.factors = it.factors.data(), a.codes = codes.data(), a.sizes = sizes.data();
    bei::round_rows(a, 0, it.num_rows);
    RoundingCase expected = it;
    expected.of.row_sizes = a.row_sizes;
    const double largest_factor = *std::max_element(it.factors.begin(), it.factors.end());
    const double error = a.has_gelu ? GELU_ERROR * largest_factor : 0.0, largest_code = a.is_unsigned ? 255 : 127;
    double most = 0;
    auto note = [&](double distance) { most = worse(most, distance); };
    for (size_t r = 0; r < it.num_rows; ++r) {
        double size = bei::LEAST_SIZE;
        bool is_number = true;
        for (size_t i = 0; i < a.width; ++i) {
            is_number = is_number && !std::isnan(expected.value(r, i));
            size = std::max(size, std::abs(expected.value(r, i)));
        }
        if (!is_number) {  // the size says it
            note(std::isnan(sizes[r]) ? 0.0 : HUGE_VAL);
            continue;
        }
        note(std::max(std::abs(sizes[r] - size) - error, 0.0) / size);
        for (size_t i = 0; i < a.width; ++i) {
            const uint8_t code = codes[r * a.width + i];
            const double found = a.is_unsigned ? double(code) : double(int8_t(code));
            note(std::abs(found - expected.value(r, i) / size * largest_code) - 2 * error / size * largest_code);
        }
    }
    return most;
}

// A random sum of rows, and its norm.
struct NormCase {
    bei::NormalizedSum of{};
    size_t num_rows = 0;
    std::vector<float> rows, residual, row_sizes, row_bias, weight, bias, factors;
    bool has_sum = false;
};

NormCase made_norm(std::mt19937 &random, Element element) {
    auto among = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
    std::normal_distribution<float> normal;
    NormCase it;
    it.num_rows = among(1, 20);
    it.of.element = element, it.of.width = among(1, 300), it.of.is_centred = among(0, 1);
    it.of.epsilon = among(0, 1) ? 1e-12f : 1e-5f;
    it.has_sum = among(0, 1);
    auto fill = [&](std::vector<float> &to, size_t size, float middle, Element as) {
        for (size_t i = 0; i < size; ++i) to.push_back(rounded(middle + normal(random), as));
    };
    fill(it.rows, it.num_rows * it.of.width, 0.3f, element);
    fill(it.residual, it.num_rows * it.of.width, 0.0f, element);
    if (among(0, 3) == 0) it.residual[among(0, it.residual.size() - 1)] = NOT_A_NUMBER;
    fill(it.weight, it.of.width, 1.0f, Element::f32);
    fill(it.bias, it.of.width, 0.0f, Element::f32);
    if (among(0, 1)) fill(it.row_sizes, it.num_rows, 2.0f, Element::f32), fill(it.row_bias, it.of.width, 0.0f, Element::f32);
    if (among(0, 1)) fill(it.factors, it.of.width, 1.0f, Element::f32), it.of.scale = among(0, 1) ? 0.02f : 0.0f;
    return it;
}

// How far the kernel is from double precision: the largest error of a sum, relative to 1 + its size, and of a norm, relative
// also to the sums in deviations, which lose digits where a row's are alike; and the largest distance of a code, and of a
// size relative to it.
std::pair<double, double> norm_errors(const NormCase &it) {
    bei::NormalizedSum a = it.of;
    const bool is_wide = a.element == Element::f32;
    const size_t size = it.rows.size(), width = a.width;
    const auto rows = narrow(it.rows), residual = narrow(it.residual);
    a.rows = is_wide ? static_cast<const void *>(it.rows.data()) : rows.data();
    a.residual = is_wide ? static_cast<const void *>(it.residual.data()) : residual.data();
    a.weight = it.weight.data(), a.bias = it.bias.data();
    if (!it.row_sizes.empty()) a.row_sizes = it.row_sizes.data(), a.row_bias = it.row_bias.data();
    std::vector<float> wide_sum(is_wide ? size : 0), wide_norm(is_wide ? size : 0);
    std::vector<uint16_t> half_sum(is_wide ? 0 : size), half_norm(is_wide ? 0 : size);
    a.sum = !it.has_sum ? nullptr : is_wide ? static_cast<void *>(wide_sum.data()) : half_sum.data();
    a.norm = is_wide ? static_cast<void *>(wide_norm.data()) : half_norm.data();
    const bool has_codes = !it.factors.empty(), has_sizes = has_codes && a.scale == 0.0f;
    std::vector<int8_t> codes(has_codes ? size : 0);
    std::vector<float> sizes(has_sizes ? it.num_rows : 0);
    a.factors = has_codes ? it.factors.data() : nullptr, a.codes = codes.data(), a.sizes = sizes.data();
    bei::normalize_sums(a, 0, it.num_rows);
    auto found = [&](const std::vector<float> &wide, const std::vector<uint16_t> &half, size_t i) {
        float value;
        const uint32_t bits = is_wide ? 0 : uint32_t(half[i]) << 16;
        std::memcpy(&value, is_wide ? static_cast<const void *>(&wide[i]) : &bits, sizeof value);
        return double(value);
    };
    double most = 0, farthest = 0;
    auto note = [](double &largest, double error) { largest = worse(largest, error); };
    for (size_t r = 0; r < it.num_rows; ++r) {
        const float *residual_row = &it.residual[r * width];
        if (std::any_of(residual_row, residual_row + width, [](float one) { return std::isnan(one); })) {
            for (size_t i = 0; i < width; ++i)
                note(most, std::isnan(found(wide_norm, half_norm, r * width + i)) ? 0.0 : HUGE_VAL);
            if (has_sizes) note(farthest, std::isnan(sizes[r]) ? 0.0 : HUGE_VAL);
            continue;
        }
        std::vector<double> sum(width), norm(width);
        double mean = 0, squares = 0, largest = bei::LEAST_SIZE;
        for (size_t i = 0; i < width; ++i) {
            const double row = it.rows[r * width + i];
            sum[i] = (a.row_sizes ? row * it.row_sizes[r] + it.row_bias[i] : row) + it.residual[r * width + i];
            mean += a.is_centred ? sum[i] / width : 0.0;
        }
        double largest_sum = 0;
        for (double one : sum) {
            squares += (one - mean) * (one - mean) / width;
            largest_sum = std::max(largest_sum, std::abs(one));
        }
        const double deviation = std::sqrt(squares + a.epsilon);
        for (size_t i = 0; i < width; ++i) {
            norm[i] = (sum[i] - mean) / deviation * it.weight[i] + it.bias[i];
            const double digits = 1 + std::abs(norm[i]) + largest_sum / deviation * std::abs(it.weight[i]);
            note(most, std::abs(found(wide_norm, half_norm, r * width + i) - norm[i]) / digits);
            if (it.has_sum)
                note(most, std::abs(found(wide_sum, half_sum, r * width + i) - sum[i]) / (1 + std::abs(sum[i])));
            if (has_codes) largest = std::max(largest, std::abs(norm[i] * it.factors[i]));
        }
        if (has_sizes) note(farthest, std::abs(sizes[r] / largest - 1));
        for (size_t i = 0; has_codes && i < width; ++i) {
            const double scale = has_sizes ? largest / 127 : a.scale;
            const double code = std::min(std::max(norm[i] * it.factors[i] / scale, -128.0), 127.0);
            note(farthest, std::abs(codes[r * width + i] - code));
        }
    }
    return {most, farthest};
}

// True if each row alone has the bits that it has among all of them.
bool is_each_alone(const NormCase &it) {
    bei::NormalizedSum a = it.of;
    a.element = Element::f32, a.rows = it.rows.data(), a.residual = it.residual.data();
    a.weight = it.weight.data(), a.bias = it.bias.data();
    std::vector<float> together(it.rows.size()), alone(it.rows.size());
    a.norm = together.data();
    bei::normalize_sums(a, 0, it.num_rows);
    a.norm = alone.data();
    for (size_t r = it.num_rows; r-- > 0;) bei::normalize_sums(a, r, r + 1);
    return std::memcmp(together.data(), alone.data(), together.size() * sizeof(float)) == 0;
}

// The kernels of this CPU; where they need no tiles but could, also the one on tiles with these in memory.
std::vector<bei::NamedKernel> kernels_and_twin(Element element) {
    size_t count;
    const bei::NamedKernel *kernels = bei::kernels_of(element, count);
    std::vector<bei::NamedKernel> found(kernels, kernels + count);
#ifdef __x86_64__
    if (std::strcmp(found[0].name, "avx512_bf16") == 0)
        found.push_back({"emulated amx_bf16", bei::emulated_amx_bf16::bf16});
#endif
    return found;
}

}  // namespace

int main(int argc, char **argv) {
    const int first = argc > 1 ? std::atoi(argv[1]) : 0, count = argc > 2 ? std::atoi(argv[2]) : 200;
    int num_wrong = 0;
    for (int seed = first; seed < first + count; ++seed) {
        std::mt19937 random(seed);
        const Element element = seed % 2 ? Element::bf16 : Element::f32;
        const Case it = made(random, element);
        const auto context = expected(it);
        for (const bei::NamedKernel &kernel : kernels_and_twin(element)) {
            const double error = largest_error(it, kernel.kernel, context, std::strstr(kernel.name, "amx"));
            if (error <= (element == Element::f32 ? 2e-5 : 4e-2)) continue;
            std::printf("seed %d, %s: an error of %g\n", seed, kernel.name, error);
            ++num_wrong;
        }
        const double distance = largest_distance(made_rounding(random, element));
        if (!(distance <= 0.5001)) {
            std::printf("seed %d, rounding: a distance of %g\n", seed, distance);
            ++num_wrong;
        }
        const NormCase sums = made_norm(random, element);
        const auto [norm_error, farthest] = norm_errors(sums);
        if (!(norm_error <= (element == Element::f32 ? 1e-6 : 4e-3) && farthest <= 0.51) || !is_each_alone(sums)) {
            std::printf("seed %d, sum and norm: an error of %g, a distance of %g\n", seed, norm_error, farthest);
            ++num_wrong;
        }
    }
    size_t num_kernels;
    const bei::NamedKernel *kernels = bei::kernels_of(Element::bf16, num_kernels);
    for (size_t i = 0; i < num_kernels; ++i) std::printf("%s\n", kernels[i].name);
    return num_wrong != 0;
}
