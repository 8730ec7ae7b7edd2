"""Tiny Qwen2-VL and Qwen2.5-VL embedders of random weights, as transformers saves the classes, and what the library's
classes answer to the turns that gme's own code writes (gme_inference.py)."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageOps

from bei.core import Float32Array
from tests.support.checkpoints import read_tensors, write_json, write_tensors
from tests.support.colqwen2 import rope
from tests.support.qwen3_vl import END, HIDDEN, PATCH, PROCESSOR, STEP, TEMPLATE, save_tokenizer

SYSTEM = "You are a helpful assistant."
# Of gme's config.json; images have as many tokens as tests of others.
GME = {
    "auto_map": {"AutoConfig": "modeling_gme_qwen2vl.GmeQwen2VLConfig", "AutoModel": "modeling_gme_qwen2vl.GmeQwen2VL"},
    **{"min_image_tokens": 4, "max_image_tokens": 40, "max_length": 200},
}


def save_qwen2_vl(
    folder: Path,
    *,
    second: bool = False,
    gme: bool = False,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    hf_class: str = "",
    words: Sequence[str] = (),
) -> Path:
    """A checkpoint of random weights, of Qwen2-VL or (``second``) Qwen2.5-VL. ``gme``: which names gme's own code.
    ``text`` and ``vision``: settings of their configs. ``words``: are tokens."""
    tokenizer = save_tokenizer(folder, ends=False, words=words)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_json(
        folder / "preprocessor_config.json", {**PROCESSOR, "patch_size": (vision or {}).get("patch_size", PATCH)}
    )
    whole: Any = transformers.Qwen2_5_VLConfig if second else transformers.Qwen2VLConfig
    own: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 4, "hidden_size": HIDDEN}
    if second:  # windows of 2 x 2 blocks of patches, so that images have several, and smaller ones at their ends
        own = {"hidden_size": 32, "depth": 4, "num_heads": 4, "intermediate_size": 44, "out_hidden_size": HIDDEN}
        own |= {"window_size": 2 * STEP, "fullatt_block_indexes": [1, 3]}
    config = whole(
        text_config={
            **{"vocab_size": len(tokenizer), "hidden_size": HIDDEN, "intermediate_size": 96},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"max_position_embeddings": 512, "rope_parameters": rope([2, 2, 2])},
            **(text or {}),
        },
        vision_config={**own, "patch_size": PATCH, **(vision or {})},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    name = hf_class or ("Qwen2_5_VLForConditionalGeneration" if second else "Qwen2VLForConditionalGeneration")
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    if gme:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **GME}))
    return folder


def save_gme(folder: Path) -> Path:
    """A checkpoint that names gme's own code."""
    return save_qwen2_vl(folder, gme=True)


def save_ranker(folder: Path) -> Path:
    """A checkpoint of jina-reranker-m0's class, which has two layers on the last token's state."""
    save_qwen2_vl(folder, text={"max_position_embeddings": 1024})
    path = folder / "config.json"
    own = {"architectures": ["JinaVLForRanking"], "auto_map": {"AutoModel": "modeling.JinaVLForRanking"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    torch.manual_seed(1)
    shapes = {"0.weight": (HIDDEN, HIDDEN), "0.bias": (HIDDEN,), "2.weight": (1, HIDDEN), "2.bias": (1,)}
    write_tensors(
        folder,
        {**read_tensors(folder), **{f"score.{name}": torch.randn(*shape) * 0.3 for name, shape in shapes.items()}},
    )
    return folder


def library_scores(folder: Path, pairs: Sequence[tuple[str | bytes, str | bytes]]) -> list[float]:
    """The scores of pairs of a query and a document, texts or files of images, as jina-reranker-m0's own code computes
    them (modeling.py), one pair at a time, on the states of transformers' class."""
    auto: Any = transformers.AutoTokenizer
    images_class: Any = transformers.Qwen2VLImageProcessorPil
    tokenizer, reads = auto.from_pretrained(folder), images_class.from_pretrained(folder)
    step = reads.patch_size * reads.merge_size
    reads.size = {"shortest_edge": 4 * step**2, "longest_edge": 768 * step**2}
    model_class: Any = transformers.Qwen2VLModel
    model = model_class.from_pretrained(folder).eval()
    tensors, found = read_tensors(folder), []
    for query, document in pairs:
        asked: dict[str, Any] = {}
        texts, counts = [], []
        sides = (document, query)
        if opened := [ImageOps.exif_transpose(Image.open(io.BytesIO(one))) for one in sides if isinstance(one, bytes)]:
            asked = dict(reads(images=opened, return_tensors="pt"))
            counts = (asked["image_grid_thw"].prod(1) // 4).tolist()
        for name, side in zip(("Document", "Query"), sides, strict=True):
            if isinstance(side, bytes):
                pads = "<|image_pad|>" * counts.pop(0)
                side = f"<|vision_start|>{pads}<|vision_end|>"
            texts.append(f"**{name}**:\n{side}")
        ids = tokenizer("\n".join(texts), return_tensors="pt")["input_ids"]
        ids = torch.cat([ids, torch.tensor([[100]])], 1)
        if asked:
            asked["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        with torch.inference_mode():
            state = model(input_ids=ids, attention_mask=torch.ones_like(ids), **asked).last_hidden_state[0, -1]
            state = torch.relu(tensors["score.0.weight"] @ state + tensors["score.0.bias"])
            logit = tensors["score.2.weight"] @ state + tensors["score.2.bias"]
        found.append(float(torch.sigmoid(logit - 2.65)))
    return found


def library_rows(
    folder: Path, files: Sequence[bytes], texts: Sequence[str], instruction: str = SYSTEM, *, as_text: bool = False
) -> list[Float32Array]:
    """``library_vectors`` of images, then of texts."""
    given: list[Sequence[str | bytes]] = [*((one,) for one in files), *((one,) for one in texts)]
    return library_vectors(folder, given, instruction, as_text=as_text)


def gme_rows(folder: Path, files: Sequence[bytes], texts: Sequence[str]) -> list[Float32Array]:
    """``library_rows`` of a checkpoint that names gme's own code."""
    return library_rows(folder, files, texts, as_text=True)


def library_vectors(
    folder: Path, inputs: Sequence[Sequence[str | bytes]], instruction: str = SYSTEM, *, as_text: bool = False
) -> list[Float32Array]:
    """Unit vectors of inputs, each texts and files of images in order: the last token's state of transformers' class,
    one input at a time. ``as_text``: it is given no positions, and counts an image's tokens as those of a text."""
    auto: Any = transformers.AutoTokenizer
    images_class: Any = transformers.Qwen2VLImageProcessorPil
    raw = json.loads((folder / "config.json").read_text())
    model_class: Any = transformers.Qwen2_5_VLModel if "2_5" in raw["model_type"] else transformers.Qwen2VLModel
    tokenizer, reads = auto.from_pretrained(folder), images_class.from_pretrained(folder)
    model = model_class.from_pretrained(folder).eval()
    if "min_image_tokens" in raw:
        size = raw["vision_config"]["patch_size"] * 2
        reads.size = {
            "shortest_edge": raw["min_image_tokens"] * size**2,
            "longest_edge": raw["max_image_tokens"] * size**2,
        }
    rows = []
    for parts in inputs:
        shown, asked = "", {}
        opened = [ImageOps.exif_transpose(Image.open(io.BytesIO(one))) for one in parts if isinstance(one, bytes)]
        counts: list[int] = []
        if opened:
            asked = dict(reads(images=opened, return_tensors="pt"))
            counts = (asked["image_grid_thw"].prod(1) // 4).tolist()
        for part in parts:
            pads = "" if isinstance(part, str) else "<|image_pad|>" * counts.pop(0)
            shown += part if isinstance(part, str) else f"<|vision_start|>{pads}<|vision_end|>"
        turns = f"<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n{shown}<|im_end|>\n"
        ids = tokenizer(f"{turns}<|im_start|>assistant\n{END}", return_tensors="pt")["input_ids"]
        if opened:
            asked["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        if as_text:
            asked["position_ids"] = torch.arange(ids.shape[1]).expand(3, 1, -1)
        with torch.inference_mode():
            last = model(input_ids=ids, attention_mask=torch.ones_like(ids), **asked).last_hidden_state[0, -1]
        rows.append((last / last.norm()).numpy())
    return rows
