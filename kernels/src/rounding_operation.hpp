// Rounding of rows as an operation of OpenVINO.
#pragma once

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <openvino/op/op.hpp>

#include "rounding.hpp"

namespace bei {

// Inputs: rows [T, width], f32 or bf16, and FP32 factors [width]. Outputs: codes i8 or u8 [T, width], sizes FP32 [T, 1].
class RoundedRows : public ov::op::Op {
public:
    OPENVINO_OP("RoundedRows", "bei")

    RoundedRows() = default;

    RoundedRows(const ov::OutputVector &inputs, bool is_unsigned, float least)
        : Op(inputs), _is_unsigned(is_unsigned), _least(least) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        const auto type = get_input_element_type(0);
        const auto &rows = get_input_partial_shape(0), &factors = get_input_partial_shape(1);
        NODE_VALIDATION_CHECK(this, type == ov::element::f32 || type == ov::element::bf16, "elements are f32 or bf16");
        NODE_VALIDATION_CHECK(this, get_input_element_type(1) == ov::element::f32, "factors are f32");
        NODE_VALIDATION_CHECK(this, rows.rank().compatible(2) && factors.rank().compatible(1));
        NODE_VALIDATION_CHECK(this, factors[0].compatible(rows[1]), "a factor for each column");
        set_output_type(0, _is_unsigned ? ov::element::u8 : ov::element::i8, {rows[0], factors[0]});
        set_output_type(1, ov::element::f32, {rows[0], 1});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector &inputs) const override {
        return std::make_shared<RoundedRows>(inputs, _is_unsigned, _least);
    }

    bool visit_attributes(ov::AttributeVisitor &visitor) override {
        visitor.on_attribute("is_unsigned", _is_unsigned);
        visitor.on_attribute("least", _least);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector &outputs, const ov::TensorVector &inputs) const override {
        RowRounding it{};
        it.element = inputs[0].get_element_type() == ov::element::f32 ? Element::f32 : Element::bf16;
        it.rows = inputs[0].data();
        it.width = inputs[0].get_shape()[1];
        it.factors = inputs[1].data<const float>();
        it.is_unsigned = _is_unsigned, it.least = _least;
        it.codes = outputs[0].data();
        it.sizes = outputs[1].data<float>();
        const size_t num_rows = inputs[0].get_shape()[0];
        tbb::parallel_for(tbb::blocked_range<size_t>(0, num_rows, ROWS_OF_A_PART),
                          [&](const tbb::blocked_range<size_t> &range) { round_rows(it, range.begin(), range.end()); });
        return true;
    }

private:
    static constexpr size_t ROWS_OF_A_PART = 16;

    bool _is_unsigned = false;
    float _least = 0.0f;
};

}  // namespace bei
