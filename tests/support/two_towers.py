"""Tiny checkpoints with two towers, of random weights, as transformers saves them, and images to ask about."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageOps

from bei.core import Float32Array
from bei_build.reference.held_out_images import held_out_images
from tests.support.checkpoints import MAX_TOKENS, bpe_tokenizer

WIDTH = 24
SIDE, PATCH = 48, 16
CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE},
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SIGLIP_PROCESSOR = {
    "image_processor_type": "SiglipImageProcessor",
    "size": {"height": SIDE, "width": SIDE},
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
NAFLEX_PROCESSOR = {
    "image_processor_type": "Siglip2ImageProcessor",
    "do_convert_rgb": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_num_patches": 30,
    "patch_size": PATCH,
    "resample": 2,
}
VIT_PROCESSOR = {**SIGLIP_PROCESSOR, "image_processor_type": "ViTImageProcessor", "resample": 2}
BIT_PROCESSOR = {**CLIP_PROCESSOR, "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 56}}
DINOV3_PROCESSOR = {
    **VIT_PROCESSOR,
    "image_processor_type": "DINOv3ViTImageProcessorFast",
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
TEXTS = ["a cat on a mat", "hello world"]


def save_clip(folder: Path, **vision: Any) -> Path:
    """CLIP's two towers. ``vision``: settings of the image's config."""
    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": MAX_TOKENS}
    config = transformers.CLIPConfig(
        text_config={
            **text,
            **{"num_hidden_layers": 2, "num_attention_heads": 4},
            **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
        },
        vision_config={
            **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"image_size": SIDE, "patch_size": PATCH},
            **vision,
        },
        projection_dim=WIDTH,
    )
    torch.manual_seed(0)
    save(transformers.CLIPModel(config), folder)
    write_processor(folder, CLIP_PROCESSOR)
    return folder


def save_siglip(folder: Path, vocab_size: int = 300, **vision: Any) -> Path:
    """SigLIP's two towers. ``vision``: settings of the image's config."""
    shared = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.SiglipConfig(
        text_config={
            **shared,
            **{"vocab_size": vocab_size, "max_position_embeddings": MAX_TOKENS},
            **{"hidden_size": 32, "projection_size": WIDTH},
        },
        vision_config={**shared, "image_size": SIDE, "patch_size": PATCH, **vision},
    )
    torch.manual_seed(0)
    save(transformers.SiglipModel(config), folder)
    change_tokenizer(folder, model_input_names=["input_ids"])
    write_processor(folder, SIGLIP_PROCESSOR)
    return folder


def save_tower(folder: Path, name: str, size: tuple[int, int] | None = None, **settings: Any) -> Path:
    """A checkpoint of transformers' class ``name``, which reads images alone. ``size``: height and width that its
    processor makes. ``settings`` of its config."""
    processors = {
        **{"CLIP": CLIP_PROCESSOR, "Siglip": SIGLIP_PROCESSOR, "ViT": VIT_PROCESSOR, "Dinov2": BIT_PROCESSOR},
        "DINOv3": DINOV3_PROCESSOR,
    }
    processor = next(settings for kind, settings in processors.items() if name.startswith(kind))
    if size:
        key = "crop_size" if "crop_size" in processor else "size"
        processor = {**processor, key: {"height": size[0], "width": size[1]}}
    model_class = getattr(transformers, name)
    config = model_class.config_class(
        **{
            **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"image_size": SIDE, "patch_size": PATCH, "projection_dim": WIDTH},
            **settings,
        }
    )
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    write_processor(folder, processor)
    return folder


def tower_vectors(folder: Path, files: list[bytes], output: str) -> Float32Array:
    """Vectors of unit length by ``output`` of the checkpoint's own class, one image at a time, float32 [n, width]; of
    token states the first."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad():
        found = [getattr(model(**model_inputs(folder, content)), output) for content in files]
    rows = torch.cat([one[:, 0] if one.ndim == 3 else one for one in found])
    vectors: Float32Array = torch.nn.functional.normalize(rows, dim=-1).numpy()
    return vectors


def save_naflex(folder: Path, **processor: Any) -> Path:
    """SigLIP 2's two towers, for images in their own proportions. ``processor``: settings of the image processor."""
    shared = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Siglip2Config(
        text_config={
            **shared,
            **{"vocab_size": 300, "max_position_embeddings": MAX_TOKENS},
            **{"hidden_size": 32, "projection_size": WIDTH},
        },
        vision_config={**shared, "patch_size": PATCH, "num_patches": 16},
    )
    torch.manual_seed(0)
    save(transformers.Siglip2Model(config), folder)
    change_tokenizer(folder, model_input_names=["input_ids"], padding_side="right")  # as the repositories have it
    write_processor(folder, {**NAFLEX_PROCESSOR, **processor})
    return folder


def change_tokenizer(folder: Path, **settings: Any) -> None:
    """Change ``tokenizer_config.json``."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def save(model: Any, folder: Path) -> None:
    """``model`` with every parameter random, and a tokenizer."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer_class: Any = transformers.PreTrainedTokenizerFast
    tokenizer_class(tokenizer_object=bpe_tokenizer(), model_max_length=MAX_TOKENS, **special).save_pretrained(folder)


def write_processor(folder: Path, settings: dict[str, Any]) -> None:
    """``preprocessor_config.json``."""
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def model_inputs(folder: Path, content: bytes, *, exact: bool = False) -> Any:
    """What the library makes of a file for a model; ``exact``: with places in FP64, where it resizes in torch."""
    processor: Any = transformers.AutoImageProcessor
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    if settings["image_processor_type"].startswith("DINOv3"):
        return {"pixel_values": _resized_fractions(image, settings, torch.float64 if exact else torch.float32)}
    read = processor.from_pretrained(folder, backend="pil")
    return read(images=image, do_convert_rgb=True, return_tensors="pt")


def _resized_fractions(image: Image.Image, settings: dict[str, Any], dtype: torch.dtype) -> Any:
    """DINOv3ViTImageProcessor's steps, with the function of torch that torchvision's ``resize`` calls: transformers has
    it for torchvision alone. Its places in FP32 move pixel values of noise by up to 2e-4."""
    levels = torch.from_numpy(transformers.image_transforms.convert_to_rgb(image, return_numpy=True))
    fractions = levels.permute(2, 0, 1).unsqueeze(0).to(dtype) * settings["rescale_factor"]
    size, filter_name = settings["size"], {2: "bilinear", 3: "bicubic"}[settings["resample"]]
    resized = torch.nn.functional.interpolate(
        fractions, size=(size["height"], size["width"]), mode=filter_name, align_corners=False, antialias=True
    )
    mean, std = (torch.tensor(settings[name]).view(1, 3, 1, 1) for name in ("image_mean", "image_std"))
    return ((resized - mean) / std).float()


def pixel_values(folder: Path, content: bytes) -> Any:
    """Of ``model_inputs``, float32 [1, 3, height, width]."""
    return model_inputs(folder, content, exact=True)["pixel_values"]


def library_vectors(folder: Path, model_class: Any, files: list[bytes], texts: list[str]) -> Float32Array:
    """Vectors of unit length of images, then of texts, by transformers, one at a time: float32 [n, width]."""
    model: Any = model_class.from_pretrained(folder).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    filled = {"padding": "max_length"} if "siglip" in model.config.model_type else {}
    with torch.no_grad():
        found = [model.get_image_features(**model_inputs(folder, content)) for content in files]
        found += [
            model.get_text_features(**tokenizer(text, return_tensors="pt", truncation=True, **filled)) for text in texts
        ]
    rows = torch.cat([getattr(one, "pooler_output", one) for one in found])
    vectors: Float32Array = torch.nn.functional.normalize(rows, dim=-1).numpy()
    return vectors


def drawn_files() -> list[bytes]:
    """Images of every format, mode and proportion."""
    return [content for _, content in held_out_images()]


def data_url(content: bytes) -> str:
    """``content`` as a client sends it."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def png(width: int = 40, height: int = 30, color: tuple[int, int, int] = (200, 30, 60)) -> bytes:
    """An image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()
