"""Decoders: refused configs that transformers' classes ignore or compute differently; heads of remote code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from bei.core import PackedBatch
from bei.errors import BeiError, CheckpointError, ConfigError, UnsupportedArchitectureError, WeightsError
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.checkpoint.remote_code import ATTENTIONS
from bei_build.spec.parts import DenseSpec
from tests.support.builds import build_artifact, random_encodings, running
from tests.support.checkpoints import Normalize, add_modules, change_config, read_tensors, write_tensors
from tests.support.reading import read, refused, saved, without
from tests.support.zoo import MAX_TOKENS

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
    assert [attention.window for attention in read(folder).spec.attentions] == [7, 7, 7]


@pytest.mark.parametrize("width", [8, None])
def test_types_of_layers_that_the_class_ignores_are_refused(width: int | None, tmp_path: Path) -> None:
    folder = saved(tmp_path, "Phi3Model-partial_rotation_and_window")
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    change_config(folder, sliding_window=width, layer_types=types)
    refused(folder, CheckpointError, f"layer_types, not all of them {'sliding' if width else 'full'}_attention")


def test_a_mistral_with_types_of_layers_is_read_as_automodel_reads_it(tmp_path: Path) -> None:
    """It becomes a Ministral; with --attention the config is not transformers' AutoConfig's, and is refused."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = change_config(saved(tmp_path / "mistral", "MistralModel"), layer_types=types)
    assert [attention.window for attention in read(folder).spec.attentions] == [7, None, 7]
    assert build_artifact(folder, tmp_path / "artifact").certificate.reference.startswith("transformers, FP32")
    with pytest.raises(CheckpointError, match="layer_types, not all of them sliding_attention"):
        read_checkpoint(locate(str(folder)), attention="causal")


def test_a_ministral_3_reads_texts_as_long_as_its_queries_are_not_scaled(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Ministral3Model")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert read(folder).max_seq_len == MAX_TOKENS
    change_config(folder, rope_parameters={**rope, "original_max_position_embeddings": 16})
    assert read(folder).max_seq_len == 16
    with pytest.raises(CheckpointError, match="max_seq_len 17 is beyond the 16 positions"):
        read_checkpoint(locate(str(folder)), max_seq_len=17)
    assert read(folder).spec.heads[0].pooling == ("last",)
    change_config(folder, is_causal=False, pooling="avg")
    assert read(folder).spec.heads[0].pooling == ("mean",)
    change_config(folder, rope_parameters={**rope, "llama_4_scaling_beta": None})
    refused(folder, CheckpointError, "llama_4_scaling_beta = None .* in rope_parameters")


@pytest.mark.parametrize("name", ["Qwen2Model", "Qwen3Model", "Gemma2Model", "Gemma3TextModel"])
def test_types_of_layers_are_obeyed_where_the_class_does(name: str, tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    folder = change_config(saved(tmp_path, name), layer_types=types, use_sliding_window=True, sliding_window=8)
    assert [attention.window for attention in read(folder).spec.attentions] == [None, 7, None]
    change_config(folder, layer_types=["full_attention", "chunked_attention", "full_attention"])
    refused(folder, CheckpointError, "a layer of type 'chunked_attention' and sliding_window = 8")


def test_a_window_without_width_is_refused(tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, "Qwen3Model"), layer_types=["sliding_attention"] * 3)
    refused(folder, CheckpointError, "type 'sliding_attention' and sliding_window = None")


@pytest.mark.parametrize("name", ["MistralModel", "Qwen2Model", "Gemma2Model"])
def test_windows_of_a_decoder_that_reads_both_ways_are_not_guessed(name: str, tmp_path: Path) -> None:
    """transformers widens them by a token, the code of such checkpoints drops them."""
    folder = change_config(saved(tmp_path, name), is_causal=False)
    refused(folder, ConfigError, r"windows of 8 tokens, and config.json \(is_causal\) does not say")
    assert not read(folder, max_seq_len=8).spec.attentions[0].causal


@pytest.mark.parametrize("name", ["GemmaModel", "Gemma2Model"])
def test_a_key_that_transformers_reads_in_two_ways_is_refused(name: str, tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, name), use_bidirectional_attention=True)
    refused(folder, CheckpointError, "use_bidirectional_attention, which transformers' gemma2? obeys or not")
    for attention in ATTENTIONS:
        spec = read_checkpoint(locate(str(folder)), max_seq_len=8, attention=attention).spec
        assert spec.attentions[0].causal is (attention == "causal")


@pytest.mark.parametrize("name", ["Olmo2Model", "GraniteModel"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {**PLAIN, "rope_type": "other"}}, "rope_type 'other'|refused by transformers"),
        ({"hidden_act": "laplace"}, "Activation 'laplace' is not supported"),
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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("CohereModel", {"use_qk_norm": True}, "use_qk_norm = True; bei's cohere family supports only False"),
        ("StableLmModel", {"qk_layernorm": True}, "qk_layernorm = True; bei's stablelm family supports only False"),
        ("OlmoModel", {"clip_qkv": 0.0}, r"clip_qkv = 0\.0: it must be a number above 0"),
        (
            "SmolLM3Model-windows",
            {"use_sliding_window": False},
            "layers of type sliding_attention and use_sliding_window = False",
        ),
        (
            "ModernBertDecoderModel",
            {"local_attention": None, "sliding_window": -1},
            "and sliding_window = -1; supported",
        ),
        ("HeliumModel", {"rope_parameters": PARTIAL}, "partial_rotary_factor = 0.5"),
        ("Olmo3Model", {"rope_parameters": {"full_attention": PARTIAL}}, "partial_rotary_factor = 0.5"),
        ("GPTNeoModel", {"is_causal": False}, "is_causal = False; bei's gpt_neo family supports only True or None"),
        ("OPTModel", {"word_embed_proj_dim": 16}, "word_embed_proj_dim = 16; bei's opt family supports only 32"),
        ("GlmModel", {"sliding_window": 8}, "sliding_window = 8; bei's glm family supports only None"),
        ("Starcoder2Model", {"layer_types": ["full_attention"] * 3}, "layer_types, not all of them sliding_attention"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_its_key(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(change_config(saved(tmp_path, name), **changes), CheckpointError, message)


@pytest.mark.parametrize(("name", "family"), [("PhiForCausalLM", "phi"), ("GPTJForCausalLM", "gptj")])
def test_scores_of_tokens_with_biases_are_refused(name: str, family: str, tmp_path: Path) -> None:
    refused(saved(tmp_path, name), ConfigError, f"{family} has no scores of tokens", score_tokens=("t", "he"))


@pytest.mark.parametrize("name", ["GPTNeoModel", "GPTJModel"])
def test_the_masks_that_older_versions_stored_are_left_aside(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name)
    tensors = read_tensors(folder)
    attention = next(tensor for tensor in tensors if tensor.endswith("q_proj.weight")).removesuffix("q_proj.weight")
    masks = {f"{attention}bias": torch.ones(1, 1, 48, 48), f"{attention}masked_bias": torch.tensor(-1e9)}
    read(write_tensors(folder, {**tensors, **masks})).weights().close()
    write_tensors(folder, {**tensors, f"{attention}q_proj.bias": torch.ones(32)})
    refused(folder, WeightsError, "q_proj.bias is not part of this architecture")


def test_the_factor_of_coheres_token_scores_must_be_above_zero(tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, "CohereForCausalLM"), logit_scale=0.0)
    refused(folder, CheckpointError, r"logit_scale = 0\.0: it must be", score_tokens=("t", "he"))


def reward_model(folder: Path, **changes: Any) -> Path:
    """Like Qwen2.5-Math-RM-72B: remote code, whose head is stored beside the model's tensors."""
    saved(folder, "Qwen2Model")
    generator = torch.Generator().manual_seed(5)
    tensors = {f"model.{name}": tensor for name, tensor in read_tensors(folder).items()}
    for name, shape in {"0.weight": (32, 32), "0.bias": (32,), "2.weight": (1, 32), "2.bias": (1,)}.items():
        tensors[f"score.{name}"] = torch.randn(shape, generator=generator)
    tensors["lm_head.weight"] = torch.ones(tensors["model.embed_tokens.weight"].shape)
    write_tensors(folder, tensors)
    auto_map = {"AutoModel": "modeling_qwen2_rm.Qwen2ForRewardModel"}
    return change_config(folder, **{"architectures": ["Qwen2ForRewardModel"], "auto_map": auto_map, **changes})


def test_the_reward_model_of_qwen_scores_the_last_token(tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "reward")
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.manifest.tasks == ["rerank", "classify"]
    texts = random_encodings((5, 17, 2, 30), artifact.manifest.spec.vocab_size)
    model: Any = AutoModel.from_pretrained(saved(tmp_path / "native", "Qwen2Model"), attn_implementation="eager").eval()
    first, bias, second, offset = (read_tensors(folder)[f"score.{name}"] for name in
                                   ("0.weight", "0.bias", "2.weight", "2.bias"))  # fmt: skip
    with torch.no_grad():
        states = [model(torch.from_numpy(text.input_ids).long()[None]).last_hidden_state[0, -1] for text in texts]
    expected = [torch.relu(state @ first.T + bias) @ second.T + offset for state in states]
    with running(artifact) as engine:
        actual = engine.run(PackedBatch.from_encodings(texts))["logits"]
    np.testing.assert_allclose(actual, torch.stack(expected).numpy(), atol=1e-4)


def test_the_process_reward_model_of_qwen_is_refused(tmp_path: Path) -> None:
    """It scores the steps of an answer, each at its own token."""
    folder = reward_model(tmp_path, architectures=["Qwen2ForProcessRewardModel"])
    refused(folder, UnsupportedArchitectureError, "Qwen2ForProcessRewardModel of model_type 'qwen2' is not supported")


def test_a_token_classifier_may_have_no_bias(tmp_path: Path) -> None:
    folder = without(saved(tmp_path, "LlamaForTokenClassification"), "score.bias")
    refused(folder, WeightsError, r"Tensor score\.bias is missing")
    (head,) = read(change_config(folder, token_classification_bias=False)).spec.heads
    assert head.token_layers == (DenseSpec("score", 32, 5, bias=False),)


def voyage(folder: Path, **changes: Any) -> Path:
    """Like voyage-4-nano: config.json names the native class, ``auto_map`` one with another mask and a projection."""
    saved(folder, "Qwen3ForCausalLM")
    projection = torch.randn((20, 32), generator=torch.Generator().manual_seed(6))
    write_tensors(folder, {**read_tensors(folder), "linear.weight": projection})
    add_modules(folder, ("mean",), [Normalize()])
    own = {"auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"}, "num_labels": 20}
    return change_config(folder, **{**own, "use_bidirectional_attention": True, **changes})


def test_voyage_projects_every_token_of_a_bidirectional_qwen3(tmp_path: Path) -> None:
    folder = voyage(tmp_path / "voyage")
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.manifest.spec.attention == "bidirectional"
    assert artifact.manifest.embedding is not None
    assert artifact.manifest.embedding.normalize
    assert artifact.certificate.reference.startswith("transformers, FP32")
    texts = random_encodings((5, 17, 2, 30), artifact.manifest.spec.vocab_size)
    native = saved(tmp_path / "native", "Qwen3ForCausalLM")
    model: Any = AutoModel.from_pretrained(native, attn_implementation="eager").eval()
    expected = []
    for text in texts:
        ids = torch.from_numpy(text.input_ids).long()[None]
        everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        with torch.no_grad():
            states = model(ids, attention_mask=everything).last_hidden_state[0]
        expected.append((states @ read_tensors(folder)["linear.weight"].T).mean(0))
    with running(artifact) as engine:
        actual = engine.run(PackedBatch.from_encodings(texts))["embedding"]
    np.testing.assert_allclose(actual, torch.stack(expected).numpy(), atol=1e-4)


def test_a_bidirectional_qwen3_of_its_own_type_is_the_mean_of_all_states(tmp_path: Path) -> None:
    """Giga-Embeddings (0826): the class that voyage's ``auto_map`` names, here as the architecture and without a
    layer behind it."""
    native = saved(tmp_path / "native", "Qwen3ForCausalLM")
    folder = shutil.copytree(native, tmp_path / "giga")
    code = {"AutoModel": "modeling_gigarembed.Qwen3BidirectionalModel"}
    own = {"model_type": "qwen3_bidirec", "architectures": ["Qwen3BidirectionalModel"], "auto_map": code}
    artifact = build_artifact(change_config(folder, **own), tmp_path / "artifact")
    assert artifact.manifest.spec.attention == "bidirectional"
    texts = random_encodings((5, 17, 2, 30), artifact.manifest.spec.vocab_size)
    model: Any = AutoModel.from_pretrained(native, attn_implementation="eager").eval()
    expected = []
    for text in texts:
        ids = torch.from_numpy(text.input_ids).long()[None]
        with torch.no_grad():
            states = model(ids, attention_mask=torch.zeros(1, 1, ids.shape[1], ids.shape[1])).last_hidden_state[0]
        expected.append(states.mean(0))
    with running(artifact) as engine:
        actual = engine.run(PackedBatch.from_encodings(texts))["embedding"]
    np.testing.assert_allclose(actual, torch.stack(expected).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_bidirectional_attention": None}, CheckpointError, "lacks use_bidirectional_attention = true"),
        ({"use_sliding_window": True, "sliding_window": 8}, CheckpointError, "sliding_window = 8"),
        ({"num_labels": 24}, WeightsError, r"linear.weight has shape \[20, 32\], but config.json implies \[24, 32\]"),
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, WeightsError, "linear.weight is not part of this architecture"),
    ],
)
def test_what_is_not_quite_voyage_is_refused(
    changes: dict[str, Any], error: type[BeiError], message: str, tmp_path: Path
) -> None:
    refused(voyage(tmp_path, **changes), error, message)


def test_states_beside_projected_embeddings_are_refused(tmp_path: Path) -> None:
    refused(voyage(tmp_path), ConfigError, "token_embeddings adds the tokens' states", token_states=True)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("internlm2", "InternLM2ForRewardModel"),
        ("gpt2", "GPT2Model"),
        ("gpt_neox", "GPTNeoXModel"),
    ],
)
def test_decoders_that_stay_refused_are_named(model_type: str, architecture: str, tmp_path: Path) -> None:
    """See docs/decisions.md."""
    folder = change_config(saved(tmp_path, "Qwen3Model"), model_type=model_type, architectures=[architecture])
    refused(
        folder,
        UnsupportedArchitectureError,
        rf"no family for model_type '{model_type}' \(architecture {architecture}\)",
    )
