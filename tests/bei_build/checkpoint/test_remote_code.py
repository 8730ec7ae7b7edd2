"""Checkpoints with their authors' own code: their configs and tensor names give the native class's outputs.

A native checkpoint is saved, then its tensors and its config are renamed to those of the original code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModel

from bei.core import Float32Array, PackedBatch
from bei.errors import CheckpointError, ConfigError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.checkpoint.remote_code import Attention
from tests.support.builds import build_artifact, random_encodings, running
from tests.support.checkpoints import add_modules, change_config, read_tensors, write_json, write_tensors
from tests.support.zoo import CASES, MAX_TOKENS, save_case

Tensors = dict[str, torch.Tensor]
LENGTHS = (6, 21, 3, 34)


def saved(folder: Path, name: str, **settings: Any) -> Path:
    """The case ``name`` with the tensor names of its class: ``save_pretrained`` writes those of the original code."""
    case = next(case for case in CASES if case.name == name)
    save_case(folder, replace(case, settings={**case.settings, **settings}))
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    return write_tensors(folder, model.state_dict())


def outputs(folder: Path, **settings: Any) -> dict[str, Float32Array]:
    artifact = build_artifact(folder, folder.with_name(f"{folder.name}-artifact"), **settings)
    texts = random_encodings(LENGTHS, artifact.manifest.spec.vocab_size, seed=4)
    with running(artifact) as engine:
        return dict(engine.run(PackedBatch.from_encodings(texts)))


def read(folder: Path, attention: Attention | None = None, max_seq_len: int | None = None) -> Checkpoint:
    return read_checkpoint(locate(str(folder)), max_seq_len=max_seq_len, attention=attention)


def renamed(folder: Path, names: Mapping[str, str], join: Callable[[Tensors], Tensors], config: dict[str, Any]) -> Path:
    """A copy of ``folder`` with other names: ``names`` are parts of tensor names, old to new, in this order."""
    copy = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-original")))
    tensors = join(read_tensors(copy))
    result = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        result[name] = tensor
    assert result.keys().isdisjoint({name for name in tensors if "layers." in name})
    write_tensors(copy, result)
    write_json(copy / "config.json", config)
    return copy


def joined(tensors: Tensors, parts: tuple[str, ...], whole: str) -> Tensors:
    """The rows of a module's tensors ``parts`` under one name ``whole``."""
    result = dict(tensors)
    for name in tensors:
        if f".{parts[0]}." in name:
            rows = [result.pop(name.replace(parts[0], part)) for part in parts]
            result[name.replace(parts[0], whole)] = torch.cat(rows)
    return result


def assert_same(actual: Mapping[str, Float32Array], expected: Mapping[str, Float32Array]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, atol=1e-5, err_msg=name)


# Alibaba's GTE, model type "new".

GTE_NAMES = {
    "layers.": "encoder.layer.",
    "self_attn.": "attention.",
    "post_attention_layernorm": "attn_ln",
    "post_mlp_layernorm": "mlp_ln",
}


def join_gte(tensors: Tensors) -> Tensors:
    tensors = joined(tensors, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    tensors = joined(tensors, ("up_proj", "gate_proj"), "up_gate_proj")
    return {f"new.{n.removeprefix('gte.')}" if n.startswith("gte.") else n: t for n, t in tensors.items()}


def gte_config(folder: Path, architecture: str, **changes: Any) -> dict[str, Any]:
    """The native config as the original code writes it."""
    native = json.loads((folder / "config.json").read_text())
    rope = native.pop("rope_parameters")
    return {
        **native,
        "architectures": [architecture],
        "model_type": "new",
        "auto_map": {"AutoModel": "modeling.NewModel"},
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_scaling": None,
        "rope_theta": rope["rope_theta"],
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
        **changes,
    }


@pytest.mark.parametrize("task", ["Model", "ForSequenceClassification", "ForTokenClassification"])
def test_gte_is_read_in_its_original_names(task: str, tmp_path: Path) -> None:
    native = saved(tmp_path / "gte", f"Gte{task}")
    original = renamed(native, GTE_NAMES, join_gte, gte_config(native, f"New{task}"))
    assert any("qkv_proj" in name for name in read_tensors(original))
    assert_same(outputs(original), outputs(native))


def test_gtes_token_classifier_is_left_aside_by_an_embedder(tmp_path: Path) -> None:
    """The layout of gte-multilingual-base: a linear layer for lexical weights, and sentence-transformers' pooling."""
    native = saved(tmp_path / "gte", "GteForTokenClassification")
    config = gte_config(native, "NewForTokenClassification")
    original = add_modules(renamed(native, GTE_NAMES, join_gte, config), ("cls",))
    expected = outputs(native, task="embed", pooling="cls")
    assert_same(outputs(original), expected)
    assert list(expected) == ["embedding"]


def test_gte_without_token_types_is_read(tmp_path: Path) -> None:
    native = saved(tmp_path / "gte", "GteModel", type_vocab_size=0)
    original = renamed(native, GTE_NAMES, join_gte, gte_config(native, "NewModel"))
    assert_same(outputs(original), outputs(native))


def test_gtes_ntk_scaling_gives_the_frequencies_of_its_code(tmp_path: Path) -> None:
    native = saved(tmp_path / "gte", "GteModel")
    theta, factor, dim = 500.0, 8.0, 8
    config = gte_config(native, "NewModel", rope_theta=theta, rope_scaling={"type": "ntk", "factor": factor})
    original = renamed(native, GTE_NAMES, join_gte, config)
    # NTKScalingRotaryEmbedding: the base times the factor, then all frequencies divided by factor ** (2 / dim).
    frequencies = (theta * factor) ** -(torch.arange(0, dim, 2) / dim) / factor ** (2 / dim)
    rope = read(original).spec.attentions[0].rope
    assert rope is not None
    np.testing.assert_allclose(rope.inv_freq, frequencies, rtol=1e-6)
    model = AutoModel.from_pretrained(native, dtype=torch.float32, attn_implementation="eager").eval()
    model.rotary_emb.inv_freq = frequencies
    vocab_size = read(native).spec.embeddings.vocab_size
    actual = outputs(original, pooling="mean")["embedding"]
    for row, text in zip(actual, random_encodings(LENGTHS, vocab_size, seed=4), strict=True):
        with torch.no_grad():
            states = model(torch.from_numpy(text.input_ids.astype(np.int64))[None]).last_hidden_state[0]
        np.testing.assert_allclose(row, states.mean(0).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.7}}, "rope_scaling 'ntk' with mixed_b"),
        ({"rope_scaling": {"type": "ntk"}}, r"was refused by transformers \('factor'\)"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type 'su'. Supported: default, linear"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'.*only 'rope'"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type = 'rms_norm'.*only 'layer_norm'"),
        ({"logn_attention_scale": True}, "logn_attention_scale = True"),
    ],
)
def test_settings_of_gtes_code_that_bei_does_not_have_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    native = saved(tmp_path / "gte", "GteModel")
    write_json(native / "config.json", gte_config(native, "NewModel", **changes))
    with pytest.raises(CheckpointError, match=message):
        read(native)


# NomicBERT, model type "nomic_bert" in both, with GPT-2's keys in the original.

NOMIC_NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    "layers.": "encoder.layers.",
    "self_attn.o_proj": "attn.out_proj",
    "self_attn.": "attn.",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


def join_nomic(tensors: Tensors) -> Tensors:
    return joined(tensors, ("q_proj", "k_proj", "v_proj"), "Wqkv")


def nomic_config(folder: Path, **changes: Any) -> dict[str, Any]:
    native = json.loads((folder / "config.json").read_text())
    return {
        "activation_function": "swiglu",
        "architectures": native["architectures"],
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "causal": False,
        "layer_norm_epsilon": native["layer_norm_eps"],
        "max_trained_positions": 2048,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "model_type": "nomic_bert",
        "n_embd": native["hidden_size"],
        "n_head": native["num_attention_heads"],
        "n_inner": native["intermediate_size"],
        "n_layer": native["num_hidden_layers"],
        "n_positions": native["max_position_embeddings"],
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_base": native["rope_parameters"]["rope_theta"],
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "type_vocab_size": native["type_vocab_size"],
        "use_rms_norm": False,
        "vocab_size": native["vocab_size"],
        **changes,
    }


def test_nomic_bert_is_read_in_its_original_names(tmp_path: Path) -> None:
    native = saved(tmp_path / "nomic", "NomicBertModel")
    original = renamed(native, NOMIC_NAMES, join_nomic, nomic_config(native))
    assert any("Wqkv" in name for name in read_tensors(original))
    assert_same(outputs(original), outputs(native))
    assert read(original).max_seq_len == MAX_TOKENS


def test_nomic_berts_length_ends_where_its_frequencies_would_change(tmp_path: Path) -> None:
    native = saved(tmp_path / "nomic", "NomicBertModel")
    config = nomic_config(native, n_positions=8192, rotary_scaling_factor=2, max_trained_positions=40)
    assert read(renamed(native, NOMIC_NAMES, join_nomic, config)).max_seq_len == 40


def test_nomic_berts_inner_width_is_four_times_its_width_if_it_does_not_say(tmp_path: Path) -> None:
    native = saved(tmp_path / "nomic", "NomicBertModel", intermediate_size=128)
    original = renamed(native, NOMIC_NAMES, join_nomic, nomic_config(native, n_inner=None))
    assert_same(outputs(original), outputs(native))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "glu"}, "activation_function 'glu'.*only swiglu, geglu, gelu"),
        ({"prenorm": True}, "prenorm = True"),
        ({"rotary_emb_fraction": 0.0}, "rotary_emb_fraction = 0.0"),
        ({"causal": True}, "causal = True"),
        ({"n_head": 0}, r"(describes no model|was refused by transformers) \("),
    ],
)
def test_settings_of_nomics_code_that_bei_does_not_have_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    native = saved(tmp_path / "nomic", "NomicBertModel")
    write_json(native / "config.json", nomic_config(native, **changes))
    with pytest.raises(CheckpointError, match=message):
        read(native)


# NVIDIA's bidirectional Llama.


def bidirectional(folder: Path, architecture: str = "LlamaBidirectionalModel", **changes: Any) -> Path:
    name = "LlamaForSequenceClassification" if architecture.endswith("Classification") else "LlamaModel"
    return change_config(saved(folder, name), architectures=[architecture], model_type="llama_bidirec", **changes)


def unmasked_states(folder: Path) -> list[torch.Tensor]:
    model = AutoModel.from_pretrained(
        folder, config=read(folder).config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = []
    for text in random_encodings(LENGTHS, read(folder).spec.embeddings.vocab_size, seed=4):
        ids = torch.from_numpy(text.input_ids.astype(np.int64))[None]
        with torch.no_grad():
            mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
            rows.append(model(ids, attention_mask=mask).last_hidden_state[0])
    return rows


@pytest.mark.parametrize(("pooling", "index"), [(None, None), ("avg", None), ("cls", 0), ("last", -1)])
def test_a_bidirectional_llama_pools_as_its_config_says(pooling: str | None, index: int | None, tmp_path: Path) -> None:
    folder = bidirectional(tmp_path / "llama", pooling=pooling)
    actual = outputs(folder)["embedding"]
    expected = [rows.mean(0) if index is None else rows[index] for rows in unmasked_states(folder)]
    np.testing.assert_allclose(actual, torch.stack(expected).numpy(), atol=1e-4)


def test_a_bidirectional_llama_scores_its_pooled_state(tmp_path: Path) -> None:
    folder = bidirectional(tmp_path / "llama", "LlamaBidirectionalForSequenceClassification", pooling="avg")
    score = read_tensors(folder)["score.weight"]
    expected = [score @ rows.mean(0) for rows in unmasked_states(folder)]
    np.testing.assert_allclose(outputs(folder)["logits"], torch.stack(expected).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": "colbert"}, "pooling 'colbert'; supported: avg, cls, last"),
        ({"pooling": ["avg"]}, "config.json describes no model"),
        ({"temperature": 0.02}, "temperature"),
    ],
)
def test_settings_of_the_bidirectional_llama_that_bei_does_not_have_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = bidirectional(tmp_path, "LlamaBidirectionalForSequenceClassification", **changes)
    with pytest.raises(CheckpointError, match=message):
        read(folder)


@pytest.mark.parametrize("buffer", ["encoder.layers.0.attn.rotary_emb.inv_freq", "embeddings.position_ids"])
def test_buffers_that_older_code_saved_are_left_aside(buffer: str, tmp_path: Path) -> None:
    native = saved(tmp_path / "nomic", "NomicBertModel")
    original = renamed(native, NOMIC_NAMES, join_nomic, nomic_config(native))
    write_tensors(original, {**read_tensors(original), buffer: torch.ones(4)})
    read(original).weights().close()


# Decoders whose authors' code has the native class's names, and another mask.

# Settings of GritLM-7B's and stella_en_1.5B_v5's config.json.
GRITLM = {"AutoModel": "modeling_gritlm7b.MistralModel", "AutoModelForCausalLM": "modeling_gritlm7b.MistralForCausalLM"}
STELLA = {
    "AutoModel": "modeling_qwen.Qwen2Model",
    "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
    "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
}
OWN_CODE = [("MistralForCausalLM", GRITLM), ("Qwen2ForCausalLM", STELLA)]


def with_own_code(folder: Path, architecture: str, auto_map: dict[str, str], **changes: Any) -> Path:
    return change_config(saved(folder, architecture), auto_map=auto_map, **{"sliding_window": None, **changes})


@pytest.mark.parametrize(("architecture", "auto_map"), OWN_CODE)
def test_a_native_class_with_code_that_no_family_claims_is_refused(
    architecture: str, auto_map: dict[str, str], tmp_path: Path
) -> None:
    folder = with_own_code(tmp_path / "decoder", architecture, auto_map)
    with pytest.raises(CheckpointError, match=rf"{auto_map['AutoModel']}.*--attention causal, or --attention bidirec"):
        read(folder)


@pytest.mark.parametrize(("architecture", "auto_map"), OWN_CODE)
def test_such_code_is_built_with_the_attention_that_is_said(
    architecture: str, auto_map: dict[str, str], tmp_path: Path
) -> None:
    folder = with_own_code(tmp_path / "decoder", architecture, auto_map)
    native = Path(shutil.copytree(folder, tmp_path / "native"))
    change_config(native, auto_map=None)
    assert_same(outputs(folder, attention="causal", pooling="mean"), outputs(native, pooling="mean"))
    expected = torch.stack([states.mean(0) for states in unmasked_states(native)]).numpy()
    artifact = build_artifact(folder, tmp_path / "both", attention="bidirectional", pooling="mean")
    assert (artifact.manifest.spec.attention, artifact.manifest.spec.attention_asked) == ("bidirectional", True)
    texts = random_encodings(LENGTHS, artifact.manifest.spec.vocab_size, seed=4)
    with running(artifact) as engine:
        np.testing.assert_allclose(engine.run(PackedBatch.from_encodings(texts))["embedding"], expected, atol=1e-4)
    assert np.abs(expected - outputs(native, pooling="mean")["embedding"]).max() > 0.1


def test_what_the_manifest_says_of_attention_is_the_models_own_if_nobody_says_more(tmp_path: Path) -> None:
    spec = build_artifact(saved(tmp_path / "llama", "LlamaModel"), tmp_path / "artifact").manifest.spec
    assert (spec.attention, spec.attention_asked) == ("causal", False)


@pytest.mark.parametrize("is_causal", [True, False])
def test_code_that_config_json_says_the_attention_of_is_known(is_causal: bool, tmp_path: Path) -> None:
    """As in gte-Qwen2."""
    folder = with_own_code(tmp_path / "qwen", "Qwen2ForCausalLM", STELLA, is_causal=is_causal)
    assert read(folder).spec.attentions[0].causal is is_causal


@pytest.mark.parametrize(
    "auto_map",
    [None, {}, {"AutoConfig": "configuration_x.MistralConfig", "AutoTokenizer": ["tokenization_x.Tok", None]}],
)
def test_own_code_of_configs_and_tokenizers_changes_no_model(auto_map: Any, tmp_path: Path) -> None:
    read(with_own_code(tmp_path / "mistral", "MistralForCausalLM", auto_map))


@pytest.mark.parametrize(
    ("key", "is_refused"),
    [
        ("AutoModel", True),
        ("AutoModelForSequenceClassification", True),
        ("AutoModelForTokenClassification", False),
        ("AutoModelForMultipleChoice", False),
    ],
)
def test_own_code_counts_where_it_would_compute_what_is_built(key: str, is_refused: bool, tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path / "bert", "BertForSequenceClassification"), auto_map={key: "modeling.Mine"})
    if is_refused:
        with pytest.raises(CheckpointError, match=r"code of its own \(modeling\.Mine\)"):
            read(folder)
    else:
        read(folder)


def test_what_windows_become_is_not_guessed(tmp_path: Path) -> None:
    """GritLM's own code attends to everything, whatever sliding_window says; others keep it."""
    folder = with_own_code(tmp_path / "mistral", "MistralForCausalLM", GRITLM, sliding_window=9)
    with pytest.raises(ConfigError, match=r"windows of 9 tokens.*set --max-seq-len 9\."):
        read(folder, "bidirectional")
    read(folder, "bidirectional", max_seq_len=9)
    read(folder, "causal")


@pytest.mark.parametrize(
    ("name", "changes", "attention"),
    [("BertModel", {}, "causal"), ("LlamaModel", {"architectures": ["LlamaBidirectionalModel"]}, "causal")],
)
def test_an_attention_that_the_model_cannot_have_is_refused(
    name: str, changes: dict[str, Any], attention: Attention, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"has no causal attention: leave --attention out"):
        read(change_config(saved(tmp_path / "model", name), **changes), attention)


def test_a_module_of_the_repositorys_own_is_refused(tmp_path: Path) -> None:
    """As in jina-embeddings-v3, whose module selects one of five adapters."""
    folder = add_modules(saved(tmp_path / "xlm", "XLMRobertaModel"))
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    write_json(folder / "modules.json", modules)
    with pytest.raises(CheckpointError, match=r"custom_st\.Transformer, which is code of the repository's own"):
        read(folder)
