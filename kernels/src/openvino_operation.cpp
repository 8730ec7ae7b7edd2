// The kernels as operations of OpenVINO, which its CPU plugin runs by `evaluate`, within the plugin's own threads.
#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <cstring>
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>
#include <sstream>
#include <vector>

#include "attention.hpp"
#include "normalized_sum_operation.hpp"
#include "rounding_operation.hpp"

// OpenVINO's headers join messages by this constructor, which libstdc++ has since GCC 9 (GLIBCXX_3.4.26). With its code
// here the library asks for no newer one than OpenVINO's own (manylinux_2_28).
template std::ostringstream::basic_ostringstream();

namespace {

struct Attributes {
    int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
    int64_t query_offset = 0, key_offset = 0, value_offset = 0;
    bool causal = false;
    int64_t window = -1;
    float softcap = 0.0f;
    bool has_key_lens = false, has_shared = false, has_biases = false;
};

// Inputs: queries, keys, values [T, ...], which may be one matrix at different offsets; starts INT32 [B + 1]; then, if
// there are any, key lengths INT32 [B]; starts of shared rows INT32 [B + 1], and these rows INT32 [R]; biases FP32
// [num_heads, 2 * reach + 1]. Output: [T, num_heads * head_dim]. Tokens that are no sequence's become zeros.
class PackedAttention : public ov::op::Op {
public:
    OPENVINO_OP("PackedAttention", "bei")

    PackedAttention() = default;

    PackedAttention(const ov::OutputVector &inputs, const Attributes &attributes) : Op(inputs), _of(attributes) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        const auto type = get_input_element_type(0);
        NODE_VALIDATION_CHECK(this, type == ov::element::f32 || type == ov::element::bf16, "elements are f32 or bf16");
        NODE_VALIDATION_CHECK(this, get_input_element_type(1) == type && get_input_element_type(2) == type);
        NODE_VALIDATION_CHECK(this, get_input_element_type(3) == ov::element::i32, "starts are i32");
        const size_t num_rare = size_t(_of.has_key_lens) + 2 * size_t(_of.has_shared) + size_t(_of.has_biases);
        NODE_VALIDATION_CHECK(this, get_input_size() == 4 + num_rare);
        NODE_VALIDATION_CHECK(this, _of.num_heads > 0 && _of.num_kv_heads > 0 && _of.head_dim > 0);
        NODE_VALIDATION_CHECK(this, _of.num_heads % _of.num_kv_heads == 0);
        for (size_t i = 4; i < get_input_size() - size_t(_of.has_biases); ++i)
            NODE_VALIDATION_CHECK(this, get_input_element_type(i) == ov::element::i32, "lengths and rows are i32");
        if (_of.has_biases) {
            const size_t last = get_input_size() - 1;
            const auto &shape = get_input_partial_shape(last);
            NODE_VALIDATION_CHECK(this, get_input_element_type(last) == ov::element::f32, "biases are f32");
            NODE_VALIDATION_CHECK(this, shape.rank().compatible(2) && shape[0].compatible(_of.num_heads), "of each head");
            NODE_VALIDATION_CHECK(this, shape[1].is_dynamic() || shape[1].get_length() % 2 == 1, "as many on each side");
        }
        const int64_t offsets[] = {_of.query_offset, _of.key_offset, _of.value_offset};
        for (size_t i = 0; i < 3; ++i) {
            const int64_t end = offsets[i] + (i ? _of.num_kv_heads : _of.num_heads) * _of.head_dim;
            const auto &shape = get_input_partial_shape(i);
            NODE_VALIDATION_CHECK(this, shape.rank().compatible(2) && offsets[i] >= 0);
            NODE_VALIDATION_CHECK(this, shape[1].is_dynamic() || end <= shape[1].get_length(), "heads exceed a row");
        }
        set_output_type(0, type, {get_input_partial_shape(0)[0], _of.num_heads * _of.head_dim});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector &inputs) const override {
        return std::make_shared<PackedAttention>(inputs, _of);
    }

    bool visit_attributes(ov::AttributeVisitor &visitor) override {
        visitor.on_attribute("num_heads", _of.num_heads);
        visitor.on_attribute("num_kv_heads", _of.num_kv_heads);
        visitor.on_attribute("head_dim", _of.head_dim);
        visitor.on_attribute("query_offset", _of.query_offset);
        visitor.on_attribute("key_offset", _of.key_offset);
        visitor.on_attribute("value_offset", _of.value_offset);
        visitor.on_attribute("causal", _of.causal);
        visitor.on_attribute("window", _of.window);
        visitor.on_attribute("softcap", _of.softcap);
        visitor.on_attribute("has_key_lens", _of.has_key_lens);
        visitor.on_attribute("has_shared", _of.has_shared);
        visitor.on_attribute("has_biases", _of.has_biases);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector &outputs, const ov::TensorVector &inputs) const override {
        bei::PackedAttention it{};
        const size_t element_size = inputs[0].get_element_type().size();
        it.element = inputs[0].get_element_type() == ov::element::f32 ? bei::Element::f32 : bei::Element::bf16;
        auto matrix = [&](size_t index, int64_t offset, const void *&data, size_t &stride) {
            data = static_cast<const char *>(inputs[index].data()) + offset * element_size;
            stride = inputs[index].get_shape()[1];
        };
        matrix(0, _of.query_offset, it.queries, it.query_stride);
        matrix(1, _of.key_offset, it.keys, it.key_stride);
        matrix(2, _of.value_offset, it.values, it.value_stride);
        it.context = outputs[0].data();
        it.starts = inputs[3].data<const int32_t>();
        it.num_sequences = inputs[3].get_size() - 1;
        OPENVINO_ASSERT(inputs[3].get_size() > 0, "PackedAttention: the end of the last sequence is missing");
        OPENVINO_ASSERT(!_of.has_key_lens || inputs[4].get_size() == it.num_sequences, "PackedAttention: key lengths");
        it.key_lens = _of.has_key_lens ? inputs[4].data<const int32_t>() : nullptr;
        if (_of.has_shared) {
            const size_t index = 4 + size_t(_of.has_key_lens);
            it.shared_starts = inputs[index].data<const int32_t>();
            it.shared_rows = inputs[index + 1].data<const int32_t>();
            require_shared(it, inputs[index].get_size(), inputs[index + 1].get_size(), inputs[1].get_shape()[0]);
        }
        it.num_heads = _of.num_heads, it.num_kv_heads = _of.num_kv_heads, it.head_dim = _of.head_dim;
        it.causal = _of.causal, it.window = _of.window, it.softcap = _of.softcap;
        if (_of.has_biases) {
            it.biases = inputs.back().data<const float>();
            it.reach = int64_t(inputs.back().get_shape()[1] / 2);
        }
        run(it, parts_of(it, inputs[0].get_shape()[0]));
        const size_t row_size = _of.num_heads * _of.head_dim * element_size, end = it.starts[it.num_sequences];
        std::memset(static_cast<char *>(it.context) + end * row_size, 0, outputs[0].get_byte_size() - end * row_size);
        return true;
    }

private:
    // Refuses shared rows that are no rows of the keys.
    static void require_shared(const bei::PackedAttention &it, size_t num_starts, size_t num_rows, size_t num_tokens) {
        const int32_t *starts = it.shared_starts;
        const bool fits = num_starts == it.num_sequences + 1 && starts[0] >= 0 &&
                          std::is_sorted(starts, starts + num_starts) && size_t(starts[num_starts - 1]) <= num_rows;
        OPENVINO_ASSERT(fits, "PackedAttention: starts of shared rows do not fit the ", num_rows, " rows");
        const bool are_rows = std::all_of(it.shared_rows, it.shared_rows + starts[num_starts - 1], [=](int32_t row) {
            return row >= 0 && size_t(row) < num_tokens;
        });
        OPENVINO_ASSERT(are_rows, "PackedAttention: a shared row is none of the ", num_tokens, " tokens");
    }

    std::vector<bei::Part> parts_of(const bei::PackedAttention &it, size_t num_tokens) const {
        std::vector<bei::Part> parts;
        for (size_t sequence = 0; sequence < it.num_sequences; ++sequence) {
            const int64_t start = it.starts[sequence], length = it.starts[sequence + 1] - start;
            const int64_t shared = it.shared_starts ? it.shared_starts[sequence + 1] - it.shared_starts[sequence] : 0;
            const bool fits = start >= 0 && length >= 0 && start + length <= int64_t(num_tokens) &&
                              (!it.biases || shared + length <= it.reach + 1);
            OPENVINO_ASSERT(fits, "PackedAttention: sequence ", sequence, " has ", length, " tokens from ", start, " on");
            for (size_t head = 0; head < it.num_heads; ++head)
                for (int64_t first = 0; first < length; first += bei::QUERIES_OF_A_PART)
                    parts.push_back({sequence, head, first});
        }
        return parts;
    }

    static void run(const bei::PackedAttention &it, const std::vector<bei::Part> &parts) {
        size_t count;
        const bei::Kernel kernel = bei::kernels_of(it.element, count)[0].kernel;
        tbb::parallel_for(tbb::blocked_range<size_t>(0, parts.size()), [&](const tbb::blocked_range<size_t> &range) {
            kernel(it, parts.data() + range.begin(), parts.data() + range.end());
        });
    }

    Attributes _of;
};

}  // namespace

OPENVINO_CREATE_EXTENSIONS(
    std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<PackedAttention>>(),
                                     std::make_shared<ov::OpExtension<bei::NormalizedSumOperation>>(),
                                     std::make_shared<ov::OpExtension<bei::RoundedRows>>()}));

// The name of the kernel that this CPU runs, for FP32 or BF16.
extern "C" __attribute__((visibility("default"))) const char *bei_kernel(int is_bf16) {
    size_t count;
    return bei::kernels_of(is_bf16 ? bei::Element::bf16 : bei::Element::f32, count)[0].name;
}
