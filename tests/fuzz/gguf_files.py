"""GGUF files: the header and the places of tensors, metadata by value, and a file that is a whole checkpoint."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random
from typing import Any

from bei_build.checkpoint.gguf_folder import laid_out
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.weights.gguf_store import GgufStore
from tests.fuzz.mutation import changed_bytes
from tests.fuzz.trial import Trial
from tests.support.checkpoints import save_checkpoint, wordpiece_tokenizer
from tests.support.gguf_files import save_gguf, vocabulary_metadata, zeros_file

# Numbers that are counts, lengths, types or offsets wherever they come to stand.
_WORDS = tuple(
    struct.pack("<Q", value % (1 << 64)) for value in (0, 1, 8, 9, 32, 255, 1 << 31, 1 << 32, 1 << 60, (1 << 63), -1)
)


def _saved(folder: Path) -> Path:
    source = save_checkpoint(folder / "source", num_hidden_layers=1)
    metadata = {**vocabulary_metadata(wordpiece_tokenizer(), "bert"), "bert.pooling_type": 1}
    return save_gguf(source, folder / "good" / "model.gguf", "bert", metadata, kind="Q8_0")


def gguf_file(folder: Path) -> Trial:
    """All of a file by byte, and its first tensors."""
    good, file = _saved(folder).read_bytes(), folder / "changed.gguf"

    def trial(random: Random) -> None:
        file.write_bytes(changed_bytes(random, good, _WORDS))
        store = GgufStore(file)
        for name in [*store.shapes][:3]:
            store.read(name)

    return trial


# Random bytes almost never make another well-formed value: here a key has one of another type or size.
_VALUES: tuple[Any, ...] = (
    *(True, False, 0, 1, -1, 7, 10_000_000, 1 << 30, (1 << 63) - 1, 0.0, -1.5, 1e-6, float("nan"), float("inf")),
    *("", "a", "bert", "gpt2", "t5", "none", "yarn", "linear", "\u2581x", [], [1], [0.5], ["a", "b"], [True]),
)
_KEYS = (
    *("split.count", "general.alignment", "tokenizer.huggingface.json", "tokenizer.ggml.model", "tokenizer.ggml.pre"),
    *("tokenizer.ggml.padding_token_id", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.precompiled_charsmap"),
)
_SETTINGS = (
    *("embedding_length", "block_count", "feed_forward_length", "context_length", "pooling_type"),
    *("attention.head_count", "attention.head_count_kv", "attention.causal", "attention.sliding_window"),
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "hidden_act"),
    *("classifier.output_labels", "attention.max_alibi_bias"),
)
_ARCHITECTURES = ("bert", "nomic-bert", "jina-bert-v2", "modern-bert", "llama", "qwen3", "gemma3", "gemma-embedding")
_ADDED = ("rope_freqs.weight", "dense_2.weight", "cls.output.weight", "token_types.weight")


def metadata(folder: Path) -> Trial:
    """A file's metadata by value, and tensors of other shapes, laid out as a checkpoint's folder."""
    vocabulary = vocabulary_metadata(wordpiece_tokenizer(), "bert")
    sizes = {"embedding_length": 32, "block_count": 2, "feed_forward_length": 48, "context_length": 64}
    sizes |= {"attention.head_count": 4, "pooling_type": 1}
    encoder = {**sizes, "attention.causal": False, "attention.layer_norm_epsilon": 1e-12}
    decoder = {**sizes, "attention.layer_norm_rms_epsilon": 1e-6}
    more: dict[str, dict[str, Any]] = {
        "modern-bert": {"attention.sliding_window": 8},
        "gemma-embedding": {"attention.causal": False},
    }
    file = folder / "m.gguf"

    def trial(random: Random) -> None:
        arch = random.choice(_ARCHITECTURES)
        settings = {**(encoder if "bert" in arch else decoder), **more.get(arch, {})}
        values: dict[str, Any] = {"general.architecture": arch, **vocabulary}
        values |= {f"{arch}.{key}": value for key, value in settings.items()}
        for _ in range(random.choice((0, 1, 1, 1, 2))):
            named = random.choice((*_KEYS, *(f"{arch}.{key}" for key in _SETTINGS), *vocabulary))
            values[named] = random.choice(_VALUES)
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (60, 32), "token_types.weight": (2, 32)}
        if random.random() < 0.3:
            shapes[random.choice(_ADDED)] = random.choice(((4,), (32,), (32, 32), (1, 4), (2, 3, 4)))
        file.write_bytes(zeros_file(values, shapes))
        laid_out(locate(str(file)))

    return trial


def checkpoint(folder: Path) -> Trial:
    """A file alone, read as a build does before it compiles."""
    good, file = _saved(folder).read_bytes(), folder / "changed" / "model.gguf"
    file.parent.mkdir()

    def trial(random: Random) -> None:
        file.write_bytes(changed_bytes(random, good, _WORDS))
        read_checkpoint(locate(str(file))).weights().close()

    return trial
