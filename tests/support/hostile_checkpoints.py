"""Checkpoints that somebody made to do harm, or that a broken download left: each is the tiny BERT, spoilt."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bei.errors import BuildError, CheckpointError, CheckpointNotFoundError, TokenizerError, WeightsError
from tests.support.checkpoints import (
    HIDDEN,
    WEIGHTS,
    Dense,
    add_modules,
    change_json,
    read_tensors,
    save_dense,
    write_json,
)

Spoil = Callable[[Path], object]

HUGE = 2 << 30
SHARD = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
BIN = "pytorch_model.bin"
EXECUTED = "executed"  # a file that code in a pickle makes beside the checkpoint


@dataclass(frozen=True)
class Hostile:
    """How the good checkpoint in a folder is spoilt, and what it is refused with."""

    spoil: Spoil
    message: str
    error: type[BuildError] = CheckpointError


def save_good(source: Path, folder: Path) -> Path:
    """A copy of ``source`` with the modules of sentence-transformers; returns ``folder``."""
    shutil.copytree(source, folder)
    return add_modules(folder, ("mean",), (Dense(8),))


def config(**settings: object) -> Spoil:
    """config.json has these settings."""
    return lambda folder: change_json(folder / "config.json", **settings)


def content(name: str, data: bytes | str) -> Spoil:
    """A file has these bytes."""

    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)

    return spoil


def large(name: str) -> Spoil:
    """A file is two gigabytes, which take no room on the disk."""

    def spoil(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.truncate(HUGE)

    return spoil


def pipe(name: str) -> Spoil:
    """A file is a named pipe, which nobody writes to."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def dangling(name: str) -> Spoil:
    """A file is a link to nothing, as in a cache that was cleaned by half."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("nothing")

    return spoil


def nested(depth: int, inner: str = "0") -> str:
    return '{"a":' * depth + inner + "}" * depth


def modules(**fields: object) -> Spoil:
    """The second module's entry, the pooling's, has these ``fields``."""

    def spoil(folder: Path) -> None:
        entries = json.loads((folder / "modules.json").read_text())
        entries[1].update(fields)
        write_json(folder / "modules.json", entries)

    return spoil


def outside(folder: Path) -> None:
    """The pooling's folder lies beside the checkpoint, and a link leads there."""
    shutil.move(folder / "1_Pooling", folder.parent / "elsewhere")
    (folder / "1_Pooling").symlink_to("../elsewhere")


def dense(**settings: object) -> Spoil:
    return lambda folder: change_json(folder / "2_Dense" / "config.json", **settings)


# Weights.


def safetensors(header: object, *, length: int | None = None, data: bytes = bytes(64)) -> Spoil:
    """The weights are a file with this ``header`` (JSON, or its text), said to be ``length`` bytes long."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return content(WEIGHTS, struct.pack("<Q", size % (1 << 64)) + text + data)


def tensor(
    dtype: str = "F32", shape: tuple[int, ...] = (4, 4), offsets: tuple[int, ...] = (0, 64)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def long_header(folder: Path) -> None:
    """Blanks, which a header may have, and which the library would read and parse."""
    text = b"{}".ljust(50_000_000)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text)


def index(names: object) -> Spoil:
    """The weights are a shard, and an index that maps tensors to ``names``; texts stand for all tensors."""

    def spoil(folder: Path) -> None:
        tensors = read_tensors(folder)
        (folder / WEIGHTS).rename(folder / SHARD)
        weight_map = dict.fromkeys(tensors, names) if isinstance(names, str) else names
        write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})

    return spoil


def linked_shard(folder: Path) -> None:
    index(SHARD)(folder)
    shutil.move(folder / SHARD, folder.parent / SHARD)
    (folder / SHARD).symlink_to(f"../{SHARD}")


def index_of(data: bytes | str) -> Spoil:
    """An index of these bytes in the place of weights."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        content(INDEX, data)(folder)

    return spoil


def large_index(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    large(INDEX)(folder)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._path),))


def pickled(make: Callable[[Path], object]) -> Spoil:
    """The weights are a plain pickle of ``make(folder)``, as torch wrote before 1.6."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / BIN).write_bytes(pickle.dumps(make(folder), protocol=2))

    return spoil


def zipped(folder: Path) -> None:
    """Code in the archive that torch writes today."""
    (folder / WEIGHTS).unlink()
    torch.save({"weight": torch.ones(2), "code": Touch(folder.parent / EXECUTED)}, folder / BIN)


def packed(folder: Path) -> None:
    """Two gigabytes of zeros in an archive of two megabytes."""
    (folder / WEIGHTS).unlink()
    block = bytes(1 << 24)
    with zipfile.ZipFile(folder / BIN, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/version", "3\n")
        with archive.open("archive/data.pkl", "w", force_zip64=True) as file:
            for _ in range(4):
                file.write(block)


def other_weights(name: str, data: bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(data)

    return spoil


def piped_weights(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        os.mkfifo(folder / name)

    return spoil


def side_pickle(folder: Path) -> None:
    """Code in the weights of a module."""
    (folder / "2_Dense" / WEIGHTS).unlink()
    torch.save({"linear.weight": Touch(folder.parent / EXECUTED)}, folder / "2_Dense" / BIN)


# The tokenizer.


def tokenizer(*path: str, value: object) -> Spoil:
    """tokenizer.json says ``value`` at ``path``."""

    def spoil(folder: Path) -> None:
        stored = json.loads((folder / "tokenizer.json").read_text())
        place = stored
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        write_json(folder / "tokenizer.json", stored)

    return spoil


def vocabulary_of_2_gb(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    large("vocab.txt")(folder)


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def wide_dense(folder: Path) -> None:
    save_dense(folder / "2_Dense", HIDDEN + 1, Dense(8))


NO_MORE = "no model has more than"
NOT_THERE = "bei does not read: "

HOSTILE: dict[str, Hostile] = {
    # config.json.
    "10^9 layers": Hostile(config(num_hidden_layers=10**9), f"num_hidden_layers = 1000000000, and {NO_MORE} 2,000"),
    "10^18 layers": Hostile(config(num_hidden_layers=10**18), NO_MORE),
    "-5 layers": Hostile(config(num_hidden_layers=-5), NO_MORE),
    "no layers": Hostile(config(num_hidden_layers=0), "a model without layers"),
    "true layers": Hostile(config(num_hidden_layers=True), "num_hidden_layers = true: correct it to a whole number"),
    "layers as a text": Hostile(config(num_hidden_layers="2"), 'layers = "2": correct it to a whole'),
    "layers as a list": Hostile(config(num_hidden_layers=[2]), "was refused by transformers"),
    "2.5 layers": Hostile(config(num_hidden_layers=2.5), "layers = 2.5: correct it to a whole number"),
    "10^9 layers, nested": Hostile(config(text_config={"num_hidden_layers": 10**9}), NO_MORE),
    "a width of 10^12": Hostile(config(hidden_size=10**12), NO_MORE),
    "a width of -32": Hostile(config(hidden_size=-32), NO_MORE),
    "a width of 0": Hostile(config(hidden_size=0), "has shape|describes no model|refused by", BuildError),
    "a width of true": Hostile(config(hidden_size=True), "correct it to a whole number"),
    "10^9 heads": Hostile(config(num_attention_heads=10**9), NO_MORE),
    "no heads": Hostile(config(num_attention_heads=0), "describes no model|refused by transformers"),
    "10^12 in between": Hostile(config(intermediate_size=10**12), NO_MORE),
    "10^12 words": Hostile(config(vocab_size=10**12), NO_MORE),
    "no words": Hostile(config(vocab_size=0), "embedding table has 0 rows", TokenizerError),
    "10^9 labels": Hostile(config(num_labels=10**9), f"num_labels = 1000000000, and {NO_MORE} 1,000,000"),
    "10^12 positions": Hostile(config(max_position_embeddings=10**12), NO_MORE),
    "-7 positions": Hostile(config(max_position_embeddings=-7), NO_MORE),
    "a width of 5000 digits": Hostile(
        lambda folder: content(
            "config.json",
            (folder / "config.json").read_text().replace(f'"hidden_size": {HIDDEN}', '"hidden_size": ' + "9" * 5000),
        )(folder),
        "is not readable JSON",
    ),
    "config: a list": Hostile(content("config.json", "[]"), "does not hold a JSON object"),
    "config: a number": Hostile(content("config.json", "7"), "does not hold a JSON object"),
    "config: nothing": Hostile(content("config.json", ""), "is not readable JSON"),
    "config: half": Hostile(content("config.json", '{"model_type": "be'), "is not readable JSON"),
    "config: no UTF-8": Hostile(content("config.json", b'{"model_type": "\xff"}'), "is not readable JSON"),
    "config: nested": Hostile(content("config.json", nested(1_000_000)), "is not readable JSON"),
    "config: nested in a key": Hostile(
        lambda folder: content(
            "config.json", (folder / "config.json").read_text().replace("{", '{"x": ' + nested(5000) + ",", 1)
        )(folder),
        "is not readable JSON",
    ),
    "config: 2 GB": Hostile(large("config.json"), "has 2,147,483,648 bytes, more than"),
    "config: a key twice": Hostile(
        content("config.json", '{"model_type": "bert", "model_type": "llama"}'), "the key 'model_type' twice"
    ),
    "config: a pipe": Hostile(pipe("config.json"), "no regular file"),
    "config: a link to nothing": Hostile(dangling("config.json"), "a link to a file that is not there"),
    "config: a type that is a list": Hostile(config(model_type=["bert"]), "does not name a model_type"),
    "config: a class that is an object": Hostile(config(architectures={"a": 1}), "does not name its architectures"),
    "config: code": Hostile(config(auto_map={"AutoModel": "evil.Model"}), "code of its own"),
    "an adapter's config": Hostile(content("adapter_config.json", "{}"), "holds an adapter"),
    # modules.json and the modules' folders.
    "module: ..": Hostile(modules(path="../elsewhere"), f"{NOT_THERE}'../elsewhere' leads out of its folder"),
    "module: .. behind a folder": Hostile(modules(path="1_Pooling/../../x"), f"{NOT_THERE}.*leads out of its folder"),
    "module: absolute": Hostile(modules(path="/etc"), f"{NOT_THERE}'/etc' leads out of its folder"),
    "module: NUL": Hostile(modules(path="1_\0"), f"{NOT_THERE}.*a NUL byte"),
    "module: too long": Hostile(modules(path="a" * 5000), f"{NOT_THERE}.*longer than a path may be"),
    "module: half a character": Hostile(modules(path="\ud800"), f"{NOT_THERE}.*is no text"),
    "module: linked from outside": Hostile(outside, "a link that leads out of its folder"),
    "module: a file": Hostile(modules(path="config.json"), "is not readable JSON"),
    "module: not there": Hostile(modules(path="7_Pooling"), "is missing"),
    "module: of no kind": Hostile(modules(type=7), "is not a list of modules"),
    "module: code": Hostile(modules(type="evil.Module"), "evil"),
    "modules: an object": Hostile(content("modules.json", "{}"), "is not a list of modules"),
    "modules: nested": Hostile(content("modules.json", nested(1_000_000)), "is not readable JSON"),
    "modules: 2 GB": Hostile(large("modules.json"), "has 2,147,483,648 bytes, more than"),
    "modules: a pipe": Hostile(pipe("modules.json"), "no regular file"),
    "modules: a link to nothing": Hostile(dangling("modules.json"), "a link to a file that is not there"),
    "pooling: a pipe": Hostile(pipe("1_Pooling/config.json"), "no regular file"),
    "pooling: a list": Hostile(content("1_Pooling/config.json", "[1]"), "does not hold a JSON object"),
    "pooling: unknown": Hostile(
        content("1_Pooling/config.json", '{"pooling_mode": "evil"}'), "asks for pooling 'evil'"
    ),
    "dense: 10^12 wide": Hostile(dense(out_features=10**12), "has shape", WeightsError),
    "dense: -8 wide": Hostile(dense(out_features=-8), "each must be at least 1"),
    "dense: true wide": Hostile(dense(out_features=True), "correct it to a value of type int"),
    "dense: of another width": Hostile(wide_dense, "32|33"),
    "dense: code in a pickle": Hostile(side_pickle, "was refused by torch's weights-only loader", WeightsError),
    "settings: 2 GB": Hostile(large("sentence_bert_config.json"), "has 2,147,483,648 bytes, more than"),
    "settings: a length of 0": Hostile(content("sentence_bert_config.json", '{"max_seq_length": 0}'), "at least 1"),
    "settings: a prompt that is none": Hostile(
        content("config_sentence_transformers.json", '{"prompts": {"query": 7}}'), "prompts that are not texts"
    ),
    # safetensors.
    "header: 2^63 bytes": Hostile(safetensors({}, length=1 << 63), "header is said to have 9,223,372,", WeightsError),
    "header: 2^64 - 1 bytes": Hostile(safetensors({}, length=-1), "header is said to have 18,446,744", WeightsError),
    "header: longer than the file": Hostile(safetensors({}, length=9000), "header is said to have 9,000", WeightsError),
    "header: no bytes": Hostile(safetensors({}, length=0), "header is said to have 0", WeightsError),
    "header: 50 MB": Hostile(long_header, "header is said to have 50,000,000 bytes", WeightsError),
    "header: no JSON": Hostile(safetensors(b"{nonsense"), "is not a readable safetensors file", WeightsError),
    "header: a list": Hostile(safetensors([1]), "is not a readable safetensors file", WeightsError),
    "header: nested": Hostile(safetensors(nested(100_000).encode()), "is not a readable safetensors", WeightsError),
    "header: a tensor beyond the file": Hostile(
        safetensors({"a": tensor(shape=(1 << 20,), offsets=(0, 1 << 22))}), "is not a readable safetens", WeightsError
    ),
    "header: a tensor that ends before it begins": Hostile(
        safetensors({"a": tensor(offsets=(64, 0))}), "is not a readable safetensors file", WeightsError
    ),
    "header: tensors over each other": Hostile(
        safetensors({"a": tensor(), "b": tensor(offsets=(32, 96))}, data=bytes(96)), "is not a readable", WeightsError
    ),
    "header: 2^64 elements": Hostile(
        safetensors({"a": tensor(shape=(1 << 32, 1 << 32))}), "is not a readable safetensors file", WeightsError
    ),
    "header: a size below zero": Hostile(
        safetensors({"a": tensor(shape=(-4, -4))}), "is not a readable safetensors file", WeightsError
    ),
    "header: an unknown type": Hostile(
        safetensors({"a": tensor("F13")}), "is not a readable safetensors file", WeightsError
    ),
    "weights: nothing": Hostile(content(WEIGHTS, b""), "is not a readable safetensors file", WeightsError),
    "weights: a pipe": Hostile(pipe(WEIGHTS), "no regular file"),
    "weights: a link to nothing": Hostile(dangling(WEIGHTS), "a link to a file that is not there"),
    # Shards.
    "shard: ..": Hostile(index("../model.safetensors"), f"{NOT_THERE}.* leads out of its folder", WeightsError),
    "shard: absolute": Hostile(index("/etc/passwd"), f"{NOT_THERE}.* leads out of its folder", WeightsError),
    "shard: NUL": Hostile(index("a\0"), f"{NOT_THERE}.*a NUL byte", WeightsError),
    "shard: not there": Hostile(index("model-9.safetensors"), "which is not in", WeightsError),
    "shard: linked from outside": Hostile(linked_shard, "a link that leads out of its folder", WeightsError),
    "shard: a number": Hostile(index({"a": 7}), "names 7, which is not in", WeightsError),
    "shards: none": Hostile(index({}), "names no files", WeightsError),
    "shards: a list": Hostile(index(["a"]), "is not an index of shards", WeightsError),
    "shards: nested": Hostile(index_of(nested(1_000_000)), "is not an index of shards", WeightsError),
    "shards: no JSON": Hostile(index_of("{"), "is not an index of shards", WeightsError),
    "shards: 2 GB": Hostile(large_index, "has 2,147,483,648 bytes, more than", WeightsError),
    # Pickles.
    "pickle: code in an archive": Hostile(zipped, "was refused by torch's weights-only loader", WeightsError),
    "pickle: code": Hostile(
        pickled(lambda folder: {"weight": Touch(folder.parent / EXECUTED)}), "was refused by torch's", WeightsError
    ),
    "pickle: parts that are packed": Hostile(packed, "part 'archive/.*' is compressed", WeightsError),
    "pickle: 10^12 bytes": Hostile(
        other_weights(BIN, b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85R."),
        "was refused by torch's weights-only loader|There is no memory left",  # of the reader, and of the command
        WeightsError,
    ),
    "pickle: nothing": Hostile(other_weights(BIN, b""), "was refused by torch's weights-only loader", WeightsError),
    "pickle: half an archive": Hostile(other_weights(BIN, b"PK\x03\x04" + bytes(40)), "was refused by", WeightsError),
    "pickle: a list": Hostile(pickled(lambda _: [1, 2]), "refused by|does not map names to tensors", WeightsError),
    "pickle: a pipe": Hostile(piped_weights(BIN), "no regular file"),
    # Tokenizers.
    "tokenizer: nested": Hostile(
        content("tokenizer.json", nested(1_000_000)), "is not a readable tokenizer", TokenizerError
    ),
    "tokenizer: 2 GB": Hostile(large("tokenizer.json"), "has 2,147,483,648 bytes, more than", TokenizerError),
    "tokenizer: an id of 2^31": Hostile(  # which the library would write with all that are missing below, 8 GB
        tokenizer("model", "vocab", "hello", value=(1 << 31) - 1), "its ids go up to 2147483647, and no", TokenizerError
    ),
    "tokenizer: a list": Hostile(content("tokenizer.json", "[]"), "is not a readable tokenizer", TokenizerError),
    "tokenizer: nothing": Hostile(content("tokenizer.json", ""), "is not a readable tokenizer", TokenizerError),
    "tokenizer: no UTF-8": Hostile(content("tokenizer.json", b"\xff"), "is not a readable tokenizer", TokenizerError),
    "tokenizer: a pipe": Hostile(pipe("tokenizer.json"), "no regular file"),
    "tokenizer: ids beyond the table": Hostile(
        tokenizer("model", "vocab", "cat", value=10**6), "ids go up to 1000000", TokenizerError
    ),
    "tokenizer: an id below zero": Hostile(
        tokenizer("model", "vocab", "cat", value=-1), "is not a readable tokenizer", TokenizerError
    ),
    "tokenizer: characters mapped by nonsense": Hostile(
        tokenizer("normalizer", value={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "is not a readable tokenizer",
        TokenizerError,
    ),
    "tokenizer: a pattern that is none": Hostile(
        tokenizer(
            "pre_tokenizer", value={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
        ),
        "is not a readable tokenizer",
        TokenizerError,
    ),
    "tokenizer: a vocabulary of 2 GB": Hostile(vocabulary_of_2_gb, "is not a readable vocabulary", TokenizerError),
    "tokenizer settings: nested": Hostile(content("tokenizer_config.json", nested(1_000_000)), "is not readable JSON"),
    "tokenizer settings: 2 GB": Hostile(large("tokenizer_config.json"), "has 2,147,483,648 bytes, more than"),
    "special tokens: a list": Hostile(content("special_tokens_map.json", "[]"), "does not hold a JSON object"),
    # Nothing to begin with.
    "no files": Hostile(
        emptied,
        "has no config.json",
        CheckpointNotFoundError,
    ),
}
