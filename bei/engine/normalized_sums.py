"""Residual sums and their norms by the kernel of ``bei-kernels-cpu``: one pass over the tokens.

OpenVINO needs one for the sum, two for the norm, casts, and in INT8 more for the norm as the input of a product.
Places for the kernel are found in the graph, so artifacts of earlier versions have them too. What differs from the form
that the builder writes stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bei.core import Float32Array
from bei.errors import EngineError

# OpenVINO computes in FP32 what an output needs besides products, and that is all sums, as each is part of the next.
# This mark exempts a node: else a product's BF16 would be widened for the cast that narrows it.
_IN_BF16 = "enforceBF16evenForGraphTail"
_LAST_AXES = ([-1], [1])  # of [T, width]
_LEVELS, _LEAST_CODE, _LARGEST_CODE = 256, -128.0, 127.0


def use_norm_kernel(openvino: Any, model: Any, library: Path, *, computes_bf16: bool) -> int:
    """Put the kernel in the place of each sum of ``model`` that a norm follows; the number of places. Raises
    EngineError."""
    places = [place for node in model.get_ordered_ops() if (place := _place_of(node))]
    try:
        return _Replacement(openvino, model, library, computes_bf16=computes_bf16).replace_all(places)
    except RuntimeError as error:
        raise EngineError(f"OpenVINO refused the kernel for residual sums and norms: {error}") from error


@dataclass(frozen=True)
class _Place:
    """A sum of two matrices [T, width], ``total``, and the norm of its rows, ``norm``. ``inside``: nodes of the norm
    that read the sum."""

    total: Any
    norm: Any
    inside: list[Any]
    is_centred: bool
    epsilon: float
    weight: Float32Array
    bias: Float32Array


@dataclass(frozen=True)
class _Codes:
    """What the norm becomes as the input of an INT8 product: outputs of the graph, and how. ``scale`` 0: each row has a
    size, the second of the ``outputs``."""

    outputs: list[Any]
    factors: Float32Array
    scale: float = 0.0


def _place_of(node: Any) -> _Place | None:
    """The place whose norm begins with ``node``."""
    if node.get_type_name() == "MVN":
        return _layer_norm(node)
    return _rms_norm(node) if node.get_type_name() == "ReduceMean" else None


def _layer_norm(node: Any) -> _Place | None:
    attributes = node.get_attributes()
    is_plain = attributes.get("normalize_variance") and attributes.get("eps_mode") == "INSIDE_SQRT"
    if not is_plain or not _is_last_axis(node.input_value(1)):
        return None
    return _weighted(node.input_value(0), node.output(0), [node], True, attributes["eps"])


def _rms_norm(node: Any) -> _Place | None:
    """x * (mean(x^2) + epsilon)^-1/2, as OpenVINO reads RMSNormalization."""
    square = _power(node.input_value(0).get_node(), 2.0)
    if square is None or not node.get_attributes()["keep_dims"] or not _is_last_axis(node.input_value(1)):
        return None
    added = _only_reader(node.output(0), "Add")
    epsilon = _beside_constant(added) if added else None
    root = _only_reader(added.output(0), "Sqrt") if added else None
    inverse = _only_reader(root.output(0), "Power") if root else None
    if epsilon is None or epsilon[1].size != 1 or inverse is None or _power(inverse, -1.0) is None:
        return None
    scaled = _only_reader(inverse.output(0), "Multiply")
    if scaled is None or square not in scaled.input_values():
        return None
    inside = [node.input_value(0).get_node(), scaled]
    return _weighted(square, scaled.output(0), inside, False, float(epsilon[1].item()))


def _weighted(source: Any, normalized: Any, inside: list[Any], is_centred: bool, epsilon: float) -> _Place | None:
    """The place whose sum is ``source``, and whose norm is ``normalized`` times a weight, with a bias if there is
    one."""
    width = _width_of_sum(source)
    product = _only_reader(normalized, "Multiply")
    weight = _vector_beside(product, width) if product else None
    if width is None or product is None or weight is None:
        return None
    norm, bias = product.output(0), np.zeros(width, np.float32)
    added = _only_reader(norm, "Add")
    offset = _vector_beside(added, width) if added else None
    if added is not None and offset is not None:
        norm, bias = added.output(0), offset
    return _Place(source.get_node(), norm, inside, is_centred, epsilon, weight, bias)


def _width_of_sum(source: Any) -> int | None:
    """The width of ``source`` if it is a sum of two computed matrices of its shape, FP32."""
    node = source.get_node()
    if node.get_type_name() != "Add" or source.get_element_type().get_type_name() != "f32":
        return None
    shapes = [value.get_partial_shape() for value in node.input_values()]
    if any(shape.rank.is_dynamic or shape.rank.get_length() != 2 or shape[1].is_dynamic for shape in shapes):
        return None
    if any(shape[0].is_static for shape in shapes) or shapes[0][1] != shapes[1][1]:
        return None  # a row for all tokens
    return int(shapes[0][1].get_length())


class _Replacement:
    def __init__(self, openvino: Any, model: Any, library: Path, *, computes_bf16: bool) -> None:
        self._model, self._ops = model, openvino.opset13
        self._factory = openvino.utils.node_factory.NodeFactory()
        self._factory.add_extension(library)
        self._computes_bf16 = computes_bf16
        # OpenVINO multiplies in INT8 in graphs alone that have one.
        self._num_fake = sum(node.get_type_name() == "FakeQuantize" for node in model.get_ops())

    def replace_all(self, places: list[_Place]) -> int:
        num_replaced = sum(self._replace(place) for place in places)
        self._model.validate_nodes_and_infer_types()
        return num_replaced

    def _replace(self, place: _Place) -> bool:
        ops, total = self._ops, place.total.output(0)
        inside = {node.get_instance_id() for node in place.inside}
        readers_of_total = [it for it in total.get_target_inputs() if it.get_node().get_instance_id() not in inside]
        sized = self._sized(place)
        codes = self._codes(place)
        rows = sized[:2] if sized else list(place.total.input_values())
        # A sum that later ones add to stays FP32, as in OpenVINO: in BF16 each of them would round it once more. What
        # is gained is casts and roundings: without either, OpenVINO is as fast (docs/decisions.md).
        is_narrow = self._computes_bf16 and not readers_of_total
        if self._computes_bf16 and not is_narrow and codes is None:
            return False
        inputs = [in_bf16(self._ops, value) for value in rows] if is_narrow else rows
        inputs = [*inputs, *(ops.constant(vector).output(0) for vector in (place.weight, place.bias))]
        if sized:
            inputs += [sized[2], ops.constant(sized[3]).output(0)]
        if codes:
            inputs.append(ops.constant(codes.factors).output(0))
        attributes = {
            "epsilon": place.epsilon,
            "scale": codes.scale if codes else 0.0,
            "is_centred": place.is_centred,
            "has_sizes": sized is not None,
            "has_sum": bool(readers_of_total),
            "has_codes": codes is not None,
        }
        outputs = list(self._factory.create("NormalizedSum", inputs, attributes).outputs())
        norm = outputs.pop(0)
        # The graph's own types are FP32; the compiler drops this cast where what follows computes in BF16.
        self._take_over(place.norm, ops.convert(norm, "f32").output(0) if is_narrow else norm)
        if readers_of_total:
            self._take_over(total, outputs.pop(0), readers_of_total)
        for old, new in zip(codes.outputs if codes else [], outputs, strict=True):
            self._take_over(old, new)
        return True

    def _take_over(self, old: Any, new: Any, readers: Any = None) -> None:
        for reader in old.get_target_inputs() if readers is None else readers:
            reader.replace_source_output(new)
        new.set_names(old.get_names())

    def _sized(self, place: _Place) -> tuple[Any, Any, Any, Float32Array] | None:
        """Where one matrix of the sum is a product of rounded rows times their sizes: that product, the other matrix,
        the sizes, the bias."""
        for index, value in enumerate(place.total.input_values()):
            if found := sized_product(value, place.weight.size):
                return found[0], place.total.input_value(1 - index), *found[1:]
        return None

    def _codes(self, place: _Place) -> _Codes | None:
        """One of the INT8 inputs that the norm becomes."""
        nodes = (reader.get_node() for reader in place.norm.get_target_inputs())  # in any order
        for node in sorted(nodes, key=lambda node: int(node.get_instance_id())):
            if node.get_type_name() == "RoundedRows" and not _is_of_activated(node):
                return _Codes(list(node.outputs()), _data(node.input_value(1)))
            if (codes := _static_codes(node, place.norm, place.weight.size)) and self._num_fake > 1:
                self._num_fake -= 1
                return codes
        return None


def _is_of_activated(rounding: Any) -> bool:
    """True where codes have no sign, or are of GELU of the rows: this kernel has neither."""
    attributes = rounding.get_attributes()
    return bool(attributes["is_unsigned"] or attributes.get("has_gelu"))


def in_bf16(ops: Any, value: Any) -> Any:
    """``value`` in BF16."""
    node = value.get_node()
    if node.get_type_name() == "Convert" and node.get_input_element_type(0).get_type_name() == "bf16":
        return node.input_value(0)
    cast = ops.convert(value, "bf16")
    cast.set_rt_info(True, _IN_BF16)
    if _is_biased_product(node):
        node.set_rt_info(True, _IN_BF16)
    return cast.output(0)


def _is_biased_product(node: Any) -> bool:
    """A sum that OpenVINO computes within a product, whose result has the type of the sum."""
    if node.get_type_name() != "Add" or node.input_value(1).get_partial_shape().rank == 2:
        return False
    product = node.input_value(0).get_node()
    if product.get_type_name() == "Multiply":  # scales of an INT8 product
        product = product.input_value(0).get_node()
    return bool(product.get_type_name() == "MatMul")


def sized_product(value: Any, width: int) -> tuple[Any, Any, Float32Array] | None:
    """Where ``value`` is a product of rounded rows times their sizes, and a bias: the product, the sizes, the bias."""
    node, bias = value.get_node(), np.zeros(width, np.float32)
    if node.get_type_name() == "Add" and len(value.get_target_inputs()) == 1:
        added = _beside_constant(node)
        if added is None or added[1].size != bias.size:
            return None
        value, bias = added[0], added[1].reshape(-1)
        node = value.get_node()
    if node.get_type_name() != "Multiply" or len(value.get_target_inputs()) != 1:
        return None
    product, sizes = node.input_values()
    shape = sizes.get_partial_shape()
    rows = product.get_partial_shape()
    if shape.rank != 2 or shape[1] != 1 or shape[0].is_static:
        return None
    if rows.rank != 2 or rows[1] != width or rows[0].is_static:
        return None  # a row for all sizes
    return product, sizes, bias


def _static_codes(node: Any, value: Any, width: int) -> _Codes | None:
    """``value``, smoothed or not by ``node``, rounded to int8 with one scale."""
    factors = np.ones(width, np.float32)
    if node.get_type_name() == "Multiply":
        by = _vector_beside(node, width)
        fake = _only_reader(node.output(0), "FakeQuantize")
        if by is None or fake is None:
            return None
        factors, value = by, node.output(0)
    else:
        fake = node
    if fake.get_type_name() != "FakeQuantize" or fake.get_attributes()["levels"] != _LEVELS:
        return None
    cast = _only_reader(fake.output(0), "Convert")
    if fake.input_value(0) != value or cast is None or cast.get_output_element_type(0).get_type_name() != "i8":
        return None
    if not all(_is_constant(bound) and _data(bound).size == 1 for bound in fake.input_values()[1:]):
        return None
    least, largest, least_code, largest_code = (float(_data(bound).item()) for bound in fake.input_values()[1:])
    scale = largest / _LARGEST_CODE
    is_symmetric = abs(least - _LEAST_CODE * scale) <= 1e-6 * largest
    if not is_symmetric or (least_code, largest_code) != (_LEAST_CODE, _LARGEST_CODE):
        return None
    return _Codes([cast.output(0)], factors, scale)


def _only_reader(value: Any, kind: str) -> Any | None:
    readers = list(value.get_target_inputs())
    if len(readers) != 1 or readers[0].get_node().get_type_name() != kind:
        return None
    return readers[0].get_node()


def _is_constant(value: Any) -> bool:
    return bool(value.get_node().get_type_name() == "Constant")


def _data(value: Any) -> Float32Array:
    found: Float32Array = value.get_node().get_data(dtype=np.float32)
    return found


def _beside_constant(node: Any) -> tuple[Any, Float32Array] | None:
    """The computed input of a node of two, and the data of the constant one."""
    one, other = node.input_values()
    if _is_constant(one) == _is_constant(other):
        return None
    return (other, _data(one)) if _is_constant(one) else (one, _data(other))


def _vector_beside(node: Any, width: int | None) -> Float32Array | None:
    """The constant input of ``node`` if it has one number for each column."""
    found = _beside_constant(node)
    return found[1].reshape(-1) if found and found[1].size == width else None


def _power(node: Any, exponent: float) -> Any | None:
    """What ``node`` raises to this power."""
    found = _beside_constant(node) if node.get_type_name() == "Power" else None
    if found is None or not _is_constant(node.input_value(1)) or found[1].tolist() != exponent:
        return None
    return found[0]


def _is_last_axis(axes: Any) -> bool:
    node = axes.get_node()
    if node.get_type_name() == "Range" and all(map(_is_constant, node.input_values())):
        return np.arange(*(int(_data(bound).item()) for bound in node.input_values())).tolist() in _LAST_AXES
    return _is_constant(axes) and _data(axes).reshape(-1).tolist() in _LAST_AXES
