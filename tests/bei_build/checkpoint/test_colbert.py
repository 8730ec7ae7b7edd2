"""Queries and documents of late interaction, built and encoded, against the original code in torch; and the settings
files."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.artifact.sides import Role
from bei.config.settings import ServeConfig
from bei.core import Expansion, Float32Array
from bei.errors import BeiError, CheckpointError, ConfigError, InvalidRequestError, TokenizerError
from bei.metrics.registry import Metrics
from bei.scheduler.device_gate import DeviceGate
from bei.service.loader import load_service
from bei.tasks.embed import EmbedTask, check_task, embed_tokens
from bei.tokenizer.prompts import prompt_of, role_of
from bei.verification.engine_answers import run
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.targets.openvino import OpenVINOCompiler
from tests.support.builds import build_artifact, open_engine, random_encodings
from tests.support.checkpoints import MAX_TOKENS, save_checkpoint, wordpiece_tokenizer, write_json
from tests.support.late_interaction import DOCUMENT, QUERY, Settings, as_original, encode, save_colbert
from tests.support.zoo import CASES

TOLERANCE = 2e-4
QUERIES = ["the cat", "a", "where is the mat? hello, world! " * 4, "hello world", "Gr\u00fc\u00dfe!"]
DOCUMENTS = ["The cat sat on the mat.", "hello, world! " * 20, "-", "a b (c) d: e, f; g.", "world"]
MODERN = replace(next(case for case in CASES if case.name == "ModernBertModel"), tokenizer=wordpiece_tokenizer)


def answers(
    artifact: Path, queries: list[str] = QUERIES, documents: list[str] = DOCUMENTS, *, batched: bool = True
) -> tuple[list[Float32Array], list[Float32Array]]:
    """Token vectors of all queries and documents, both sides in the queue at once, or one text after the other."""

    async def run() -> list[Float32Array]:
        service = load_service(artifact, ServeConfig(tokenizer_threads=1), Metrics(), DeviceGate())

        async def embed(side: str, texts: list[str]) -> list[Float32Array]:
            task = check_task(service, EmbedTask(texts, input_type=side), "embed_tokens")
            with service.admit(texts) as ticket:
                return (await embed_tokens(service, task, ticket=ticket)).vectors

        try:
            if batched:
                pairs = await asyncio.gather(embed("query", queries), embed("document", documents))
                return [rows for side in pairs for rows in side]
            sides = [("query", text) for text in queries] + [("document", text) for text in documents]
            return [(await embed(side, [text]))[0] for side, text in sides]
        finally:
            await asyncio.get_running_loop().run_in_executor(None, service.close)

    rows = asyncio.run(run())
    return rows[: len(queries)], rows[len(queries) :]


def assert_close(actual: list[Float32Array], expected: list[Float32Array]) -> None:
    assert [rows.shape for rows in actual] == [rows.shape for rows in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", [None, MODERN], ids=["BERT", "ModernBERT, windows shorter than queries"])
@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(attend_to_expansion_tokens=True),
        Settings(do_query_expansion=False),
        Settings(query_length=12, document_length=20, skiplist_words=("the", ".", "no such token")),
        Settings(skiplist_words=()),
    ],
    ids=["as published", "attended", "without expansion", "short", "nothing skipped"],
)
def test_vectors_are_those_of_its_own_code(settings: Settings, case: Any, tmp_path: Path) -> None:
    folder = save_colbert(tmp_path / "colbert", settings, case)
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.certificate.outputs[0].cosine_mean >= 0.99999
    expected = [
        encode(folder, texts, settings, is_query=is_query) for texts, is_query in ((QUERIES, True), (DOCUMENTS, False))
    ]
    for batched in (True, False):
        for ours, theirs in zip(answers(artifact.path, batched=batched), expected, strict=True):
            assert_close(ours, theirs)


def test_the_original_layout_gives_the_same(tmp_path: Path) -> None:
    settings = Settings(query_length=16)
    folder = save_colbert(tmp_path / "colbert", settings)
    expected = [
        encode(folder, texts, settings, is_query=is_query) for texts, is_query in ((QUERIES, True), (DOCUMENTS, False))
    ]
    build_artifact(as_original(folder, settings), tmp_path / "artifact", reference="engine")
    for ours, theirs in zip(answers(tmp_path / "artifact"), expected, strict=True):
        assert_close(ours, theirs)


def test_padding_in_a_text_is_found_by_its_id_as_the_original_finds_it(tmp_path: Path) -> None:
    """Its QueryTokenizer replaces every padding id by the mask token, its doc_tokenization leaves them out by ``mask``.
    In PyLate and sentence-transformers they are ordinary tokens."""
    settings, queries, documents = Settings(query_length=16), ["the [PAD] cat [PAD]", "[PAD]"], ["a [PAD] [PAD] cat."]
    folder = save_colbert(tmp_path / "colbert", settings)
    build_artifact(folder, tmp_path / "pylate", verify=False)
    expected = [encode(folder, queries, settings, is_query=True), encode(folder, documents, settings, is_query=False)]
    for ours, theirs in zip(answers(tmp_path / "pylate", queries, documents), expected, strict=True):
        assert_close(ours, theirs)
    masked = [query.replace("[PAD]", "[MASK]") for query in queries]
    skipping = replace(settings, skiplist_words=(*settings.skiplist_words, "[PAD]"))
    expected = [encode(folder, masked, settings, is_query=True), encode(folder, documents, skipping, is_query=False)]
    build_artifact(as_original(folder, settings), tmp_path / "original", reference="engine")
    for ours, theirs in zip(answers(tmp_path / "original", queries, documents), expected, strict=True):
        assert_close(ours, theirs)


def test_each_part_of_it_matters(tmp_path: Path) -> None:
    """The control of the tests above."""
    folder = save_colbert(tmp_path, Settings())
    published = encode(folder, QUERIES, Settings(), is_query=True)
    attended = encode(folder, QUERIES, Settings(attend_to_expansion_tokens=True), is_query=True)
    assert np.abs(published[0] - attended[0]).max() > 50 * TOLERANCE
    plain = encode(folder, QUERIES, Settings(do_query_expansion=False), is_query=True)
    assert [len(rows) for rows in plain] == [5, 4, 32, 5, 5]
    assert [len(rows) for rows in published] == [32] * 5
    np.testing.assert_allclose(published[0][:5], plain[0], atol=1e-5)  # no token has attended to the mask tokens
    documents = encode(folder, DOCUMENTS, Settings(), is_query=False)
    whole = encode(folder, DOCUMENTS, Settings(skiplist_words=()), is_query=False)
    assert [len(a) - len(b) for a, b in zip(whole, documents, strict=True)] == [1, 18, 1, 6, 0]


@pytest.mark.parametrize("case", [None, MODERN], ids=["BERT", "ModernBERT"])
def test_tokens_without_keys_have_the_same_states_in_any_batch(case: Any, tmp_path: Path) -> None:
    artifact = build_artifact(save_colbert(tmp_path / "colbert", Settings(), case), tmp_path / "artifact", verify=False)
    engine = open_engine(artifact.engine_dir, artifact.manifest)
    whole = random_encodings([9, 3, 47, 30], 50)
    partial = [encoding._replace(num_keys=keys) for encoding, keys in zip(whole, (4, 1, 46, 30), strict=True)]
    mixed = [partial[0], whole[2], partial[1], whole[0], *partial[2:], whole[1]]
    try:
        together = run(engine, mixed, ["token_embedding"])["token_embedding"]
        for encoding, rows in zip(mixed, together, strict=True):
            alone = run(engine, [encoding], ["token_embedding"])["token_embedding"][0]
            np.testing.assert_allclose(rows, alone, atol=1e-5, rtol=0)
    finally:
        engine.close()
    assert np.abs(together[0] - together[3]).max() > 50 * TOLERANCE  # the same ids, of which fewer are looked at


def test_the_certificate_covers_queries(tmp_path: Path) -> None:
    """An engine that lets tokens attend to the mask tokens fails."""
    folder = save_colbert(tmp_path / "colbert", Settings())
    real = OpenVINOCompiler.compile

    def blind(self: Any, spec: Any, *rest: Any) -> Any:
        return real(self, replace(spec, partial_keys=False), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenVINOCompiler, "compile", blind)
        with pytest.raises(BeiError, match="Verification failed: token_embedding: mean cosine"):
            build_artifact(folder, tmp_path / "artifact")
    assert build_artifact(folder, tmp_path / "artifact").certificate.passed


# Settings in the files.


def read(folder: Path, task: str = "auto", **arguments: Any) -> Checkpoint:
    return read_checkpoint(locate(str(folder)), HeadChoice(task=task), **arguments)


def save_settings(folder: Path, **config: object) -> Path:
    """A checkpoint in PyLate's layout whose config_sentence_transformers.json is ``config``."""
    save_colbert(folder, Settings())
    write_json(folder / "config_sentence_transformers.json", config)
    return folder


VOCABULARY = wordpiece_tokenizer().get_vocab()
MASK, PAD = VOCABULARY["[MASK]"], VOCABULARY["[PAD]"]


def ids(words: str) -> list[int]:
    return sorted(VOCABULARY[word] for word in words if word in VOCABULARY)


PYLATE = {
    "query": Role(max_tokens=32, expansion=Expansion(MASK, 32, attended=False), skip_ids=[]),
    "document": Role(max_tokens=180, expansion=None, skip_ids=ids(string.punctuation)),
}


@pytest.mark.parametrize("config", [{"query_prefix": "[unused0]"}, {"model_type": "ColBERT"}, {"skiplist_words": None}])
def test_what_pylates_files_do_not_say_is_as_in_pylate(config: dict[str, object], tmp_path: Path) -> None:
    checkpoint = read(save_settings(tmp_path, **config))
    assert checkpoint.roles == PYLATE
    assert checkpoint.spec.partial_keys
    assert checkpoint.max_seq_len == MAX_TOKENS  # a length beyond the positions is none


@pytest.mark.parametrize(
    ("asked", "length", "expansion"),
    [
        (None, 24, None),
        ({"strategy": "fixed", "length": 16, "attend": True}, 16, Expansion(MASK, 16, attended=True)),
        ({"strategy": "min", "length": 16}, 24, Expansion(MASK, 16, attended=False)),
    ],
    ids=["off", "fixed", "min"],
)
def test_query_expansion_beside_pylates_keys_is_read_as_sentence_transformers_does(
    asked: object, length: int, expansion: Expansion | None, tmp_path: Path
) -> None:
    query = read(save_settings(tmp_path, model_type="ColBERT", query_length=24, query_expansion=asked)).roles["query"]
    assert (query.max_tokens, query.expansion) == (length, expansion)


def test_a_side_without_a_prompt_may_be_named(tmp_path: Path) -> None:
    folder = save_settings(tmp_path / "colbert", query_prefix="[unused0]")
    assert build_artifact(folder, tmp_path / "artifact").manifest.prompts == {"query": "[unused0]", "document": ""}


NAMED = {"search_query": "[unused0]", "corpus": "[unused1]"}


@pytest.mark.parametrize(("files", "asked"), [(NAMED, ()), ({}, tuple(NAMED.items()))], ids=["files", "settings"])
def test_a_prompt_under_another_name_of_its_side_is_found(files: Any, asked: Any, tmp_path: Path) -> None:
    """An empty one under the side's own name would come before it."""
    folder = save_modules(tmp_path / "colbert", {}, {})
    write_json(folder / "config_sentence_transformers.json", {"prompts": files})
    manifest = build_artifact(folder, tmp_path / "artifact", prompts=asked).manifest
    assert manifest.prompts == NAMED
    assert [prompt_of(manifest, None, side) for side in ("query", "document")] == ["[unused0]", "[unused1]"]


def test_a_prompt_under_another_name_takes_room_too(tmp_path: Path) -> None:
    folder = save_modules(tmp_path, {"document_length": 5}, {})
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"passage": "the cat sat"}})
    with pytest.raises(CheckpointError, match=r"document length 5 .* leaves no room beside the 5 tokens"):
        read(folder)


def test_a_projection_without_any_of_its_settings_has_no_roles(tmp_path: Path) -> None:
    checkpoint = read(save_settings(tmp_path, prompts={"other": "x"}))
    assert (checkpoint.roles, checkpoint.spec.partial_keys, checkpoint.files.prompts) == ({}, False, {"other": "x"})


def test_roles_are_those_of_the_files(tmp_path: Path) -> None:
    settings = Settings(24, 40, attend_to_expansion_tokens=True, skiplist_words=(".", "nowhere"))
    folder = save_colbert(tmp_path, settings)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 39})  # left there by PyLate
    checkpoint = read(folder)
    assert checkpoint.roles == {
        "query": Role(max_tokens=24, expansion=Expansion(MASK, 24, attended=True), skip_ids=[]),
        "document": Role(max_tokens=40, expansion=None, skip_ids=ids(".")),
    }
    assert not checkpoint.spec.partial_keys
    assert checkpoint.max_seq_len == 40
    assert checkpoint.files.prompts == {"query": QUERY, "document": DOCUMENT}


def test_a_longer_document_can_be_asked_for(tmp_path: Path) -> None:
    folder = save_colbert(tmp_path, Settings(24, 30))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 29})
    checkpoint = read(folder, document_length=48)
    assert (checkpoint.roles["document"].max_tokens, checkpoint.max_seq_len) == (48, 48)
    for length, longest in ((49, None), (40, 32)):
        with pytest.raises(CheckpointError, match=f"document_length {length} is above max_seq_len {longest or 48}"):
            read(folder, document_length=length, max_seq_len=longest)


def test_a_document_length_raises_what_is_built_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenVINOCompiler, "longest_by_default", 20)
    folder = save_colbert(tmp_path / "colbert", Settings(12, 16))
    lengths = []
    for length in (None, 18, 30):
        manifest = build_artifact(folder, tmp_path / "artifact", document_length=length).manifest
        lengths.append((manifest.roles["document"].max_tokens, manifest.max_seq_len))
    assert lengths == [(16, 20), (18, 20), (30, 30)]


def test_a_document_length_is_for_late_interaction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="document_length is for late interaction"):
        read(save_checkpoint(tmp_path), document_length=20)


def test_a_plain_embedder_made_of_it_has_no_roles(tmp_path: Path) -> None:
    checkpoint = read(save_colbert(tmp_path, Settings()), task="embed")
    assert (checkpoint.roles, checkpoint.spec.partial_keys) == ({}, False)


@pytest.mark.parametrize(
    ("metadata", "query", "document"),
    [
        # colbert/infra/config/settings.py: doc_maxlen 220
        (
            {},
            Role(max_tokens=32, expansion=Expansion(MASK, 32, attended=False, padding_id=PAD), skip_ids=[]),
            Role(max_tokens=220, expansion=None, skip_ids=[PAD, *ids(string.punctuation)]),
        ),
        (
            {"query_maxlen": 20, "doc_maxlen": 30, "attend_to_mask_tokens": True, "mask_punctuation": False},
            Role(max_tokens=20, expansion=Expansion(MASK, 20, attended=True, padding_id=PAD), skip_ids=[]),
            Role(max_tokens=30, expansion=None, skip_ids=[PAD]),
        ),
    ],
)
def test_the_originals_metadata(metadata: dict[str, object], query: Role, document: Role, tmp_path: Path) -> None:
    folder = as_original(save_colbert(tmp_path, Settings()), Settings())
    write_json(folder / "artifact.metadata", metadata)
    assert read(folder).roles == {"query": query, "document": document}


@pytest.mark.parametrize("prompts", [{}, {"query": "", "document": ""}, {"query": "[unused0]"}], ids=str)
def test_the_originals_metadata_counts_beside_settings_that_say_nothing_of_it(
    prompts: dict[str, str], tmp_path: Path
) -> None:
    folder = as_original(save_colbert(tmp_path, Settings()), Settings(query_length=20))
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "similarity_fn_name": "MaxSim"})
    files = read(folder).files
    assert files.sides["query"].length == 20
    assert (files.prompts, files.similarity) == ({"query": f"{QUERY} ", "document": f"{DOCUMENT} "}, "MaxSim")
    write_json(folder / "config_sentence_transformers.json", {"query_length": 24, "query_prefix": "[Q]"})
    files = read(folder).files
    assert (files.sides["query"].length, files.prompts) == (24, {"query": "[Q]"})


def save_modules(folder: Path, transformer: dict[str, object], mask: dict[str, object]) -> Path:
    """A checkpoint in the layout of sentence-transformers 6."""
    save_colbert(folder, Settings())
    modules = json.loads((folder / "modules.json").read_text())
    modules += [{"idx": 2, "name": "2", "path": "2_Mask", "type": "sentence_transformers.x.MultiVectorMask"}]
    write_json(folder / "modules.json", modules)
    write_json(folder / "2_Mask" / "config.json", mask)
    write_json(folder / "sentence_bert_config.json", transformer)
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "[unused0]"}})
    return folder


@pytest.mark.parametrize(
    ("transformer", "mask", "query", "document"),
    [
        ({}, {}, (None, None, []), (None, None, [])),
        (
            {"query_length": 32, "document_length": 40, "query_expansion": {"strategy": "min", "length": 24}},
            {"skiplist_words": ["."], "skiplist_tasks": ["document"], "keep_only_token_ids": None},
            (32, Expansion(MASK, 24, attended=False), []),
            (40, None, ids(".")),
        ),
        (
            {"query_length": 40, "query_expansion": {"strategy": "fixed", "length": 16, "attend": True, "token": "a"}},
            {"skiplist_words": ["."], "skiplist_tasks": ["query"]},
            (16, Expansion(VOCABULARY["a"], 16, attended=True), ids(".")),
            (None, None, []),
        ),
        (
            {"query_expansion": {"strategy": "min", "length": 16, "attend": False, "token": None}},
            {"skiplist_words": []},
            (None, Expansion(MASK, 16, attended=False), []),
            (None, None, []),
        ),
    ],
    ids=["nothing", "min", "fixed", "unlimited"],
)
def test_the_modules_of_sentence_transformers(
    transformer: dict[str, object], mask: dict[str, object], query: Any, document: Any, tmp_path: Path
) -> None:
    roles = read(save_modules(tmp_path, transformer, mask)).roles
    names = ("max_tokens", "expansion", "skip_ids")
    assert roles == {
        "query": Role(**dict(zip(names, query, strict=True))),
        "document": Role(**dict(zip(names, document, strict=True))),
    }


def test_lengths_and_expansion_need_no_mask_module(tmp_path: Path) -> None:
    asked = {"document_length": 40, "query_expansion": {"strategy": "fixed", "length": 16}}
    folder = save_modules(tmp_path, asked, {})
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", modules[:-1])
    roles = {
        "query": Role(max_tokens=16, expansion=Expansion(MASK, 16, attended=False), skip_ids=[]),
        "document": Role(max_tokens=40, expansion=None, skip_ids=[]),
    }
    assert read(folder).roles == roles
    write_json(folder / "sentence_bert_config.json", {"query_length": None, "max_seq_length": 40})
    assert read(folder).roles == {}
    write_json(folder / "sentence_bert_config.json", asked)
    write_json(folder / "config_sentence_transformers.json", {"query_length": 24})  # PyLate, which reads its own alone
    assert read(folder).roles["query"].max_tokens == 24


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda f: save_settings(f, query_length=0), CheckpointError, "query_length = 0: it must be at least 1"),
        (lambda f: save_settings(f, document_length="9"), CheckpointError, "document_length = '9'"),
        (lambda f: save_settings(f, skiplist_words=[1]), CheckpointError, r"skiplist_words = \[1\]: .* list of texts"),
        (lambda f: save_settings(f, query_length=2), CheckpointError, "query length 2 .* leaves no room beside the 2"),
        (
            lambda f: save_settings(f, query_length=49),
            CheckpointError,
            "max_seq_len 48 is less than the 49 tokens",
        ),
        (lambda f: save_modules(f, {}, {"keep_only_token_ids": [3]}), CheckpointError, "keep_only_token_ids"),
        (
            lambda f: save_modules(f, {"query_expansion": {"strategy": "max", "length": 4}}, {}),
            CheckpointError,
            "query_expansion .*: it needs a length and the strategy fixed or min",
        ),
        (
            lambda f: save_modules(f, {"query_expansion": {"strategy": "min", "length": 9, "token": "nowhere"}}, {}),
            TokenizerError,
            "filled up with nowhere, which the vocabulary does not have",
        ),
    ],
)
def test_settings_that_cannot_be_met_are_refused(
    change: Callable[[Path], Path], error: type[BeiError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(change(tmp_path))


def test_a_checkpoint_without_a_mask_token_fills_up_with_the_end_of_a_text(tmp_path: Path) -> None:
    folder = save_colbert(tmp_path, Settings())
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace('"[MASK]"', '"[GONE]"'))
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}  # BERT's adds the mask token
    write_json(folder / "tokenizer_config.json", plain)
    with pytest.raises(TokenizerError, match="filled up with a mask token, which the vocabulary does not have"):
        read(folder)
    write_json(folder / "tokenizer_config.json", {**plain, "eos_token": "[SEP]"})
    expansion = read(folder).roles["query"].expansion
    assert expansion is not None
    assert expansion.token_id == VOCABULARY["[SEP]"]
    mask = {"__type": "AddedToken", "content": "the"}
    write_json(folder / "tokenizer_config.json", {**plain, "eos_token": "[SEP]", "mask_token": mask})
    expansion = read(folder).roles["query"].expansion
    assert expansion is not None
    assert expansion.token_id == VOCABULARY["the"]


def test_a_side_without_a_prompt_can_be_named(tmp_path: Path) -> None:
    artifact = build_artifact(save_settings(tmp_path / "colbert", query_length=20), tmp_path / "artifact")
    manifest = artifact.manifest
    assert manifest.prompts == {"query": "", "document": ""}
    for name in ("query", "search_query"):
        assert prompt_of(manifest, None, name) == ""
        assert role_of(manifest, None, name) == manifest.roles["query"]
    assert role_of(manifest, "document", "query") == manifest.roles["document"]
    assert role_of(manifest) is None
    with pytest.raises(InvalidRequestError, match="has no prompt for 'poem'"):
        prompt_of(manifest, None, "poem")


# Token pooling: sentence-transformers 6 keeps it as a module, in PyLate it is an argument of encode().


@pytest.mark.parametrize(
    "config",
    [
        {"pool_factor": 1, "num_protected_tokens": 1, "tasks": ["document"]},
        {"pool_factor": 1.0, "normalize_embeddings": True},
        {},
        {"pool_factor": 2, "tasks": []},
    ],
)
def test_token_pooling_that_does_nothing_is_passed_over(config: dict[str, object], tmp_path: Path) -> None:
    assert read(save_pooling(tmp_path / "pooled", config)).roles == read(save_modules(tmp_path / "plain", {}, {})).roles


@pytest.mark.parametrize("factor", [2, 1.5])
def test_token_pooling_is_refused_by_name(factor: float, tmp_path: Path) -> None:
    folder = save_pooling(tmp_path, {"pool_factor": factor, "num_protected_tokens": 1, "tasks": ["document"]})
    message = f"3_HierarchicalTokenPooling .* one for every {factor}, .* take the module out of modules.json"
    with pytest.raises(CheckpointError, match=message):
        read(folder)


def save_pooling(folder: Path, config: dict[str, object]) -> Path:
    """A checkpoint with the pooling module at the end, as ``MultiVectorEncoder.save_pretrained`` writes it."""
    save_modules(folder, {}, {})
    prefix = "sentence_transformers.multi_vector_encoder.modules.token_pooling"
    path, kind = "3_HierarchicalTokenPooling", f"{prefix}.HierarchicalTokenPooling"
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [*modules, {"idx": 3, "name": "3", "path": path, "type": kind}])
    write_json(folder / path / "config.json", config)
    return folder
