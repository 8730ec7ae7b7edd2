// Compiled with -mamx-tile and -mamx-bf16 as well: products of tiles of BF16, added in FP32.
//
// A tile has 16 rows of 64 bytes. Queries and weights are left factors, a row each. Keys and values are right factors, in
// which a row holds two neighbouring elements of every column: just how the block's keys and values are packed.
//
// A tile is multiplied whole: an infinite key or value of a sequence makes NaN (0 * inf) of queries in its tile that do
// not see it, as of all queries of the sequence in OpenVINO's own attention, and never of another sequence.
#define BEI_LANES 16
#define BEI_ROWS 16
#define BEI_BF16_DOT
#include "kernel.hpp"
#include "kernels.hpp"

namespace {

constexpr int64_t ROW_BYTES = 64;       // of a tile
constexpr int64_t TILE = ROWS * LANES;  // units or floats of it
constexpr int64_t FEWEST_TOKENS = 5;    // of a sequence, its own, for whose few scores a tile is no waste

// All tiles are whole: what a sequence or a head lacks is filled up where it is packed.
struct alignas(64) Palette {
    uint8_t number = 1, first_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES};
    uint8_t rows[16] = {ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS};
};
constexpr Palette PALETTE;

// GCC does not know that a tile is loaded from memory: without it what was stored before may be stored behind.
inline void store_before_tiles() { asm volatile("" ::: "memory"); }

// 2^x, relative error 9e-5, a twentieth of what rounding to BF16 may add. 2^0 is 1, 2^-inf is 0, NaN stays.
inline Floats power_of_two(Floats x) {
    constexpr int FLOOR = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const Floats f = (Floats)_mm512_reduce_ps((__m512)x, FLOOR);
    Floats p = f * 7.706712e-2f + 2.2764491e-1f;
    p = p * f + 6.9511681e-1f;
    p = p * f + 1.0f;
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// One half of each 2 * Distance lanes of both vectors, those of `a` and of `b` in turn.
template <int64_t Distance, bool Second, size_t... I>
inline Floats halves(Floats a, Floats b, std::index_sequence<I...>) {
    constexpr int64_t D = Distance;
    return __builtin_shufflevector(
        a, b, (int64_t(I) / D % 2 * LANES + int64_t(I) / D / 2 * 2 * D + int64_t(I) % D + (Second ? D : 0))...);
}

// Lane r of the result is vector r, of as many as there are lanes, reduced to one number.
template <class Reduce, int64_t Distance = LANES / 2>
inline Floats each_across(Floats *vectors, Reduce reduce) {
    constexpr auto lanes = std::make_index_sequence<LANES>{};
    for (int64_t i = 0; i < Distance; ++i)
        vectors[i] = reduce(halves<Distance, false>(vectors[i], vectors[i + Distance], lanes),
                            halves<Distance, true>(vectors[i], vectors[i + Distance], lanes));
    if constexpr (Distance == 1)
        return vectors[0];
    else
        return each_across<Reduce, Distance / 2>(vectors, reduce);
}

// The lowest `count` lanes; none below 0, all from LANES on.
inline __mmask16 lanes_below(int64_t count) { return __mmask16((1u << std::clamp<int64_t>(count, 0, LANES)) - 1); }

class TiledHead : Head<BF16Pairs> {
public:
    using Head<BF16Pairs>::Head;

    void compute() {
        bool is_written = false;
        for_each_tile([&](int64_t row) {
            if (row == 0) fill_values();
            tile(row);
            if (_is_last) write(row);
            is_written = _is_last;
        });
        if (!is_written)  // no query sees a key
            for (int64_t row = 0; row < _num_queries; ++row) std::fill_n(out(row), _it.head_dim, 0);
    }

private:
    float *scores_of(int64_t column) const { return _scratch.scores + column * TILE; }
    Unit *weights_of(int64_t pair) const { return _scratch.weights + pair * TILE; }
    float *context_of(int64_t row) const { return _scratch.context + row * _scratch.width; }
    Stored *out(int64_t row) const { return _out + row * _it.num_heads * _it.head_dim; }

    // What the block lacks of its last tile of values.
    void fill_values() const {
        const int64_t count = (_block_end - _block + 1) / 2;
        std::fill_n(_scratch.values + count * _scratch.width, (rounded_up(count, ROWS) - count) * _scratch.width, 0);
    }

    // The queries from `row` on, up to ROWS, with the block's keys: columns of LANES keys each, two for a tile of weights.
    void tile(int64_t row) {
        _count = std::min<int64_t>(ROWS, _num_queries - row);
        _position = _first_position + row;
        const int64_t first = first_key(_position), end = last_key(_position + _count - 1);
        if (end <= first) {
            if (_is_first) std::fill_n(context_of(row), ROWS * _scratch.width, 0.0f);
            return;
        }
        for (int64_t r = 0; r < _count; ++r) {
            const Stored *query = _queries + (row + r) * _it.query_stride;
            row_to_units<BF16Pairs>(query, _it.head_dim, _scratch.queries + r * _scratch.units);
        }
        _from = (first - _block) / (2 * LANES) * 2, _to = (end - _block + LANES - 1) / LANES;
        for (int64_t column = _from; column < _to; ++column) begin_scores(column);
        multiply_keys();
        if (_it.softcap != 0.0f) cap_scores();
        const Floats scale = softmax(row);
        if (!_is_first) scale_context(row, scale);
        add_values(row);
    }

    // What is added to the scores of a query with the keys from that of `column` on.
    Floats addend(int64_t position, int64_t column) const {
        const int64_t key = _block + column * LANES;
        const __mmask16 seen = lanes_below(last_key(position) - key) & ~lanes_below(first_key(position) - key);
        const Floats none = Floats{} + NONE;
        if (!_it.biases) return (Floats)_mm512_mask_blend_ps(seen, (__m512)none, __m512{});
        const float *biases = _it.biases + _part.head * (2 * _it.reach + 1) + _it.reach;
        return (Floats)_mm512_mask_loadu_ps((__m512)none, seen, biases + (key - position));
    }

    // Scores that are not only products begin as what is added to them, unless they are capped before.
    void begin_scores(int64_t column) {
        const int64_t key = _block + column * LANES, last = _position + _count - 1;
        const bool all_seen = key >= first_key(last) && key + LANES <= last_key(_position);
        _is_begun[column] = (!all_seen || _it.biases) && _it.softcap == 0.0f;
        if (!_is_begun[column]) return;
        for (int64_t r = 0; r < _count; ++r) store(scores_of(column) + r * LANES, addend(_position + r, column));
    }

    void cap_scores() {
        for (int64_t column = _from; column < _to; ++column)
            for (int64_t r = 0; r < _count; ++r) {
                float *scores = scores_of(column) + r * LANES;
                store(scores, capped(load<Floats>(scores)) + addend(_position + r, column));
            }
    }

    void multiply_keys() const {
        const int64_t stride = _scratch.units * sizeof(Unit), key_tile = _scratch.units * LANES;
        store_before_tiles();
        for (int64_t column = _from; column < _to; column += 2) {
            const bool has_second = column + 1 < _to;
            const Unit *keys = _scratch.keys + column * key_tile;
            if (_is_begun[column])
                _tile_loadd(0, scores_of(column), ROW_BYTES);
            else
                _tile_zero(0);
            if (has_second && _is_begun[column + 1])
                _tile_loadd(1, scores_of(column + 1), ROW_BYTES);
            else
                _tile_zero(1);
            for (int64_t unit = 0; unit < _scratch.units; unit += LANES) {
                _tile_loadd(2, _scratch.queries + unit, stride);
                _tile_loadd(3, keys + unit * LANES, ROW_BYTES);
                _tile_dpbf16ps(0, 2, 3);
                if (!has_second) continue;
                _tile_loadd(4, keys + key_tile + unit * LANES, ROW_BYTES);
                _tile_dpbf16ps(1, 2, 4);
            }
            _tile_stored(0, scores_of(column), ROW_BYTES);
            if (has_second) _tile_stored(1, scores_of(column + 1), ROW_BYTES);
        }
    }

    // Turns scores into weights, and returns the scale of what was summed before; a lane is a query.
    Floats softmax(int64_t row) {
        constexpr float LOG2_E = 1.44269504f;
        const auto larger = [](Floats a, Floats b) { return a > b ? a : b; };
        Floats rows[ROWS] = {};
        for (int64_t r = 0; r < _count; ++r) {
            rows[r] = load<Floats>(scores_of(_from) + r * LANES);
            for (int64_t column = _from + 1; column < _to; ++column)
                rows[r] = larger(rows[r], load<Floats>(scores_of(column) + r * LANES));
        }
        const Floats before = load<Floats>(_scratch.most + row), now = larger(before, each_across(rows, larger));
        alignas(ROW_BYTES) float bases[ROWS];
        store(bases, now == NONE ? Floats{} : now * LOG2_E);
        for (int64_t r = 0; r < _count; ++r) {
            const auto weights = [&](int64_t column) {
                return power_of_two(load<Floats>(scores_of(column) + r * LANES) * LOG2_E - bases[r]);
            };
            rows[r] = Floats{};
            for (int64_t column = _from; column < _to; column += 2) {
                const Floats one = weights(column), other = column + 1 < _to ? weights(column + 1) : Floats{};
                rows[r] += one + other;
                store(weights_of(column / 2) + r * LANES, (Units)_mm512_cvtne2ps_pbh((__m512)other, (__m512)one));
            }
        }
        const Floats scale = exp_of(before == NONE ? before : before - now);
        const Floats sums = each_across(rows, [](Floats a, Floats b) { return a + b; });
        store(_scratch.most + row, now);
        store(_scratch.sum + row, load<Floats>(_scratch.sum + row) * scale + sums);
        return scale;
    }

    void scale_context(int64_t row, Floats scale) const {
        for (int64_t r = 0; r < _count; ++r)
            for (int64_t lane = 0; lane < _scratch.width; lane += LANES) {
                float *context = context_of(row + r) + lane;
                store(context, load<Floats>(context) * scale[r]);
            }
    }

    void add_values(int64_t row) const {
        const int64_t width = _scratch.width, stride = width * sizeof(Unit);
        store_before_tiles();
        for (int64_t lane = 0; lane < width; lane += 2 * LANES) {
            const bool has_second = lane + LANES < width;
            float *context = context_of(row) + lane;
            if (_is_first) {
                _tile_zero(0);
                _tile_zero(1);
            } else {
                _tile_loadd(0, context, stride);
                if (has_second) _tile_loadd(1, context + LANES, stride);
            }
            for (int64_t pair = _from / 2; 2 * pair < _to; ++pair) {
                const Unit *values = _scratch.values + pair * ROWS * width + lane;
                _tile_loadd(2, weights_of(pair), ROW_BYTES);
                _tile_loadd(3, values, stride);
                _tile_dpbf16ps(0, 2, 3);
                if (!has_second) continue;
                _tile_loadd(4, values + LANES, stride);
                _tile_dpbf16ps(1, 2, 4);
            }
            _tile_stored(0, context, stride);
            if (has_second) _tile_stored(1, context + LANES, stride);
        }
    }

    void write(int64_t row) const {
        const Floats sums = load<Floats>(_scratch.sum + row), shares = sums == 0.0f ? Floats{} : 1.0f / sums;
        for (int64_t r = 0; r < _count; ++r) {
            const float *context = context_of(row + r);
            for (int64_t i = 0; i < _scratch.width; i += 2 * LANES) {
                const int64_t left = int64_t(_it.head_dim) - i;
                const Floats low = load<Floats>(context + i) * shares[r];
                const Floats high = left > LANES ? load<Floats>(context + i + LANES) * shares[r] : Floats{};
                const auto both = (Units)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
                if (left >= 2 * LANES)
                    store(out(row + r) + i, both);
                else
                    std::memcpy(out(row + r) + i, &both, left * sizeof(Stored));
            }
        }
    }

    bool _is_begun[KEYS_OF_A_BLOCK / LANES];
    int64_t _count, _position;  // the queries of the tile: how many, and where the first one is
    int64_t _from, _to;         // the columns that they see
};

}  // namespace

namespace bei::amx_bf16 {
// Tiles are a thread's: they are released, so that what runs there next need not save them.
void bf16(const PackedAttention &it, const Part *first, const Part *end) {
    _tile_loadconfig(&PALETTE);
    for (; first != end; ++first)
        if (it.starts[first->sequence + 1] - it.starts[first->sequence] < FEWEST_TOKENS)
            avx512_bf16::bf16(it, first, first + 1);
        else
            TiledHead(it, *first).compute();
    _tile_release();
}
}  // namespace bei::amx_bf16
