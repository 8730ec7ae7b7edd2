"""The Hugging Face implementation in FP32: the reference for engines.

It runs one text at a time, without padding; it shares the spec of the heads with the graph, and no code. The only file
that imports torch and transformers' model classes.
"""

from __future__ import annotations

import importlib.util
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bei.core import Encoding, Float32Array
from bei.errors import VerificationError
from bei.utils.libraries import importing
from bei_build import memory
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.families.base import Family
from bei_build.spec.head_layers import HeadLayer, LikelihoodSpec
from bei_build.spec.model_spec import HeadSpec
from bei_build.spec.parts import (
    Activation,
    ActivationSpec,
    DenseSpec,
    LatentAttentionSpec,
    NormLayerSpec,
    NormSpec,
    Pooling,
)
from bei_build.weights.model_weights import ModelWeights
from bei_build.weights.stored_names import StoredNames

# Models with this many bytes of FP32 weights are widened module by module, if they are stored in one 16-bit type. The
# numbers are the same, and only one module's weights are in memory as FP32; each text takes longer by the time of
# widening (docs/decisions.md, "Memory of large models").
WIDEN_FROM_BYTES = 2 << 30
_NARROW_TYPES = {"BF16": "bfloat16", "F16": "float16", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}


def is_available() -> bool:
    """True if torch is installed in a version that transformers supports."""
    if importlib.util.find_spec("torch") is None:
        return False
    from transformers.utils.import_utils import is_torch_available

    return bool(is_torch_available())


class HFReference:
    """transformers' model class as the backbone, with pooling and heads written here in torch."""

    def __init__(self, checkpoint: Checkpoint, weights: ModelWeights) -> None:
        # Torch's threads spin by default while they wait for each other: on shared cores, or under a container's quota,
        # MiniLM took 15 to 35 s to verify instead of 3. Torch reads this once, when it is first imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with importing("torch", "cuda", "Verifying with transformers' model", remedy="install its CPU build"):
            import torch
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.name = "transformers, FP32, one text at a time"
        if checkpoint.fp8:
            self.name += ", its FP8 weights times their scales"
        if weights.dequantized:
            self.name += f", its {', '.join(weights.dequantized)} weights dequantized"
        self.is_own = False
        self._spec = checkpoint.spec
        self._torch = torch
        # Rows without a key in their window: torch's attention gives zeros, as the graph does, the eager one a mean
        # over padding.
        windows = any(attention.window is not None for attention in checkpoint.spec.attentions)
        implementation = "sdpa" if checkpoint.spec.partial_keys and windows else "eager"
        # Decoders made bidirectional by their authors' own code: transformers would mask later tokens, except in
        # classes that know the config.json key for it.
        known = hasattr(type(checkpoint.config), "use_bidirectional_attention")
        own_mask = known and bool(checkpoint.config.use_bidirectional_attention)
        is_decoder = checkpoint.family.is_decoder
        self._unmask = is_decoder and not own_mask and not checkpoint.spec.attentions[0].causal
        self._weights = {name: torch.from_numpy(weights.read(name)) for name, _ in checkpoint.spec.head_weights()}
        is_merged = checkpoint.adapter is not None and checkpoint.adapter.changes_weights
        reads_files = not (checkpoint.fp8 or weights.is_renamed or is_merged)
        self._model: Any = self._widened(checkpoint, implementation, weights.stored_types) if reads_files else None
        if self._model is None:
            # Otherwise the model's weights are the mapped pages of the file.
            if not reads_files or weights.stored_types - {"F32", "torch.float32"}:
                memory.require(4 * checkpoint.spec.num_parameters, "The reference, a copy of the model in FP32,")
            tensors = None if reads_files else {n: torch.from_numpy(array) for n, array in weights.stored_tensors()}
            self._model = load_model(checkpoint, implementation, torch.float32, tensors)

    @property
    def model(self) -> Any:
        """transformers' module that computes the token states, a torch.nn.Module."""
        return self._model

    def _widened(self, checkpoint: Checkpoint, implementation: str, stored: frozenset[str]) -> Any:
        """The model with weights as stored and FP32 arithmetic; None for small models, and where this is not exact."""
        torch, narrow = self._torch, [_NARROW_TYPES.get(name) for name in stored]
        if 4 * checkpoint.spec.num_parameters < WIDEN_FROM_BYTES or len(narrow) != 1 or narrow[0] is None:
            return None
        self._model = model = load_model(checkpoint, implementation, getattr(torch, narrow[0]))
        if any(buffer.is_floating_point() and buffer.dtype != torch.float32 for buffer in model.buffers()):
            return None  # transformers has rounded constants to the stored type (Gemma's scale of embeddings)
        widen_modules(model)
        try:
            with torch.inference_mode():
                states = self._states(Encoding(np.zeros(2, np.int32)))
        except VerificationError:  # the model's code reads a module's weights, or their type, from outside
            return None
        return model if states.dtype == torch.float32 else None

    def run(self, encodings: Sequence[Encoding], outputs: Sequence[str]) -> Mapping[str, list[Float32Array]]:
        """Outputs ``outputs`` of each encoding: float32 [width], or [tokens, width] for an output per token."""
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
        shares = self._spec.layer_shares
        try:
            outputs = self._model(**inputs, **({"output_hidden_states": True} if shares else {}))
            if shares is None:
                return outputs.last_hidden_state[0]
            return sum(share * states[0] for share, states in zip(shares, outputs.hidden_states, strict=True))
        except Exception as error:  # the model's code may raise anything
            raise _unusable(f"transformers' {type(self._model).__name__} failed on a text", error) from error

    def _head(self, states: Any, head: HeadSpec, encoding: Encoding) -> Any:
        for layer in head.token_layers:
            if isinstance(layer, LikelihoodSpec):
                return self._likelihood(states, layer, encoding)
            states = self._layer(states, layer)
        if head.pooling:
            states = states[encoding.num_unpooled :]
            states = self._torch.cat([self._pool(states, mode, encoding, head) for mode in head.pooling])
        for layer in head.layers:
            states = self._layer(states, layer)
        return states

    def _likelihood(self, states: Any, layer: LikelihoodSpec, encoding: Encoding) -> Any:
        """[tokens, 1]; 0 of tokens that are not scored."""
        torch, first = self._torch, max(1, encoding.num_unpooled)
        logits = torch.nn.functional.linear(states[first - 1 : -1], self._weights[f"{layer.name}.weight"])
        logits = logits * layer.factor
        if layer.cap is not None:
            logits = layer.cap * torch.tanh(logits / layer.cap)
        ids = torch.from_numpy(encoding.input_ids.astype(np.int64))[first:, None]
        return torch.cat([torch.zeros(first, 1), logits.log_softmax(1).gather(1, ids)])

    def _pool(self, states: Any, mode: Pooling, encoding: Encoding, head: HeadSpec) -> Any:
        torch, count = self._torch, len(states)
        if mode == "last" and head.passed_id is not None:
            others = np.flatnonzero(encoding.input_ids != head.passed_id)
            return states[others[-1] if len(others) else 0]
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
            result = self._activate(functional.linear(states, weight, bias), layer.activation)
            if not layer.residual:
                return result
            matrix = self._weights.get(f"{layer.name}.residual.weight")
            return result + (states if matrix is None else functional.linear(states, matrix))
        if isinstance(layer, NormLayerSpec):
            return self._norm(states, layer.name, layer.norm)
        if isinstance(layer, ActivationSpec):
            return self._activate(states, layer.activation)
        if isinstance(layer, LatentAttentionSpec):
            return self._latent_attention(states, layer)
        return functional.normalize(states, dim=-1)

    def _latent_attention(self, states: Any, layer: LatentAttentionSpec) -> Any:
        functional, weights = self._torch.nn.functional, self._weights

        def linear(rows: Any, part: str) -> Any:
            return functional.linear(
                rows, weights[f"{layer.name}.{part}.weight"], weights.get(f"{layer.name}.{part}.bias")
            )

        def norm(rows: Any, part: str) -> Any:
            return self._norm(rows, f"{layer.name}.{part}", layer.norm)

        def by_head(rows: Any) -> Any:
            return rows.view(1, len(rows), layer.num_heads, layer.head_dim).transpose(1, 2)

        query = linear(norm(states, "norm"), "query")
        key, value = linear(norm(weights[f"{layer.name}.latents.weight"], "latents_norm"), "key_value").chunk(2, -1)
        context = functional.scaled_dot_product_attention(by_head(query), by_head(key), by_head(value))
        states = states + linear(context[0].transpose(0, 1).flatten(1), "output")
        up, gate = linear(norm(states, "mlp_norm"), "mlp.up").chunk(2, -1)
        return states + linear(up * functional.gelu(gate), "mlp.down")

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
            "gelu_10": lambda v: functional.gelu(v).clip(-10, 10),
            "relu6": functional.relu6,
            "leaky_relu": functional.leaky_relu,
            "elu": functional.elu,
            "hardswish": functional.hardswish,
            "mish": functional.mish,
            "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
            "log1p_relu": lambda v: torch.log1p(functional.relu(v)),
        }[activation](states)


def widen_modules(model: Any) -> None:
    """Give each module of ``model`` FP32 copies of its own parameters while it runs.

    A module raises TypeError for a 16-bit input, which other code has rounded.
    """
    import torch

    widening = _Widening()
    for module in model.modules():
        if type(module) is torch.nn.Embedding:  # widen the rows that were looked up, not the table
            module.register_forward_hook(lambda _module, _args, rows: rows.float())
        elif module._parameters:
            module.register_forward_pre_hook(widening.widen, with_kwargs=True)
            module.register_forward_hook(widening.narrow, always_call=True)


class _Widening:
    """Hooks around a module. Matrices of linear layers are widened into reused memory: most of the time of widening
    went into fresh pages. Other modules might return their parameters, so their copies are new each time."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Any]] = {}

    def widen(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before the module runs."""
        import torch

        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float32:
                raise TypeError(f"{type(module).__name__} gets {value.dtype}")
        module.stored_parameters = dict(module._parameters)
        for name, parameter in module.stored_parameters.items():
            if parameter is not None:
                free = self._free.get(parameter.shape) if type(module) is torch.nn.Linear else None
                wide = free.pop() if free else torch.empty(parameter.shape, dtype=torch.float32)
                module._parameters[name] = wide.copy_(parameter)

    def narrow(self, module: Any, *_: Any) -> None:
        """Hook after it has run, or failed."""
        import torch

        stored = module.__dict__.pop("stored_parameters", {})
        for name, parameter in stored.items():
            if parameter is not None and type(module) is torch.nn.Linear:
                self._free.setdefault(parameter.shape, []).append(module._parameters[name])
        module._parameters.update(stored)


def load_model(checkpoint: Checkpoint, implementation: str, dtype: Any, tensors: dict[str, Any] | None = None) -> Any:
    """The family's reference class with the checkpoint's weights as ``dtype``; ``tensors``, by the checkpoint's names,
    replace the content of its files. Raises VerificationError."""
    import torch
    import transformers

    assert checkpoint.family.reference_class is not None, "the caller asks only for families that have a reference"
    name, *modules = checkpoint.family.reference_class.split(".")
    try:
        model_class = getattr(transformers, name)
        if tensors is not None and name == "AutoModel":  # AutoModel needs a folder; the class that it selects does not
            model_class = _class_of(checkpoint.config)
        model, found = model_class.from_pretrained(
            checkpoint.folder if tensors is None else None,
            state_dict=tensors,
            config=checkpoint.config,
            dtype=dtype,
            attn_implementation=implementation,
            key_mapping=dict(checkpoint.family.reference_names) or None,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises ValueError, OSError, KeyError, RuntimeError, and its own
        raise _unusable(f"transformers' {name} does not load the checkpoint", error) from error
    _refuse_random(name, checkpoint.family, found["missing_keys"])
    for head in checkpoint.family.reference_heads:
        setattr(model, head, torch.nn.Identity())
    return operator.attrgetter(".".join(modules))(model.eval()) if modules else model.eval()


def _refuse_random(name: str, family: Family, missing: Iterable[str]) -> None:
    """Raise VerificationError for tensors that transformers did not find and filled with random numbers. Tensors that
    it computes are allowed, and those on which no output depends."""
    names = StoredNames(family)
    random = sorted(tensor for tensor in missing if names.is_read(tensor) and not names.computed(tensor))
    if random:
        more = f" (and {len(random) - 1} more)" if len(random) > 1 else ""
        raise VerificationError(
            f"transformers' {name} does not find {random[0]}{more} in the checkpoint and would take random numbers. "
            "Build with --reference engine to verify with bei's own FP32 engine instead."
        )


def _class_of(config: Any) -> Any:
    """The class that transformers' AutoModel selects for ``config``."""
    import torch
    import transformers

    with torch.device("meta"):
        return type(transformers.AutoModel.from_config(config))  # type: ignore[no-untyped-call]


def _unusable(what: str, error: Exception) -> VerificationError:
    reason = next(iter(str(error).splitlines()), "")  # later lines list all existing classes
    return VerificationError(
        f"{what} ({type(error).__name__}: {reason}). Build with --reference engine to verify with bei's own FP32 "
        "engine instead. If transformers has another class for this model, its family must name it as reference_class."
    )
