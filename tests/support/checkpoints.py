"""Random tiny checkpoints, saved by the Hugging Face classes as a user's would be. Nothing is downloaded.

Every parameter is random, biases and norms too: an engine that mixes two of them up gives other vectors.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

MAX_TOKENS = 48  # the longest sequence these checkpoints take
HIDDEN = 32
WEIGHTS = "model.safetensors"

_WORDS = ["the", "cat", "sat", "on", "a", "mat", "hello", "world", "##s", "##ing", "##ed"]
_PUNCTUATION = list("!?.,;:'\"()-_/@#0123456789")


def wordpiece_tokenizer() -> Tokenizer:
    """As BERT's: lower case, accents stripped, ``[CLS] a [SEP] b [SEP]`` with token types 0 and 1."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = list(string.ascii_lowercase)
    words = [*special, *_PUNCTUATION, *letters, *(f"##{letter}" for letter in letters), *_WORDS[:4], *_WORDS[5:]]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def bpe_tokenizer() -> Tokenizer:
    """As RoBERTa's: byte-level BPE (any text has tokens), ``<s> a </s></s> b </s>``, case kept."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("t", "he"), ("Ġ", "the"), ("i", "n")]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


def unigram_tokenizer() -> Tokenizer:
    """As XLM-RoBERTa's: SentencePiece unigram, ``<s> a </s></s> b </s>``, case kept."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = ["▁", *string.ascii_letters, *_PUNCTUATION, "▁the", "▁cat", "ing", "é", "ß", "世", "界"]
    scored = [(piece, 0.0) for piece in special] + [(piece, -2.0 - rank / 64) for rank, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=3))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


@dataclass(frozen=True)
class _Family:
    class_prefix: str
    tokenizer: Callable[[], Tokenizer]
    settings: Mapping[str, Any]


_BERT_SHAPE = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": MAX_TOKENS,
}
# Positions are counted from pad_token_id + 1 = 2, so the table has two rows more than a sequence has tokens.
_ROBERTA_SHAPE = {**_BERT_SHAPE, "max_position_embeddings": MAX_TOKENS + 2, "pad_token_id": 1, "type_vocab_size": 1}
_DISTILBERT_SHAPE = {
    "dim": HIDDEN,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": MAX_TOKENS,
}
_FAMILIES = {
    "bert": _Family("Bert", wordpiece_tokenizer, _BERT_SHAPE),
    "roberta": _Family("Roberta", bpe_tokenizer, _ROBERTA_SHAPE),
    "xlm-roberta": _Family("XLMRoberta", unigram_tokenizer, _ROBERTA_SHAPE),
    "distilbert": _Family("DistilBert", wordpiece_tokenizer, _DISTILBERT_SHAPE),
}
FAMILIES = tuple(_FAMILIES)


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """``tokenizer`` with files by which transformers takes it as it stands, and gives its token types: a family's own
    class would rebuild its own pipeline around the vocabulary."""
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ["input_ids", "token_type_ids", "attention_mask"]
    write_json(
        folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
    )


def save_checkpoint(
    folder: Path,
    family: str = "bert",
    *,
    task: str = "Model",
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Save a random checkpoint of ``family`` with its tokenizer.json into ``folder``; returns ``folder``.

    ``task`` is the end of the class name (``ForMaskedLM``); ``config`` overrides the tiny shape.
    """
    kind = _FAMILIES[family]
    tokenizer = kind.tokenizer()
    config = {"vocab_size": tokenizer.get_vocab_size(), **kind.settings, **config}
    hf_config = getattr(transformers, f"{kind.class_prefix}Config")(**config)
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = getattr(transformers, kind.class_prefix + task)(hf_config)
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if _is_norm_weight(name) else 0.0, std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def save_static(
    folder: Path, writer: str = "model2vec", tokenizer: Callable[[], Tokenizer] = wordpiece_tokenizer, **config: Any
) -> Path:
    """Save random static embeddings as ``writer`` (model2vec or sentence-transformers) does; returns ``folder``.

    ``config`` goes on top of model2vec's config.json. Without a Normalize module: ``add_static_modules`` lists others.
    """
    home = folder if writer == "model2vec" else folder / "0_StaticEmbedding"
    home.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(home / "tokenizer.json"))
    generator = torch.Generator().manual_seed(21)
    table = torch.randn(tokenizer().get_vocab_size(), HIDDEN, generator=generator)
    write_tensors(home, {"embeddings" if writer == "model2vec" else "embedding.weight": table})
    if writer == "model2vec":
        settings = {"model_type": "model2vec", "architectures": ["StaticModel"], "hidden_dim": 7, "seq_length": 1000000}
        write_json(folder / "config.json", {**settings, **config})
    return add_static_modules(folder, home.relative_to(folder).as_posix())


def share_rows(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    mapping: torch.dtype | None = torch.int64,
    weights: torch.dtype | None = torch.float32,
) -> Path:
    """Give the tokens of a saved model2vec model few rows, as ``quantize_model`` of model2vec 0.10.0 stores them.

    None leaves a tensor out; without ``mapping`` each token keeps its own row. Returns ``folder``.
    """
    table = read_tensors(folder)["embeddings"]
    num_tokens, num_rows = len(table), 20 if mapping else len(table)
    generator = torch.Generator().manual_seed(23)
    rows = table[:num_rows] * (127 / table.abs().max() if dtype == torch.int8 else 1)
    tensors = {"embeddings": rows.round().to(dtype) if dtype == torch.int8 else rows.to(dtype)}
    if mapping:
        tensors["mapping"] = torch.randint(num_rows, (num_tokens,), generator=generator).to(mapping)
        change_config(folder, vocabulary_quantization=num_rows)
    if weights:
        tensors["weights"] = torch.rand(num_tokens, generator=generator).to(weights)
    change_config(folder, embedding_dtype=str(dtype).removeprefix("torch."))
    return write_tensors(folder, tensors)


def add_static_modules(folder: Path, home: str = ".", *tail: str) -> Path:
    """Write modules.json: a StaticEmbedding in ``home``, then modules called ``tail``; returns ``folder``."""
    entries = [("StaticEmbedding", home), *((kind, f"{index}_{kind}") for index, kind in enumerate(tail, start=1))]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(entries)
    ]
    write_json(folder / "modules.json", modules)
    return folder


def _is_norm_weight(name: str) -> bool:
    return name.lower().endswith(("layernorm.weight", "layer_norm.weight"))


@dataclass(frozen=True)
class Dense:
    """A module behind the pooling. ``activation`` is the name of torch's class."""

    out_features: int
    activation: str = "Tanh"
    bias: bool = True


@dataclass(frozen=True)
class Normalize:
    """A module without settings."""


# Our names of the pooling modes: (sentence-transformers' name, its boolean up to version 5).
POOLINGS = {
    "cls": ("cls", "pooling_mode_cls_token"),
    "max": ("max", "pooling_mode_max_tokens"),
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "mean_sqrt_len": ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens"),
    "weighted_mean": ("weightedmean", "pooling_mode_weightedmean_tokens"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
}


def add_modules(
    folder: Path,
    pooling: Sequence[str] = ("mean",),
    tail: Sequence[Dense | Normalize] = (),
    *,
    booleans: bool = True,
    hidden: int = HIDDEN,
) -> Path:
    """Write modules.json, the pooling's config and the tail's random weights beside a checkpoint; returns ``folder``.

    ``booleans``: the pooling's format up to sentence-transformers 5 (then several modes are concatenated in the order
    of ``POOLINGS``), else the one after it.
    """
    names = ["Transformer", "Pooling", *(type(layer).__name__ for layer in tail)]
    paths = ["", *(f"{index}_{name}" for index, name in enumerate(names) if index)]
    write_json(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (name, path) in enumerate(zip(names, paths, strict=True))
        ],
    )
    if booleans:
        modes: dict[str, object] = {flag: mode in pooling for mode, (_, flag) in POOLINGS.items()}
    else:
        modes = {
            "pooling_mode": [POOLINGS[mode][0] for mode in pooling] if len(pooling) > 1 else POOLINGS[pooling[0]][0]
        }
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden, **modes})
    width = hidden * len(pooling)
    for path, layer in zip(paths[2:], tail, strict=True):
        if isinstance(layer, Dense):
            save_dense(folder / path, width, layer)
            width = layer.out_features
    return folder


def save_dense(folder: Path, in_features: int, layer: Dense) -> dict[str, torch.Tensor]:
    """Save a Dense module with random weights into ``folder``; returns its tensors."""
    module = "linear" if layer.activation == "Identity" else "activation"
    config = {
        "in_features": in_features,
        "out_features": layer.out_features,
        "bias": layer.bias,
        "activation_function": f"torch.nn.modules.{module}.{layer.activation}",
    }
    write_json(folder / "config.json", config)
    generator = torch.Generator().manual_seed(30 + layer.out_features)
    tensors = {"linear.weight": torch.randn(layer.out_features, in_features, generator=generator) / in_features**0.5}
    if layer.bias:
        tensors["linear.bias"] = torch.randn(layer.out_features, generator=generator)
    save_file(tensors, folder / WEIGHTS)
    return tensors


def write_json(path: Path, content: object) -> Path:
    """Write ``content`` to ``path``, whose folder is made; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def change_config(folder: Path, **settings: object) -> Path:
    """Set keys of config.json; None removes one. Returns ``folder``."""
    change_json(folder / "config.json", **settings)
    return folder


def change_json(path: Path, **settings: object) -> None:
    """Set keys of the object in ``path``; None removes one."""
    content = {**json.loads(path.read_text()), **settings}
    write_json(path, {key: value for key, value in content.items() if value is not None})


def read_tensors(folder: Path, file: str = WEIGHTS) -> dict[str, torch.Tensor]:
    """The tensors of ``model.safetensors``, or of another file, by name."""
    tensors: dict[str, torch.Tensor] = load_file(folder / file)
    return tensors


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], file: str = WEIGHTS) -> Path:
    """Replace ``model.safetensors``, or another file; returns ``folder``."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
    return folder
