"""Rounding of linear layers' inputs to int8, a range for each token, by the kernel of ``bei-kernels-cpu``.

As with attention (``bei.engine.packed_attention``), the graph of an artifact is complete without it: each step of the
rounding is an operation of OpenVINO there, with its own pass over the tokens. The kernel needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bei.artifact.manifest import OPENVINO_ROUNDINGS
from bei.engine.normalized_sums import in_bf16, sized_product
from bei.engine.packed_attention import Kernels
from bei.errors import EngineError


class RoundingSite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One rounding of a graph, by the names of tensors: ``value`` [T, width], less ``least`` if that is given, times
    ``factors`` [width] if there are any, becomes ``codes`` and ``sizes`` [T, 1]."""

    value: str
    codes: str
    sizes: str
    factors: str | None = None
    least: float | None = None


_DECODER = msgspec.json.Decoder(list[RoundingSite])


def encoded_roundings(sites: Sequence[RoundingSite]) -> bytes:
    """The list as an artifact keeps it."""
    return msgspec.json.encode(sites)


def use_rounding_kernel(openvino: Any, model: Any, listed: Path, kernels: Kernels, *, computes_bf16: bool) -> None:
    """Put the kernel in the place of each rounding of ``model`` that the file ``listed`` lists, and of the GELU before
    it. Raises EngineError if the list does not fit the model."""
    factory, ops = openvino.utils.node_factory.NodeFactory(), openvino.opset13
    factory.add_extension(kernels.library)
    try:
        sites = _DECODER.decode(listed.read_bytes())
        tensors = {name: port for node in model.get_ops() for port in node.outputs() for name in port.get_names()}
        for site in sites:
            value, factors = tensors[site.value], _factors(site, tensors)
            rows, others, of_gelu = _rows(ops, value, factors.size, kernels.activates, computes_bf16)
            attributes = {"is_unsigned": site.least is not None, "least": site.least or 0.0, **of_gelu}
            node = factory.create("RoundedRows", [rows, ops.constant(factors).output(0), *others], attributes)
            for name, output in zip((site.codes, site.sizes), node.outputs(), strict=True):
                for reader in tensors[name].get_target_inputs():
                    reader.replace_source_output(output)
        model.validate_nodes_and_infer_types()
    except (msgspec.DecodeError, KeyError, RuntimeError) as error:
        raise EngineError(
            f"The graph lacks roundings that {OPENVINO_ROUNDINGS} lists ({error}): build it again."
        ) from error


def _rows(
    ops: Any, value: Any, width: int, activates: bool, computes_bf16: bool
) -> tuple[Any, list[Any], dict[str, bool]]:
    """What the kernel rounds for ``value``, and its inputs and attributes for GELU, if ``value`` is that."""
    if not activates or not _is_gelu(value):
        return _unconverted(value), [], {}
    rows, others = value.get_node().input_value(0), []
    if sized := sized_product(rows, width):
        rows, sizes, bias = sized
        others = [sizes, ops.constant(bias).output(0)]
    return in_bf16(ops, rows) if computes_bf16 else rows, others, {"has_gelu": True, "has_sizes": bool(others)}


def _is_gelu(value: Any) -> bool:
    node = value.get_node()
    return bool(node.get_type_name() == "Gelu" and node.get_attributes()["approximation_mode"].upper() == "ERF")


def _unconverted(value: Any) -> Any:
    """What ``value`` was before it was widened from BF16, if it was."""
    node = value.get_node()
    is_widened = node.get_type_name() == "Convert" and node.get_input_element_type(0).get_type_name() == "bf16"
    return node.input_value(0) if is_widened else value


def _factors(site: RoundingSite, tensors: dict[str, Any]) -> Any:
    if site.factors is None:
        width = tensors[site.value].get_partial_shape()[1].get_length()
        return np.ones(width, np.float32)
    return tensors[site.factors].get_node().get_data(dtype=np.float32).reshape(-1)
