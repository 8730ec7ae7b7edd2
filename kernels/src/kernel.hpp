// The kernel, written for vectors of BEI_LANES floats and included by one file for each instruction set.
//
// Keys and values of a block are packed into 32-bit units: a float, or with BEI_BF16_DOT two neighbouring bfloat16, whose
// products one instruction adds up. A tile of up to ROWS queries then computes scores, softmax and context of that block.
// Texts longer than a block keep a running maximum and sum, and rescale what was summed before.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include "attention.hpp"

namespace {

using bei::PackedAttention;
using bei::Part;

constexpr int64_t LANES = BEI_LANES;
constexpr int ROWS = BEI_ROWS;         // of a tile; with two columns of vectors its sums fit in the registers
constexpr int64_t KEYS_OF_A_BLOCK = 256;  // packed keys and values stay in the second-level cache
constexpr float LOWEST_EXPONENT = -87.0f;  // below it exp is 0

using Unit = uint32_t;
typedef float Floats __attribute__((vector_size(4 * BEI_LANES)));
typedef Unit Units __attribute__((vector_size(4 * BEI_LANES)));
typedef int32_t Indices __attribute__((vector_size(4 * BEI_LANES)));

template <class Vector>
inline Vector load(const void *from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector>
inline void store(void *to, Vector vector) {
    std::memcpy(to, &vector, sizeof vector);
}

inline int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// Elements, and how they become units. `per_unit`: neighbouring elements in one.
struct F32 {
    using Stored = float;
    static constexpr int per_unit = 1;
    static float wide(Stored value) { return value; }
    static Stored narrow(float value) { return value; }
};

struct BF16 {
    using Stored = uint16_t;
    static constexpr int per_unit = 1;
    static float wide(Stored value) {
        const uint32_t bits = uint32_t(value) << 16;
        float found;
        std::memcpy(&found, &bits, sizeof found);
        return found;
    }
    static Stored narrow(float value) {  // to the nearest, ties to even; NaN stays NaN
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        const uint32_t up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return Stored((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : up);
    }
};

struct BF16Pairs : BF16 {
    static constexpr int per_unit = 2;
};

// sum + units * others, lane by lane; pairs: both products of a lane.
template <class E>
inline Floats dot(Floats sum, Units units, Units others) {
#ifdef BEI_BF16_DOT
    if constexpr (E::per_unit == 2) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)units, (__m512bh)others);
#endif
    return sum + (Floats)units * (Floats)others;
}

#ifdef BEI_BF16_DOT
inline void store_bf16(void *to, Floats values) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)values);
    std::memcpy(to, &narrow, sizeof narrow);
}
#endif

// exp(x) for x <= 0, relative error 2e-7: 2^n * 2^f, the latter by its series.
inline Floats exp_of(Floats x) {
    constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const auto is_zero = x < LOWEST_EXPONENT;
    x = is_zero ? Floats{} + LOWEST_EXPONENT : x;
    const Floats power = x * 1.44269504f;
    const Floats shifted = power + ROUNDING;
    const Floats f = power - (shifted - ROUNDING);
    Floats p = f * 1.54035304e-4f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    return is_zero ? Floats{} : (Floats)((Units)p + ((Units)shifted << 23));
}

template <int64_t Distance, size_t... I>
inline Floats rotated(Floats vector, std::index_sequence<I...>) {
    return __builtin_shufflevector(vector, vector, ((I + Distance) % LANES)...);
}

// All lanes reduced to one, by halves.
template <class Reduce, int64_t Distance = LANES / 2>
inline float across(Floats vector, Reduce reduce) {
    if constexpr (Distance == 0) {
        return vector[0];
    } else {
        const Floats other = rotated<Distance>(vector, std::make_index_sequence<LANES>{});
        return across<Reduce, Distance / 2>(reduce(vector, other), reduce);
    }
}

template <size_t... I>
inline Indices counted(std::index_sequence<I...>) {
    return Indices{I...};
}

// A call of memcpy would cost as much as the few vectors of a row.
inline void copy_bytes(const void *from, int64_t size, void *to) {
    int64_t at = 0;
    for (; at + int64_t(sizeof(Units)) <= size; at += sizeof(Units))
        store(static_cast<char *>(to) + at, load<Units>(static_cast<const char *>(from) + at));
    for (; at < size; at += sizeof(Unit))
        store(static_cast<char *>(to) + at, load<Unit>(static_cast<const char *>(from) + at));
}

// A row of `width` elements as units; what is left of the last unit is 0.
template <class E>
inline void row_to_units(const typename E::Stored *row, int64_t width, Unit *units) {
    if constexpr (E::per_unit == 2) {
        copy_bytes(row, width / 2 * sizeof *units, units);
        if (width % 2) units[width / 2] = row[width - 1];
    } else if constexpr (sizeof *row == sizeof *units) {
        copy_bytes(row, width * sizeof *row, units);
    } else {
        for (int64_t i = 0; i < width; ++i) {
            const float value = E::wide(row[i]);
            std::memcpy(units + i, &value, sizeof value);
        }
    }
}

template <size_t From, size_t... I>
inline Units zipped(Units a, Units b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, (From + I / 2 + I % 2 * LANES)...);
}

// `rows` [LANES] transposed: each pass interleaves the first half with the second.
inline void transpose(Units *rows) {
    constexpr auto lanes = std::make_index_sequence<LANES>{};
    for (int64_t pass = 1; pass < LANES; pass *= 2) {
        Units next[LANES];
        for (int64_t i = 0; i < LANES / 2; ++i) {
            next[2 * i] = zipped<0>(rows[i], rows[i + LANES / 2], lanes);
            next[2 * i + 1] = zipped<LANES / 2>(rows[i], rows[i + LANES / 2], lanes);
        }
        for (int64_t i = 0; i < LANES; ++i) rows[i] = next[i];
    }
}

// Memory of one thread. Sizes are in units, rounded up to whole vectors.
struct Scratch {
    int64_t units, width;  // of a head's queries and keys; of its values and context
    Unit *keys;            // [vectors of keys, units, LANES]
    Unit *values;          // [units of keys, width]
    Unit *queries;         // [ROWS, units]
    float *scores;         // [ROWS, KEYS_OF_A_BLOCK]
    Unit *weights;         // [ROWS, KEYS_OF_A_BLOCK]
    float *context;        // [QUERIES_OF_A_PART, width]
    float *most, *sum;     // [QUERIES_OF_A_PART]: of each query's scores so far, of their exponentials
};

Scratch scratch_for(int64_t head_dim, int per_unit) {
    constexpr size_t ALIGNMENT = 64;
    struct Free {
        void operator()(Unit *block) const { ::operator delete(block, std::align_val_t(ALIGNMENT)); }
    };
    thread_local std::unique_ptr<Unit, Free> block;
    thread_local int64_t held = 0;
    Scratch it;
    it.units = rounded_up((head_dim + per_unit - 1) / per_unit, LANES);
    it.width = rounded_up(head_dim, LANES);
    const int64_t sizes[] = {KEYS_OF_A_BLOCK * it.units, KEYS_OF_A_BLOCK * it.width, ROWS * it.units,
                             ROWS * KEYS_OF_A_BLOCK,     ROWS * KEYS_OF_A_BLOCK,     bei::QUERIES_OF_A_PART * it.width,
                             bei::QUERIES_OF_A_PART,     bei::QUERIES_OF_A_PART};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    if (total > held) {
        block.reset(static_cast<Unit *>(::operator new(total * sizeof(Unit), std::align_val_t(ALIGNMENT))));
        held = total;
    }
    Unit *places[8], *next = block.get();
    for (int i = 0; i < 8; ++i) {
        places[i] = next;
        next += sizes[i];
    }
    it.keys = places[0], it.values = places[1], it.queries = places[2], it.weights = places[4];
    it.scores = reinterpret_cast<float *>(places[3]), it.context = reinterpret_cast<float *>(places[5]);
    it.most = reinterpret_cast<float *>(places[6]), it.sum = reinterpret_cast<float *>(places[7]);
    return it;
}

template <class E>
class Head {
    using Stored = typename E::Stored;

public:
    Head(const PackedAttention &attention, const Part &part)
        : _it(attention), _part(part), _scratch(scratch_for(attention.head_dim, E::per_unit)) {
        const int64_t begin = _it.starts[part.sequence], length = _it.starts[part.sequence + 1] - begin;
        const size_t kv_head = part.head / (_it.num_heads / _it.num_kv_heads);
        _num_keys = _it.key_lens ? std::min<int64_t>(_it.key_lens[part.sequence], length) : length;
        _num_queries = std::min(length - part.first_query, bei::QUERIES_OF_A_PART);
        _queries = rows(_it.queries, _it.query_stride, begin + part.first_query, part.head);
        _keys = rows(_it.keys, _it.key_stride, begin, kv_head);
        _values = rows(_it.values, _it.value_stride, begin, kv_head);
        const size_t first = (begin + part.first_query) * _it.num_heads + part.head;
        _out = static_cast<Stored *>(_it.context) + first * _it.head_dim;
    }

    void compute() {
        std::fill_n(_scratch.context, _num_queries * _scratch.width, 0.0f);
        std::fill_n(_scratch.most, _num_queries, -std::numeric_limits<float>::infinity());
        std::fill_n(_scratch.sum, _num_queries, 0.0f);
        const int64_t last = _part.first_query + _num_queries - 1;
        for (_block = 0; _block < _num_keys; _block += KEYS_OF_A_BLOCK) {
            _block_end = std::min(_block + KEYS_OF_A_BLOCK, _num_keys);
            if (last_key(last) <= first_key(_part.first_query)) continue;
            pack_keys();
            pack_values();
            for (int64_t row = 0; row < _num_queries; row += ROWS) tile(row);
        }
        write_context();
    }

private:
    const Stored *rows(const void *matrix, size_t stride, int64_t token, size_t head) const {
        return static_cast<const Stored *>(matrix) + token * stride + head * _it.head_dim;
    }

    // The keys of the block from the first to before the last are visible to the query at `position`.
    int64_t first_key(int64_t position) const {
        return _it.window < 0 ? _block : std::max(_block, position - _it.window);
    }

    int64_t last_key(int64_t position) const {
        int64_t end = _block_end;
        if (_it.causal) end = std::min(end, position + 1);
        if (_it.window >= 0) end = std::min(end, position + _it.window + 1);
        return end;
    }

    void pack_keys() {
        const int64_t width = _it.head_dim;
        for (int64_t key = _block; key < _block_end; key += LANES) {
            const int64_t count = std::min(LANES, _block_end - key);
            Unit *to = _scratch.keys + (key - _block) * _scratch.units;
            alignas(64) Unit row[LANES];
            for (int64_t unit = 0; unit < _scratch.units; unit += LANES) {
                Units square[LANES] = {};
                const int64_t element = unit * E::per_unit, left = std::min(width - element, LANES * E::per_unit);
                for (int64_t lane = 0; lane < count; ++lane) {
                    const Stored *from = _keys + (key + lane) * _it.key_stride + element;
                    if (left < LANES * E::per_unit) store(row, Units{});
                    row_to_units<E>(from, left, row);
                    square[lane] = load<Units>(row);
                }
                transpose(square);
                for (int64_t i = 0; i < LANES; ++i) store(to + (unit + i) * LANES, square[i]);
            }
        }
    }

    void pack_values() {
        const int64_t width = _it.head_dim, stride = _it.value_stride;
        for (int64_t key = _block; key < _block_end; key += E::per_unit) {
            Unit *to = _scratch.values + (key - _block) / E::per_unit * _scratch.width;
            const Stored *from = _values + key * stride;
            if constexpr (E::per_unit == 2) {
                if (key + 1 == _block_end)
                    for (int64_t i = 0; i < width; ++i) to[i] = from[i];
                else
                    for (int64_t i = 0; i < width; ++i) to[i] = from[i] | Unit(from[stride + i]) << 16;
            } else {
                row_to_units<E>(from, width, to);
            }
            std::fill(to + width, to + _scratch.width, 0);
        }
    }

    // The rows of the queries from `row` on, as many as there are, up to ROWS.
    void tile(int64_t row) {
        tile_of(row, std::min<int64_t>(ROWS, _num_queries - row), std::make_integer_sequence<int, ROWS>{});
    }

    template <int... I>
    void tile_of(int64_t row, int64_t count, std::integer_sequence<int, I...>) {
        ((count == I + 1 ? sized_tile<I + 1>(row) : void()), ...);
    }

    template <int R>
    void sized_tile(int64_t row) {
        const int64_t position = _part.first_query + row;
        const int64_t first = first_key(position), end = last_key(position + R - 1);
        if (end <= first) return;
        for (int r = 0; r < R; ++r)
            row_to_units<E>(_queries + (row + r) * _it.query_stride, _it.head_dim, _scratch.queries + r * _scratch.units);
        const int64_t from = (first - _block) / LANES, to = (end - _block + LANES - 1) / LANES;  // vectors of keys
        int64_t column = from;
        for (; column + 2 <= to; column += 2) scores<R, 2>(column);
        if (column < to) scores<R, 1>(column);
        float scales[R];
        for (int r = 0; r < R; ++r) scales[r] = softmax(row + r, r, from * LANES, to * LANES);
        int64_t lane = 0;
        for (; lane + 2 * LANES <= _scratch.width; lane += 2 * LANES) add_values<R, 2>(row, lane, from, to, scales);
        if (lane < _scratch.width) add_values<R, 1>(row, lane, from, to, scales);
    }

    // Scores of R queries with C vectors of keys.
    template <int R, int C>
    void scores(int64_t column) {
        const int64_t units = (_it.head_dim + E::per_unit - 1) / E::per_unit, stride = _scratch.units;
        const Unit *keys = _scratch.keys + column * stride * LANES;
        Floats sums[R][C] = {};
        for (int64_t unit = 0; unit < units; ++unit) {
            Units vectors[C];
            for (int c = 0; c < C; ++c) vectors[c] = load<Units>(keys + (c * stride + unit) * LANES);
            for (int r = 0; r < R; ++r) {
                const Units query = Units{} + _scratch.queries[r * stride + unit];
                for (int c = 0; c < C; ++c) sums[r][c] = dot<E>(sums[r][c], query, vectors[c]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) store(_scratch.scores + r * KEYS_OF_A_BLOCK + (column + c) * LANES, sums[r][c]);
    }

    // Turns scores of the keys [from, to) of the block into weights, and returns the scale of what was summed before.
    float softmax(int64_t row, int r, int64_t from, int64_t to) {
        float *scores = _scratch.scores + r * KEYS_OF_A_BLOCK;
        const int64_t position = _part.first_query + row;
        const int64_t first = std::min(first_key(position) - _block, to);
        const int64_t end = std::max(last_key(position) - _block, first);
        if (_it.softcap != 0.0f) cap(scores, from, to);
        if (_it.biases) {
            const float *biases = _it.biases + _part.head * (2 * _it.reach + 1) + _it.reach + _block - position;
            for (int64_t i = first; i < end; ++i) scores[i] += biases[i];
        }
        constexpr float NONE = -std::numeric_limits<float>::infinity();
        hide(scores, from, first, [=](Indices index) { return index < int32_t(first); });
        hide(scores, end / LANES * LANES, to, [=](Indices index) { return index >= int32_t(end); });
        const auto larger = [](Floats a, Floats b) { return a > b ? a : b; };
        Floats most = load<Floats>(scores + from);
        for (int64_t i = from + LANES; i < to; i += LANES) most = larger(most, load<Floats>(scores + i));
        const float before = _scratch.most[row], now = std::max(before, across(most, larger));
        if (now == NONE) {  // no key so far
            std::fill_n(_scratch.weights + r * KEYS_OF_A_BLOCK + from / E::per_unit, (to - from) / E::per_unit, 0);
            return 1.0f;
        }
        Floats sum = {};
        for (int64_t i = from; i < to; i += LANES) {
            const Floats weights = exp_of(load<Floats>(scores + i) - now);
            sum += weights;
            store_weights(_scratch.weights + r * KEYS_OF_A_BLOCK + i / E::per_unit, weights);
        }
        const float scale = before == NONE ? 0.0f : exp_of(Floats{} + (before - now))[0];
        _scratch.most[row] = now;
        _scratch.sum[row] = _scratch.sum[row] * scale + across(sum, [](Floats a, Floats b) { return a + b; });
        return scale;
    }

    // Takes out the scores of [from, to) whose index is hidden.
    template <class IsHidden>
    static void hide(float *scores, int64_t from, int64_t to, IsHidden is_hidden) {
        for (int64_t i = from; i < to; i += LANES) {
            const Indices index = counted(std::make_index_sequence<LANES>{}) + int32_t(i);
            const Floats none = Floats{} - std::numeric_limits<float>::infinity();
            store(scores + i, is_hidden(index) ? none : load<Floats>(scores + i));
        }
    }

    void cap(float *scores, int64_t from, int64_t to) const {  // tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)
        for (int64_t i = from; i < to; i += LANES) {
            const Floats x = load<Floats>(scores + i) / _it.softcap;
            const Floats e = exp_of(-2.0f * (x < 0.0f ? -x : x));
            const Floats size = _it.softcap * (1.0f - e) / (1.0f + e);
            store(scores + i, x < 0.0f ? -size : size);
        }
    }

    static void store_weights(Unit *to, Floats weights) {
#ifdef BEI_BF16_DOT
        if constexpr (E::per_unit == 2) return store_bf16(to, weights);
#endif
        store(to, weights);
    }

    // Adds the values of the keys in vectors [from, to), times their weights, to C vectors of R queries' context.
    template <int R, int C>
    void add_values(int64_t row, int64_t lane, int64_t from, int64_t to, const float *scales) {
        const int64_t width = _scratch.width;
        const int64_t end = std::min(to * LANES, _block_end - _block);
        float *context = _scratch.context + row * width + lane;
        Floats sums[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) sums[r][c] = load<Floats>(context + r * width + c * LANES) * scales[r];
        for (int64_t unit = from * LANES / E::per_unit; unit * E::per_unit < end; ++unit) {
            Units vectors[C];
            for (int c = 0; c < C; ++c) vectors[c] = load<Units>(_scratch.values + unit * width + lane + c * LANES);
            for (int r = 0; r < R; ++r) {
                const Units weight = Units{} + _scratch.weights[r * KEYS_OF_A_BLOCK + unit];
                for (int c = 0; c < C; ++c) sums[r][c] = dot<E>(sums[r][c], weight, vectors[c]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) store(context + r * width + c * LANES, sums[r][c]);
    }

    void write_context() {
        const size_t stride = _it.num_heads * _it.head_dim;
        for (int64_t row = 0; row < _num_queries; ++row) {
            const float sum = _scratch.sum[row], share = sum == 0.0f ? 0.0f : 1.0f / sum;
            const float *from = _scratch.context + row * _scratch.width;
            Stored *to = _out + row * stride;
            size_t i = 0;
#ifdef BEI_BF16_DOT
            if constexpr (E::per_unit == 2)
                for (; i + LANES <= _it.head_dim; i += LANES) store_bf16(to + i, load<Floats>(from + i) * share);
#endif
            for (; i < _it.head_dim; ++i) to[i] = E::narrow(from[i] * share);
        }
    }

    const PackedAttention &_it;
    const Part &_part;
    const Scratch _scratch;
    const Stored *_queries, *_keys, *_values;
    Stored *_out;
    int64_t _num_keys, _num_queries;
    int64_t _block = 0, _block_end = 0;  // the keys that are packed
};

template <class E>
void attend(const PackedAttention &attention, const Part &part) {
    Head<E>(attention, part).compute();
}

}  // namespace
