"""Differences between transformers 4 and 5: the build follows 5, notes the difference, and its remedy works.

The behaviour of 4 is written here as it was measured with 4.57.6 (docs/decisions.md): it is not installed beside 5.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bei.errors import CheckpointError
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.checkpoint.remote_code import ATTENTIONS
from bei_build.checkpoint.transformers_versions import version_notes
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.progress import Progress
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import DenseSpec
from tests.support.builds import build_artifact, open_engine
from tests.support.checkpoints import change_config, read_tensors, save_checkpoint, write_tensors
from tests.support.reading import read, refused, saved

Settings = Mapping[str, Any]

LINEAR = {"rope_type": "linear", "factor": 2.0}
PLAIN = {"rope_type": "default"}
FULL, SLIDING = "full_attention", "sliding_attention"


def said_as_4(folder: Path, name: str, changes: Settings) -> Path:
    """The case ``name`` with ``changes`` in its config.json, which names transformers 4 and has none of 5's keys."""
    return change_config(saved(folder, name), **{"transformers_version": "4.57.6", "rope_parameters": None, **changes})


def notes(folder: Path) -> list[str]:
    return list(version_notes(read(folder)))


def thetas(spec: ModelSpec) -> list[float]:
    """For each layer, the base of its second frequency."""
    ropes = [attention.rope for attention in spec.attentions if attention.rope]
    return [round(rope.inv_freq[1] ** -len(rope.inv_freq)) for rope in ropes]


def same_theta(theta: float) -> Settings:
    return {kind: {**PLAIN, "rope_theta": theta} for kind in (FULL, SLIDING)}


@pytest.mark.parametrize(
    ("name", "changes", "expected", "remedy", "as_4"),
    [
        (
            "CohereModel",
            {},
            ['rope_theta: .* 500000.0, .* 10000.0. For that set "rope_theta": 10000.0$'],
            {"rope_theta": 10_000.0},
            [10_000] * 3,
        ),
        (
            "LlamaModel",
            {"rope_theta": 100.0, "rope_parameters": {**PLAIN, "rope_theta": 50.0}},
            ['rope_theta: .* 50.0, .* 100.0. For that set "rope_theta": 100.0 in rope_parameters'],
            {"rope_parameters": {**PLAIN, "rope_theta": 100.0}},
            [100] * 3,
        ),
        (
            "LlamaModel",
            {"rope_theta": 100.0, "rope_scaling": {**PLAIN, "rope_theta": 50.0}},
            ['rope_theta: .* 50.0, .* 100.0. For that set "rope_theta": 100.0 in rope_scaling'],
            {"rope_scaling": {**PLAIN, "rope_theta": 100.0}},
            [100] * 3,
        ),
        (
            "Olmo3Model",
            {"rope_theta": 10_000.0},
            ['rope_theta of sliding_attention: .* 500000.0, .* 10000.0. For that set "rope_parameters": {"full_att'],
            {"rope_parameters": same_theta(10_000.0)},
            [10_000] * 3,
        ),
        (
            "ModernBertDecoderModel",
            {"global_rope_theta": 160_000.0, "sliding_window": None},
            ['rope_theta of sliding_attention: .* 10000.0, .* 160000.0. For that set "rope_parameters": {"full_att'],
            {"rope_parameters": same_theta(160_000.0)},
            [160_000] * 3,
        ),
        (
            "ModernBertModel",
            {"rope_scaling": {**PLAIN, "rope_theta": 50.0}},
            [
                'rope_theta of full_attention: .* 50.0, .* 160000.0. For that take "rope_theta" out of rope_scaling',
                'rope_theta of sliding_attention: .* 50.0, .* 10000.0. For that take "rope_theta" out of rope_scaling',
            ],
            {"rope_scaling": PLAIN},
            [160_000, 10_000, 160_000],
        ),
        (
            "NemotronModel",
            {"rope_scaling": LINEAR, "partial_rotary_factor": 0.5},
            ['rope_scaling: .* linear, .* none. For that set "rope_scaling": null'],
            {"rope_scaling": None},
            [10_000] * 3,
        ),
    ],
    ids=["default", "said twice", "said in scaling", "OLMo 3", "ModernBERT decoder", "ModernBERT", "Nemotron"],
)
def test_rotations_are_those_of_5_and_the_note_says_how_to_have_those_of_4(
    name: str, changes: Settings, expected: list[str], remedy: Settings, as_4: list[float], tmp_path: Path
) -> None:
    folder = said_as_4(tmp_path, name, changes)
    assert thetas(read(folder).spec) != as_4
    found = notes(folder)
    assert len(found) == len(expected)
    for note, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, note), note
    change_config(folder, **remedy)
    assert thetas(read(folder).spec) == as_4
    assert notes(folder) == []


def test_a_window_that_4_saved_and_did_not_read_is_noted(tmp_path: Path) -> None:
    folder = said_as_4(
        tmp_path, "ModernBertDecoderModel", {"local_attention": None, "rope_parameters": same_theta(160_000.0)}
    )
    assert [attention.window for attention in read(folder).spec.attentions] == [None, 7, None]
    (note,) = notes(folder)
    assert note.startswith("sliding_window: this build takes 8, as transformers 5 does; transformers 4 took 64. For")
    change_config(folder, sliding_window=64)
    assert [attention.window for attention in read(folder).spec.attentions] == [None, 63, None]
    assert notes(folder) == []


@pytest.mark.parametrize(("name", "former"), [("ModernBertModel", "obeyed"), ("Gemma3TextModel", "refused")])
def test_a_scaling_under_an_old_name_is_noted(name: str, former: str, tmp_path: Path) -> None:
    folder = said_as_4(tmp_path, name, {"rope_scaling": {"type": "linear", "factor": 2.0}})
    plain = read(folder).spec
    (note,) = notes(folder)
    assert f"this build does not scale, as transformers 5 does not; transformers 4 {former} it" in note
    assert note.endswith("""For 'linear' name the key "rope_type\"""")
    change_config(folder, rope_scaling=LINEAR)
    assert [attention.rope for attention in read(folder).spec.attentions] != [
        attention.rope for attention in plain.attentions
    ]
    assert notes(folder) == []


def test_gemmas_gelu_is_the_tanh_form_and_noted(tmp_path: Path) -> None:
    folder = said_as_4(tmp_path, "GemmaModel", {"hidden_act": "gelu"})
    assert read(folder).spec.layers[0].mlp.activation == "gelu_tanh"
    (note,) = notes(folder)
    assert "hidden_act 'gelu': this build takes the tanh form" in note


def test_a_decoder_that_is_not_causal_in_5_is_noted_unless_the_user_or_its_own_code_says_it(tmp_path: Path) -> None:
    folder = said_as_4(tmp_path, "LlamaModel", {"is_causal": False})
    (note,) = notes(folder)
    assert note.startswith("is_causal = false: this build takes no causal mask")
    assert note.endswith("build with --attention causal")
    assert not read(folder).spec.attentions[0].causal
    for attention in ATTENTIONS:
        checkpoint = read_checkpoint(locate(str(folder)), attention=attention)
        assert checkpoint.spec.attentions[0].causal is (attention == "causal")
        assert list(version_notes(checkpoint, attention)) == []
    assert notes(change_config(folder, auto_map={"AutoModel": "modeling.LlamaModel"})) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("BertModel", {}),
        ("LlamaModel", {"rope_theta": 500_000.0, "rope_scaling": LINEAR}),
        ("Phi3Model", {"rope_theta": 10_000.0, "rope_scaling": None}),
        ("ModernBertModel", {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}),
        ("Gemma3TextModel", {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR}),
        ("SmolLM3Model", {}),
        ("EsmModel", {"rope_theta": 10_000.0}),
        ("JinaEmbeddingsV3Model", {"rope_parameters": {**PLAIN, "rope_theta": 50.0}}),  # 4 had no class of it
    ],
)
def test_what_both_read_alike_is_not_noted(name: str, changes: Settings, tmp_path: Path) -> None:
    assert notes(said_as_4(tmp_path, name, changes)) == []


def test_what_5_has_saved_is_not_noted(tmp_path: Path) -> None:
    folder = said_as_4(tmp_path, "CohereModel", {"transformers_version": version("transformers")})
    assert notes(folder) == []
    assert len(notes(change_config(folder, transformers_version=None))) == 1  # unknown version


def test_the_build_prints_the_notes_and_the_manifest_names_the_version(tmp_path: Path) -> None:
    text = io.StringIO()
    config = BuildConfig(
        model=str(said_as_4(tmp_path / "gemma", "GemmaModel", {"hidden_act": "gelu"})),
        out=str(tmp_path / "out"),
        precision="fp32",
        verify=False,
    )
    artifact = build(config, open_engine, Progress(Console(file=text, width=500)))
    assert "note: hidden_act 'gelu': this build takes the tanh form, as transformers 5 does" in text.getvalue()
    assert artifact.manifest.source.transformers == version("transformers")


# Keys that one version obeys and another ignores.


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("BertModel", {"pruned_heads": {"0": [1]}}, "pruned_heads: transformers 4 leaves these heads out"),
        ("LlamaModel", {"per_layer_config": {"0": {"rms_norm_eps": 0.1}}}, "per_layer_config, settings of single lay"),
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("BartModel", {"is_causal": False}, "is_causal = False; bei's bart family supports only True"),
        ("CLIPTextModel", {"is_causal": False}, "is_causal = False; bei's clip_text_model family supports only True"),
        ("T5EncoderModel", {"is_decoder": True}, "is_decoder = True; bei's t5 family supports only False"),
    ],
)
def test_what_changes_a_model_in_one_version_only_is_refused(
    name: str, changes: Settings, message: str, tmp_path: Path
) -> None:
    refused(change_config(saved(tmp_path, name), **changes), CheckpointError, message)


def test_no_pruned_heads_are_none(tmp_path: Path) -> None:
    read(change_config(saved(tmp_path, "BertModel"), pruned_heads={}))


@pytest.mark.parametrize("name", ["LlamaModel", "ModernBertDecoderModel"])
def test_a_key_for_bidirectional_attention_that_nothing_reads_is_refused(name: str, tmp_path: Path) -> None:
    """transformers' class masks later tokens; the reference was made as bidirectional as the engine."""
    folder = change_config(saved(tmp_path, name), use_bidirectional_attention=True)
    refused(folder, CheckpointError, f"use_bidirectional_attention, which transformers' {name} does not read")
    for attention in ATTENTIONS:
        spec = read_checkpoint(locate(str(folder)), max_seq_len=8, attention=attention).spec
        assert spec.attentions[0].causal is (attention == "causal")


def test_code_of_the_repositorys_own_may_read_the_key(tmp_path: Path) -> None:
    own = {"auto_map": {"AutoModel": "modeling.LlamaModel"}, "use_bidirectional_attention": True}
    assert not read(change_config(saved(tmp_path, "LlamaModel"), **own)).spec.attentions[0].causal


@pytest.mark.parametrize("name", ["NemotronModel", "StableLmModel"])
def test_a_key_that_only_one_implementation_of_attention_obeys_is_refused(name: str, tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, name), is_causal=False)
    refused(folder, CheckpointError, f"is_causal = False, which transformers' {name} obeys in eager attention only")
    for attention in ATTENTIONS:
        spec = read_checkpoint(locate(str(folder)), attention=attention).spec
        assert spec.attentions[0].causal is (attention == "causal")


def test_distilberts_scores_read_its_own_activation(tmp_path: Path) -> None:
    """transformers' class has no ``hidden_act``: a stray one changes nothing."""
    folder = save_checkpoint(tmp_path / "checkpoint", "distilbert", task="ForMaskedLM")
    (head,) = read(change_config(folder, hidden_act="relu")).spec.heads
    assert [layer.activation for layer in head.token_layers if isinstance(layer, DenseSpec)] == ["gelu", "identity"]


def test_how_a_model_answers_does_not_matter(tmp_path: Path) -> None:
    """The reference uses one form of answer; 28 tokens are not a multiple of the chunk."""
    folder = change_config(saved(tmp_path / "bert", "BertModel"), return_dict=False, chunk_size_feed_forward=27)
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.certificate.outputs[0].cosine_mean >= 0.99999


@pytest.mark.parametrize(
    ("name", "embeddings", "scores", "choice"),
    [
        ("BertForMaskedLM", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", {}),
        ("Qwen3ForCausalLM", "model.embed_tokens.weight", "lm_head.weight", {"score_tokens": ("t", "he")}),
    ],
)
def test_scores_that_are_stored_although_they_are_tied_are_noted(
    name: str, embeddings: str, scores: str, choice: dict[str, Any], tmp_path: Path
) -> None:
    folder = said_as_4(tmp_path, name, {"tie_word_embeddings": True})

    def stored(matrix: torch.Tensor) -> Path:
        return write_tensors(folder, {**read_tensors(folder), scores: matrix})

    def found() -> list[str]:
        return list(version_notes(read(folder, **choice)))

    table = read_tensors(folder)[embeddings]
    assert found() == []
    stored(table)
    assert found() == []
    stored(table + 1.0)
    (note,) = found()
    assert note.startswith("the matrix of token scores: this build takes the stored one, as transformers 5 does")
    change_config(folder, tie_word_embeddings=False)
    assert found() == []
