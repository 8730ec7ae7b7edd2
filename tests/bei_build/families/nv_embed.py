"""NV-Embed: random checkpoints as its authors' code saves them, and that code's computation in torch.

After modeling_nvembed.py of nvidia/NV-Embed-v2, as copies of it are public.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.support.checkpoints import read_tensors, write_json, write_tensors

HEADS, HEAD_DIM, LATENTS = 3, 10, 7
_BLOCKS = "latent_attention_model.cross_attend_blocks"
functional = torch.nn.functional


def around(folder: Path, **changes: Any) -> Path:
    """Add latent attention with random weights to the saved Mistral in ``folder``; texts have only BOS, as Llama's
    tokenizer puts it. ``changes`` apply to config.json."""
    text = json.loads((folder / "config.json").read_text())
    width = text["hidden_size"]
    tensors = {f"embedding_model.{name}": tensor for name, tensor in read_tensors(folder).items()}
    write_tensors(folder, {**tensors, **_latent_tensors(width)})
    latent = {"num_latents_value": LATENTS, "num_cross_heads": HEADS, "cross_dim_head": HEAD_DIM, "latent_dim": width}
    config = {
        "architectures": ["NVEmbedModel"],
        "auto_map": {"AutoConfig": "configuration_nvembed.NVEmbedConfig", "AutoModel": "modeling_nvembed.NVEmbedModel"},
        "model_type": "nvembed",
        "hidden_size": width,
        "padding_side": "right",
        "is_mask_instruction": True,
        "add_eos": True,
        "text_config": {**text, "model_type": "bidir_mistral", "sliding_window": 3},  # the code ignores these
        "latent_attention_config": {**latent, "hidden_dim": width, "output_normalize": True},
        **changes,
    }
    write_json(folder / "config.json", config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", special_tokens=[bos])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    return folder


def _latent_tensors(width: int) -> dict[str, torch.Tensor]:
    generator, inner = torch.Generator().manual_seed(3), HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        f"{_BLOCKS}.0.fn.to_q.weight": (inner, width),
        f"{_BLOCKS}.0.fn.to_kv.weight": (2 * inner, width),
        f"{_BLOCKS}.0.fn.to_out.weight": (width, inner),
        f"{_BLOCKS}.1.fn.net.0.weight": (8 * width, width),
        f"{_BLOCKS}.1.fn.net.0.bias": (8 * width,),
        f"{_BLOCKS}.1.fn.net.2.weight": (width, 4 * width),
        f"{_BLOCKS}.1.fn.net.2.bias": (width,),
        "latent_attention_model.latents": (LATENTS, width),
    }
    tensors = {name: 0.2 * torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    for norm in ("0.norm", "0.norm_context", "1.norm"):
        tensors[f"{_BLOCKS}.{norm}.weight"] = 1 + 0.2 * torch.randn(width, generator=generator)
        tensors[f"{_BLOCKS}.{norm}.bias"] = 0.2 * torch.randn(width, generator=generator)
    return tensors


@torch.no_grad()
def latent_attention(folder: Path, states: torch.Tensor) -> torch.Tensor:
    """The code's result for a text's last ``states``, [tokens, width], before the mean."""
    tensors = read_tensors(folder)

    def get(name: str) -> torch.Tensor:
        return tensors[f"{_BLOCKS}.{name}"]

    def norm(rows: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(rows, rows.shape[-1:], get(f"{name}.weight"), get(f"{name}.bias"))

    latents = norm(tensors["latent_attention_model.latents"], "0.norm_context")
    key, value = (latents @ get("0.fn.to_kv.weight").T).chunk(2, dim=-1)
    query = norm(states, "0.norm") @ get("0.fn.to_q.weight").T
    heads = []
    for index in range(HEADS):
        part = slice(index * HEAD_DIM, (index + 1) * HEAD_DIM)
        heads.append((query[:, part] @ key[:, part].T * HEAD_DIM**-0.5).softmax(-1) @ value[:, part])
    states = torch.cat(heads, dim=-1) @ get("0.fn.to_out.weight").T + states
    inner = norm(states, "1.norm") @ get("1.fn.net.0.weight").T + get("1.fn.net.0.bias")
    rows, gates = inner.chunk(2, dim=-1)
    return (rows * functional.gelu(gates)) @ get("1.fn.net.2.weight").T + get("1.fn.net.2.bias") + states
