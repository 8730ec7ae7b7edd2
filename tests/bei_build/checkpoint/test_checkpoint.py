"""Finding and reading a checkpoint, its weights under our names, and its possible errors."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bei.errors import (
    BeiError,
    CheckpointError,
    CheckpointNotFoundError,
    HubUnreachableError,
    TokenizerError,
    UnsupportedArchitectureError,
    WeightsError,
)
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint, source_of
from tests.support.checkpoints import (
    FAMILIES,
    HIDDEN,
    MAX_TOKENS,
    Dense,
    add_modules,
    bpe_tokenizer,
    change_config,
    read_tensors,
    save_checkpoint,
    write_json,
    write_tensors,
)

QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.fixture
def folder(bert: Path, tmp_path: Path) -> Path:
    """A copy of the tiny BERT, to be changed."""
    return Path(shutil.copytree(bert, tmp_path / "tiny"))


def read(folder: Path, task: str = "auto") -> Checkpoint:
    return read_checkpoint(locate(str(folder)), HeadChoice(task))


def weights_of(folder: Path, task: str = "auto") -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    checkpoint = read(folder, task)
    with checkpoint.weights() as weights:
        return {name: weights.read(name) for name, _ in checkpoint.spec.weights()}


# Finding it.


def test_an_existing_folder_is_found_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    location = locate("tiny")
    assert (location.folder, location.model, location.kind, location.revision) == (folder, "tiny", "path", None)


def test_an_installed_package_is_found_without_importing_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tiny_model_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    folder.rename(package / "model")
    monkeypatch.syspath_prepend(tmp_path / "site")
    location = locate("tiny-model-package")
    assert (location.folder, location.model, location.kind) == (package / "model", "tiny-model-package", "package")


def test_a_package_without_a_checkpoint_says_so() -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"'pytest' carries no checkpoint.*hub id"):
        locate("pytest")


def test_a_hub_id_is_downloaded_without_pickles_where_there_are_safetensors(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    location = locate("owner/name", "v1")
    assert (location.folder, location.model, location.kind, location.revision) == (
        folder,
        "owner/name",
        "hub",
        folder.name,
    )
    assert len(asked) == 1
    assert not any("pytorch" in pattern for pattern in asked[0])
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: [])
    assert locate("owner/name").revision == folder.name  # the snapshot's folder is called after its commit
    assert len(asked) == 3
    assert any("pytorch" in pattern for pattern in asked[2])


def test_without_a_network_the_ways_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointNotFoundError, match=r"'owner/name' is neither a folder.*network.*, or pass the path"):
        locate("owner/name")


def test_a_download_that_fills_the_disk_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(HubUnreachableError, match=r"cannot be kept\. The disk of .* is full: free space.* HF_HOME"):
        locate("owner/name")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all"])
def test_a_path_that_is_not_there_is_not_looked_for_elsewhere(model: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=rf"{model} does not exist\. Pass .* artifact"):
        locate(model)


def test_a_file_is_not_a_checkpoint(folder: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="is not a folder"):
        locate(str(folder / "config.json"))


def test_a_file_of_settings_is_not_a_checkpoint_either(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: x\n")
    with pytest.raises(CheckpointNotFoundError, match=r"recipe\.yaml is a file of settings.* --config"):
        locate(str(tmp_path / "recipe.yaml"))


# Reading it.


def test_sequences_are_as_long_as_the_files_say(folder: Path) -> None:
    assert read(folder).max_seq_len == MAX_TOKENS
    write_json(folder / "tokenizer_config.json", {"model_max_length": 40})
    assert read(folder).max_seq_len == 40
    add_modules(folder)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 32})
    assert read(folder).max_seq_len == 32
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS + 1})
    assert read(folder).max_seq_len == MAX_TOKENS
    assert read_checkpoint(locate(str(folder)), max_seq_len=16).max_seq_len == 16


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_sequences_up_to_its_position_table(family: str, tmp_path: Path) -> None:
    assert read(save_checkpoint(tmp_path, family)).max_seq_len == MAX_TOKENS


def test_a_length_beyond_the_position_table_is_refused(folder: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"{MAX_TOKENS + 1} is beyond the {MAX_TOKENS} positions of the checkpoint"
    ):
        read_checkpoint(locate(str(folder)), max_seq_len=MAX_TOKENS + 1)


def test_a_folder_without_config_json_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"has no config\.json.*Pass the folder that holds one"):
        read(folder)


@pytest.mark.parametrize("content", ["", "{", "\xff", "[1]", "3", "[" * 100_000])
def test_a_config_that_is_not_a_json_object_is_refused(content: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json .*Download the checkpoint again"):
        read(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": None}, "does not name a model_type"),
        ({"architectures": None}, r'does not name its architectures. Add the class, e.g. \["BertModel"\]'),
        ({"architectures": []}, "does not name its architectures"),
        ({"architectures": "BertModel"}, "does not name its architectures"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(GPTQ, bits = None\)"),
        ({"quantization_config": "awq"}, r"quantized \(awq\)"),
        ({"hidden_act": "laplace"}, "Activation 'laplace' is not supported. Supported: gelu, "),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'.*only 'absolute'"),
        ({"is_decoder": True}, "is_decoder = True.*only False"),
        ({"hidden_size": "wide"}, "correct it to a whole number"),
        ({"hidden_size": True}, "correct it to a whole number"),
        ({"num_attention_heads": 0}, r"describes no model \(.*zero\)"),
        ({"num_hidden_layers": 0}, "a model without layers"),
    ],
)
def test_a_config_beyond_the_family_is_refused(changed: dict[str, object], message: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(change_config(folder, **changed))


def test_a_switch_that_is_called_like_a_size_is_none(folder: Path) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="no family for model_type 'lfm2_moe'"):
        read(
            change_config(folder, model_type="lfm2_moe", architectures=["Lfm2MoeModel"], block_auto_adjust_ff_dim=True)
        )


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    bpe_tokenizer().save(str(folder / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"a vocabulary of BPE, and transformers .* one of WordPiece"):
        read(folder)


def test_a_dense_layer_of_another_width_is_refused(folder: Path) -> None:
    add_modules(folder, ("mean",), [Dense(16)], hidden=HIDDEN + 1)
    with pytest.raises(CheckpointError, match=rf"takes {HIDDEN + 1} features but is given {HIDDEN}: check the pooling"):
        read(folder)


@pytest.fixture(scope="module")
def settings_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with every settings file. Examples restore what they change."""
    folder = add_modules(save_checkpoint(tmp_path_factory.mktemp("settings")), ("mean",), [Dense(8)])
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": False})
    prompts = {"prompts": {"q": "x"}, "default_prompt_name": "q", "similarity_fn_name": "dot", "matryoshka_dims": [4]}
    write_json(folder / "config_sentence_transformers.json", prompts)
    write_json(folder / "tokenizer_config.json", {"model_max_length": 16})
    return folder


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_of_any_setting_is_understood_or_refused(data: st.DataObject, settings_files: Path) -> None:
    path = data.draw(st.sampled_from([settings_files / "modules.json", *sorted(settings_files.rglob("*config*.json"))]))
    before = path.read_text()
    content = json.loads(before)
    target = content if isinstance(content, dict) else data.draw(st.sampled_from(content))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(
        st.sampled_from([None, 0, -1, 1, 1.5, float("nan"), "", "text", [], [1], ["text"], {}, {"a": 1}, True, False])
    )
    path.write_text(json.dumps(content))
    try:
        with contextlib.suppress(BeiError):  # the only way out but success: no traceback for a user
            weights_of(settings_files)
    finally:
        path.write_text(before)


# Its weights.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", ["Model", "ForMaskedLM"])
def test_task_checkpoints_build_as_embedders(family: str, task: str, tmp_path: Path) -> None:
    expected = weights_of(save_checkpoint(tmp_path / "base", family))
    folder = save_checkpoint(tmp_path / "task", family, task=task)
    actual = weights_of(folder, task="embed")
    assert {name: array.shape for name, array in actual.items()} == {n: a.shape for n, a in expected.items()}
    stored = read_tensors(folder)
    word = next(name for name in stored if name.endswith("word_embeddings.weight"))
    np.testing.assert_array_equal(actual["embeddings.word.weight"], stored[word].numpy())


def test_bert_for_pre_training_builds_as_an_embedder(tmp_path: Path) -> None:
    assert len(weights_of(save_checkpoint(tmp_path, task="ForPreTraining"))) == 5 + 2 * 16


def rename_norms(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {next((n.replace(a, b) for a, b in old.items() if n.endswith(a)), n): t for n, t in tensors.items()}


def add_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"bert.{name}": tensor for name, tensor in tensors.items()}


def add_position_ids(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "embeddings.position_ids": torch.arange(MAX_TOKENS)[None]}


def drop_pooler(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}


@pytest.mark.parametrize("change", [rename_norms, add_prefix, add_position_ids, drop_pooler])
def test_names_of_older_checkpoints_are_understood(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], folder: Path
) -> None:
    expected = weights_of(folder)
    changed = change(read_tensors(folder))
    assert changed.keys() != read_tensors(folder).keys()
    actual = weights_of(write_tensors(folder, changed))
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)


def test_position_rows_that_are_never_used_are_cut_off(tmp_path: Path) -> None:
    """Rows before the padding's, except the one that a padding id in a text reads, whatever the file holds there."""
    folder = save_checkpoint(tmp_path, "roberta", pad_token_id=3, max_position_embeddings=MAX_TOKENS + 4)
    table = read_tensors(folder)["embeddings.position_embeddings.weight"].numpy()
    np.testing.assert_array_equal(weights_of(folder)["embeddings.position.weight"], table[3:])
    assert table[3].any()


def test_missing_tensors_are_named_and_counted(folder: Path) -> None:
    tensors = read_tensors(folder)
    del tensors[QUERY], tensors["encoder.layer.1.output.dense.bias"]
    with pytest.raises(WeightsError, match=rf"{QUERY} is missing \(and 1 more\)\. Download"):
        weights_of(write_tensors(folder, tensors))


def test_extra_tensors_are_named(folder: Path) -> None:
    tensors = {**read_tensors(folder), "encoder.layer.0.adapter.down.weight": torch.ones(2)}
    with pytest.raises(WeightsError, match=r"layer\.0\.adapter\.down\.weight is not part of.*Merge adapters"):
        weights_of(write_tensors(folder, tensors))


def test_misshapen_tensors_are_named_with_both_shapes(folder: Path) -> None:
    tensors = read_tensors(folder)
    tensors[QUERY] = tensors[QUERY][:5]
    with pytest.raises(
        WeightsError, match=rf"{QUERY} has shape \[5, {HIDDEN}\], but .* \[{HIDDEN}, {HIDDEN}\].*Download"
    ):
        weights_of(write_tensors(folder, tensors))


def test_a_dense_layer_without_its_bias_is_refused(folder: Path) -> None:
    add_modules(folder, ("mean",), [Dense(16)])
    dense = folder / "2_Dense"
    write_tensors(dense, {"linear.weight": read_tensors(dense)["linear.weight"]})
    with pytest.raises(WeightsError, match=r"linear\.bias is missing"):
        weights_of(folder)


# Its record in the manifest.


def test_the_source_hash_covers_what_was_read_and_nothing_else(folder: Path) -> None:
    add_modules(folder, ("mean",), [Dense(16)])
    first = source_of(read(folder))
    assert (first.model, first.kind, first.revision) == ("tiny", "path", None)
    write_json(folder / "artifact" / "manifest.json", {})  # an artifact that was built into the checkpoint's folder
    assert source_of(read(folder)).sha256 == first.sha256
    for file in (
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
    ):
        before = (folder / file).read_bytes()
        changed = bytes([*before[:-1], before[-1] ^ 1]) if file.endswith(".safetensors") else before + b" "
        (folder / file).write_bytes(changed)
        checkpoint = read(folder)
        assert source_of(checkpoint).sha256 != first.sha256, file
        (folder / file).write_bytes(before)
    assert source_of(read(folder)).sha256 == first.sha256
