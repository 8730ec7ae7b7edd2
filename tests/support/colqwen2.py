"""Tiny ColQwen2 checkpoints of random weights, as transformers saves class and processor, and the library's answers."""

from __future__ import annotations

import io
import json
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

WIDTH, HIDDEN = 16, 48
PATCH = 8
STEP = 2 * PATCH  # of the sides of images
# Of processors: images of up to 40 blocks of four patches, and stripes.
FEWEST, MOST = 4 * STEP**2, 40 * STEP**2
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)


def save_colqwen2(
    folder: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    images: dict[str, Any] | None = None,
    second: bool = False,
    width: int = WIDTH,
) -> Path:
    """A checkpoint with a Qwen2-VL of random weights, or (``second``) a Qwen2.5-VL. ``text`` and ``vision``: settings
    of their configs; ``images`` of the image processor."""
    processor = save_processor(folder, **{"patch_size": (vision or {}).get("patch_size", PATCH), **(images or {})})
    tokenizer = processor.tokenizer
    whole: Any = transformers.Qwen2_5_VLConfig if second else transformers.Qwen2VLConfig
    own: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 4, "hidden_size": HIDDEN}
    if second:  # windows of 2 x 2 blocks of patches, so that images have several, and smaller ones at their ends
        own = {"hidden_size": 32, "depth": 4, "num_heads": 4, "intermediate_size": 44, "out_hidden_size": HIDDEN}
        own |= {"window_size": 2 * STEP, "fullatt_block_indexes": [1, 3]}
    config = transformers.ColQwen2Config(
        vlm_config=whole(
            text_config={
                **{"vocab_size": len(tokenizer), "hidden_size": HIDDEN, "intermediate_size": 96},
                **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
                **{"max_position_embeddings": 256, "rope_parameters": rope([2, 2, 2])},
                **(text or {}),
            },
            vision_config={**own, "patch_size": PATCH, **(vision or {})},
            image_token_id=processor.image_token_id,
            vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
            vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
            video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        ),
        embedding_dim=width,
    )
    torch.manual_seed(0)
    model = transformers.ColQwen2ForRetrieval(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def rope(sections: list[int], theta: float = 10_000.0) -> dict[str, Any]:
    """Rotary positions in ``sections``, one for each axis."""
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": sections}


def save_processor(folder: Path, **settings: Any) -> Any:
    """ColQwen2's processor, with a tokenizer like Qwen2's, of few pieces. ``settings`` of the image processor."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*_SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*held_out_texts()[:40], "Query: Describe the image."], trainer)
    tokenizer_class: Any = transformers.Qwen2Tokenizer
    made = tokenizer_class(
        tokenizer_object=tokenizer,
        **{"pad_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": None, "bos_token": None},
        additional_special_tokens=[*_SPECIAL[1:]],
    )
    images: Any = transformers.Qwen2VLImageProcessorPil
    own = images(**{"min_pixels": FEWEST, "max_pixels": MOST, **settings})
    processor: Any = transformers.ColQwen2Processor(own, made)
    processor.save_pretrained(folder)
    return processor


def as_colpali_engine(folder: Path, within: str = "") -> Path:
    """Give the checkpoint of transformers' class the form of colpali-engine's: the config of the model that it extends,
    names of tensors, with those of both towers ``within``, the image processor's file, and the tokenizer alone."""
    raw = json.loads((folder / "config.json").read_text())
    name = {"qwen2_vl": "ColQwen2", "qwen2_5_vl": "ColQwen2_5"}[raw["vlm_config"]["model_type"]]
    (folder / "config.json").write_text(json.dumps({**raw["vlm_config"], "architectures": [name]}))
    own = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    (folder / "preprocessor_config.json").write_text(json.dumps({**own, "processor_class": f"{name}_Processor"}))
    (folder / "processor_config.json").unlink()
    names = {"vlm.visual.": f"{within}visual.", "vlm.language_model.": f"{within}language_model."}
    if not within:
        names["vlm.language_model."] = "model."  # of the first versions
    names["embedding_proj_layer."] = "custom_text_proj."
    tensors = {}
    for stored, tensor in read_tensors(folder).items():
        start = next(start for start in names if stored.startswith(start))
        tensors[stored.replace(start, names[start], 1)] = tensor
    write_tensors(folder, tensors)
    return folder


def library_processor(folder: Path) -> Any:
    """ColQwen2Processor of the checkpoint, with images on Pillow."""
    processor_class: Any = transformers.ColQwen2Processor
    return processor_class.from_pretrained(folder)


def library_rows(folder: Path, files: Sequence[bytes], texts: Sequence[str]) -> list[Float32Array]:
    """Vectors of the tokens of images, then of queries, by transformers' processor and class, one at a time. The class
    gets an image's positions on three axes, which its language model counts and transformers 5 does not pass on."""
    model_class: Any = transformers.ColQwen2ForRetrieval
    model, processor = model_class.from_pretrained(folder).eval(), library_processor(folder)
    asked = []
    for content in files:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        one = dict(processor.process_images(images=image))
        types = (one["input_ids"] == processor.image_token_id).int()
        positions, _ = model.vlm.get_rope_index(
            one["input_ids"], mm_token_type_ids=types, image_grid_thw=one["image_grid_thw"]
        )
        asked.append({**one, "position_ids": positions})
    asked += [dict(processor.process_queries(text=[text])) for text in texts]
    with torch.inference_mode():
        return [model(**one).embeddings[0].numpy() for one in asked]
