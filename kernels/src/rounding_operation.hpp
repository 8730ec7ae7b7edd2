// Rounding of rows as an operation of OpenVINO.
#pragma once

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <openvino/op/op.hpp>

#include "rounding.hpp"

namespace bei {

// Inputs: rows [T, width], f32 or bf16, and FP32 factors [width]; with has_sizes FP32 sizes of the rows [T, 1] and their
// bias [width], both for GELU. Outputs: codes i8 or u8 [T, width], sizes FP32 [T, 1].
class RoundedRows : public ov::op::Op {
public:
    OPENVINO_OP("RoundedRows", "bei")

    RoundedRows() = default;

    struct Attributes {
        bool is_unsigned = false, has_gelu = false, has_sizes = false;
        float least = 0.0f;
    };

    RoundedRows(const ov::OutputVector &inputs, const Attributes &attributes) : Op(inputs), _of(attributes) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        const auto type = get_input_element_type(0);
        const auto &rows = get_input_partial_shape(0), &factors = get_input_partial_shape(1);
        NODE_VALIDATION_CHECK(this, type == ov::element::f32 || type == ov::element::bf16, "elements are f32 or bf16");
        NODE_VALIDATION_CHECK(this, get_input_element_type(1) == ov::element::f32, "factors are f32");
        NODE_VALIDATION_CHECK(this, rows.rank().compatible(2) && factors.rank().compatible(1));
        NODE_VALIDATION_CHECK(this, factors[0].compatible(rows[1]), "a factor for each column");
        NODE_VALIDATION_CHECK(this, get_input_size() == 2 + 2 * size_t(_of.has_sizes));
        NODE_VALIDATION_CHECK(this, _of.has_gelu || !_of.has_sizes, "rows have sizes before GELU alone");
        if (_of.has_sizes) {
            const auto &sizes = get_input_partial_shape(2), &bias = get_input_partial_shape(3);
            NODE_VALIDATION_CHECK(this, get_input_element_type(2) == ov::element::f32 && sizes.compatible({-1, 1}));
            NODE_VALIDATION_CHECK(this, get_input_element_type(3) == ov::element::f32 && bias.compatible({rows[1]}));
        }
        set_output_type(0, _of.is_unsigned ? ov::element::u8 : ov::element::i8, {rows[0], factors[0]});
        set_output_type(1, ov::element::f32, {rows[0], 1});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector &inputs) const override {
        return std::make_shared<RoundedRows>(inputs, _of);
    }

    bool visit_attributes(ov::AttributeVisitor &visitor) override {
        visitor.on_attribute("is_unsigned", _of.is_unsigned);
        visitor.on_attribute("least", _of.least);
        visitor.on_attribute("has_gelu", _of.has_gelu);
        visitor.on_attribute("has_sizes", _of.has_sizes);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector &outputs, const ov::TensorVector &inputs) const override {
        RowRounding it{};
        it.element = inputs[0].get_element_type() == ov::element::f32 ? Element::f32 : Element::bf16;
        it.rows = inputs[0].data();
        it.width = inputs[0].get_shape()[1];
        it.factors = inputs[1].data<const float>();
        it.is_unsigned = _of.is_unsigned, it.least = _of.least, it.has_gelu = _of.has_gelu;
        if (_of.has_sizes) it.row_sizes = inputs[2].data<const float>(), it.bias = inputs[3].data<const float>();
        it.codes = outputs[0].data();
        it.sizes = outputs[1].data<float>();
        const size_t num_rows = inputs[0].get_shape()[0];
        OPENVINO_ASSERT(!_of.has_sizes || inputs[2].get_size() == num_rows, "RoundedRows: not a size for each row");
        tbb::parallel_for(tbb::blocked_range<size_t>(0, num_rows, ROWS_OF_A_PART),
                          [&](const tbb::blocked_range<size_t> &range) { round_rows(it, range.begin(), range.end()); });
        return true;
    }

private:
    static constexpr size_t ROWS_OF_A_PART = 16;

    Attributes _of;
};

}  // namespace bei
