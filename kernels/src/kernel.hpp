// The kernel, written for vectors of BEI_LANES floats and included by one file for each instruction set.
//
// Keys and values of a block are packed into units. A tile of up to ROWS queries then computes scores, softmax and context
// of that block. Texts longer than a block keep a running maximum and sum, and rescale what was summed before.
#include <algorithm>
#include <memory>
#include <new>

#include "attention.hpp"
#include "vectors.hpp"

namespace {

using bei::PackedAttention;
using bei::Part;

constexpr int ROWS = BEI_ROWS;         // of a tile; with two columns of vectors its sums fit in the registers
constexpr int64_t KEYS_OF_A_BLOCK = 256;  // packed keys and values stay in the second-level cache

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
protected:
    using Stored = typename E::Stored;

public:
    Head(const PackedAttention &attention, const Part &part)
        : _it(attention), _part(part), _scratch(scratch_for(attention.head_dim, E::per_unit)) {
        const int64_t begin = _it.starts[part.sequence], length = _it.starts[part.sequence + 1] - begin;
        const size_t kv_head = part.head / (_it.num_heads / _it.num_kv_heads);
        if (_it.shared_starts) {
            _shared_rows = _it.shared_rows + _it.shared_starts[part.sequence];
            _num_shared = _it.shared_starts[part.sequence + 1] - _it.shared_starts[part.sequence];
        }
        _first_own = begin - _num_shared;
        _num_keys = _num_shared + length;
        if (_it.key_lens) _num_keys = std::min<int64_t>(_it.key_lens[part.sequence], _num_keys);
        _num_queries = std::min(length - part.first_query, bei::QUERIES_OF_A_PART);
        _first_position = _num_shared + part.first_query;
        _queries = rows(_it.queries, _it.query_stride, begin + part.first_query, part.head);
        _keys = rows(_it.keys, _it.key_stride, 0, kv_head);
        _values = rows(_it.values, _it.value_stride, 0, kv_head);
        const size_t first = (begin + part.first_query) * _it.num_heads + part.head;
        _out = static_cast<Stored *>(_it.context) + first * _it.head_dim;
    }

    void compute() {
        std::fill_n(_scratch.context, _num_queries * _scratch.width, 0.0f);
        for_each_tile([this](int64_t row) { tile(row); });
        write_context();
    }

protected:
    // Packs each block of keys that a query of the part sees, and calls `tile` with every ROWS-th query.
    template <class Tile>
    void for_each_tile(Tile tile) {
        std::fill_n(_scratch.most, _num_queries, NONE);
        std::fill_n(_scratch.sum, _num_queries, 0.0f);
        _block_end = _num_keys;
        const int64_t first = first_key(_first_position), end = last_key(_first_position + _num_queries - 1);
        for (_block = first / KEYS_OF_A_BLOCK * KEYS_OF_A_BLOCK; _block < end; _block += KEYS_OF_A_BLOCK) {
            _block_end = std::min(_block + KEYS_OF_A_BLOCK, _num_keys);
            _is_first = _block <= first, _is_last = _block + KEYS_OF_A_BLOCK >= end;
            pack_keys();
            pack_values();
            for (int64_t row = 0; row < _num_queries; row += ROWS) tile(row);
        }
    }

    const Stored *rows(const void *matrix, size_t stride, int64_t token, size_t head) const {
        return static_cast<const Stored *>(matrix) + token * stride + head * _it.head_dim;
    }

    // The row of the token at `position` of the sequence.
    int64_t row_of(int64_t position) const {
        return position < _num_shared ? _shared_rows[position] : _first_own + position;
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
                    const Stored *from = _keys + row_of(key + lane) * _it.key_stride + element;
                    if constexpr (E::per_unit == 2) {
                        square[lane] = pairs(from, left);
                    } else {
                        if (left < LANES) store(row, Units{});
                        row_to_units<E>(from, left, row);
                        square[lane] = load<Units>(row);
                    }
                }
                transpose(square);
                for (int64_t i = 0; i < LANES; ++i) store(to + (unit + i) * LANES, square[i]);
            }
        }
    }

    void pack_values() {
        for (int64_t key = _block; key < _block_end; key += E::per_unit) {
            Unit *to = _scratch.values + (key - _block) / E::per_unit * _scratch.width;
            const Stored *from = _values + row_of(key) * _it.value_stride;
            if constexpr (E::per_unit == 2) {
                zip_values(from, key + 1 < _block_end ? _values + row_of(key + 1) * _it.value_stride : nullptr, to);
            } else {
                row_to_units<E>(from, _it.head_dim, to);
                std::fill(to + _it.head_dim, to + _scratch.width, 0);
            }
        }
    }

    // The values of two keys, element by element; without a second one zeros.
    void zip_values(const Stored *row, const Stored *next, Unit *to) const {
        for (int64_t i = 0; i < _scratch.width; i += 2 * LANES) {
            const int64_t left = _it.head_dim - i;
            const auto [low, high] = zipped_rows(pairs(row + i, left), next ? pairs(next + i, left) : Units{});
            store(to + i, low);
            if (i + LANES < _scratch.width) store(to + i + LANES, high);
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
        const int64_t position = _first_position + row;
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
        const int64_t position = _first_position + row;
        const int64_t first = std::min(first_key(position) - _block, to);
        const int64_t end = std::max(last_key(position) - _block, first);
        if (_it.softcap != 0.0f)
            for (int64_t i = from; i < to; i += LANES) store(scores + i, capped(load<Floats>(scores + i)));
        if (_it.biases) {
            const float *biases = _it.biases + _part.head * (2 * _it.reach + 1) + _it.reach + _block - position;
            for (int64_t i = first; i < end; ++i) scores[i] += biases[i];
        }
        hide(scores, from, first, [=](Indices index) { return index < int32_t(first); });
        hide(scores, end / LANES * LANES, to, [=](Indices index) { return index >= int32_t(end); });
        const auto larger = [](Floats a, Floats b) { return a > b ? a : b; };
        Floats most = load<Floats>(scores + from);
        for (int64_t i = from + LANES; i < to; i += LANES) most = larger(most, load<Floats>(scores + i));
        const float before = _scratch.most[row], largest = across(most, larger);
        const float now = before > largest ? before : largest;  // NaN stays
        const float base = now == NONE ? 0.0f : now;             // no key so far: all weights are 0
        Floats sum = {};
        for (int64_t i = from; i < to; i += LANES) {
            const Floats weights = exp_of(load<Floats>(scores + i) - base);
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
            store(scores + i, is_hidden(index) ? Floats{} + NONE : load<Floats>(scores + i));
        }
    }

    Floats capped(Floats score) const {  // tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)
        const Floats x = score / _it.softcap;
        const Floats e = exp_of(-2.0f * (x < 0.0f ? -x : x));
        const Floats size = _it.softcap * (1.0f - e) / (1.0f + e);
        return x < 0.0f ? -size : size;
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
    const int32_t *_shared_rows = nullptr;
    int64_t _num_shared = 0, _first_own;  // the tokens of others; the row of an own token less its position
    int64_t _num_keys, _num_queries, _first_position;
    int64_t _block = 0, _block_end = 0;  // the keys that are packed
    bool _is_first = false, _is_last = false;  // of the blocks that the part sees
};

template <class E>
void attend(const PackedAttention &attention, const Part *first, const Part *end) {
    for (; first != end; ++first) Head<E>(attention, *first).compute();
}

}  // namespace
