"""Attention of CPU engines by the kernels of ``bei-kernels-cpu``, where that package is installed.

The graph of an artifact is complete without it: attention is padded there, in OpenVINO's own operations. A file beside
it lists the graph's attentions (``AttentionSite``), and ``use_kernels`` puts one operation in the place of each. It
reads packed tokens, and neither gathers, pads nor masks.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bei.artifact.manifest import OPENVINO_ATTENTION
from bei.core import Float32Array
from bei.engine.cpu_features import has_tiles_of_bf16
from bei.engine.normalized_sums import in_bf16
from bei.engine.packing import SHARED_KEYS
from bei.errors import EngineError, LibraryVersionError, MissingDependencyError
from bei.utils.libraries import load

log = logging.getLogger(__name__)

_STARTS, _KEY_LENS = "cu_query_lens", "key_lens"


class AttentionSite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One attention of a graph: names of tensors, and what is computed between them.

    ``query`` is scaled. ``biases``: a table [2 * reach + 1, num_heads], added to the scores by distance;
    ``alibi_slopes``: one for each head, of a bias that falls with the distance. ``partial_keys``: not all tokens are
    keys. The rest as in ``bei_build.spec.parts.AttentionSpec``.
    """

    query: str
    key: str
    value: str
    context: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    biases: str | None = None
    alibi_slopes: list[float] | None = None
    partial_keys: bool = False


_DECODER = msgspec.json.Decoder(list[AttentionSite])


def encoded(sites: Sequence[AttentionSite]) -> bytes:
    """The list as an artifact keeps it."""
    return msgspec.json.encode(sites)


PACKAGE = "bei-kernels-cpu"
# The first version that attends on tiles (AMX). OpenVINO's own attention does, and was faster than those before it.
_ON_TILES = (0, 3)
# The first one whose attention reads keys that sequences share.
_SHARING = (0, 5)
# The first one whose rounding computes GELU.
_ACTIVATING = (0, 6)


@dataclass(frozen=True)
class Kernels:
    """The installed package. ``name``: it and the kernel that this CPU runs, for people. ``attends``: as fast as
    OpenVINO's own operations, or faster. ``normalizes_sums``: it has the operation for residual sums and norms, as from
    0.4.0 on. ``shares_prefixes``: its attention reads keys that sequences share, as from 0.5.0 on. ``activates``: its
    rounding also computes GELU, as from 0.6.0 on."""

    library: Path
    name: str
    attends: bool = True
    normalizes_sums: bool = False
    shares_prefixes: bool = False
    activates: bool = False


def why_not_on_tiles(version: str) -> str | None:
    """Why the package of that ``version`` does not attend in BF16 on a CPU with AMX, and what to do; None: it does."""
    if _release(version) >= _ON_TILES:
        return None
    return (
        f"{PACKAGE} {version} does not attend on tiles (AMX), as OpenVINO does, and is not used for attention in BF16: "
        f"pip install -U {PACKAGE}"
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def installed_kernels(openvino: Any, *, computes_bf16: bool) -> Kernels | None:
    """The kernels for this CPU; None if the package is missing. Raises LibraryVersionError if the package was compiled
    for another OpenVINO."""
    try:
        package = load("bei_kernels_cpu", "bei-kernels-cpu", None, "Attention by kernels of our own")
    except MissingDependencyError:
        return None
    version = openvino.__version__.split("-")[0]
    if version != package.OPENVINO:
        raise LibraryVersionError(
            f"bei-kernels-cpu {package.__version__} runs with OpenVINO {package.OPENVINO}, and {version} is installed: "
            f"pip install openvino=={package.OPENVINO}, or pip uninstall bei-kernels-cpu to serve without it."
        )
    kernel_of = ctypes.CDLL(str(package.LIBRARY)).bei_kernel
    kernel_of.restype = ctypes.c_char_p
    kernel = kernel_of(int(computes_bf16)).decode()
    slow = why_not_on_tiles(package.__version__) if computes_bf16 and has_tiles_of_bf16() else None
    if slow is not None:
        log.warning(slow)
    operations = getattr(package, "OPERATIONS", ())  # not in versions before 0.4.0
    name = f"bei-kernels-cpu {package.__version__} ({kernel})"
    return Kernels(
        package.LIBRARY,
        name,
        attends=slow is None,
        normalizes_sums="NormalizedSum" in operations,
        shares_prefixes=_release(package.__version__) >= _SHARING,
        activates=_release(package.__version__) >= _ACTIVATING,
    )


def use_kernels(
    openvino: Any, model: Any, listed: Path, kernels: Kernels, max_seq_len: int, *, computes_bf16: bool
) -> None:
    """Put the kernel in the place of each attention of ``model`` that the file ``listed`` lists. Raises EngineError if
    the list does not fit the model."""
    try:
        sites = _DECODER.decode(listed.read_bytes())
        shares = kernels.shares_prefixes and all(site.causal and not site.partial_keys for site in sites)
        _Replacement(openvino, model, kernels.library, max_seq_len, computes_bf16, shares).replace_all(sites)
    except (msgspec.DecodeError, KeyError, RuntimeError) as error:
        raise EngineError(
            f"The graph lacks attentions that {OPENVINO_ATTENTION} lists ({error}): build it again."
        ) from error


class _Replacement:
    def __init__(
        self, openvino: Any, model: Any, library: Path, max_seq_len: int, computes_bf16: bool, shares: bool
    ) -> None:
        self._openvino, self._model, self._ops = openvino, model, openvino.opset13
        self._factory = openvino.utils.node_factory.NodeFactory()
        self._factory.add_extension(library)
        self._max_seq_len = max_seq_len
        self._computes_bf16 = computes_bf16
        self._shares = shares
        self._tensors = {name: port for node in model.get_ops() for port in node.outputs() for name in port.get_names()}
        self._narrowed: dict[tuple[str, int], Any] = {}

    def replace_all(self, sites: Sequence[AttentionSite]) -> None:
        for site in sites:
            context = self._tensors[site.context]
            readers = context.get_target_inputs()
            replacement = self._emitted(site)
            for reader in readers:
                reader.replace_source_output(replacement)
            replacement.set_names({site.context})  # the same tensor for whoever replaces what reads it
        for parameter in self._model.get_parameters():
            if not parameter.output(0).get_target_inputs():
                self._model.remove_parameter(parameter)
        self._model.validate_nodes_and_infer_types()

    def _emitted(self, site: AttentionSite) -> Any:
        matrices = [self._matrix(self._tensors[name]) for name in (site.query, site.key, site.value)]
        inputs = [self._narrow(matrix) for matrix, _ in matrices]
        inputs.append(self._input(_STARTS))
        if site.partial_keys:
            inputs.append(self._input(_KEY_LENS))
        if self._shares:
            inputs += [self._input(name) for name in SHARED_KEYS]
        biases = self._biases(site)
        if biases is not None:
            inputs.append(self._ops.constant(biases).output(0))
        attributes = {
            "num_heads": site.num_heads,
            "num_kv_heads": site.num_kv_heads,
            "head_dim": site.head_dim,
            **{f"{role}_offset": offset for role, (_, offset) in zip(("query", "key", "value"), matrices, strict=True)},
            "causal": site.causal,
            "window": -1 if site.window is None else site.window,
            "softcap": site.softcap or 0.0,
            "has_key_lens": site.partial_keys,
            "has_shared": self._shares,
            "has_biases": biases is not None,
        }
        context = self._factory.create("PackedAttention", inputs, attributes).output(0)
        # The graph's own types are FP32; the compiler drops this cast where what follows computes in BF16.
        return self._ops.convert(context, "f32").output(0) if self._computes_bf16 else context

    def _matrix(self, rows: Any) -> tuple[Any, int]:
        """The matrix that ``rows`` [T, width] are columns of, and the first of those columns."""
        node = rows.get_node()
        if node.get_type_name() != "VariadicSplit":
            return rows, 0
        axis, widths = (node.input_value(index).get_node().get_data().flatten() for index in (1, 2))
        return (node.input_value(0), int(widths[: rows.get_index()].sum())) if int(axis[0]) == 1 else (rows, 0)

    def _narrow(self, matrix: Any) -> Any:
        """``matrix`` in the type that the engine computes in: one cast each, which the compiler merges with its
        source."""
        if not self._computes_bf16:
            return matrix
        key = matrix.get_node().get_friendly_name(), matrix.get_index()
        if key not in self._narrowed:
            self._narrowed[key] = in_bf16(self._ops, matrix)
        return self._narrowed[key]

    def _input(self, name: str) -> Any:
        """The INT32 vector of that name among the model's inputs."""
        if name not in self._tensors:
            parameter = self._ops.parameter([-1], self._openvino.Type.i32, name=name)
            parameter.output(0).set_names({name})
            self._model.add_parameters([parameter])
            self._tensors[name] = parameter.output(0)
        return self._tensors[name]

    def _biases(self, site: AttentionSite) -> Float32Array | None:
        """[num_heads, 2 * max_seq_len - 1], by key position less query position.

        The kernel reads no further than its table, whose ends also serve farther distances.
        """
        distances = np.arange(1 - self._max_seq_len, self._max_seq_len)
        total = None
        if site.biases is not None:
            table = self._tensors[site.biases].get_node().get_data(dtype=np.float32)
            reach = len(table) // 2
            total = table[np.clip(distances, -reach, reach) + reach].T
        if site.alibi_slopes is not None:
            falling = -np.array(site.alibi_slopes, np.float32)[:, None] * np.abs(distances).astype(np.float32)
            total = falling if total is None else total + falling
        return None if total is None else np.ascontiguousarray(total)
