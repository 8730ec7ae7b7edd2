"""The packed PyTorch module as the reference for models that transformers has no class for.

It implements the same spec a second time: it shares the reading of the checkpoint with the ONNX graph, but no
computation. An error common to both stays hidden, so its certificates say self-consistency.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from bei.core import Encoding, PackedBatch, rows_of_sequences
from bei.engine.pytorch import load_torch
from bei.errors import BeiError, CompileError
from bei.verification.engine_answers import Rows, joined
from bei_build import memory
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.reference import hf_model as hf
from bei_build.weights.model_weights import ModelWeights

_PURPOSE = "Verifying with PyTorch"


def unsupported_reason(checkpoint: Checkpoint) -> str | None:
    """The reason why the module cannot be the reference of ``checkpoint`` here; None where it can."""
    if not hf.is_available():
        return "torch is not installed"
    try:
        torch = load_torch(_PURPOSE)
        from bei_build.torch_graph.model import PackedModel
        from bei_build.torch_graph.parameters import TensorOptions

        PackedModel(checkpoint.spec, checkpoint.max_seq_len, TensorOptions(torch.device("meta"), torch.float32))
    except CompileError as error:
        return f"bei's PyTorch module does not compute this model ({error})"
    except BeiError as error:  # torch is too old, or broken
        return str(error)
    return None


class ModuleReference:
    """The module in FP32 on the CPU, one text at a time. Raises VerificationError where memory does not suffice."""

    def __init__(self, checkpoint: Checkpoint, weights: ModelWeights) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in HFReference
        load_torch(_PURPOSE)
        from bei_build.torch_graph.model import packed_model

        self.name = "bei's PyTorch module, FP32, one text at a time"
        if weights.dequantized:
            self.name += f", its {', '.join(weights.dequantized)} weights dequantized"
        self.is_own = True
        memory.require(4 * checkpoint.spec.num_parameters, "The reference, a copy of the model in FP32,")
        self._per_token = {str(head.output): not head.pooling for head in checkpoint.spec.heads}
        self._model = packed_model(checkpoint.spec, weights.read, checkpoint.max_seq_len)

    def run(self, encodings: Sequence[Encoding], outputs: Sequence[str]) -> Rows:
        """Outputs ``outputs`` of each encoding: float32 [width], or [tokens, width] for an output per token."""
        from bei_build.torch_graph.model import run

        parts: list[Rows] = []
        for encoding in encodings:
            batch = PackedBatch.from_encodings([encoding])
            found = run(self._model, batch)
            parts.append(
                {name: rows_of_sequences(found[name], batch, per_token=self._per_token[name]) for name in outputs}
            )
        return joined(parts)
