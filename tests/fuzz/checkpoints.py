"""What a checkpoint is made of: its readers one by one, and all of them."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from bei_build.checkpoint.adapter_prompts import with_task_prompts
from bei_build.checkpoint.gliner import extraction_of, own_tokens
from bei_build.checkpoint.gliner2 import ENCODER_FOLDER
from bei_build.checkpoint.gliner2 import extraction_of as schema_of
from bei_build.checkpoint.glirel import extraction_of as relations_of
from bei_build.checkpoint.heads import reading_config
from bei_build.checkpoint.locate import check_entries, locate
from bei_build.checkpoint.read import _config, _spec, read_checkpoint
from bei_build.checkpoint.sentence_transformers import read_sentence_transformers
from bei_build.tokenizer.artifact_tokenizer import artifact_tokenizer, model_max_length, stored_truncation
from bei_build.tokenizer.library_tokenizer import TokenizerSettings, open_tokenizer, stored_tokenizer
from bei_build.weights.tensor_store import check_weights, open_weights
from tests.bei_build.tokenizer.test_artifact_tokenizer import sentencepiece_alone
from tests.fuzz.mutation import ROUGH, changed, changed_body, changed_bytes, spoilt
from tests.fuzz.trial import Trial
from tests.support.checkpoints import (
    WEIGHTS,
    Dense,
    Normalize,
    add_modules,
    bpe_tokenizer,
    save_checkpoint,
    save_static,
    unigram_tokenizer,
    wordpiece_tokenizer,
    write_json,
)
from tests.support.gliclass_models import save_gliclass
from tests.support.gliner2_models import gliner2_tokenizer, save_gliner2
from tests.support.gliner_models import gliner_tokenizer, save_gliner
from tests.support.glirel_models import glirel_tokenizer, save_glirel
from tests.support.hostile_checkpoints import INDEX, SHARD
from tests.support.inference_free import save_inference_free
from tests.support.late_interaction import Settings, save_colbert
from tests.support.zoo import CASES, config_of

_Write = Callable[[Random], None]


def _saved(folder: Path) -> Path:
    """A tiny BERT with modules behind it, and all settings that sentence-transformers writes."""
    save_checkpoint(folder)
    add_modules(folder, ("mean", "cls"), (Dense(8), Normalize()))
    processing = {"chat_template": {"add_generation_prompt": True}, "text": {"padding": True}, "common": {}}
    modalities = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    transformer = {"max_seq_length": 32, "do_lower_case": True, "processing_kwargs": processing}
    write_json(folder / "sentence_bert_config.json", {**transformer, "modality_config": modalities})
    prompts = {"query": "query: ", "passage": "passage: "}
    settings = {"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", {**settings, "truncate_dim": None})
    separator = {"__type": "AddedToken", "content": "[SEP]", "lstrip": False, "rstrip": False, "normalized": False}
    names = {"cls_token": "[CLS]", "sep_token": separator, "mask_token": "[MASK]", "pad_token": "[PAD]"}
    write_json(folder / "special_tokens_map.json", {**names, "sep_token": "[SEP]"})
    write_json(folder / "added_tokens.json", {"[MASK]": 4})
    named = {"tokenizer_class": "BertTokenizerFast", "model_max_length": 48, "do_lower_case": True, **names}
    write_json(folder / "tokenizer_config.json", {**named, "added_tokens_decoder": {"0": {"content": "[PAD]"}}})
    return folder


def _of_json(folder: Path) -> list[tuple[Path, Any, bytes]]:
    """All files of JSON below ``folder``: parsed, and as they are."""
    found = sorted(path for path in folder.rglob("*.json") if path.is_file())
    return [(path, json.loads(path.read_text()), path.read_bytes()) for path in found]


def config(folder: Path) -> Trial:
    """config.json, of every family, and what its heads and prompts are made of."""
    save_gliclass(folder)
    contents = [json.loads((folder / "config.json").read_text())]
    for case in CASES:
        (architecture,) = case.changes.get("architectures", [case.architecture])
        contents.append({**config_of(case).to_dict(), "architectures": [architecture], **case.changes})
    contents.append({**contents[-1], "task_instructions": {"retrieval": "Find: "}})
    file, files = folder / "config.json", read_sentence_transformers(folder)

    def trial(random: Random) -> None:
        file.write_bytes(changed_body(random, contents, ROUGH))
        found, architecture, family, _ = _config(folder, None, static=None)
        _spec(family, found, architecture)
        with reading_config():
            family.architectures[architecture](found)
        with_task_prompts(files, getattr(found, "task_instructions", None))

    return trial


def gliner(folder: Path) -> Trial:
    """gliner_config.json: with the encoder's config, without it, and of models that score words."""
    save_gliner(folder)
    file, tokenizer = folder / "gliner_config.json", gliner_tokenizer()
    content = json.loads(file.read_text())
    bare = {**content, "encoder_config": None, "model_name": "microsoft/deberta-v3-small", "vocab_size": -1}
    contents = [content, bare, {**content, "model_type": "gliner_uni_encoder_token", "span_mode": "token_level"}]

    def trial(random: Random) -> None:
        file.write_bytes(changed_body(random, contents, ROUGH))
        found, architecture, family, _ = _config(folder, None, static=None)
        heads = family.architectures[architecture](found)
        own_tokens(found)
        extraction_of(replace(_spec(family, found, architecture), heads=heads), found, tokenizer)

    return trial


def glirel(folder: Path) -> Trial:
    """glirel_config.json with the encoder's config, as ``gliner_folder.with_encoder`` lays it out."""
    save_glirel(folder)
    file, encoder = folder / "glirel_config.json", Path(f"{folder}-encoder")
    shutil.copy(encoder / "tokenizer.json", folder)
    contents = [{**json.loads(file.read_text()), "encoder_config": json.loads((encoder / "config.json").read_text())}]
    tokenizer = glirel_tokenizer()

    def trial(random: Random) -> None:
        file.write_bytes(changed_body(random, contents, ROUGH))
        found, architecture, family, _ = _config(folder, None, static=None)
        heads = family.architectures[architecture](found)
        relations_of(replace(_spec(family, found, architecture), heads=heads), found, tokenizer)

    return trial


def gliner2(folder: Path) -> Trial:
    """GLiNER2's config.json, and its encoder's."""
    save_gliner2(folder)
    tokenizer = gliner2_tokenizer()
    files = [folder / "config.json", folder / ENCODER_FOLDER / "config.json"]
    contents = [json.loads(file.read_text()) for file in files]
    contents[0] |= {"architecture": "span", "span_head": {"max_width": 5, "span_mode": "markerV0"}}

    def trial(random: Random) -> None:
        place = random.randrange(2)
        files[1 - place].write_text(json.dumps(contents[1 - place]))
        files[place].write_bytes(changed_body(random, [contents[place]], ROUGH))
        found, architecture, family, _ = _config(folder, None, static=None)
        heads = family.architectures[architecture](found)
        schema_of(replace(_spec(family, found, architecture), heads=heads), found, tokenizer)

    return trial


def sentence_transformers(folder: Path) -> Trial:
    """modules.json, and all settings that it leads to: of embedders, late interaction, sparse and static models."""
    roots = [
        _saved(folder / "bert"),
        save_static(folder / "static"),
        save_inference_free(folder / "sparse"),
        save_colbert(folder / "colbert", Settings()),
    ]
    files = [_of_json(root) for root in roots]

    def trial(random: Random) -> None:
        at = random.randrange(len(roots))
        path, content, good = random.choice(files[at])
        path.write_bytes(changed_body(random, [content], ROUGH))
        try:
            found = read_sentence_transformers(roots[at])
            for module in found.folders:
                check_entries(module)
        finally:
            path.write_bytes(good)

    return trial


def safetensors(folder: Path) -> Trial:
    """model.safetensors: its header by value, and all of it by byte."""
    save_checkpoint(folder, num_hidden_layers=1)
    file = folder / WEIGHTS
    good = file.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    few = {name: header[name] for name in [*header][:4]}

    def trial(random: Random) -> None:
        if random.random() < 0.3:
            file.write_bytes(changed_bytes(random, good, (b'"BF16"', b'"F8_E4M3"', b'"I64"', b"[0,0]")))
        else:
            content: Any = header if random.random() < 0.3 else few
            for _ in range(random.randrange(4)):
                content = changed(random, content)
            text = spoilt(random, content)
            wrong = random.choice((0, -1, 8, 1 << 40))
            size = len(text) + (wrong if random.random() < 0.1 else 0)
            file.write_bytes(struct.pack("<Q", size % (1 << 64)) + text + data)
        check_weights(folder)
        store = open_weights(folder)
        try:
            assert store.types is not None
            for name in [*store.shapes][:3]:
                store.read(name)
        finally:
            store.close()

    return trial


def shards(folder: Path) -> Trial:
    """The index of several files of weights."""
    save_checkpoint(folder, num_hidden_layers=1)
    (folder / WEIGHTS).rename(folder / SHARD)
    content = {"metadata": {"total_size": 9}, "weight_map": {"a": SHARD, "b": SHARD, "c": "../x", "d": "/dev/zero"}}
    good = {**content, "weight_map": {"a": SHARD, "b": SHARD}}

    def trial(random: Random) -> None:
        (folder / INDEX).write_bytes(changed_body(random, [good, good, content], ROUGH))
        check_weights(folder)

    return trial


def pickles(folder: Path) -> Trial:
    """pytorch_model.bin, an archive or a plain pickle."""
    file = folder / "pytorch_model.bin"
    tensors = {"a": torch.ones(4, 4), "b": torch.zeros(3, dtype=torch.bfloat16)}
    goods = []
    for is_archive in (True, False):
        torch.save(tensors, file, _use_new_zipfile_serialization=is_archive)
        goods.append(file.read_bytes())
    words = (b"cos\nsystem\n", b"cbuiltins\neval\n", b"R.", b"\x8a\x08", b"cbuiltins\nbytearray\n", b"PK\3\4")

    def trial(random: Random) -> None:
        file.write_bytes(changed_bytes(random, random.choice(goods), words))
        store = open_weights(folder)
        for name in store.shapes:
            store.type_of(name)
        store.close()

    return trial


def tokenizer_json(folder: Path) -> Trial:
    """tokenizer.json of four kinds of models, as it stands."""
    made = (wordpiece_tokenizer(), bpe_tokenizer(), unigram_tokenizer())
    contents = [json.loads(one.to_str()) for one in made]
    settings = TokenizerSettings("file")

    def trial(random: Random) -> None:
        (folder / "tokenizer.json").write_bytes(changed_body(random, contents, ROUGH))
        if stored_tokenizer(folder) is None:
            return
        stored_truncation(folder)
        library = open_tokenizer(folder, settings)
        artifact_tokenizer(library, settings, folder)
        library.encode([("the cats",), ("",)], 8)

    return trial


def tokenizer_settings(folder: Path) -> Trial:
    """Settings beside tokenizer.json, which transformers' classes read."""
    source = _saved(folder / "bert")
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
    files = {name: (source / name).read_bytes() for name in names}

    def trial(random: Random) -> None:
        for name, good in files.items():
            (source / name).write_bytes(good)
        name = random.choice(names)
        (source / name).write_bytes(changed_body(random, [json.loads(files[name])], ROUGH))
        settings = TokenizerSettings(random.choice(("auto", "transformers")))
        library = open_tokenizer(source, settings)
        artifact_tokenizer(library, settings, source)
        model_max_length(source)
        library.encode([("the cats",), ("",)], 8)

    return trial


def sentencepiece_model(folder: Path) -> Trial:
    """A vocabulary of SentencePiece without a tokenizer.json."""
    sentencepiece_alone(folder)
    file = folder / "sentencepiece.bpe.model"
    good = file.read_bytes()

    def trial(random: Random) -> None:
        file.write_bytes(changed_bytes(random, good, (b"\x0a\xff\xff\xff\x7f", b"\x12", b"<unk>")))
        settings = TokenizerSettings()
        artifact_tokenizer(open_tokenizer(folder, settings), settings, folder)

    return trial


def whole(folder: Path) -> Trial:
    """A file of any kind in a whole checkpoint, which is then read as a build does before it compiles."""
    good, path = _saved(folder / "good"), folder / "checkpoint"
    read_checkpoint(locate(str(good))).weights().close()
    contents = _of_json(good)

    def trial(random: Random) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(good, path)
        for _ in range(random.choice((1, 1, 2))):
            source, content, _ = random.choice(contents)
            file = path / source.relative_to(good)
            kind = random.randrange(12)
            if kind > 2 and file.is_file():
                file.write_bytes(changed_body(random, [content], ROUGH))
            elif kind == 0 and not file.is_dir():
                file.unlink(missing_ok=True)
                random.choice((os.mkfifo, os.mkdir, lambda at: os.symlink("/dev/zero", at)))(file)
            elif kind == 1 and not file.is_dir():
                file.unlink(missing_ok=True)
            elif (path / WEIGHTS).is_file():
                (path / WEIGHTS).write_bytes(changed_bytes(random, (path / WEIGHTS).read_bytes()))
        read_checkpoint(locate(str(path))).weights().close()

    return trial
