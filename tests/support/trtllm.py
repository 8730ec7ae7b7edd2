"""A stand-in for the module ``tensorrt_llm``: what of it bei uses, with the behaviour that its documents and sources
describe (docs/decisions.md), computed by transformers' classes in FP32 from the checkpoint it is given.

It is stricter where the original is lax: arguments that no model's forward has are refused, not swallowed, and calls
that overlap are found out.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file

VERSION = "1.4.0rc1"
Tensors = dict[str, torch.Tensor]
Prompts = Sequence[Sequence[int]]

_FIELDS = (
    *("model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "tensor_parallel_size"),
    *("dtype", "revision", "tokenizer_revision", "encode_only", "max_batch_size", "max_num_tokens", "max_seq_len"),
    *("attn_backend", "cuda_graph_config", "torch_compile_config", "enable_autotuner", "quant_config"),
)


class TorchLlmArgs:
    """The arguments of LLM, as pydantic lists them."""

    model_fields = dict.fromkeys(_FIELDS)


@dataclass(kw_only=True)
class EncodeExtraInputSpec:
    """A tensor that the model's forward has as an argument, for graphs; from 1.4.0rc1 on."""

    name: str
    shape: tuple[str | int, ...]
    dtype: str

    def check(self, value: object, num_tokens: int, num_prompts: int) -> None:
        """Raise ValueError unless ``value`` is given as it was declared."""
        sizes = {"num_tokens": num_tokens, "batch_size": num_prompts}
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (shape, getattr(torch, self.dtype)):
            raise ValueError(f"{self.name} must be passed as {self.dtype} {shape}")


@dataclass(kw_only=True)
class EncodeCudaGraphConfig:
    """Keyword arguments only; sizes in order and positive."""

    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False
    mode: str = "encode"
    num_tokens: list[int] | None = None
    max_num_token: int = 0
    seq_lens: list[int] | None = None
    max_seq_len: int = 0
    extra_model_inputs: list[EncodeExtraInputSpec] = field(default_factory=list)

    def __post_init__(self) -> None:
        for sizes in (self.batch_sizes, self.num_tokens, self.seq_lens):
            assert sizes is None or (sizes and sizes == sorted(sizes) and sizes[0] > 0)


@dataclass
class EncoderOutput:
    """What ``encode`` gives for a prompt."""

    logits: torch.Tensor
    prompt: str | None
    prompt_token_ids: list[int]


class LLM:
    """The public class. ``made`` has all that were, the newest last; ``batches`` the shapes of what one was asked."""

    made: ClassVar[list[LLM]] = []

    def __init__(
        self,
        model: str,
        tokenizer: object = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        unknown = kwargs.keys() - set(_FIELDS)
        if unknown:
            raise ValueError(f"1 validation error for TorchLlmArgs\n{unknown}\n  Extra inputs are not permitted")
        if not skip_tokenizer_init:
            raise OSError(f"Can't load tokenizer for {model!r}")  # the folder has none
        self._encode_only = kwargs.get("encode_only", False)
        self.limits = kwargs["max_batch_size"], kwargs["max_num_tokens"], kwargs["max_seq_len"]
        assert kwargs.get("attn_backend", "TRTLLM") in ("TRTLLM", "VANILLA")
        self.graphs: EncodeCudaGraphConfig | None = kwargs.get("cuda_graph_config")
        assert self.graphs is None or isinstance(self.graphs, EncodeCudaGraphConfig)
        self._inside = threading.Lock()
        self._forward, self._inputs = _model(Path(model))
        self._buffer = torch.empty(0)  # one for all calls, as large as the largest so far
        self.is_shut_down = False
        self.batches: list[list[int]] = []
        self.made.append(self)

    def generate(self, *args: Any, **kwargs: Any) -> None:
        """Refuses."""
        self._refuse("generate")

    def generate_async(self, *args: Any, **kwargs: Any) -> None:
        """Refuses."""
        self._refuse("generate_async")

    def _refuse(self, name: str) -> None:
        if self._encode_only:
            raise RuntimeError(f"{name}() is not available when encode_only=True. Use llm.encode().")
        raise AssertionError("bei never generates")

    def encode(
        self,
        inputs: str | Sequence[Any],
        add_special_tokens: bool = True,
        batch_indexed_model_output: bool = True,
        copy_logits_to_host: bool = True,
        return_raw_logits: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """One forward pass, on the calling thread."""
        if not self._encode_only:
            raise RuntimeError("encode() requires encode_only=True. Set encode_only=True in the LLM() constructor.")
        if self.is_shut_down:
            raise RuntimeError("LLM is shut down or not initialized. Please recreate the LLM object.")
        if not self._inside.acquire(blocking=False):
            raise RuntimeError("two calls of encode() at once: their buffers are the same")
        try:
            return self._encoded(inputs, copy_logits_to_host, return_raw_logits, model_kwargs)
        finally:
            self._inside.release()

    def _encoded(
        self, inputs: str | Sequence[Any], to_host: bool, raw: bool, model_kwargs: dict[str, Any]
    ) -> list[EncoderOutput] | torch.Tensor:
        if isinstance(inputs, str) or any(isinstance(prompt, str) for prompt in inputs):
            raise ValueError("no tokenizer: it was not initialized")
        if not isinstance(inputs, list) or not all(isinstance(prompt, list) for prompt in inputs):
            raise TypeError(f"Unsupported input type: {type(inputs)}")
        if not all(type(token) is int for prompt in inputs for token in prompt):
            raise TypeError("token ids are Python's integers")
        lengths = [len(prompt) for prompt in inputs]
        most_sequences, most_tokens, longest = self.limits
        if len(inputs) > most_sequences:
            raise ValueError(f"Batch size ({len(inputs)}) exceeds max_batch_size ({most_sequences}).")
        if sum(lengths) > most_tokens:
            raise ValueError(f"Total tokens ({sum(lengths)}) across the batch exceeds max_num_tokens ({most_tokens}).")
        if max(lengths) > longest:
            raise ValueError(f"Max sequence length ({max(lengths)}) exceeds max_seq_len ({longest}).")
        if self.graphs:
            declared = {spec.name: spec for spec in self.graphs.extra_model_inputs}
            if model_kwargs.keys() - declared:
                raise ValueError(f"undeclared tensors: {sorted(model_kwargs.keys() - declared)}")
            for name, spec in declared.items():
                spec.check(model_kwargs.get(name), sum(lengths), len(lengths))
        if model_kwargs.keys() - set(self._inputs):
            raise TypeError(f"no forward takes {sorted(model_kwargs)}")
        self.batches.append(lengths)
        time.sleep(0.002)  # so that calls of several threads overlap, where they may
        with torch.inference_mode():
            logits = self._forward(inputs, **model_kwargs)
        if self._buffer.numel() < logits.numel() or self._buffer.dtype != logits.dtype:
            self._buffer = torch.empty(2 * logits.numel(), dtype=logits.dtype)
        shared = self._buffer[: logits.numel()].view(logits.shape)
        shared.copy_(logits)
        if raw:
            return shared
        return [EncoderOutput(rows, None, list(prompt)) for rows, prompt in zip(shared, inputs, strict=True)]

    def shutdown(self) -> None:
        """Free everything."""
        self.is_shut_down = True


def _model(folder: Path) -> tuple[Callable[..., torch.Tensor], tuple[str, ...]]:
    """What the class named in config.json computes, and which arguments of its own its forward has."""
    raw = json.loads((folder / "config.json").read_bytes())
    name, dtype = raw["architectures"][0], getattr(torch, raw["torch_dtype"])
    tensors = _dequantized(_tensors(folder), raw, folder)
    settings = {key: value for key, value in raw.items() if key not in ("quantization_config", "torch_dtype")}
    config: Any = transformers.AutoConfig.for_model(**settings)
    config._attn_implementation = "eager"
    if name == "BertForSequenceClassification":
        classifier: Any = transformers.BertForSequenceClassification(config)
        classifier.eval()
        classifier.load_state_dict(tensors)  # strict: TensorRT-LLM reads all of these by name
        return _bert(classifier), ("token_type_ids",)
    classes = {"Qwen3ForTextEmbedding": transformers.Qwen3Model, "Qwen2ForRewardModel": transformers.Qwen2Model}
    backbone: Any = classes[name](config)
    backbone.eval()
    score = {key: tensors.pop(key) for key in list(tensors) if key.startswith("score.")}
    backbone.load_state_dict({key.removeprefix("model."): tensor for key, tensor in tensors.items()})
    assert all(key.startswith("model.") for key in tensors)

    def last_states(prompts: Prompts) -> torch.Tensor:
        return torch.cat([backbone(torch.tensor([prompt])).last_hidden_state[:, -1] for prompt in prompts])

    if name == "Qwen3ForTextEmbedding":
        return lambda prompts: torch.nn.functional.normalize(last_states(prompts), dim=-1).to(dtype), ()

    def rewards(prompts: Prompts) -> torch.Tensor:
        hidden = torch.relu(last_states(prompts) @ score["score.0.weight"].T + score["score.0.bias"])
        return (hidden @ score["score.2.weight"].T + score["score.2.bias"]).to(dtype)

    return rewards, ()


def _bert(classifier: Any) -> Callable[..., torch.Tensor]:
    def forward(prompts: Prompts, token_type_ids: torch.Tensor | None = None) -> torch.Tensor:
        lengths = [len(prompt) for prompt in prompts]
        if token_type_ids is None:
            token_type_ids = torch.zeros(sum(lengths), dtype=torch.int32)
        assert isinstance(token_type_ids, torch.Tensor)
        assert token_type_ids.dtype in (torch.int32, torch.int64)
        assert token_type_ids.shape == (sum(lengths),)
        rows = [
            classifier(torch.tensor([prompt]), token_type_ids=types[None].long()).logits
            for prompt, types in zip(prompts, torch.split(token_type_ids, lengths), strict=True)
        ]
        return torch.cat(rows).float()

    return forward


def _tensors(folder: Path) -> Tensors:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    return {key: tensor for name in names for key, tensor in load_file(folder / name).items()}


def _dequantized(tensors: Tensors, raw: dict[str, Any], folder: Path) -> Tensors:
    """FP32. FP8 only where both files of settings say it; with the stored scales, activations as they are."""
    quantized = [key for key, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    path = folder / "hf_quant_config.json"
    if quantized:
        assert raw["quantization_config"]["quant_method"] == "modelopt"
        settings = json.loads(path.read_bytes())["quantization"]
        assert settings["quant_algo"] == raw["quantization_config"]["quant_algo"] == "FP8"
        assert settings["exclude_modules"] == raw["quantization_config"]["ignore"]
    else:
        assert not path.exists()
        assert "quantization_config" not in raw
    scales = {key: tensors.pop(f"{key}_scale") for key in quantized}
    assert all(scale.shape == () and scale.dtype == torch.float32 for scale in scales.values())
    return {key: tensor.float() * scales.get(key, 1.0) for key, tensor in tensors.items()}


def _cuda(capability: int) -> ModuleType:
    """cuda-python's runtime, on a machine with one GPU."""
    runtime: Any = ModuleType("cuda.bindings.runtime")
    properties = SimpleNamespace(
        name=b"NVIDIA Stand-in\0", major=capability // 10, minor=capability % 10, totalGlobalMem=1 << 34
    )
    success = SimpleNamespace(value=0, name="cudaSuccess")
    runtime.cudaDriverGetVersion = lambda: (success, 13000)
    runtime.cudaGetDeviceCount = lambda: (success, 1)
    runtime.cudaGetDeviceProperties = lambda device: (success, properties)
    runtime.cudaDeviceSynchronize = lambda: (success,)
    runtime.cudaGetLastError = lambda: (success,)
    runtime.cudaGetErrorString = lambda status: (success, f"simulated {status.name}".encode())
    module: ModuleType = runtime
    return module


@contextmanager
def installed(capability: int = 90) -> Iterator[Any]:
    """TensorRT-LLM and a GPU of compute ``capability``, as imports find them; gives the module ``tensorrt_llm``.

    Meanwhile torch has one thread: its threads wait for each other, and these models are too small for two.
    """
    module: Any = ModuleType("tensorrt_llm")
    module.__spec__ = ModuleSpec("tensorrt_llm", None)
    module.__version__ = VERSION
    module.LLM = type("LLM", (LLM,), {"made": []})
    module.llmapi = ModuleType("tensorrt_llm.llmapi")
    module.llmapi.EncodeCudaGraphConfig = EncodeCudaGraphConfig
    module.llmapi.EncodeExtraInputSpec = EncodeExtraInputSpec
    module.llmapi.TorchLlmArgs = TorchLlmArgs
    modules = {
        "tensorrt_llm": module,
        "tensorrt_llm.llmapi": module.llmapi,
        "cuda.bindings.runtime": _cuda(capability),
    }
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch.dict(sys.modules, modules):
            yield module
    finally:
        torch.set_num_threads(num_threads)
