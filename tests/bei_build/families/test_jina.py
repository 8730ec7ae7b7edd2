"""JinaBERT v2 against an implementation in torch, written from the papers: transformers has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bei.core import PackedBatch
from bei.errors import CheckpointError, ConfigError, WeightsError
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from tests.bei_build.families.jina import CODE, HIDDEN, LONGEST, PAPERS, VOCABULARY, save, states
from tests.support.builds import build_artifact, embed, random_encodings, running
from tests.support.checkpoints import add_modules, read_tensors
from tests.support.cpus import BF16

functional = torch.nn.functional


@pytest.mark.parametrize(("kind", "activation"), [("geglu", functional.gelu), ("reglu", functional.relu)])
@pytest.mark.parametrize("code", [PAPERS, CODE])
@pytest.mark.parametrize("prefix", ["", "bert."])
def test_vectors_are_those_of_the_papers(prefix: str, code: str, kind: str, activation: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "jina", prefix, code, feed_forward_type=kind)
    add_modules(folder, ("mean",), hidden=HIDDEN)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in read_tensors(folder).items()}
    texts = random_encodings([5, 33, 2, 64, 17], VOCABULARY, pairs=True)
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    assert artifact.manifest.max_seq_len == LONGEST
    with running(artifact) as engine:
        actual = embed(engine, texts)
    expected = torch.stack([states(tensors, text, activation, code).mean(0) for text in texts])
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("code", [PAPERS, CODE])
def test_a_classifier_reads_the_pooled_first_token(code: str, tmp_path: Path) -> None:
    labels = {"0": "low", "1": "middle", "2": "high"}
    architectures = ["JinaBertForSequenceClassification"]
    folder = save(tmp_path / "jina", "bert.", code, architectures=architectures, id2label=labels)
    tensors = {name.removeprefix("bert."): tensor for name, tensor in read_tensors(folder).items()}
    texts = random_encodings([5, 33, 2], VOCABULARY, pairs=True)
    with running(build_artifact(folder, tmp_path / "artifact", verify=False)) as engine:
        actual = engine.run(PackedBatch.from_encodings(texts))["logits"]
    for row, text in zip(actual, texts, strict=True):
        first = states(tensors, text, code=code)[0]
        pooled = torch.tanh(functional.linear(first, tensors["pooler.dense.weight"], tensors["pooler.dense.bias"]))
        expected = functional.linear(pooled, tensors["classifier.weight"], tensors["classifier.bias"])
        np.testing.assert_allclose(row, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("precision", [BF16, "int8"])
def test_the_model_for_code_is_close_in_fewer_bits(precision: str, tmp_path: Path) -> None:
    artifact = build_artifact(save(tmp_path / "jina", code=CODE), tmp_path / "artifact", precision=precision)
    certificate = json.loads((artifact.path / "certificate.json").read_text())
    assert certificate["passed"]
    assert certificate["outputs"][0]["cosine_mean"] < 1.0, "computed in FP32 after all"


def test_a_copy_of_the_model_for_code_is_known_by_its_origin(tmp_path: Path) -> None:
    """transformers writes ``_name_or_path``; copying the code beside the weights changes auto_map."""
    auto_map = {"AutoModel": "modeling_bert.JinaBertModel"}
    folder = save(tmp_path / "jina", code=CODE, auto_map=auto_map, _name_or_path=CODE)
    assert read_checkpoint(locate(str(folder))).spec.layers[0].second_attention_norm


def test_it_is_verified_with_a_second_writing_of_its_spec(tmp_path: Path) -> None:
    folder = save(tmp_path / "jina")
    certificate = build_artifact(folder, tmp_path / "artifact").certificate
    assert certificate.reference.startswith("bei's PyTorch module, FP32")
    with pytest.raises(ConfigError, match=r"transformers has no JinaBertForMaskedLM\. Use --reference engine"):
        build_artifact(folder, tmp_path / "other", reference="hf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_type": "original"}, "feed_forward_type 'original'; .* only geglu or reglu"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'.*only 'alibi'"),
    ],
)
def test_other_settings_of_its_code_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(locate(str(save(tmp_path, **changes))))


def test_the_model_for_code_without_its_origin_is_refused_by_its_tensors(tmp_path: Path) -> None:
    folder = save(tmp_path, code=CODE, auto_map={})
    with pytest.raises(WeightsError, match=r"layer\.0\.mlp\.gated_layers\.weight is missing"):
        read_checkpoint(locate(str(folder))).weights()
