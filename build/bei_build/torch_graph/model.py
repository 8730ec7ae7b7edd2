"""ModelSpec to a module over packed tokens: embeddings, layers, heads; and its run on a packed batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bei.core import Float32Array, PackedBatch
from bei.engine.packing import Sizes, graph_inputs, rows_of_tokens
from bei.errors import CompileError, WeightsError
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import AttentionSpec, DecoderSpec, LayerSpec
from bei_build.spec.quantization import Quantization
from bei_build.torch_graph.adapters import StepInUse, add_adapters
from bei_build.torch_graph.attention import PositionModules
from bei_build.torch_graph.attention_kernels import Kernel, KernelChoice, choose_kernel
from bei_build.torch_graph.convolution import Convolution
from bei_build.torch_graph.embeddings import Embeddings, ShiftedIds
from bei_build.torch_graph.experts import Experts
from bei_build.torch_graph.fp8 import FP8Linear, ProductChoice, Rounding
from bei_build.torch_graph.fp8_experts import FP8Experts
from bei_build.torch_graph.fusion_choice import Fusions, choose_fusions
from bei_build.torch_graph.heads import Head
from bei_build.torch_graph.layer import Layer
from bei_build.torch_graph.layer_inputs import LayerInputs
from bei_build.torch_graph.norms import Norm, States
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Table, TensorOptions
from bei_build.torch_graph.positions import RelativeBias, RelativePositions
from bei_build.torch_graph.quantize import check, quantize


class PackedModel(nn.Module):
    """``spec`` for sequences of up to ``max_seq_len`` tokens, without values; ``load`` reads them.

    ``kernel`` overrides ``attention_kernels.choose_kernel`` for all layers, ``fusions`` overrides
    ``fusion_choice.choose_fusions``. ``quantization``: its linear layers are FP8. Do not change types with
    ``nn.Module.to``: some parts are FP32 whatever the model's type is. Raises CompileError for an unsupported spec or
    quantization.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_seq_len: int,
        options: TensorOptions,
        kernel: Kernel | None = None,
        quantization: Quantization | None = None,
        fusions: Fusions | None = None,
    ) -> None:
        super().__init__()
        if quantization is not None:
            check(spec, quantization, options.device)
        self.fusions = choose_fusions(options.device) if fusions is None else fusions
        options = replace(options, fusions=self.fusions)
        self.spec = spec
        self.max_seq_len = max_seq_len
        self.choices: dict[AttentionSpec, KernelChoice] = {
            attention: choose_kernel(attention, options.device, options.dtype, partial_keys=spec.partial_keys)
            if kernel is None
            else KernelChoice(kernel, ("asked for",))
            for attention in spec.attentions
        }
        self._storage = options
        self._positions = PositionModules(max_seq_len)
        self._add_position_weights()
        self.embeddings = Embeddings(spec.embeddings, spec.hidden_size, options)
        # Layers that share weights have scales of their own, and so matrices of their own.
        owners = spec.weights_of if quantization is None else None
        self._order = [str(index) for index in owners or range(len(spec.layers))]
        self._stored_name: Callable[[str], str] = str if quantization is None else spec.weight_read_as
        self.layers = self._layers_of(dict(zip(self._order, spec.layers, strict=True)))
        if any(self.layers[name].spec != layer for name, layer in zip(self._order, spec.layers, strict=True)):
            raise CompileError(f"{spec.architecture}: layers that share their weights must be alike for PyTorch.")
        self.convolution = Convolution(spec.convolution, spec.hidden_size, options) if spec.convolution else None
        self.layer_inputs = LayerInputs(spec.layer_inputs, spec, options) if spec.layer_inputs else None
        self.final_norm = Norm(spec.final_norm, spec.hidden_size, options) if spec.final_norm else None
        self.decoder = self._decoder_of(spec.decoder) if spec.decoder else None
        self._heads = [Head(head, spec, self, options) for head in spec.heads]
        if quantization is not None:
            quantize(self, spec, quantization, options)
        self._keeps_states = bool(spec.layer_shares) or any(head.joins_states for head in spec.heads)
        self._used = add_adapters(self, spec.adapters, options) if spec.adapters else StepInUse()
        self.input_names = self._input_names()
        self.eval()

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every head's output, float32 [B', width] or, without pooling, [T', width], from the tensors ``input_names``
        of ``bei.engine.packing.graph_inputs``. An embedding is not normalized at the end."""
        self._used.step = step = PackedStep(inputs)
        ids = step["input_ids"]
        embedded = self.embeddings(ids, self.embeddings.word, step)
        states = States(embedded)
        passed = [embedded]
        of_layers = self.layer_inputs(embedded) if self.layer_inputs else ()
        for index, name in enumerate(self._order):
            is_convolved = index == 0 and self.convolution is not None
            is_changed = is_convolved or index < self.spec.embeddings.image_layers
            following = None if is_changed else self._rounding_behind(index)
            states = self.layers[name](states, step, of_layers[index] if of_layers else None, following)
            if self.convolution and is_convolved:
                states = States(self.convolution(states.total, embedded, step))
            if index < self.spec.embeddings.image_layers:
                total = states.total
                states = States(total + self.embeddings.image_part(index + 1, step).to(total.dtype))
            if self._keeps_states:
                passed.append(states.total)
        hidden = _finished(states, self.final_norm, step)
        if self.spec.layer_shares:
            hidden = _weighted_sum([*passed[:-1], hidden], self.spec.layer_shares)
        if self.decoder:
            hidden = self.decoder(ids, self.embeddings.word, hidden, step)
        return {head.spec.output: head(hidden, step, passed[1:]) for head in self._heads}

    def _rounding_behind(self, index: int) -> Rounding | None:
        """Rounding of the states by the layer after the one at ``index``."""
        if index + 1 == len(self._order):
            return None
        layer = self.layers[self._order[index + 1]]
        assert isinstance(layer, Layer)
        return layer.rounding

    @property
    def products(self) -> dict[str, ProductChoice]:
        """The method for each FP8 layer's product, by its path; for experts that of all together."""
        found = {path: module.choice for path, module in self.named_modules() if isinstance(module, FP8Linear)}
        of_experts = ((path, module.products) for path, module in self.named_modules() if isinstance(module, Experts))
        return found | {f"{path}.{name}": choice for path, of_each in of_experts for name, choice in of_each.items()}

    def weights_by_name(self) -> dict[str, Tensor]:
        """Every weight by its name in ``spec.weights()``: to read or fill, until ``parameters.join_linear_layers``.
        Weights of FP8 layers are missing: they are no longer numbers of the model's type.

        The names are those of the state dict, except for token types: a module cannot have a submodule called ``type``.
        """
        return {name.replace("embeddings.types.", "embeddings.type."): it for name, it in self.state_dict().items()}

    def load(self, read: Callable[[str], npt.NDArray[np.float32]]) -> PackedModel:
        """Fill every weight with ``read`` of its name; one is in memory at a time. Raises WeightsError."""

        def array_of(name: str, shape: torch.Size) -> npt.NDArray[np.float32]:
            array = np.require(read(self._stored_name(name)), np.float32, ["C", "W"])
            if array.shape != tuple(shape):
                raise WeightsError(f"Weight {name} has shape {list(array.shape)}, not {list(shape)}.")
            return array

        for name, tensor in self.weights_by_name().items():
            tensor.copy_(torch.from_numpy(array_of(name, tensor.shape)))
        for path, module in self.named_modules():
            if isinstance(module, (FP8Linear, FP8Experts)):
                array = array_of(f"{path}.weight", module.stored_shape)
                module.fill(torch.from_numpy(array).to(module.codes.device))
        return self

    def _layers_of(self, specs: Mapping[str, LayerSpec]) -> nn.ModuleDict:
        shared = self.spec, self.choices, self._positions, self._storage
        return nn.ModuleDict({name: Layer(layer, *shared) for name, layer in specs.items()})

    def _decoder_of(self, spec: DecoderSpec) -> Decoder:
        layers = self._layers_of({str(index): layer for index, layer in enumerate(spec.layers)})
        return Decoder(spec, self.spec.hidden_size, layers, self._storage)

    def _add_position_weights(self) -> None:
        """The tables that the attention of all layers shares, by the first layer's spec."""
        attention = self.spec.layers[0].attention if self.spec.layers else None
        if attention is None:
            return
        hidden, positions = self.spec.hidden_size, self._positions
        if attention.relative_bias:
            arguments = attention.relative_bias, attention.num_heads, self.max_seq_len, self._storage
            self.relative_bias = positions.relative_bias = RelativeBias(*arguments)
        if spec := attention.disentangled:
            table = RelativePositions(spec, hidden, self.max_seq_len, self._storage)
            self.relative_positions = positions.relative_positions = table
            if spec.norm:
                self.relative_positions_norm = Norm(spec.norm, hidden, self._storage)
                positions.relative_positions_norm = self.relative_positions_norm

    def _input_names(self) -> tuple[str, ...]:
        names = {"input_ids"}.union(*(head.reads for head in self._heads))
        for module in self.modules():
            names.update(getattr(module, "reads", ()))
        return tuple(sorted(names))


class Decoder(nn.Module):
    """Layers that read the text shifted by one token, and the encoder's states."""

    def __init__(self, spec: DecoderSpec, hidden_size: int, layers: nn.ModuleDict, options: TensorOptions) -> None:
        super().__init__()
        self._shifted_ids = ShiftedIds(spec)
        self.embeddings = Embeddings(spec.embeddings, hidden_size, options, with_words=False)
        self.layers = layers
        self.final_norm = Norm(spec.final_norm, hidden_size, options) if spec.final_norm else None

    def forward(self, input_ids: Tensor, words: Table, encoded: Tensor, step: PackedStep) -> Tensor:
        """Token states [T, hidden]."""
        states = States(self.embeddings(self._shifted_ids(input_ids, step), words, step))
        layers = list(self.layers.values())
        for layer, behind in zip(layers, [*layers[1:], None], strict=True):
            states = layer(states, step, encoded, behind.rounding if behind is not None else None)
        return _finished(states, self.final_norm, step)


def _finished(states: States, norm: Norm | None, step: PackedStep) -> Tensor:
    """The last states, [T, hidden]."""
    found = norm.of_sum(states, step).value if norm else states.total
    assert found is not None
    return found


def _weighted_sum(states: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The sum of ``states``, each times its share, added in FP32."""
    parts = [state.float() * share for state, share in zip(states, shares, strict=True) if share]
    return torch.stack(parts).sum(0).to(states[0].dtype)


def packed_model(
    spec: ModelSpec,
    read: Callable[[str], npt.NDArray[np.float32]],
    max_seq_len: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kernel: Kernel | None = None,
    quantization: Quantization | None = None,
    fusions: Fusions | None = None,
) -> PackedModel:
    """The model of ``spec`` with weights from ``read`` by their names in ``spec.weights()``."""
    options = TensorOptions(torch.device(device), dtype)
    return PackedModel(spec, max_seq_len, options, kernel, quantization, fusions).load(read)


def tensors_of(model: PackedModel, batch: PackedBatch, sizes: Sizes | None = None) -> dict[str, Tensor]:
    """The inputs of ``model`` for ``batch``, on its device, filled up as in ``bei.engine.packing.graph_inputs``."""
    arrays = graph_inputs(batch, model.input_names, sizes)
    device = next(model.parameters()).device
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def run(model: PackedModel, batch: PackedBatch, sizes: Sizes | None = None) -> dict[str, Float32Array]:
    """The outputs for ``batch``, a row per sequence or, without pooling, per token."""
    with torch.inference_mode():
        outputs = model(tensors_of(model, batch, sizes))
    found: dict[str, Float32Array] = {}
    for head in model.spec.heads:
        rows = outputs[head.output].cpu().numpy()
        if head.pooling:
            found[head.output] = rows[: batch.batch_size]
        else:
            found[head.output] = rows_of_tokens(rows[: batch.num_computed], batch)
    return found
