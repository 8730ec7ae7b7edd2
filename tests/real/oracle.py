"""What real models should answer: transformers' classes, padded and masked, and ONNX Runtime on unconverted exports.

Texts are tokenized by AutoTokenizer, so that agreement says something about the artifact's tokenizer as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import transformers
from onnx import numpy_helper
from transformers import AutoTokenizer

from bei.core import Float32Array
from tests.real.clients import Input
from tests.real.conversions import ORIGINAL

_BATCH = 8


class TransformersOracle:
    """The model class ``architecture``, in FP32 unless told otherwise, on batches padded on the right."""

    def __init__(self, folder: Path, architecture: str, max_seq_len: int, dtype: torch.dtype = torch.float32) -> None:
        self._inputs = _Inputs(folder, max_seq_len)
        self._model = getattr(transformers, architecture).from_pretrained(folder, dtype=dtype).eval()

    def embed(self, texts: Sequence[str], pooling: str) -> Float32Array:
        """Pooled states of the last layer, [n, E]; not normalized."""
        rows: list[torch.Tensor] = []
        for inputs in self._inputs.batches(texts):
            rows += pool(self._model(**inputs).last_hidden_state.float(), inputs["attention_mask"], pooling)
        return torch.stack(rows).numpy()

    def embed_tokens(self, texts: Sequence[str]) -> list[Float32Array]:
        """States of the last layer, [tokens, E] a text."""
        rows: list[Float32Array] = []
        for inputs in self._inputs.batches(texts):
            states, lengths = self._model(**inputs).last_hidden_state, inputs["attention_mask"].sum(1)
            rows += [state[:length].numpy() for state, length in zip(states, lengths, strict=True)]
        return rows

    def logits(self, texts: Sequence[Input]) -> Float32Array:
        """A classifier's scores, [n, labels]."""
        rows = [self._model(**inputs).logits for inputs in self._inputs.batches(texts)]
        return torch.cat(rows).numpy()

    def next_token(self, texts: Sequence[str], less: str, more: str) -> Float32Array:
        """By how much a language model prefers the token ``more`` to ``less`` behind each text, [n, 1]."""
        ids = [self._inputs.tokenizer.convert_tokens_to_ids(token) for token in (less, more)]
        rows = []
        for inputs in self._inputs.batches(texts):
            last = inputs["attention_mask"].sum(1) - 1
            scores = self._model(**inputs).logits[torch.arange(len(last)), last]
            rows.append(scores[:, ids[1]] - scores[:, ids[0]])
        return torch.cat(rows).numpy()[:, None]


class OnnxOracle:
    """ONNX Runtime on the export that the checkpoint was converted from, one text at a time, computing in FP32.

    As they are, FP16 exports round every intermediate tensor and constant: bge-small's vectors then differ by 5e-4, the
    prompt guard's logits by 5e-3.
    """

    def __init__(self, folder: Path, max_seq_len: int) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._inputs = _Inputs(folder, max_seq_len, batch=1)
        model = in_fp32(onnx.load(folder / ORIGINAL)).SerializeToString()
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def embed(self, texts: Sequence[str], pooling: str) -> Float32Array:
        """Pooled states of the last layer, [n, E]; not normalized."""
        rows = [
            pool(torch.from_numpy(self._run(inputs)), inputs["attention_mask"], pooling)[0]
            for inputs in self._inputs.batches(texts)
        ]
        return torch.stack(rows).numpy()

    def logits(self, texts: Sequence[Input]) -> Float32Array:
        """A classifier's scores, [n, labels]."""
        return np.concatenate([self._run(inputs) for inputs in self._inputs.batches(texts)])

    def _run(self, inputs: dict[str, torch.Tensor]) -> Float32Array:
        wanted = {declared.name for declared in self._session.get_inputs()}
        given = {"token_type_ids": torch.zeros_like(inputs["input_ids"]), **inputs}
        feed = {name: tensor.numpy() for name, tensor in given.items() if name in wanted}
        answer: Float32Array = self._session.run(None, feed)[0].astype(np.float32)
        return answer


class _Inputs:
    """Tokenized and padded by our own hand: some of these tokenizers have no padding token."""

    def __init__(self, folder: Path, max_seq_len: int, batch: int = _BATCH) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._max_seq_len, self._batch = max_seq_len, batch
        config = transformers.AutoConfig.from_pretrained(folder)
        self._padding = config.pad_token_id or 0
        self._has_types = getattr(config, "type_vocab_size", 0) > 1

    def batches(self, texts: Sequence[Input]) -> list[dict[str, torch.Tensor]]:
        """Inputs of the model for every batch of texts, in order. Nothing here asks for gradients."""
        torch.set_grad_enabled(False)
        encoded = [self._encode(text) for text in texts]
        return [self._padded(encoded[start : start + self._batch]) for start in range(0, len(encoded), self._batch)]

    def _encode(self, text: Input) -> dict[str, list[int]]:
        parts = (text,) if isinstance(text, str) else text
        encoded: dict[str, list[int]] = self.tokenizer(*parts, truncation=True, max_length=self._max_seq_len)
        return encoded

    def _padded(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        fillers = {"input_ids": self._padding, "attention_mask": 0}
        if self._has_types and "token_type_ids" in rows[0]:
            fillers["token_type_ids"] = 0
        return {
            name: torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in rows])
            for name, filler in fillers.items()
        }


# Constants of the models' mathematics that FP16 rounds: GELU's root, the logarithm in DeBERTa's buckets of distances.
_CONSTANTS = {float(np.float16(value)): value for value in (math.sqrt(2), math.log(511 / 128))}


def in_fp32(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with FP32 wherever it has FP16. Weights keep their values, constants get back what they lost."""
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    graph = model.graph
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    for attribute in attributes:
        if attribute.name == "to" and attribute.i == half:
            attribute.i = single
    for tensor in (*graph.initializer, *(attribute.t for attribute in attributes if attribute.HasField("t"))):
        if tensor.data_type == half:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            if values.size == 1:
                values = np.full_like(values, _CONSTANTS.get(float(values.flat[0]), values.flat[0]))
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    del graph.value_info[:]
    for output in graph.output:
        output.type.tensor_type.elem_type = single
    return model


def pool(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """[n, tokens, E] to [n, E]."""
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last":
        return states[torch.arange(len(states)), mask.sum(1) - 1]
    weights = mask[:, :, None].float()
    return (states * weights).sum(1) / weights.sum(1)
