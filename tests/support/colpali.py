"""Tiny ColPali checkpoints of random weights, as transformers saves class and processor, and the library's answers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageOps
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from bei.core import Float32Array
from bei_build.reference.held_out import held_out_texts
from tests.support.checkpoints import read_tensors, write_tensors
from tests.support.two_towers import PATCH, SIDE

WIDTH, HIDDEN = 16, 48
NUM_PATCHES = (SIDE // PATCH) ** 2
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
_NUM_EXTRA = 1152  # PaliGemma's tokens of places and segments, which its processor adds


def save_colpali(folder: Path, *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> Path:
    """A checkpoint with a Gemma and a SigLIP of random weights. ``text`` and ``vision``: settings of their configs."""
    processor = save_processor(folder, (SIDE // (vision or {}).get("patch_size", PATCH)) ** 2)
    config = transformers.ColPaliConfig(
        vlm_config=transformers.PaliGemmaConfig(
            text_config={
                **{"model_type": "gemma", "vocab_size": len(processor.tokenizer), "hidden_size": HIDDEN},
                **{"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
                **{"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128},
                **(text or {}),
            },
            vision_config={
                **{"model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 64},
                **{"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH},
                **{"vision_use_head": False, **(vision or {})},
            },
            image_token_index=processor.image_token_id,
            projection_dim=HIDDEN,
            hidden_size=HIDDEN,
        ),
        embedding_dim=WIDTH,
    )
    torch.manual_seed(0)
    model = transformers.ColPaliForRetrieval(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def save_processor(folder: Path, num_patches: int) -> Any:
    """ColPali's processor of images with so many patches, with a tokenizer like Gemma's, of few pieces."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\n"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator([*held_out_texts()[:40], "Question: Describe the image."], trainer)
    tokenizer_class: Any = transformers.GemmaTokenizer
    made = tokenizer_class(
        tokenizer_object=tokenizer,
        **{"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
    )
    images: Any = transformers.SiglipImageProcessorPil
    own = images(size={"height": SIDE, "width": SIDE}, resample=3)
    own.image_seq_length = num_patches
    processor: Any = transformers.ColPaliProcessor(own, made)
    processor.save_pretrained(folder)
    return processor


def library_processor(folder: Path) -> Any:
    """ColPaliProcessor of the checkpoint."""
    processor_class: Any = transformers.ColPaliProcessor
    return processor_class.from_pretrained(folder)


def rename_tensors(folder: Path, before: str, after: str) -> Path:
    """The checkpoint with names that begin with ``after`` in place of ``before``, and a language model's head."""
    stored = read_tensors(folder)
    tensors = {name.replace(before, after) if name.startswith(before) else name: stored[name] for name in stored}
    assert tensors.keys() != stored.keys()
    word = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors["vlm.language_model.lm_head.weight"] = tensors[word].clone()
    return write_tensors(folder, tensors)


def library_rows(folder: Path, files: Sequence[bytes], texts: Sequence[str]) -> list[Float32Array]:
    """Vectors of the tokens of images, then of queries, by transformers' processor and class, one at a time."""
    model_class: Any = transformers.ColPaliForRetrieval
    model, processor = model_class.from_pretrained(folder).eval(), library_processor(folder)
    images = (ImageOps.exif_transpose(Image.open(io.BytesIO(content))) for content in files)
    asked = [processor.process_images(images=image) for image in images]
    asked += [processor.process_queries(text=[text]) for text in texts]
    with torch.inference_mode():
        return [model(**{n: v for n, v in one.items() if n != "labels"}).embeddings[0].numpy() for one in asked]
