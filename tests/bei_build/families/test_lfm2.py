"""LFM2's bidirectional models, and convolutions that end where a text ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Lfm2Model

from bei.core import Encoding, Engine, Float32Array
from bei.engine.packing import can_share
from bei.errors import CheckpointError, ConfigError
from bei_build.torch_graph.model import PackedModel, packed_model
from tests.bei_build.families import lfm2
from tests.bei_build.torch_graph.rig import of_the_graph, of_the_module
from tests.support.builds import build_artifact, embed, random_encodings, running
from tests.support.checkpoints import add_modules, change_config
from tests.support.cpus import needs_bf16
from tests.support.reading import read, refused, saved

TOLERANCE = 2e-4
LENGTHS = (1, 48, 2, 17, 3, 5, 33, 9)
VOCABULARY = 100
CASES = ("Lfm2Model", "Lfm2Model-biases")


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lfm2.save(tmp_path_factory.mktemp("lfm2") / "checkpoint", request.param)


def module_of(folder: Path, pooling: str = "mean") -> PackedModel:
    checkpoint = read(folder, pooling=pooling)
    with checkpoint.weights() as weights:
        return packed_model(checkpoint.spec, weights.read, checkpoint.max_seq_len)


def largest(actual: Float32Array, expected: list[torch.Tensor]) -> float:
    return float(np.abs(actual - np.stack([row.numpy() for row in expected])).max())


def test_lfm2_5_embedding_is_its_authors_computation(folder: Path, tmp_path: Path) -> None:
    """``Lfm2BidirectionalModel``: the engine and the module for PyTorch, all texts in one batch and alone."""
    encodings = random_encodings(LENGTHS, VOCABULARY)
    oracle = lfm2.Oracle(folder)
    first = [oracle.states(text)[0] for text in encodings]
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.manifest.embedding is not None
    assert artifact.manifest.embedding.pooling == "cls"
    assert artifact.manifest.spec.attention == "bidirectional"
    with running(artifact) as engine:
        assert largest(embed(engine, encodings), first) <= TOLERANCE
        alone = np.concatenate([embed(engine, [text]) for text in encodings])
    assert largest(alone, first) <= TOLERANCE
    means = [oracle.states(text).mean(0) for text in encodings]
    assert largest(np.stack(of_the_module(module_of(folder), encodings)["embedding"]), means) <= TOLERANCE


@needs_bf16
def test_the_bf16_engine_stays_close(folder: Path, tmp_path: Path) -> None:
    encodings = random_encodings(LENGTHS, VOCABULARY)
    oracle = lfm2.Oracle(folder)
    with running(build_artifact(folder, tmp_path / "artifact", precision="bf16", pooling="mean")) as engine:
        found = embed(engine, encodings)
    expected = np.stack([oracle.states(text).mean(0).numpy() for text in encodings])
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() >= 0.999


def test_the_convolution_is_not_the_causal_one(folder: Path) -> None:
    (text,) = random_encodings([9], VOCABULARY)
    causal = Lfm2Model.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        states = causal(torch.from_numpy(text.input_ids).long()[None]).last_hidden_state[0]
    assert (states - lfm2.Oracle(folder).states(text)).abs().max() > 0.01


# Neighbours in a batch.


@pytest.fixture(scope="module", params=["Lfm2Model", "Lfm2BidirectionalModel"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    scratch = tmp_path_factory.mktemp("neighbours")
    save = saved if request.param == "Lfm2Model" else lfm2.save
    folder = save(scratch / "checkpoint", "Lfm2Model")
    with running(build_artifact(folder, scratch / "artifact", pooling="mean", verify=False)) as opened:
        yield opened


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=9), seed=st.integers(0, 1000))
def test_no_text_reads_across_its_ends(lengths: list[int], seed: int, engine: Engine) -> None:
    """A text's vector is the same beside any others, in any order."""
    encodings = random_encodings(lengths, VOCABULARY, seed=seed)
    together = embed(engine, encodings)
    np.testing.assert_allclose(embed(engine, encodings[::-1])[::-1], together, atol=1e-5)
    for text, row in zip(encodings, together, strict=True):
        np.testing.assert_allclose(embed(engine, [text])[0], row, atol=1e-5)


def test_the_module_for_pytorch_takes_no_shared_tokens(folder: Path) -> None:
    assert not can_share(module_of(folder).input_names)


# Late interaction: queries that end in tokens which others do not attend to.


def states_with_expansion(folder: Path, tmp_path: Path) -> tuple[Encoding, list[Float32Array]]:
    """A text of which 6 tokens are keys, and its states by the graph and by the module."""
    (text,) = random_encodings([11], VOCABULARY)
    text = Encoding(text.input_ids, num_keys=6)
    checkpoint = read(folder, token_states=True)
    spec = replace(checkpoint.spec, partial_keys=True)
    with checkpoint.weights() as weights:
        module = packed_model(spec, weights.read, checkpoint.max_seq_len)
        graph = of_the_graph(spec, weights.read, checkpoint.max_seq_len, [text], tmp_path / "graph")
    return text, [found["token_embedding"][0] for found in (graph, of_the_module(module, [text]))]


def test_convolutions_of_lfm2_5_colbert_read_expansion_tokens(folder: Path, tmp_path: Path) -> None:
    text, found = states_with_expansion(folder, tmp_path)
    expected = lfm2.Oracle(folder).states(text).numpy()
    for states in found:
        np.testing.assert_allclose(states, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_convolutions_of_lfm2_colbert_do_not(name: str, tmp_path: Path) -> None:
    """As transformers' class, which gives zeros to what is masked."""
    folder = saved(tmp_path / "checkpoint", name)
    text, found = states_with_expansion(folder, tmp_path)
    model = Lfm2Model.from_pretrained(folder, attn_implementation="eager")
    ids, mask = torch.from_numpy(text.input_ids).long()[None], torch.arange(11)[None] < 6
    with torch.inference_mode():
        expected = model(ids, attention_mask=mask.long()).last_hidden_state[0].numpy()
    for states in found:
        np.testing.assert_allclose(states, expected, atol=TOLERANCE)


# What is refused.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"layer_types": ["conv", "full_attention", "sliding_attention"]},
            CheckpointError,
            "a layer of type 'sliding_attention'",
        ),
        ({"layer_types": ["conv"] * 3}, CheckpointError, "no layer of type full_attention"),
        ({"conv_L_cache": 5}, CheckpointError, r"layers\.0\.conv\.conv.*has shape"),
        ({"architectures": ["Lfm2Model"]}, CheckpointError, "code of its own"),
    ],
)
def test_what_the_family_does_not_describe_is_refused(
    changes: dict[str, object], error: type[CheckpointError], message: str, tmp_path: Path
) -> None:
    refused(change_config(lfm2.save(tmp_path / "checkpoint"), **changes), error, message)


def test_an_attention_that_its_convolutions_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Lfm2Model has no bidirectional attention"):
        build_artifact(saved(tmp_path / "checkpoint", "Lfm2Model"), tmp_path / "artifact", attention="bidirectional")


def test_sentence_transformers_files_choose_the_pooling(tmp_path: Path) -> None:
    folder = add_modules(lfm2.save(tmp_path / "checkpoint"), ("mean",))
    assert read(folder).spec.heads[0].pooling == ("mean",)
