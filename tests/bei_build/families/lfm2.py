"""LFM2.5's bidirectional code: random checkpoints as it saves them, and its computation on transformers' LFM2.

What it changes there is known from the model cards, the ports of mlx-swift-lm and SGLang, and a proposed class of
transformers (lfm2_bidirectional at d25b7800): no causal mask, and convolutions padded by half a kernel on both sides.
LFM2.5-ColBERT's copy does not zero what is not attended to; LFM2.5-Embedding's texts have no such tokens.
"""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.nn import functional
from transformers import Lfm2Model

from bei.core import Encoding
from tests.support.checkpoints import change_config
from tests.support.reading import saved

CODE = "modeling_lfm2_bidirectional.Lfm2BidirectionalModel"


def save(folder: Path, name: str = "Lfm2Model") -> Path:
    """A case of ``tests.support.zoo`` under the names of the bidirectional code."""
    config = {"architectures": ["Lfm2BidirectionalModel"], "auto_map": {"AutoModel": CODE}, "use_cache": False}
    return change_config(saved(folder, name), **config)


def _centred(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    length = hidden_states.shape[1]
    gate, factor, inner = module.in_proj(hidden_states).transpose(1, 2).chunk(3, dim=1)
    weight, reach = module.conv.weight, module.conv.weight.shape[-1] // 2
    mixed = functional.conv1d(gate * inner, weight, module.conv.bias, padding=reach, groups=len(weight))
    result: torch.Tensor = module.out_proj((factor * mixed[..., :length]).transpose(1, 2))
    return result


class Oracle:
    """The bidirectional model of ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = Lfm2Model.from_pretrained(folder, attn_implementation="eager")
        layers: Any = self._model.layers
        for layer in layers:
            if not layer.is_attention_layer:
                layer.conv.forward = MethodType(_centred, layer.conv)

    @torch.inference_mode()
    def states(self, text: Encoding) -> torch.Tensor:
        """[tokens, hidden]."""
        ids = torch.from_numpy(text.input_ids).long()[None]
        visible = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        visible[..., text.num_keys or ids.shape[1] :] = torch.finfo(torch.float32).min
        masks = {"full_attention": visible, "conv": None}
        states: torch.Tensor = self._model(ids, attention_mask=masks).last_hidden_state[0]
        return states
