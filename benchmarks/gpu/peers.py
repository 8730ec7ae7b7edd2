"""The peer: transformers' classes of the same shapes, padded, eager and compiled; random checkpoints of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.record import Skipped
from benchmarks.gpu.shapes import Shape

_BATCH = 32


def require(*packages: str) -> None:
    """Raise Skipped naming the first of ``packages`` that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"the package {package} is not installed")


def transformers_model(shape: Shape, device: torch.device, attention: str, *, is_compiled: bool) -> Any:
    """A random model of transformers' class for ``shape``, BF16."""
    require("transformers", *(("flash_attn",) if attention == "flash_attention_2" else ()))
    if is_compiled and device.type != "cuda":
        raise Skipped("compiling for CPUs takes minutes")
    config, model_class = _classes(shape)
    with torch.device(device):
        model = model_class._from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    model = model.to(device).eval()
    return torch.compile(model) if is_compiled else model


def padded_batches(lengths: list[int], vocab: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Random sequences of ``lengths``, sorted, padded in batches of 32."""
    rng, ordered = np.random.default_rng(1), sorted(lengths)
    batches = []
    for start in range(0, len(ordered), _BATCH):
        members = np.array(ordered[start : start + _BATCH])
        shape = len(members), int(members.max())
        ids = torch.from_numpy(rng.integers(3, vocab, shape))
        mask = torch.from_numpy((np.arange(shape[1]) < members[:, None]).astype(np.int64))
        batches.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
    return batches


def random_checkpoint(shape: Shape, folder: Path) -> int:
    """Save a random model of transformers' class for ``shape``, with a tokenizer of words w0, w1, ... that are a token
    each. Returns how many words there are."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(shape.sizes.vocab - 2)}
    special = {"[PAD]": len(words), "[UNK]": len(words) + 1}
    tokenizer = Tokenizer(models.WordLevel({**words, **special}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=shape.max_seq_len
    )
    config, model_class = _classes(shape)
    model_class(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return len(words)


def random_texts(lengths: list[int], num_words: int) -> list[str]:
    """A text for each of ``lengths``, of so many of the words of ``random_checkpoint``."""
    rng = np.random.default_rng(1)
    return [" ".join(f"w{word}" for word in rng.integers(0, num_words, length)) for length in lengths]


def _classes(shape: Shape) -> tuple[Any, Any]:
    """A config of these sizes, and the class of the model."""
    import transformers

    sizes = shape.sizes
    given = {"num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    optional = {name: size for name, size in given.items() if size}
    config_name, model_name = shape.hf
    config = getattr(transformers, config_name)(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.inner,
        max_position_embeddings=shape.max_seq_len + 2,  # RoBERTa never uses the first two
        **optional,
    )
    return config, getattr(transformers, model_name)
