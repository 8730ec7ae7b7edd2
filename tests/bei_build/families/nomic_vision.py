"""nomic-embed-vision: random checkpoints, and its own code's computation in torch, one image at a time.

Written from nomic-ai/nomic-bert-2048 (modeling_hf_nomic_bert.py); keys of config.json are from memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bei.core import Float32Array
from tests.support.checkpoints import read_tensors, write_tensors
from tests.support.two_towers import CLIP_PROCESSOR, PATCH, SIDE, pixel_values, write_processor

WIDTH, HEADS, LAYERS, INNER = 32, 4, 2, 256
functional = torch.nn.functional


def config_of(**changes: Any) -> dict[str, Any]:
    """config.json, with the keys of nomic-embed-vision-v1.5."""
    return {
        "activation_function": "swiglu",
        "architectures": ["NomicVisionModel"],
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicVisionModel"},
        "causal": False,
        "img_size": SIDE,
        "layer_norm_epsilon": 1e-06,
        "learned_pos_embedding": False,
        "mask_token": False,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "model_type": "nomic_bert",
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_inner": 200,
        "n_layer": LAYERS,
        "norm_mlp": True,
        "num_channels": 3,
        "patch_embed_bias": True,
        "patch_size": PATCH,
        "prenorm": True,
        "qkv_proj_bias": True,
        "ref_feat_shape": [5, 5],
        "rotary_emb_fraction": 0.0,
        "use_pos_embed": True,
        "use_rms_norm": False,
        "use_rotary_pos_emb": True,
        **changes,
    }


def save(folder: Path, **changes: Any) -> Path:
    """A checkpoint of random weights."""
    folder.mkdir(exist_ok=True)
    config = config_of(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    write_processor(folder, CLIP_PROCESSOR)
    count, numbers = 1 + (SIDE // PATCH) ** 2, 3 * PATCH**2
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.cls_token": (1, 1, WIDTH),
        "embeddings.pos_embed": (1, count, WIDTH),
        "selector.attn.latent": (1, 1, WIDTH),
        **_linear("embeddings.proj", WIDTH, numbers),
        **_linear("selector.attn.Wq", WIDTH, WIDTH),
        **_linear("selector.attn.Wkv", 2 * WIDTH, WIDTH),
        **_linear("selector.attn.out_proj", WIDTH, WIDTH),
        **_norm("selector.norm1", WIDTH),
        **_mlp("selector.mlp"),
    }
    for layer in (f"layers.{index}" for index in range(LAYERS)):
        shapes |= _linear(f"{layer}.attn.Wqkv", 3 * WIDTH, WIDTH) | _linear(f"{layer}.attn.out_proj", WIDTH, WIDTH)
        shapes |= _norm(f"{layer}.norm1", WIDTH) | _norm(f"{layer}.norm2", WIDTH) | _mlp(f"{layer}.mlp")
        shapes |= _norm(f"{layer}.mlp.norm", INNER) if config["norm_mlp"] else {}
    generator = torch.Generator().manual_seed(0)
    write_tensors(folder, {name: _tensor(name, shape, generator) for name, shape in shapes.items()})
    return folder


def _tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values: torch.Tensor = torch.randn(shape, generator=generator) * min(0.3, shape[-1] ** -0.5)
    return values + 1 if "norm" in name and name.endswith("weight") else values


def _linear(name: str, out: int, entering: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, entering), f"{name}.bias": (out,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _mlp(name: str) -> dict[str, tuple[int, ...]]:
    return (
        _linear(f"{name}.fc11", INNER, WIDTH)
        | _linear(f"{name}.fc12", INNER, WIDTH)
        | _linear(f"{name}.fc2", WIDTH, INNER)
    )


class Oracle:
    """The model's own code for one image at a time."""

    def __init__(self, folder: Path) -> None:
        self._tensors = read_tensors(folder)
        self._config = json.loads((folder / "config.json").read_text())
        self._folder = folder

    def vectors(self, files: list[bytes]) -> Float32Array:
        """Of ``files``, at unit length, float32 [n, width]."""
        rows = [self._vector(pixel_values(self._folder, content)[0]) for content in files]
        found: Float32Array = functional.normalize(torch.stack(rows), dim=-1).numpy()
        return found

    def _linear(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return functional.linear(value, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def _norm(self, name: str, value: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        weight, bias = (self._tensors[f"{name}.{kind}"] for kind in ("weight", "bias"))
        return functional.layer_norm(value, value.shape[-1:], weight, bias, eps)

    def _mlp(self, name: str, value: torch.Tensor, *, is_normed: bool) -> torch.Tensor:
        inner = self._linear(f"{name}.fc11", value) * functional.silu(self._linear(f"{name}.fc12", value))
        return self._linear(f"{name}.fc2", self._norm(f"{name}.norm", inner, 1e-5) if is_normed else inner)

    def _turned(self, heads: torch.Tensor) -> torch.Tensor:
        """[heads, tokens, head_dim], all but the first token rotated by row and column."""
        if not self._config["use_rotary_pos_emb"]:
            return heads
        side, quarter = SIDE // PATCH, heads.shape[-1] // 4
        bands = 1.0 / (10000.0 ** (torch.arange(quarter) / quarter))
        places = torch.arange(side, dtype=torch.float32) / side * self._config["ref_feat_shape"][0]
        rows, columns = torch.meshgrid(places, places, indexing="ij")
        angles = torch.stack([rows, columns], -1).unsqueeze(-1) * bands
        angles = angles.reshape(side * side, -1).repeat_interleave(2, -1)
        first, rest = heads[:, :1], heads[:, 1:]
        swapped = torch.stack([-rest[..., 1::2], rest[..., ::2]], -1).reshape(rest.shape)
        return torch.cat([first, rest * angles.cos() + swapped * angles.sin()], 1)

    def _vector(self, pixels: torch.Tensor) -> torch.Tensor:
        side = SIDE // PATCH
        cut = pixels.reshape(3, side, PATCH, side, PATCH).permute(1, 3, 0, 2, 4).reshape(side * side, -1)
        states = torch.cat([self._tensors["embeddings.cls_token"][0], self._linear("embeddings.proj", cut)])
        states = states + self._tensors["embeddings.pos_embed"][0]
        for layer in (f"layers.{index}" for index in range(LAYERS)):
            states = states + self._attention(layer, self._norm(f"{layer}.norm1", states))
            entering = self._norm(f"{layer}.norm2", states)
            states = states + self._mlp(f"{layer}.mlp", entering, is_normed=self._config["norm_mlp"])
        attended = self._norm("selector.norm1", self._attended(states))
        return (states + self._mlp("selector.mlp", attended, is_normed=False))[0]

    def _attention(self, layer: str, value: torch.Tensor) -> torch.Tensor:
        joined = self._linear(f"{layer}.attn.Wqkv", value).view(len(value), 3, HEADS, -1).permute(1, 2, 0, 3)
        query, key, attended = self._turned(joined[0]), self._turned(joined[1]), joined[2]
        found = functional.scaled_dot_product_attention(query, key, attended)
        return self._linear(f"{layer}.attn.out_proj", found.transpose(0, 1).flatten(1))

    def _attended(self, states: torch.Tensor) -> torch.Tensor:
        query = self._linear("selector.attn.Wq", self._tensors["selector.attn.latent"][0]).view(1, HEADS, -1)
        key, value = self._linear("selector.attn.Wkv", states).view(len(states), 2, HEADS, -1).unbind(1)
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        found = functional.scaled_dot_product_attention(query, key, value)
        return self._linear("selector.attn.out_proj", found.transpose(0, 1).flatten(1))
