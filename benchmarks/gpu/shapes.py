"""Models of real shapes with random weights, straight from a ModelSpec, and the batches that they are asked."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bei.core import Encoding, PackedBatch
from bei_build.spec.linear_layers import linear_layers
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import (
    AttentionSpec,
    DenseSpec,
    EmbeddingsSpec,
    LayerSpec,
    MLPSpec,
    NormalizeSpec,
    NormSpec,
    Pooling,
    RopeSpec,
)
from bei_build.spec.quantization import LayerQuantization, Quantization
from bei_build.torch_graph.attention_kernels import Kernel
from bei_build.torch_graph.fp8 import FP8Linear
from bei_build.torch_graph.model import PackedModel
from bei_build.torch_graph.parameters import TensorOptions, join_linear_layers

_WIDEST_INPUT = 32.0  # of linear layers of these models


@dataclass(frozen=True)
class Sizes:
    """Of a transformer; ``kv_heads`` None: as many as ``heads``; ``head_dim`` None: so that heads are as wide as states
    together."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True)
class Shape:
    """``hf`` names the transformers classes of config and model with these sizes. ``is_fp8``: linear layers are."""

    name: str
    sizes: Sizes
    spec_of: Callable[[Sizes], ModelSpec]
    max_seq_len: int
    hf: tuple[str, str]
    is_fp8: bool = False

    @property
    def spec(self) -> ModelSpec:
        return self.spec_of(self.sizes)

    def shrunk(self) -> Shape:
        """The same structure, small enough for a CPU in a test."""
        kv_heads, head_dim = 2 if self.sizes.kv_heads else None, 32 if self.sizes.head_dim else None
        sizes = Sizes(2, hidden=64, heads=4, inner=96, vocab=300, kv_heads=kv_heads, head_dim=head_dim)
        return replace(self, sizes=sizes, max_seq_len=64)


def _attention(sizes: Sizes, *, bias: bool, **more: Any) -> AttentionSpec:
    head_dim, kv_heads = sizes.head_dim or sizes.hidden // sizes.heads, sizes.kv_heads or sizes.heads
    return AttentionSpec(sizes.heads, head_dim, kv_heads, head_dim**-0.5, bias=bias, output_bias=bias, **more)


def _encoder(sizes: Sizes, positions: int, types: int, heads: tuple[HeadSpec, ...]) -> ModelSpec:
    """BERT's structure."""
    norm = NormSpec(1e-12)
    layer = LayerSpec(_attention(sizes, bias=True), MLPSpec(sizes.inner, "gelu"), norm)
    embeddings = EmbeddingsSpec(sizes.vocab, max_positions=positions, type_vocab_size=types, norm=norm)
    return ModelSpec("bert", "BertModel", sizes.hidden, embeddings, (layer,) * sizes.layers, heads=heads)


def _bert(pooling: Pooling) -> Callable[[Sizes], ModelSpec]:
    return lambda sizes: _encoder(sizes, 512, 2, (HeadSpec("embedding", (pooling,)),))


def _bge_m3(sizes: Sizes) -> ModelSpec:
    """XLM-RoBERTa with the three outputs of bge-m3."""
    width = sizes.hidden
    weights = HeadSpec("token_weights", token_layers=(DenseSpec("sparse_linear", width, 1, activation="relu"),))
    tokens = HeadSpec("token_embedding", token_layers=(DenseSpec("colbert_linear", width, width), NormalizeSpec()))
    return _encoder(sizes, 8192, 1, (HeadSpec("embedding", ("cls",)), weights, tokens))


def _decoder(family: str, architecture: str, sizes: Sizes, norm: NormSpec, base: float, **more: Any) -> ModelSpec:
    """Llama's structure; ``base`` of the rotations, ``more`` of the attention."""
    head_dim = sizes.head_dim or sizes.hidden // sizes.heads
    rope = RopeSpec(tuple((base ** -(np.arange(0, head_dim, 2) / head_dim)).tolist()))
    attention = _attention(sizes, bias=False, causal=True, rope=rope, **more)
    mlp = MLPSpec(sizes.inner, "silu", gated=True, bias=False, down_bias=False)
    layers = (LayerSpec(attention, mlp, norm, "pre"),) * sizes.layers
    heads = (HeadSpec("embedding", ("last",)),)
    return ModelSpec(family, architecture, sizes.hidden, EmbeddingsSpec(sizes.vocab), layers, norm, heads)


def _mistral(sizes: Sizes) -> ModelSpec:
    """e5-mistral's structure; its window of 4,096 tokens is longer than the texts here."""
    return _decoder("mistral", "MistralModel", sizes, NormSpec(1e-5, kind="rms", bias=False), 10_000.0)


def _qwen3(sizes: Sizes) -> ModelSpec:
    norm = NormSpec(1e-6, kind="rms", bias=False)
    return _decoder("qwen3", "Qwen3Model", sizes, norm, 1_000_000.0, qk_norm=norm)


_BERT, _XLMR, _MISTRAL, _QWEN3 = (
    (f"{name}Config", f"{name}Model") for name in ("Bert", "XLMRoberta", "Mistral", "Qwen3")
)
_ALL = (
    Shape("minilm", Sizes(6, 384, 12, 1536, 30_522), _bert("mean"), 512, _BERT),
    Shape("bert-base", Sizes(12, 768, 12, 3072, 30_522), _bert("cls"), 512, _BERT),
    Shape("bert-large", Sizes(24, 1024, 16, 4096, 30_522), _bert("cls"), 512, _BERT),
    Shape("bge-m3", Sizes(24, 1024, 16, 4096, 250_002), _bge_m3, 8192, _XLMR),
    Shape("qwen3-0.6b", Sizes(28, 1024, 16, 3072, 151_669, kv_heads=8, head_dim=128), _qwen3, 4096, _QWEN3),
    Shape("mistral-7b", Sizes(32, 4096, 32, 14_336, 32_000, kv_heads=8), _mistral, 4096, _MISTRAL),
)
SHAPES = {shape.name: shape for shape in _ALL}
# The same weights.
SHAPES |= {
    f"{name} FP8": replace(SHAPES[name], name=f"{name} FP8", is_fp8=True) for name in ("bert-large", "mistral-7b")
}


def random_model(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    kernel: Kernel | None = None,
    joined: bool = True,
    is_fp8: bool = False,
) -> PackedModel:
    """``shape`` with random weights, the same numbers in every type: they are BF16's. ``is_fp8``: all linear layers of
    its layers are FP8."""
    quantization = quantization_of(shape.spec) if is_fp8 else None
    model = PackedModel(shape.spec, shape.max_seq_len, TensorOptions(device, dtype), kernel, quantization)
    for name, tensor in model.weights_by_name().items():
        tensor.copy_(_random(name, tensor.shape, device))
    for path, module in model.named_modules():
        if isinstance(module, FP8Linear):
            module.fill(_random(f"{path}.weight", module.codes.shape, device).float())
    if joined:
        join_linear_layers(model)
    return model


def _random(name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """The weight ``name`` of every model, BF16."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, device=device)
    if len(shape) > 1:
        values *= shape[-1] ** -0.5
    else:  # of norms about 1, biases small
        values = 0.02 * values + (1.0 if name.endswith("norm.weight") else 0.0)
    return values.bfloat16()


def quantization_of(spec: ModelSpec) -> Quantization:
    """One range for all inputs, wider than any of them: numbers of FP8 are as fine within it as within their own."""
    return Quantization("fp8", {layer.name: LayerQuantization(_WIDEST_INPUT) for layer in linear_layers(spec)})


def fixed(num_tokens: int, length: int) -> list[int]:
    """Sequences of ``length`` tokens, ``num_tokens`` together."""
    return [length] * max(1, num_tokens // length)


def uniform(num_tokens: int, least: int, most: int) -> list[int]:
    """Lengths spread evenly between ``least`` and ``most``, about ``num_tokens`` together."""
    rng = np.random.default_rng(0)
    return _up_to(num_tokens, lambda: int(rng.integers(least, most + 1)))


def lognormal(num_tokens: int, mean: float, most: int) -> list[int]:
    """Lengths as of passages and pages: log-normal with ``mean``, cut at ``most``, about ``num_tokens`` together."""
    rng, sigma = np.random.default_rng(0), 0.85
    location = np.log(mean) - sigma**2 / 2
    return _up_to(num_tokens, lambda: int(np.clip(np.rint(rng.lognormal(location, sigma)), 4, most)))


def _up_to(num_tokens: int, length: Callable[[], int]) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(length())
    return lengths


def batch_of(lengths: list[int], vocab: int) -> PackedBatch:
    rng = np.random.default_rng(1)
    return PackedBatch.from_encodings([Encoding(rng.integers(0, vocab, n).astype(np.int32)) for n in lengths])
