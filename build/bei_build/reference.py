"""The Hugging Face implementation in FP32: what every engine is held against.

One text at a time, without padding; shares the spec of the heads with the graph, and no code. The only file that
imports torch and transformers' model classes.
"""

from __future__ import annotations

import importlib.util
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bei.core import Encoding, Float32Array
from bei.errors import VerificationError
from bei_build.checkpoint import Checkpoint
from bei_build.model_weights import ModelWeights
from bei_build.spec import Activation, ActivationSpec, DenseSpec, HeadLayer, HeadSpec, NormLayerSpec, NormSpec, Pooling


def is_available() -> bool:
    """Whether torch is installed, in a version that transformers works with."""
    if importlib.util.find_spec("torch") is None:
        return False
    from transformers.utils.import_utils import is_torch_available

    return bool(is_torch_available())


class HFReference:
    """The backbone is transformers' model class; pooling and heads are written here, in torch."""

    def __init__(self, checkpoint: Checkpoint, weights: ModelWeights) -> None:
        # Torch's threads spin by default while they wait for each other: on shared cores, or under a container's quota,
        # MiniLM took 15 to 35 s to verify instead of 3. Torch reads this once, when it is first imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.name = "transformers, FP32, one text at a time"
        self.is_own = False
        self._spec = checkpoint.spec
        self._torch = torch
        # A token may have no key in its window: torch's attention gives zeros, as the graph does, the eager one a mean
        # over padding.
        windows = any(layer.attention.window is not None for layer in checkpoint.spec.layers)
        implementation = "sdpa" if checkpoint.spec.partial_keys and windows else "eager"
        self._model = _load_model(checkpoint, implementation)
        # Decoders made bidirectional by their authors' own code: transformers would mask what comes later, but for
        # classes that know the key by which config.json says it.
        known = hasattr(type(checkpoint.config), "use_bidirectional_attention")
        own_mask = known and bool(checkpoint.config.use_bidirectional_attention)
        is_decoder = "score" in checkpoint.family.weights
        self._unmask = is_decoder and not own_mask and not checkpoint.spec.layers[0].attention.causal
        self._weights = {name: torch.from_numpy(weights.read(name)) for name, _ in checkpoint.spec.head_weights()}

    def run(self, encodings: Sequence[Encoding], outputs: Sequence[str]) -> Mapping[str, list[Float32Array]]:
        """Each of ``outputs`` of each encoding: float32 [width], or [tokens, width] of an output per token."""
        heads = [head for head in self._spec.heads if head.output in outputs]
        rows: dict[str, list[Float32Array]] = {head.output: [] for head in heads}
        with self._torch.inference_mode():
            for encoding in encodings:
                states = self._states(encoding)
                for head in heads:
                    rows[head.output].append(self._head(states, head, encoding).numpy())
        return rows

    def _states(self, encoding: Encoding) -> Any:
        torch = self._torch
        ids = torch.from_numpy(encoding.input_ids.astype(np.int64))[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if encoding.num_keys is not None:
            inputs["attention_mask"][:, encoding.num_keys :] = 0
        if self._unmask:
            hidden = torch.where(inputs["attention_mask"] > 0, 0.0, torch.finfo(torch.float32).min)
            inputs["attention_mask"] = hidden[:, None, None].expand(1, 1, ids.shape[1], -1)
        if encoding.token_type_ids is not None and self._spec.embeddings.type_vocab_size > 1:
            inputs["token_type_ids"] = torch.from_numpy(encoding.token_type_ids.astype(np.int64))[None]
        try:
            return self._model(**inputs).last_hidden_state[0]
        except Exception as error:  # whatever the model's code raises
            raise _unusable(f"transformers' {type(self._model).__name__} failed on a text", error) from error

    def _head(self, states: Any, head: HeadSpec, encoding: Encoding) -> Any:
        for layer in head.token_layers:
            states = self._layer(states, layer)
        if head.pooling:
            states = states[encoding.num_unpooled :]
            states = self._torch.cat([self._pool(states, mode, encoding) for mode in head.pooling])
        for layer in head.layers:
            states = self._layer(states, layer)
        return states

    def _pool(self, states: Any, mode: Pooling, encoding: Encoding) -> Any:
        torch, count = self._torch, len(states)
        if mode == "last_marked":
            marked = np.flatnonzero(encoding.input_ids == self._spec.marked_id)
            return states[marked[-1] if len(marked) else -1]
        if mode in ("first_marked", "largest_id"):
            ids = encoding.input_ids
            return states[int(np.argmax(ids if mode == "largest_id" else ids == self._spec.marked_id))]
        if mode == "weighted_mean":
            weights = torch.arange(1, count + 1, dtype=torch.float32)[:, None]
            return (states * weights).sum(0) / weights.sum()
        return {
            "cls": lambda: states[0],
            "last": lambda: states[-1],
            "mean": lambda: states.mean(0),
            "max": lambda: states.max(0).values,
            "sum": lambda: states.sum(0),
            "mean_sqrt_len": lambda: states.sum(0) / count**0.5,
        }[mode]()

    def _layer(self, states: Any, layer: HeadLayer) -> Any:
        functional = self._torch.nn.functional
        if isinstance(layer, DenseSpec):
            weight, bias = self._weights[f"{layer.name}.weight"], self._weights.get(f"{layer.name}.bias")
            return self._activate(functional.linear(states, weight, bias), layer.activation)
        if isinstance(layer, NormLayerSpec):
            return self._norm(states, layer.name, layer.norm)
        if isinstance(layer, ActivationSpec):
            return self._activate(states, layer.activation)
        return functional.normalize(states, dim=-1)

    def _norm(self, states: Any, name: str, norm: NormSpec) -> Any:
        functional, width = self._torch.nn.functional, states.shape[-1:]
        weight = self._weights[f"{name}.weight"] + norm.offset
        if norm.kind == "rms":
            return functional.rms_norm(states, width, weight, norm.eps)
        return functional.layer_norm(states, width, weight, self._weights.get(f"{name}.bias"), norm.eps)

    def _activate(self, states: Any, activation: Activation) -> Any:
        torch, functional = self._torch, self._torch.nn.functional
        return {
            "identity": lambda v: v,
            "tanh": torch.tanh,
            "relu": functional.relu,
            "relu2": lambda v: functional.relu(v).square(),
            "gelu": functional.gelu,
            "silu": functional.silu,
            "quick_gelu": lambda v: v * torch.sigmoid(1.702 * v),
            "sigmoid": torch.sigmoid,
            "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
            "log1p_relu": lambda v: torch.log1p(functional.relu(v)),
        }[activation](states)


def _load_model(checkpoint: Checkpoint, implementation: str) -> Any:
    """The family's reference class with the checkpoint's weights, in FP32. Raises VerificationError."""
    import torch
    import transformers

    assert checkpoint.family.reference_class is not None, "the caller asks only for families that have a reference"
    name, *modules = checkpoint.family.reference_class.split(".")
    try:
        model = getattr(transformers, name).from_pretrained(
            checkpoint.folder, config=checkpoint.config, dtype=torch.float32, attn_implementation=implementation
        )
    except Exception as error:  # transformers raises ValueError, OSError, KeyError, RuntimeError, and its own
        raise _unusable(f"transformers' {name} does not load the checkpoint", error) from error
    return operator.attrgetter(".".join(modules))(model.eval()) if modules else model.eval()


def _unusable(what: str, error: Exception) -> VerificationError:
    reason = next(iter(str(error).splitlines()), "")  # what follows lists all classes that there are
    return VerificationError(
        f"{what} ({type(error).__name__}: {reason}). Build with --reference engine to verify with bei's own FP32 "
        "engine instead. If transformers has another class for this model, its family must name it as reference_class."
    )
