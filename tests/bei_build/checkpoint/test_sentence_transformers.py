"""The files that sentence-transformers writes: bei obeys them, and refuses unsupported settings by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bei.errors import CheckpointError
from bei_build.checkpoint.sentence_transformers import SentenceTransformersFiles, read_sentence_transformers
from bei_build.spec.parts import DenseSpec, NormalizeSpec
from tests.support.checkpoints import HIDDEN, POOLINGS, Dense, Normalize, add_modules, write_json

PROMPTS = "config_sentence_transformers.json"
SETTINGS = "sentence_bert_config.json"


def test_a_folder_without_any_of_them_gives_the_defaults(tmp_path: Path) -> None:
    assert read_sentence_transformers(tmp_path) == SentenceTransformersFiles(tmp_path, (tmp_path,))


@pytest.mark.parametrize("booleans", [True, False], ids=["booleans", "pooling_mode"])
@pytest.mark.parametrize("mode", POOLINGS)
def test_every_pooling_is_read_in_both_formats(mode: str, booleans: bool, tmp_path: Path) -> None:
    assert read_sentence_transformers(add_modules(tmp_path, (mode,), booleans=booleans)).pooling == (mode,)


def test_several_poolings_keep_the_order_of_their_format(tmp_path: Path) -> None:
    modes = ("mean", "cls")
    assert read_sentence_transformers(add_modules(tmp_path, modes, booleans=False)).pooling == modes
    assert read_sentence_transformers(add_modules(tmp_path, modes, booleans=True)).pooling == ("cls", "mean")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"idx": 0}, {"idx": 2}, {"idx": 1}], r"another order than their idx, \[0, 2, 1\]"),
        ([{"name": "0"}, {"name": "1"}, {"name": "1"}], r"two modules one name, \['0', '1', '1'\]"),
    ],
)
def test_modules_that_the_library_would_run_otherwise_are_refused(
    changes: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    """It goes by the list whatever their numbers, and of equal names it runs the last one."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    add_modules(tmp_path)
    write_json(tmp_path / "modules.json", modules)
    assert read_sentence_transformers(tmp_path).normalize is True
    changed = [{**module, **change} for module, change in zip(modules, changes, strict=True)]
    write_json(tmp_path / "modules.json", changed)
    with pytest.raises(CheckpointError, match=message):
        read_sentence_transformers(tmp_path)


def test_the_tail_is_read_and_a_final_normalize_left_to_the_runtime(tmp_path: Path) -> None:
    tail: list[Dense | Normalize] = [Dense(24, "Tanh"), Normalize(), Dense(8, "Identity", bias=False)]
    expected = (
        DenseSpec("tail.0", HIDDEN, 24, True, "tanh"),
        NormalizeSpec(),
        DenseSpec("tail.2", 24, 8, False, "identity"),
    )
    files = read_sentence_transformers(add_modules(tmp_path / "a", ("mean",), tail))
    assert (files.tail, files.normalize) == (expected, False)
    files = read_sentence_transformers(add_modules(tmp_path / "b", ("mean",), [*tail, Normalize()]))
    assert (files.tail, files.normalize) == (expected, True)
    assert {name: folder.name for name, folder in files.tail_folders.items()} == {
        "tail.0": "2_Dense",
        "tail.2": "4_Dense",
    }


def test_a_dense_config_without_activation_or_bias_means_what_the_library_means(tmp_path: Path) -> None:
    add_modules(tmp_path, ("mean",), [Dense(8)])
    write_json(tmp_path / "2_Dense" / "config.json", {"in_features": HIDDEN, "out_features": 8})
    assert read_sentence_transformers(tmp_path).tail == (DenseSpec("tail.0", HIDDEN, 8, True, "tanh"),)


def test_the_transformer_may_lie_in_a_folder_of_its_own(tmp_path: Path) -> None:
    add_modules(tmp_path)
    modules = [
        {"idx": 0, "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    write_json(tmp_path / "modules.json", modules)
    write_json(tmp_path / "0_Transformer" / SETTINGS, {"max_seq_length": 12})
    files = read_sentence_transformers(tmp_path)
    assert files.transformer_folder == tmp_path / "0_Transformer"
    assert files.max_seq_length == 12


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "xlm-roberta"])
def test_settings_of_the_transformer_are_read_under_every_name(name: str, tmp_path: Path) -> None:
    add_modules(tmp_path)
    write_json(tmp_path / f"sentence_{name}_config.json", {"max_seq_length": 12, "do_lower_case": True})
    files = read_sentence_transformers(tmp_path)
    assert (files.max_seq_length, files.do_lower_case) == (12, True)


@pytest.mark.parametrize("key", ["matryoshka_dims", "matryoshka_dimensions"])
def test_prompts_similarity_and_matryoshka_dimensions_are_read(key: str, tmp_path: Path) -> None:
    config = {
        "prompts": {"query": "query: ", "document": ""},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
        key: [16, 8],
    }
    write_json(tmp_path / PROMPTS, config)
    files = read_sentence_transformers(tmp_path)
    assert files.prompts == {"query": "query: ", "document": ""}
    assert (files.default_prompt_name, files.similarity, files.matryoshka_dimensions) == ("query", "dot", (16, 8))


def test_a_prompt_with_the_slot_of_our_templates_is_refused_as_the_library_reads_it_literally(tmp_path: Path) -> None:
    write_json(tmp_path / PROMPTS, {"prompts": {"query": "the {text} of "}})
    with pytest.raises(CheckpointError, match=r"has \{text\} in the prompt 'query'"):
        read_sentence_transformers(tmp_path)


def test_null_settings_are_absent_settings(tmp_path: Path) -> None:
    add_modules(tmp_path)
    nothing = {"prompts": None, "default_prompt_name": None, "similarity_fn_name": None, "matryoshka_dims": None}
    write_json(tmp_path / PROMPTS, nothing)
    write_json(tmp_path / SETTINGS, {"max_seq_length": None, "do_lower_case": None})
    files = read_sentence_transformers(tmp_path)
    assert (files.prompts, files.similarity, files.max_seq_length, files.do_lower_case) == ({}, None, None, False)


@pytest.mark.parametrize(
    "kinds",
    [
        [],
        ["Transformer"],
        ["Pooling", "Transformer"],
        ["Transformer", "Pooling", "LSTM"],
        ["StaticEmbedding", "Pooling"],
        ["Normalize", "StaticEmbedding"],
        ["Transformer", "Pooling", "Pooling"],
    ],
    ids="-".join,
)
def test_unknown_modules_are_refused_by_name(kinds: list[str], tmp_path: Path) -> None:
    modules = [{"idx": i, "path": "", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    write_json(tmp_path / "modules.json", modules)
    with pytest.raises(CheckpointError, match=rf"asks for {' -> '.join(kinds)}; bei builds Transformer -> Pooling"):
        read_sentence_transformers(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", {}, "is not a list of modules"),
        ("modules.json", [{"type": "Transformer"}], "is not a list of modules"),
        ("1_Pooling/config.json", [], "does not hold a JSON object"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "asks for pooling 'median'. Supported: cls, max, mean"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", {}]}, "asks for pooling {}"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": 1}, "include_prompt"),
        ("2_Dense/config.json", "text", "does not hold a JSON object"),
        (
            "2_Dense/config.json",
            {"in_features": 2, "out_features": 2, "activation_function": "a.Mish"},
            "activation_function 'a.Mish'",
        ),
        ("2_Dense/config.json", {"in_features": 2}, "lacks in_features or out_features"),
        ("2_Dense/config.json", {"in_features": "2", "out_features": 2}, "in_features = '2'"),
        (SETTINGS, [1], "does not hold a JSON object"),
        (SETTINGS, {"max_seq_length": "128"}, "max_seq_length = '128'"),
        (SETTINGS, {"do_lower_case": "yes"}, "do_lower_case = 'yes'"),
        (SETTINGS, {"config_args": {"use_bidirectional_attention": True}}, "config_args = use_bidirectional_attention"),
        (SETTINGS, {"model_kwargs": {"dtype": "auto", "is_causal": False}}, "model_kwargs = is_causal, which"),
        (SETTINGS, {"model_args": ["a"]}, "model_args"),
        (SETTINGS, {"tokenizer_name_or_path": "other"}, "another model's tokenizer"),
        (SETTINGS, {"query_length": 8, "max_seq_length": 16}, "has query_length, by which"),
        (PROMPTS, [], "does not hold a JSON object"),
        (PROMPTS, {"prompts": ["query: "]}, "prompts ="),
        (PROMPTS, {"prompts": {"query": 3}}, "prompts that are not texts"),
        (PROMPTS, {"prompts": {"a": ""}, "default_prompt_name": "b"}, r"names the default prompt 'b', .* \['a'\]"),
        (PROMPTS, {"similarity_fn_name": 1}, "similarity_fn_name = 1"),
        (PROMPTS, {"matryoshka_dims": "64,32"}, "matryoshka_dims = '64,32'"),
        (PROMPTS, {"matryoshka_dims": [64, "32"]}, "Matryoshka dimensions"),
    ],
)
def test_malformed_files_are_refused(file: str, content: Any, message: str, tmp_path: Path) -> None:
    add_modules(tmp_path, ("mean",), [Dense(8)])
    write_json(tmp_path / file, content)
    with pytest.raises(CheckpointError, match=message):
        read_sentence_transformers(tmp_path)


def test_arguments_by_which_no_number_changes_are_left_aside(tmp_path: Path) -> None:
    add_modules(tmp_path)
    idle = {"attn_implementation": "eager", "add_pooling_layer": False, "trust_remote_code": True}
    settings = {"model_args": idle, "config_kwargs": {"unpad_inputs": False}, "max_seq_length": 12}
    write_json(tmp_path / SETTINGS, settings)
    assert read_sentence_transformers(tmp_path).max_seq_length == 12


def test_a_pooling_config_that_is_not_there_is_refused(tmp_path: Path) -> None:
    add_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"1_Pooling.config\.json is missing.*Download"):
        read_sentence_transformers(tmp_path)
