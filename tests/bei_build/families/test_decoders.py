"""Decoders whose class in transformers ignores what others read from config.json: it is refused, not applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bei.errors import CheckpointError, ConfigError
from bei_build.checkpoint import read_checkpoint
from bei_build.location import locate
from bei_build.remote_code import ATTENTIONS
from tests.bei_build.builds import build_artifact
from tests.bei_build.reading import read, refused, saved
from tests.checkpoints import change_config

PLAIN = {"rope_type": "default", "rope_theta": 100.0}
PARTIAL = {**PLAIN, "partial_rotary_factor": 0.5}

WITHOUT_WINDOWS = ["LlamaModel", "GemmaModel", "Olmo2Model", "GraniteModel", "EuroBertModel"]
WITHOUT_PARTIAL_ROTATION = [*WITHOUT_WINDOWS, "MistralModel", "Qwen2Model", "Qwen3Model", "Gemma2Model"]
BY_LAYER_TYPE = ["Gemma3TextModel", "ModernBertModel"]


@pytest.mark.parametrize("name", WITHOUT_WINDOWS)
def test_a_window_that_the_class_ignores_is_refused(name: str, tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, name), sliding_window=8)
    refused(folder, CheckpointError, "sliding_window = 8; bei's .* family supports only None")


@pytest.mark.parametrize("name", WITHOUT_PARTIAL_ROTATION)
def test_a_partial_rotation_that_the_class_ignores_is_refused(name: str, tmp_path: Path) -> None:
    refused(change_config(saved(tmp_path, name), rope_parameters=PARTIAL), CheckpointError, "rotary_factor = 0.5")


@pytest.mark.parametrize("name", BY_LAYER_TYPE)
@pytest.mark.parametrize("partial", ["full_attention", "sliding_attention"])
def test_so_is_one_of_a_type_of_layers(name: str, partial: str, tmp_path: Path) -> None:
    ropes = {"full_attention": PLAIN, "sliding_attention": PLAIN, partial: PARTIAL}
    refused(change_config(saved(tmp_path, name), rope_parameters=ropes), CheckpointError, "rotary_factor = 0.5")


@pytest.mark.parametrize("name", ["MistralModel", "Phi3Model-partial_rotation_and_window"])
def test_layers_without_types_have_the_window_of_the_config(name: str, tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, name), layer_types=["sliding_attention"] * 3)
    assert [layer.attention.window for layer in read(folder).spec.layers] == [7, 7, 7]


@pytest.mark.parametrize("width", [8, None])
def test_types_of_layers_that_the_class_ignores_are_refused(width: int | None, tmp_path: Path) -> None:
    folder = saved(tmp_path, "Phi3Model-partial_rotation_and_window")
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    change_config(folder, sliding_window=width, layer_types=types)
    refused(folder, CheckpointError, f"layer_types, not all of them {'sliding' if width else 'full'}_attention")


def test_a_mistral_with_types_of_layers_is_read_as_automodel_reads_it(tmp_path: Path) -> None:
    """As a Ministral; where --attention is said, the config is not transformers' AutoConfig's: refused."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = change_config(saved(tmp_path / "mistral", "MistralModel"), layer_types=types)
    assert [layer.attention.window for layer in read(folder).spec.layers] == [7, None, 7]
    assert build_artifact(folder, tmp_path / "artifact").certificate.reference.startswith("transformers, FP32")
    with pytest.raises(CheckpointError, match="layer_types, not all of them sliding_attention"):
        read_checkpoint(locate(str(folder)), attention="causal")


@pytest.mark.parametrize("name", ["Qwen2Model", "Qwen3Model", "Gemma2Model", "Gemma3TextModel"])
def test_types_of_layers_are_obeyed_where_the_class_does(name: str, tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    folder = change_config(saved(tmp_path, name), layer_types=types, use_sliding_window=True, sliding_window=8)
    assert [layer.attention.window for layer in read(folder).spec.layers] == [None, 7, None]
    change_config(folder, layer_types=["full_attention", "chunked_attention", "full_attention"])
    refused(folder, CheckpointError, "a layer of type 'chunked_attention' and sliding_window = 8")


def test_a_window_without_width_is_refused(tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, "Qwen3Model"), layer_types=["sliding_attention"] * 3)
    refused(folder, CheckpointError, "type 'sliding_attention' and sliding_window = None")


@pytest.mark.parametrize("name", ["MistralModel", "Qwen2Model", "Gemma2Model"])
def test_windows_of_a_decoder_that_reads_both_ways_are_not_guessed(name: str, tmp_path: Path) -> None:
    """Transformers widens them by a token, the code of such checkpoints drops them."""
    folder = change_config(saved(tmp_path, name), is_causal=False)
    refused(folder, ConfigError, r"windows of 8 tokens, and config.json \(is_causal\) does not say")
    assert not read(folder, max_seq_len=8).spec.layers[0].attention.causal


@pytest.mark.parametrize("name", ["GemmaModel", "Gemma2Model"])
def test_a_key_that_transformers_reads_in_two_ways_is_refused(name: str, tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, name), use_bidirectional_attention=True)
    refused(folder, CheckpointError, "use_bidirectional_attention, which transformers' gemma2? obeys or not")
    for attention in ATTENTIONS:
        spec = read_checkpoint(locate(str(folder)), max_seq_len=8, attention=attention).spec
        assert spec.layers[0].attention.causal is (attention == "causal")


@pytest.mark.parametrize("name", ["Olmo2Model", "GraniteModel"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {**PLAIN, "rope_type": "other"}}, "rope_type 'other'|refused by transformers"),
        ({"hidden_act": "quick_gelu"}, "Activation 'quick_gelu' is not supported"),
    ],
    ids=["rotation", "activation"],
)
def test_what_the_family_does_not_compute_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(change_config(saved(tmp_path, name), **changes), CheckpointError, message)


@pytest.mark.parametrize("key", ["embedding_multiplier", "attention_multiplier", "residual_multiplier"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_of_granite_must_be_above_zero(key: str, value: float, tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, "GraniteModel"), **{key: value})
    refused(folder, CheckpointError, f"config.json has {key} = {value}: it must be a number above 0")


def test_the_divisor_of_token_scores_must_be_above_zero(tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, "GraniteForCausalLM"), logits_scaling=0.0)
    refused(folder, CheckpointError, r"logits_scaling = 0\.0: it must be", score_tokens=("t", "he"))
    read(folder).weights().close()  # an embedder does not read it
