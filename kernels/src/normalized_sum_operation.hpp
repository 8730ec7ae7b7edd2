// Residual sum and norm as an operation of OpenVINO.
#pragma once

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <openvino/op/op.hpp>

#include "normalized_sum.hpp"

namespace bei {

// Inputs: rows and residual [T, width], f32 or bf16; FP32 weight and bias [width]; with has_sizes FP32 sizes of the rows
// [T, 1] and their bias [width]; with has_codes FP32 factors [width]. Outputs: the norm; with has_sum the sum; with has_codes
// the codes, i8, and, where scale is 0, their sizes, FP32 [T, 1].
class NormalizedSumOperation : public ov::op::Op {
public:
    OPENVINO_OP("NormalizedSum", "bei")

    struct Attributes {
        float epsilon = 0.0f, scale = 0.0f;
        bool is_centred = true, has_sizes = false, has_sum = false, has_codes = false;
    };

    NormalizedSumOperation() = default;

    NormalizedSumOperation(const ov::OutputVector &inputs, const Attributes &attributes) : Op(inputs), _of(attributes) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        const auto type = get_input_element_type(0);
        NODE_VALIDATION_CHECK(this, type == ov::element::f32 || type == ov::element::bf16, "elements are f32 or bf16");
        NODE_VALIDATION_CHECK(this, get_input_element_type(1) == type, "rows and residual have one type");
        NODE_VALIDATION_CHECK(this, get_input_size() == 4 + 2 * size_t(_of.has_sizes) + size_t(_of.has_codes));
        const auto &rows = get_input_partial_shape(0);
        NODE_VALIDATION_CHECK(this, rows.rank().compatible(2) && get_input_partial_shape(1).rank().compatible(2));
        NODE_VALIDATION_CHECK(this, get_input_partial_shape(1).compatible(rows), "a row of the residual for each row");
        for (size_t i = 2; i < get_input_size(); ++i) {
            const auto &shape = get_input_partial_shape(i);
            NODE_VALIDATION_CHECK(this, get_input_element_type(i) == ov::element::f32, "all other inputs are f32");
            if (_of.has_sizes && i == 4) {
                NODE_VALIDATION_CHECK(this, shape.rank().compatible(2) && shape[1].compatible(1), "a size for each row");
            } else {
                NODE_VALIDATION_CHECK(this, shape.rank().compatible(1) && shape[0].compatible(rows[1]));
            }
        }
        size_t output = 0;
        set_output_type(output++, type, rows);
        if (_of.has_sum) set_output_type(output++, type, rows);
        if (_of.has_codes) set_output_type(output++, ov::element::i8, rows);
        if (_of.has_codes && _of.scale == 0.0f) set_output_type(output++, ov::element::f32, {rows[0], 1});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector &inputs) const override {
        return std::make_shared<NormalizedSumOperation>(inputs, _of);
    }

    bool visit_attributes(ov::AttributeVisitor &visitor) override {
        visitor.on_attribute("epsilon", _of.epsilon);
        visitor.on_attribute("scale", _of.scale);
        visitor.on_attribute("is_centred", _of.is_centred);
        visitor.on_attribute("has_sizes", _of.has_sizes);
        visitor.on_attribute("has_sum", _of.has_sum);
        visitor.on_attribute("has_codes", _of.has_codes);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector &outputs, const ov::TensorVector &inputs) const override {
        NormalizedSum it{};
        it.element = inputs[0].get_element_type() == ov::element::f32 ? Element::f32 : Element::bf16;
        it.rows = inputs[0].data(), it.residual = inputs[1].data();
        it.width = inputs[0].get_shape()[1];
        it.weight = inputs[2].data<const float>(), it.bias = inputs[3].data<const float>();
        it.is_centred = _of.is_centred, it.epsilon = _of.epsilon, it.scale = _of.scale;
        if (_of.has_sizes) it.row_sizes = inputs[4].data<const float>(), it.row_bias = inputs[5].data<const float>();
        size_t output = 0;
        it.norm = outputs[output++].data();
        if (_of.has_sum) it.sum = outputs[output++].data();
        if (_of.has_codes) {
            it.factors = inputs.back().data<const float>();
            it.codes = static_cast<int8_t *>(outputs[output++].data());
            if (_of.scale == 0.0f) it.sizes = outputs[output++].data<float>();
        }
        const size_t num_rows = inputs[0].get_shape()[0];
        for (size_t i : {size_t(1), size_t(_of.has_sizes ? 4 : 1)})
            OPENVINO_ASSERT(inputs[i].get_shape()[0] == num_rows, "NormalizedSum: input ", i, " has not ", num_rows, " rows");
        tbb::parallel_for(tbb::blocked_range<size_t>(0, num_rows, ROWS_OF_A_PART), [&](const auto &range) {
            normalize_sums(it, range.begin(), range.end());
        });
        return true;
    }

private:
    static constexpr size_t ROWS_OF_A_PART = 16;

    Attributes _of;
};

}  // namespace bei
