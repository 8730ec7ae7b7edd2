"""Target ``trtllm``, experimental: TensorRT-LLM's encode-only mode. The only module of the runtime that imports it.

``LLM(encode_only=True).encode`` runs a batch on the calling thread, in buffers that calls share: no queue, no KV cache,
no sampler. So bei forms the batches, admits one caller at a time, and copies the results. Inputs are token ids, never
texts. TensorRT-LLM calls this interface a prototype; the engine's constructor checks each part that is used.

Written after TensorRT-LLM's documents and sources, and tested against a stand-in that behaves accordingly; it has not
been run with TensorRT-LLM itself, nor on a GPU.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from bei.artifact.held_files import Folder, on_disk
from bei.artifact.manifest import Manifest
from bei.core import EngineInfo, Float32Array, Limits, Outputs, PackedBatch
from bei.engine.nvidia import current_gpu, load_cuda
from bei.engine.tensorrt.cuda import Cuda
from bei.errors import (
    ArtifactManifestError,
    ArtifactWrongDeviceError,
    EngineDeadError,
    EngineError,
    LibraryVersionError,
)
from bei.utils.libraries import importing
from bei.utils.untrusted_files import read_bounded

log = logging.getLogger(__name__)

# The oldest version whose documents describe all of it; bei_build.targets.trtllm has the same.
_LEAST = "1.3.0rc27"
# Without a driver its libraries do not load. Wheels are not on every index, and need the CUDA toolkit and Open MPI.
_INSTALL = "pip install 'bei[trtllm]', on a machine with an NVIDIA driver, or take NVIDIA's image (docs/reference.md)"

_ENCODE_ARGUMENTS = ("add_special_tokens", "copy_logits_to_host", "return_raw_logits")
_LLM_ARGUMENTS = ("encode_only", "max_batch_size", "max_num_tokens", "max_seq_len", "attn_backend", "cuda_graph_config")

# The lowest compute capability that supports a precision.
_CAPABILITIES = {"bf16": 80, "fp16": 70, "fp8": 89}

# Encoder CUDA graphs are captured at start for every possible combination of batch size, number of tokens and longest
# length: at most 60, for small batches only, where the host's part of a step matters.
_GRAPH_BATCH_SIZES = (1, 2, 4, 8)
_LEAST_GRAPH_TOKENS = 16


@dataclass(frozen=True)
class TRTLLMOptions:
    """``graph_tokens``: batches of up to this many tokens have CUDA graphs; 0: none."""

    graph_tokens: int = 512


class TRTLLMEngine:
    """An ``LLM`` in encode-only mode. ``close`` shuts it down."""

    def __init__(self, folder: Folder, manifest: Manifest, options: TRTLLMOptions) -> None:
        """Raises MissingDependencyError, LibraryVersionError, DeviceNotFoundError, ArtifactWrongDeviceError,
        ArtifactManifestError, EngineError."""
        api = _load_api(manifest)
        log.warning("%s: target trtllm is experimental (docs/decisions.md)", manifest.name)
        runtime = load_cuda(f"Serving {manifest.name} (target trtllm)", "trtllm")
        gpu = current_gpu(runtime)
        self._cuda = Cuda(runtime)
        if gpu.capability < _CAPABILITIES.get(manifest.precision, 0):
            raise ArtifactWrongDeviceError(
                f"The artifact of {manifest.name} computes in {manifest.precision}, which {gpu.name} "
                f"({gpu.architecture}) does not: build it again with another --precision, or for another target."
            )
        output = _only_output(manifest)
        self._output, self._width = output.name, output.dimension
        self._lock = threading.Lock()
        self._llm: Any = None
        has_types = _has_token_types(folder, manifest)
        limits = manifest.limits
        graphs = _graphs(api, limits, options.graph_tokens, has_types=has_types)
        self._needs_types = has_types and graphs is not None  # an input of graphs belongs to every call
        try:
            with on_disk(folder) as path:
                self._llm = api.LLM(
                    model=str(path),
                    skip_tokenizer_init=True,
                    trust_remote_code=False,
                    encode_only=True,
                    max_batch_size=limits.max_batch_size,
                    max_num_tokens=limits.max_num_tokens,
                    max_seq_len=limits.max_seq_len,
                    attn_backend="TRTLLM",
                    cuda_graph_config=graphs,
                )
            self._like = self._on_the_device() if has_types else None
        except Exception as error:  # any error of pydantic, torch or the library
            self._shut_down()
            raise EngineError(
                f"TensorRT-LLM {api.__version__} could not load {manifest.name}: {_one_line(error)}. bei needs "
                f"{_LEAST} or newer; the target is experimental: build for another one, such as bei build --target cpu."
            ) from error
        self._info = EngineInfo(
            target=manifest.target,
            precision=manifest.precision,
            device=gpu.name,
            limits=limits,
            outputs={self._output: self._width},
            is_replaceable=False,  # a new one would share the CUDA context, where a stuck kernel blocks loading
        )

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine. TensorRT-LLM does not report its device memory."""
        return self._info

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Compute ``outputs`` (None: all), float32, one row for each sequence; rows may hold NaN or Inf. Raises
        EngineError, EngineDeadError."""
        if not (batch.key_lens is batch.unpooled_lens is batch.adapters is None):
            raise EngineError("TensorRT-LLM has no keys or means of some tokens, and no adapters. This is a bug.")
        if outputs is not None and self._output not in outputs:
            return {}
        prompts = [part.tolist() for part in np.split(batch.input_ids, batch.cu_seqlens[1:-1])]
        with self._lock:
            if self._llm is None:
                raise EngineError("The engine is closed.")
            try:
                logits = self._llm.encode(prompts, **_RAW, copy_logits_to_host=True, **self._token_types(batch))
                # numpy has no bfloat16; copied, since the next batch reuses the buffer.
                rows: Float32Array = np.array(logits.float().cpu().numpy(), np.float32)
            except Exception as error:  # errors of the batch size, CUDA or torch: this batch failed
                self._check_gpu(error)
                raise EngineError(
                    f"TensorRT-LLM failed on a batch of {batch.batch_size} sequences and {batch.num_tokens} tokens: "
                    f"{_one_line(error)}"
                ) from error
        if rows.shape != (batch.batch_size, self._width):
            raise EngineError(
                f"TensorRT-LLM answered {list(rows.shape)} for {self._output}, not "
                f"{[batch.batch_size, self._width]}: this version's class differs from the one the artifact is for."
            )
        return {self._output: rows}

    def _check_gpu(self, error: Exception) -> None:
        """Raise EngineDeadError if the device is in error: an error of a kernel lasts for the life of the process."""
        lost = self._cuda.settle()
        if lost is not None:
            raise EngineDeadError(
                f"The GPU does not answer this process any more ({lost}): restart the server. It began with: "
                f"{_one_line(error)}"
            ) from error

    def warmup(self) -> None:
        """Run the batch with most tokens once."""
        limits = self._info.limits
        length = limits.max_seq_len
        count = max(1, min(limits.max_batch_size, limits.max_num_tokens // length))
        cu_seqlens = np.arange(count + 1, dtype=np.int32) * np.int32(length)
        self.run(PackedBatch(np.zeros(count * length, np.int32), cu_seqlens))

    def close(self) -> None:
        """Shut the LLM down, after a running batch."""
        with self._lock:
            self._shut_down()

    def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        self._like = None
        if llm is not None:
            llm.shutdown()

    def _on_the_device(self) -> Any:
        """A tensor on the device, from which token types are made there; these ones are given from the host."""
        types = {}
        if self._needs_types:
            torch: Any = importlib.import_module("torch")  # TensorRT-LLM has imported it
            types = {"token_type_ids": torch.zeros(1, dtype=torch.int32)}
        return self._llm.encode([[0]], **_RAW, copy_logits_to_host=False, **types)

    def _token_types(self, batch: PackedBatch) -> dict[str, Any]:
        """The keyword argument for BERT's token types, int32 [T] on the device; without it all types are 0."""
        types = batch.token_type_ids
        if self._like is None or (types is None and not self._needs_types):
            return {}
        values = [0] * batch.num_tokens if types is None else types.tolist()
        return {"token_type_ids": self._like.new_tensor(values).int()}


# The signature: batches of token ids in, one tensor [B, width] out.
_RAW = {"add_special_tokens": False, "return_raw_logits": True}


def _load_api(manifest: Manifest) -> Any:
    """The module, if it has all that is used of it. Raises MissingDependencyError, BrokenDependencyError,
    LibraryVersionError."""
    purpose = f"Serving {manifest.name} (target trtllm)"
    with importing("tensorrt-llm", "trtllm", purpose, modules=("tensorrt_llm",), remedy=_INSTALL):
        import tensorrt_llm as api
    missing = next(_missing(api), None)
    if missing:
        version = getattr(api, "__version__", "of unknown version")
        raise LibraryVersionError(
            f"TensorRT-LLM {version} has no {missing}: install {_LEAST} or newer, with pip install 'bei[trtllm]'."
        )
    return api


def _missing(api: Any) -> Any:
    """The name of a part that bei uses and this version lacks."""
    encode = getattr(getattr(api, "LLM", None), "encode", None)
    if encode is None:
        yield "LLM.encode"
        return
    known = inspect.signature(encode).parameters
    yield from (f"argument {name} of LLM.encode" for name in _ENCODE_ARGUMENTS if name not in known)
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    if not hasattr(llmapi, "EncodeCudaGraphConfig"):
        yield "llmapi.EncodeCudaGraphConfig"
    fields = getattr(getattr(llmapi, "TorchLlmArgs", None), "model_fields", None)
    if fields is not None:  # otherwise the constructor reports it
        yield from (f"argument {name} of LLM" for name in _LLM_ARGUMENTS if name not in fields)


def _only_output(manifest: Manifest) -> Any:
    if len(manifest.outputs) != 1 or manifest.outputs[0].per_token:
        raise ArtifactManifestError(
            f"The artifact of {manifest.name} has outputs that TensorRT-LLM does not give. Build it again."
        )
    return manifest.outputs[0]


def _has_token_types(folder: Folder, manifest: Manifest) -> bool:
    """True if the model adds rows for token types."""
    try:
        config: Mapping[str, Any] = json.loads(read_bounded(folder / "config.json"))
        return int(config.get("type_vocab_size", 0)) > 1
    except (OSError, ValueError, AttributeError) as error:
        raise ArtifactManifestError(
            f"config.json of {manifest.name} cannot be read ({_one_line(error)}). Build it again."
        ) from error


def _graphs(api: Any, limits: Limits, graph_tokens: int, *, has_types: bool) -> Any:
    """The configuration of CUDA graphs for batches of up to ``graph_tokens`` tokens; None: none.

    Those of models with token types have these as an input, which versions before 1.4.0rc1 do not offer.
    """
    declare: Any = getattr(api.llmapi, "EncodeExtraInputSpec", None)
    if has_types and declare is None:
        return None
    inputs = [declare(name="token_type_ids", shape=("num_tokens",), dtype="int32")] if has_types else []
    tokens, size = [], _LEAST_GRAPH_TOKENS
    while size <= min(graph_tokens, limits.max_num_tokens):
        tokens.append(size)
        size *= 2
    lengths = [length for length in tokens if length <= limits.max_seq_len]
    if not lengths:
        return None
    return api.llmapi.EncodeCudaGraphConfig(
        batch_sizes=[size for size in _GRAPH_BATCH_SIZES if size <= limits.max_batch_size],
        num_tokens=tokens,
        seq_lens=lengths,
        enable_padding=True,
        **({"extra_model_inputs": inputs} if inputs else {}),
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
