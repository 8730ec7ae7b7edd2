"""Tiny EmbeddingGemma 2 models of random weights, as transformers saves the class, with a tokenizer like Gemma's and a
chat template that follows the published one's rules, and what the library's classes answer to texts and images."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageOps
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from bei.core import Float32Array
from bei_build.reference.held_out import held_out_texts
from tests.support.checkpoints import read_tensors, write_json, write_tensors

HIDDEN, WIDTH = 40, 24
PATCH, SIDE = 4, 3
STEP = PATCH * SIDE  # of the sides of images
TOKENS = 70  # of an image, at most
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>")
TEMPLATE = """{%- for m in messages if m.role == 'system' -%}{%- for part in m.content if part.type == 'text' -%}
{{ part.text }}{%- endfor -%}{%- endfor -%}
{%- for m in messages if m.role != 'system' -%}
{%- set written = m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
{%- for part in m.content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- elif part.type == 'image' and '<|image|>' not in written -%}<|image|>{%- endif -%}
{%- endfor -%}{%- endfor -%}"""
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
PROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor",
    **{"do_normalize": False, "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0], "resample": 3},
    **{"patch_size": PATCH, "pooling_kernel_size": SIDE, "max_soft_tokens": TOKENS, "image_seq_length": 280},
}


def save_embedding_gemma2(
    folder: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
    template: str | None = TEMPLATE,
) -> Path:
    """A checkpoint of random weights. ``text``, ``vision`` and ``processor``: settings of its configs."""
    tokenizer = save_tokenizer(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    sizes = {"patch_size": (vision or {}).get("patch_size", PATCH)}
    sizes["pooling_kernel_size"] = (vision or {}).get("pooling_kernel_size", SIDE)
    own = {**PROCESSOR, **sizes, **(processor or {})}
    write_json(
        folder / "processor_config.json", {"image_processor": own, "processor_class": "EmbeddingGemma2Processor"}
    )
    config = transformers.EmbeddingGemma2Config(
        text_config={
            **{"vocab_size": len(tokenizer), "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 3},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
            **{"global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window_pattern": 3},
            **{"hidden_size_per_layer_input": 12, "embedding_dim": WIDTH, "max_position_embeddings": 1024},
            **(text or {}),
        },
        vision_config={
            **{"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "patch_size": PATCH},
            **{"pooling_kernel_size": SIDE, "position_embedding_size": 256},
            **(vision or {}),
        },
        **{f"{kind}_token_id": tokenizer.convert_tokens_to_ids(f"<|{kind}|>") for kind in ("image", "video", "audio")},
        boi_token_id=tokenizer.convert_tokens_to_ids("<|image>"),
        eoi_token_id=tokenizer.convert_tokens_to_ids("<image|>"),
    )
    torch.manual_seed(0)
    model = transformers.EmbeddingGemma2Model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def add_audio(folder: Path) -> None:
    """An audio tower's config, and a tensor of it: what is not read."""
    raw = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**raw, "audio_config": {"model_type": "gemma4_audio"}})
    names = ("audio_tower.layers.0.weight", "embed_audio.embedding_projection.weight")
    write_tensors(folder, {**read_tensors(folder), **{name: torch.ones(2, 2) for name in names}})


def save_modules(folder: Path) -> Path:
    """sentence-transformers' files as it writes them for the class (6.2)."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    entry = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities = {
        **dict.fromkeys(("text", "image", "audio", "video"), entry),
        "message": {**entry, "format": "structured"},
    }
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": modalities,
            "module_output_name": "token_embeddings",
        },
    )
    (folder / "1_Pooling").mkdir()
    pooling = {"embedding_dimension": WIDTH, "pooling_mode": "mean", "include_prompt": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine", "prompts": PROMPTS})
    return folder


def save_published(folder: Path) -> Path:
    """A checkpoint as the repository has it: an audio tower beside, and sentence-transformers' files."""
    add_audio(save_embedding_gemma2(folder))
    return save_modules(folder)


def save_tokenizer(folder: Path) -> Any:
    """A tokenizer like Gemma's, of few pieces: blanks are characters, texts begin and end in tokens."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*_SPECIAL], show_progress=False)
    tokenizer.train_from_iterator([*held_out_texts()[:60]], trainer)
    ends = [(name, _SPECIAL.index(name)) for name in ("<bos>", "<eos>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> <bos> $B <eos>", special_tokens=ends
    )
    tokenizer_class: Any = transformers.PreTrainedTokenizerFast
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    made = tokenizer_class(tokenizer_object=tokenizer, additional_special_tokens=[*_SPECIAL[4:]], **named)
    made.save_pretrained(folder)
    return made


def image_inputs(folder: Path, files: Sequence[bytes]) -> dict[str, Any]:
    """What transformers' image processor on Pillow makes of ``files``."""
    processor_class: Any = transformers.Gemma4ImageProcessorPil
    settings = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    opened = [ImageOps.exif_transpose(Image.open(io.BytesIO(one))) for one in files]
    return dict(processor_class(**settings)(images=opened, return_tensors="pt"))


def library_rows(
    folder: Path, files: Sequence[bytes], texts: Sequence[str], prompt: str | None = None
) -> list[Float32Array]:
    """Unit vectors of images, then of texts, one at a time."""
    return library_vectors(folder, [*((one,) for one in files), *((one,) for one in texts)], prompt)


def library_vectors(
    folder: Path, given: Sequence[Sequence[str | bytes]], prompt: str | None = None
) -> list[Float32Array]:
    """Unit vectors of inputs that are texts and files of images in order: the mean of transformers'
    EmbeddingGemma2Model, of the text that the chat template writes behind ``prompt``, in which its processor puts
    tokens for each image."""
    auto: Any = transformers.AutoTokenizer
    model_class: Any = transformers.EmbeddingGemma2Model
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    config.audio_config = None
    tokenizer, model = auto.from_pretrained(folder), model_class.from_pretrained(folder, config=config)
    model.eval()
    system = [{"role": "system", "content": [{"type": "text", "text": prompt}]}] if prompt else []
    rows = []
    for parts in given:
        content = [{"type": "text", "text": one} if isinstance(one, str) else {"type": "image"} for one in parts]
        messages = [*system, {"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=TEMPLATE)
        inputs: dict[str, Any] = {}
        if files := [one for one in parts if isinstance(one, bytes)]:
            inputs = image_inputs(folder, files)
            counts = inputs.pop("num_soft_tokens_per_image").tolist()
            first, *rest = text.split("<|image|>")
            blocks = [f"<|image>{'<|image|>' * count}<image|>" for count in counts]
            text = first + "".join(block + one for block, one in zip(blocks, rest, strict=True))
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            states = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).last_hidden_state[0]
        vector: Float32Array = torch.nn.functional.normalize(states.mean(0), dim=0).numpy()
        rows.append(vector)
    return rows
