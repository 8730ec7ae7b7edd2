"""Tiny Qwen3-VL embedders of random weights, as transformers saves the class, with a tokenizer that ends texts and a
chat template, and what the library's classes answer to the turns that the model's own code writes."""

from __future__ import annotations

import io
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
from tests.support.checkpoints import write_json

HIDDEN = 48
PATCH = 8
STEP = 2 * PATCH  # of the sides of images
FEWEST, MOST = 4 * STEP**2, 40 * STEP**2
INSTRUCTION = "Represent the user's input."
END = "<|endoftext|>"
_SPECIAL = (
    *(END, "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE = """{%- macro shown(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{%- endmacro -%}
{%- if messages[0].role != 'system' -%}{{ "<|im_start|>system\\nDefault turn.<|im_end|>\\n" }}{%- endif -%}
{%- for message in messages -%}
{{ "<|im_start|>" + message.role + "\\n" + shown(message.content) + "<|im_end|>\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    **{"min_pixels": FEWEST, "max_pixels": MOST, "return_tensors": None, "pad_size": None},
    **{"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2},
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}


def save_qwen3_vl(
    folder: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    ends: bool = True,
    hf_class: str = "Qwen3VLForConditionalGeneration",
    words: Sequence[str] = (),
) -> Path:
    """A checkpoint of random weights. ``text`` and ``vision``: settings of their configs. ``ends``: the tokenizer puts
    a token behind texts. ``words``: are tokens."""
    tokenizer = save_tokenizer(folder, ends=ends, words=words)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_json(
        folder / "preprocessor_config.json", {**PROCESSOR, "patch_size": (vision or {}).get("patch_size", PATCH)}
    )
    config = transformers.Qwen3VLConfig(
        text_config={
            **{"vocab_size": len(tokenizer), "hidden_size": HIDDEN, "intermediate_size": 96, "head_dim": 12},
            **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"max_position_embeddings": 256, "rope_parameters": rope([2, 2, 2])},
            **(text or {}),
        },
        vision_config={
            **{"hidden_size": 32, "depth": 4, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": HIDDEN},
            **{"patch_size": PATCH, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
            **(vision or {}),
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = getattr(transformers, hf_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def rope(sections: list[int], theta: float = 10_000.0) -> dict[str, Any]:
    """Rotary positions whose axes take turns, in ``sections``."""
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, "mrope_interleaved": True}


def save_tokenizer(folder: Path, *, ends: bool, words: Sequence[str] = ()) -> Any:
    """A tokenizer like Qwen3-VL-Embedding's, of few pieces, which has ``words``."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*_SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    often = [word for word in words for _ in range(2000)]
    tokenizer.train_from_iterator([*held_out_texts()[:40], f"system user assistant {INSTRUCTION}", *often], trainer)
    if ends:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=f"$A {END}", pair=f"$A $B {END}", special_tokens=[(END, 0)]),
            ]
        )
    tokenizer_class: Any = transformers.PreTrainedTokenizerFast
    made = tokenizer_class(
        tokenizer_object=tokenizer, pad_token=END, eos_token="<|im_end|>", additional_special_tokens=[*_SPECIAL[1:]]
    )
    made.save_pretrained(folder)
    return made


def library_rows(
    folder: Path,
    files: Sequence[bytes],
    texts: Sequence[str],
    instruction: str | None = INSTRUCTION,
    *,
    generates: bool = True,
    bare: bool = False,
) -> list[Float32Array]:
    """Unit vectors of images, then of texts, one at a time: the last token's state of transformers' Qwen3VLModel,
    behind the system's ``instruction`` (None: the template's own), and with the beginning of the assistant's turn where
    it ``generates``. ``bare``: texts as they stand, without turns."""
    given: list[Sequence[str | bytes]] = [*((one,) for one in files), *((one,) for one in texts)]
    return library_vectors(folder, given, instruction, generates=generates, bare=bare)


def library_vectors(
    folder: Path,
    given: Sequence[Sequence[str | bytes]],
    instruction: str | None = INSTRUCTION,
    *,
    generates: bool = True,
    bare: bool = False,
) -> list[Float32Array]:
    """As ``library_rows``, of inputs that are texts and files of images in order."""
    auto: Any = transformers.AutoTokenizer
    images_class: Any = transformers.Qwen2VLImageProcessorPil
    model_class: Any = transformers.AutoModel
    tokenizer, reads, model = (of.from_pretrained(folder) for of in (auto, images_class, model_class))
    model.eval()
    system = [{"role": "system", "content": [{"type": "text", "text": instruction}]}] if instruction else []

    def state(parts: list[dict[str, str]], inputs: dict[str, Any], counts: list[int]) -> Float32Array:
        messages = [*system, {"role": "user", "content": parts}]
        turns = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generates)
        turns = parts[0]["text"] if bare else turns
        if counts:
            first, *rest = turns.split("<|image_pad|>")
            turns = first + "".join("<|image_pad|>" * count + one for count, one in zip(counts, rest, strict=True))
        ids = tokenizer(turns, return_tensors="pt")["input_ids"]
        types = (ids == model.config.image_token_id).int()
        asked = {"mm_token_type_ids": types, **inputs} if inputs else {}
        with torch.inference_mode():
            last = model(input_ids=ids, attention_mask=torch.ones_like(ids), **asked).last_hidden_state[0, -1]
        row: Float32Array = (last / last.norm()).numpy()
        return row

    rows = []
    for parts in given:
        inputs: dict[str, Any] = {}
        if opened := [ImageOps.exif_transpose(Image.open(io.BytesIO(one))) for one in parts if isinstance(one, bytes)]:
            inputs = dict(reads(images=opened, return_tensors="pt"))
        shown = [{"type": "text", "text": one} if isinstance(one, str) else {"type": "image"} for one in parts]
        rows.append(state(shown, inputs, (inputs["image_grid_thw"].prod(1) // 4).tolist() if inputs else []))
    return rows


# Of a reranker, as its own code has them (scripts/qwen3_vl_reranker.py).
NO, YES = "no", "yes"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
TASK = "Given a search query, retrieve relevant candidates that answer the query."
RERANKER: dict[str, Any] = {
    "task": "rerank",
    "score_tokens": (NO, YES),
    "rerank_prefix": f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n",
    "rerank_body": "<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}",
    "rerank_suffix": "<|im_end|>\n<|im_start|>assistant\n",
    "rerank_instruction": TASK,
}


def save_reranker(folder: Path) -> Path:
    """A checkpoint whose tokenizer ends no text, for pairs of some length."""
    return save_qwen3_vl(folder, text={"max_position_embeddings": 1024}, ends=False, words=(NO, YES))


def library_scores(
    folder: Path, pairs: Sequence[tuple[Sequence[str | bytes], Sequence[str | bytes]]], instruction: str = TASK
) -> list[float]:
    """The share of YES against NO behind each pair of a query and a document, texts and files of images in order, by
    transformers' Qwen3VLForConditionalGeneration, in the messages that the reranker's own code writes."""
    auto: Any = transformers.AutoTokenizer
    images_class: Any = transformers.Qwen2VLImageProcessorPil
    model_class: Any = transformers.Qwen3VLForConditionalGeneration
    tokenizer, reads, model = (of.from_pretrained(folder) for of in (auto, images_class, model_class))
    model.eval()
    no, yes = tokenizer.convert_tokens_to_ids([NO, YES])
    scores = []
    for pair in pairs:
        content: list[dict[str, str]] = [{"type": "text", "text": f"<Instruct>: {instruction}"}]
        files = []
        for name, side in zip(("<Query>:", "\n<Document>:"), pair, strict=True):
            content.append({"type": "text", "text": name})
            for part in side:
                content.append({"type": "text", "text": part} if isinstance(part, str) else {"type": "image"})
                files += [part] if isinstance(part, bytes) else []
        messages = [{"role": "system", "content": [{"type": "text", "text": _JUDGE}]}]
        messages.append({"role": "user", "content": content})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        asked: dict[str, Any] = {}
        if files:
            opened = [ImageOps.exif_transpose(Image.open(io.BytesIO(one))) for one in files]
            asked = dict(reads(images=opened, return_tensors="pt"))
            counts = (asked["image_grid_thw"].prod(1) // 4).tolist()
            first, *rest = text.split("<|image_pad|>")
            text = first + "".join("<|image_pad|>" * count + one for count, one in zip(counts, rest, strict=True))
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        if files:
            asked["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **asked).logits[0, -1]
        scores.append(float(torch.sigmoid(logits[yes] - logits[no])))
    return scores
