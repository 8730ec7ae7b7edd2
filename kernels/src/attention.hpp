// Attention over packed tokens: the sequences of a batch lie end to end, nothing is padded or masked.
//
// Scores and sums are FP32 whatever the elements are. The answer of a sequence does not depend on its batch: each of its
// rows adds up the same numbers in the same order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bei {

enum class Element { f32, bf16 };

// Queries, keys and values have one row a token, heads side by side, and a stride between rows, in elements: they may be
// parts of one matrix. The score scale is in the queries already.
struct PackedAttention {
    Element element;
    const void *queries, *keys, *values;
    size_t query_stride, key_stride, value_stride;
    void *context;              // [num_tokens, num_heads * head_dim]
    const int32_t *starts;      // [num_sequences + 1]: sequence b holds the tokens from starts[b] to starts[b + 1]
    const int32_t *key_lens;    // [num_sequences]: how many leading tokens of each are keys; null: all
    // [num_sequences + 1]: sequence b begins with tokens of other sequences, which are its keys and not its queries, in
    // the rows shared_rows[shared_starts[b]] to before shared_rows[shared_starts[b + 1]]. Its own tokens follow them;
    // positions, windows and key_lens count both. Null: nothing is shared.
    const int32_t *shared_starts, *shared_rows;
    size_t num_sequences;
    size_t num_heads, num_kv_heads, head_dim;  // neighbouring heads share keys and values
    bool causal;
    int64_t window;             // keys at most so many positions away are visible; negative: all
    float softcap;              // scores s become softcap * tanh(s / softcap); 0: they stay
    const float *biases;        // [num_heads, 2 * reach + 1], added to the scores by key position less query position
    int64_t reach;              // at least the longest sequence less 1, shared tokens counted; null biases: none
};

constexpr int64_t QUERIES_OF_A_PART = 256;

// What one thread computes at once: one head of up to QUERIES_OF_A_PART queries of a sequence.
struct Part {
    size_t sequence, head;
    int64_t first_query;
};

// Writes the context rows of the parts from `first` to before `end`. A row without a visible key becomes zeros.
using Kernel = void (*)(const PackedAttention &, const Part *first, const Part *end);

struct NamedKernel {
    const char *name;
    Kernel kernel;
};

// The kernels that this CPU can run, the fastest first; the last is portable.
const NamedKernel *kernels_of(Element element, size_t &count);

}  // namespace bei
