"""Jina's XLM-RoBERTa in the names of its own code: two kinds of positions, and one of several adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bei.artifact.manifest import Adapters
from bei.core import Float32Array, PackedBatch
from bei.errors import CheckpointError, ConfigError, InvalidRequestError, WeightsError
from bei.tokenizer.prompts import prompt_of
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from tests.support.builds import build_artifact, random_encodings, running
from tests.support.checkpoints import add_modules, change_config, read_tensors, write_json, write_tensors
from tests.support.reading import saved

Tensors = dict[str, torch.Tensor]

LENGTHS = (6, 21, 3, 34)
TASKS = ["retrieval.query", "retrieval.passage", "text-matching"]
INSTRUCTIONS = {"retrieval.query": "find: ", "retrieval.passage": "read: ", "text-matching": ""}
RANK, ALPHA = 4, 3
CODE = "jinaai/xlm-roberta-flash-implementation--"
AUTO_MAP = {
    "AutoConfig": f"{CODE}configuration_xlm_roberta.XLMRobertaFlashConfig",
    "AutoModel": f"{CODE}modeling_lora.XLMRobertaLoRA",
    "AutoModelForSequenceClassification": f"{CODE}modeling_xlm_roberta.XLMRobertaForSequenceClassification",
}
# XLM-RoBERTa's names in the order of replacement.
NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    "encoder.layer.": "encoder.layers.",
    "attention.output.LayerNorm": "norm1",
    "attention.output.dense": "mixer.out_proj",
    "intermediate.dense": "mlp.fc1",
    "output.LayerNorm": "norm2",
    "output.dense": "mlp.fc2",
}


def outputs(folder: Path, **settings: Any) -> dict[str, Float32Array]:
    artifact = build_artifact(folder, folder.with_name(f"{folder.name}-artifact"), **settings)
    texts = random_encodings(LENGTHS, artifact.manifest.spec.vocab_size, seed=4)
    with running(artifact) as engine:
        return dict(engine.run(PackedBatch.from_encodings(texts)))


def assert_same(actual: Mapping[str, Float32Array], expected: Mapping[str, Float32Array]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, atol=1e-5, err_msg=name)


def original(folder: Path, architecture: str = "XLMRobertaModel", **changes: Any) -> Path:
    """The checkpoint with the config of the original code; transformers has saved its tensors' names already."""
    assert any("mixer.Wqkv" in name for name in read_tensors(folder))
    theta = json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"]
    settings = {
        "architectures": [architecture],
        "auto_map": AUTO_MAP,
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rope_parameters": None,
        "rotary_emb_base": theta,
        "truncate_dim": None,
        **changes,
    }
    return change_config(folder, **settings)


def with_adapters(folder: Path, merged: int | None) -> Path:
    """A copy of the checkpoint whose matrices and tables have factors; or with those of task ``merged`` added."""
    copy = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-{merged}")))
    generator = torch.Generator().manual_seed(9)
    tensors: Tensors = {}
    for name, tensor in read_tensors(folder).items():
        if tensor.ndim != 2:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        is_table = "embeddings" in name
        shapes = ((rows, RANK), (RANK, columns)) if is_table else ((RANK, columns), (rows, RANK))
        a, b = (0.3 * torch.randn(len(TASKS), *shape, generator=generator) for shape in shapes)
        if merged is not None:
            product = a[merged] @ b[merged] if is_table else b[merged] @ a[merged]
            tensors[name] = tensor + product * (ALPHA / RANK)
            continue
        module = name.removesuffix(".weight")
        parts = {"original": tensor, "0.lora_A": a, "0.lora_B": b}
        tensors |= {f"{module}.parametrizations.weight.{part}": value for part, value in parts.items()}
    write_tensors(copy, tensors)
    if merged is not None:
        return copy
    adapters = {"lora_adaptations": TASKS, "lora_rank": RANK, "lora_alpha": ALPHA, "task_instructions": INSTRUCTIONS}
    return change_config(copy, **adapters)


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return saved(tmp_path / "native", "JinaEmbeddingsV3Model")


@pytest.fixture
def adapted(native: Path) -> Path:
    return with_adapters(original(native), None)


@pytest.mark.parametrize("task", TASKS)
def test_an_adapter_is_merged_into_matrices_and_tables(task: str, native: Path, adapted: Path) -> None:
    merged = with_adapters(native, TASKS.index(task))
    assert_same(outputs(adapted, adapter=task), outputs(merged))


def test_the_weights_can_be_built_without_any_adapter(native: Path, adapted: Path) -> None:
    assert_same(outputs(adapted, adapter="none"), outputs(native))


def test_the_artifact_says_its_adapter_and_has_its_prompt_only(adapted: Path, tmp_path: Path) -> None:
    manifest = build_artifact(adapted, tmp_path / "artifact", adapter="retrieval.query").manifest
    assert manifest.spec.adapter == "retrieval.query"
    assert manifest.prompts == {"retrieval.query": "find: "}
    assert manifest.default_prompt_name == "retrieval.query"
    assert prompt_of(manifest) == prompt_of(manifest, input_type="query") == "find: "
    with pytest.raises(InvalidRequestError, match=r"retrieval\.query"):
        prompt_of(manifest, input_type="document")
    assert build_artifact(adapted, tmp_path / "artifact", adapter="none").manifest.prompts == {}


def test_the_files_of_sentence_transformers_are_read(adapted: Path, native: Path, tmp_path: Path) -> None:
    add_modules(adapted, ("cls",))
    modules = json.loads((adapted / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    write_json(adapted / "modules.json", modules)
    prompts = {**INSTRUCTIONS, "other": "more: "}
    write_json(adapted / "config_sentence_transformers.json", {"prompts": prompts})
    manifest = build_artifact(adapted, tmp_path / "artifact", adapter="retrieval.passage").manifest
    assert manifest.embedding is not None
    assert manifest.embedding.pooling == "cls"
    assert manifest.prompts == {"retrieval.passage": "read: ", "other": "more: "}


def test_the_codes_own_pooling_is_read(native: Path, tmp_path: Path) -> None:
    manifest = build_artifact(original(native, emb_pooler="cls"), tmp_path / "artifact").manifest
    assert manifest.embedding is not None
    assert manifest.embedding.pooling == "cls"


def test_an_adapter_that_there_is_not_is_refused(adapted: Path) -> None:
    with pytest.raises(ConfigError, match=r"retrieval\.query, retrieval\.passage, text-matching\. .*--adapter none"):
        read_checkpoint(locate(str(adapted)), adapter="separation")


def test_all_adapters_of_one_artifact_are_those_that_are_merged(adapted: Path, tmp_path: Path) -> None:
    artifact = build_artifact(adapted, tmp_path / "artifact")
    manifest = artifact.manifest
    assert manifest.adapters == Adapters(names=TASKS, tasks=TASKS, is_required=False)
    assert manifest.prompts == INSTRUCTIONS
    texts = random_encodings((5, 17, 2, 9), manifest.spec.vocab_size)
    with running(artifact) as engine:
        together = engine.run(PackedBatch.from_encodings([t._replace(adapter=i) for i, t in enumerate(texts)]))
    for index, task in enumerate(["none", *TASKS]):
        merged = build_artifact(adapted, tmp_path / f"merged{index}", adapter=task)
        with running(merged) as engine:
            alone = engine.run(PackedBatch.from_encodings([texts[index]]))
        np.testing.assert_allclose(together["embedding"][index], alone["embedding"][0], atol=2e-5, rtol=0)


def test_a_checkpoint_without_adapters_takes_no_choice(native: Path) -> None:
    with pytest.raises(ConfigError, match="has no adapters"):
        read_checkpoint(locate(str(native)), adapter="retrieval.query")


def test_adapters_of_another_rank_are_refused(adapted: Path) -> None:
    change_config(adapted, lora_rank=2)
    with pytest.raises(WeightsError, match=r"The adapters of .* 3 adapters of rank 2"):
        read_checkpoint(locate(str(adapted)), adapter="text-matching").weights()


def test_adapters_that_the_config_does_not_name_are_refused(adapted: Path) -> None:
    change_config(adapted, lora_adaptations=None)
    with pytest.raises(WeightsError, match="belongs to an adapter"):
        read_checkpoint(locate(str(adapted))).weights()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": None}, "lora_rank None"),
        ({"lora_adaptations": "text-matching"}, "lora_adaptations 'text-matching'"),
        ({"task_instructions": {"text-matching": 3}}, "task_instructions that are not texts"),
        ({"task_instructions": ["a"]}, "task_instructions that are not texts"),
    ],
)
def test_adapters_that_are_not_described_are_refused(changes: dict[str, Any], message: str, adapted: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(locate(str(change_config(adapted, **changes))), adapter="text-matching")


@pytest.mark.parametrize("suffix", ["ForSequenceClassification", "ForMaskedLM"])
def test_task_classes_are_read_in_the_original_names(suffix: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "native", f"JinaEmbeddingsV3{suffix}")
    expected = outputs(folder)
    assert_same(outputs(original(folder, f"XLMRoberta{suffix}")), expected)


def test_colbert_has_a_linear_layer_on_rotary_states(native: Path) -> None:
    states = outputs(native, token_embeddings=True)["token_embedding"]
    matrix = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    folder = original(native, "HF_ColBERT")
    write_tensors(folder, {**read_tensors(folder), "linear.weight": matrix})
    np.testing.assert_allclose(outputs(folder)["token_embedding"], states @ matrix.numpy().T, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_fast"])
def test_a_reranker_with_learned_positions_is_read(activation: str, tmp_path: Path) -> None:
    native = saved(tmp_path / "native", "XLMRobertaForSequenceClassification")
    change_config(native, hidden_act="gelu" if activation == "gelu" else "gelu_pytorch_tanh")
    expected = outputs(native)
    tensors: Tensors = {}
    for name, tensor in read_tensors(native).items():
        parts = [name.replace("query", part) for part in ("query", "key", "value")]
        if "attention.self.query" in name:
            rows = [read_tensors(native)[part] for part in parts]
            tensor, name = torch.cat(rows), name.replace("attention.self.query", "mixer.Wqkv")
        elif "attention.self" in name:
            continue
        for old, new in NAMES.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    write_tensors(native, tensors)
    change_config(native, auto_map=AUTO_MAP, position_embedding_type="absolute", hidden_act=activation)
    assert_same(outputs(native), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        ({"position_embedding_type": None}, "lacks position_embedding_type"),
        ({"hidden_act": None}, "lacks hidden_act"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved = True"),
        ({"rotary_emb_dim": 4}, "rotary_emb_dim = 4"),
        ({"rotary_emb_scale_base": 512.0}, "rotary_emb_scale_base = 512.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "config.json has rope_scaling"),
        ({"truncate_dim": 16}, "truncate_dim = 16"),
        ({"pad_vocab_size_multiple": 8}, "pad_vocab_size_multiple = 8"),
        ({"auto_map": {"AutoModel": "modeling.XLMRobertaModel"}}, "code of its own"),
    ],
)
def test_other_settings_of_its_code_are_refused(changes: dict[str, Any], message: str, native: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(locate(str(original(native, **changes))))
