"""The Hugging Face implementation in FP32: what every engine is held against.

One text at a time, without padding, pooled here in torch; shares no code with the graph. The only file that imports
torch and transformers' model classes.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from bei.core import Encoding, Float32Array
from bei_build.checkpoint import Checkpoint, ModelWeights
from bei_build.spec import DenseSpec, Pooling


def is_available() -> bool:
    """Whether torch is installed, in a version that transformers works with."""
    if importlib.util.find_spec("torch") is None:
        return False
    from transformers.utils.import_utils import is_torch_available

    return bool(is_torch_available())


class HFReference:
    """``embed`` as transformers and sentence-transformers would."""

    def __init__(self, checkpoint: Checkpoint, weights: ModelWeights) -> None:
        # Torch's threads spin by default while they wait for each other: on shared cores, or under a container's quota,
        # MiniLM took 15 to 35 s to verify instead of 3. Torch reads this once, when it is first imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch
        from transformers import AutoModel
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.name = "transformers, FP32, one text at a time"
        self._spec = checkpoint.spec
        self._torch = torch
        self._model = AutoModel.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
        self._tail = {name: torch.from_numpy(weights.read(name)) for name, _ in checkpoint.spec.tail_weights()}

    def embed(self, encodings: Sequence[Encoding]) -> Float32Array:
        """Vectors before the final normalization, float32 [n, E]."""
        with self._torch.inference_mode():
            rows = [self._embed_one(encoding) for encoding in encodings]
        array: Float32Array = np.stack(rows)
        return array

    def _embed_one(self, encoding: Encoding) -> Float32Array:
        torch = self._torch
        inputs = {"input_ids": torch.from_numpy(encoding.input_ids.astype(np.int64))[None]}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if encoding.token_type_ids is not None and self._spec.embeddings.type_vocab_size > 1:
            inputs["token_type_ids"] = torch.from_numpy(encoding.token_type_ids.astype(np.int64))[None]
        states = self._model(**inputs).last_hidden_state[0]
        vector = torch.cat([self._pool(states, mode) for mode in self._spec.pooling])
        for index, layer in enumerate(self._spec.tail):
            vector = self._apply_tail(vector, layer, index)
        row: Float32Array = vector.numpy()
        return row

    def _pool(self, states: Any, mode: Pooling) -> Any:
        torch, count = self._torch, len(states)
        if mode == "weighted_mean":
            weights = torch.arange(1, count + 1, dtype=torch.float32)[:, None]
            return (states * weights).sum(0) / weights.sum()
        return {
            "cls": lambda: states[0],
            "last": lambda: states[-1],
            "mean": lambda: states.mean(0),
            "max": lambda: states.max(0).values,
            "mean_sqrt_len": lambda: states.sum(0) / count**0.5,
        }[mode]()

    def _apply_tail(self, vector: Any, layer: Any, index: int) -> Any:
        functional = self._torch.nn.functional
        if not isinstance(layer, DenseSpec):
            return functional.normalize(vector, dim=0)
        vector = functional.linear(vector, self._tail[f"tail.{index}.weight"], self._tail.get(f"tail.{index}.bias"))
        return {
            "identity": lambda v: v,
            "tanh": self._torch.tanh,
            "relu": functional.relu,
            "gelu": functional.gelu,
            "silu": functional.silu,
            "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
        }[layer.activation](vector)
