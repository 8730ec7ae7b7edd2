"""Checkpoints that cannot be built give one line that names the cause and the remedy. Tied weights can be built."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from bei.core import PackedBatch
from bei.errors import (
    BeiError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    TokenizerError,
    UnsupportedArchitectureError,
    WeightsError,
)
from bei_build.config import BuildConfig
from tests.bei_build.families import jina, nomic
from tests.bei_build.quantization.fp8 import quantize
from tests.support.builds import build_artifact, random_encodings, running
from tests.support.checkpoints import (
    HIDDEN,
    MAX_TOKENS,
    change_config,
    read_tensors,
    save_checkpoint,
    save_static,
    write_json,
    write_tensors,
)
from tests.support.reading import read, refused, saved, without

Tensors = dict[str, torch.Tensor]
QUERY = "encoder.layer.0.attention.self.query"


@pytest.fixture
def folder(bert: Path, tmp_path: Path) -> Path:
    """A copy of the tiny BERT, to be changed."""
    return Path(shutil.copytree(bert, tmp_path / "tiny"))


# Quantized checkpoints.


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "hqq"])
def test_a_quantized_checkpoint_is_refused_by_its_config(method: str, key: str, folder: Path) -> None:
    change_config(folder, **{key: {"quant_method": method, "bits": 4}})
    refused(
        folder, CheckpointError, rf"quantized \({method}\): build from the original 16- or 32-bit.*--precision int8"
    )


@pytest.mark.parametrize(("name", "method"), [("quantize_config.json", "GPTQ's"), ("quant_config.json", "AWQ's")])
def test_a_quantizers_own_config_is_found_beside_it(name: str, method: str, folder: Path) -> None:
    write_json(folder / name, {"bits": 4, "group_size": 128})
    message = rf"matrices have {method} 4-bit form, and none of them is packed"
    refused(folder, WeightsError, message)


@pytest.mark.parametrize("settings", [{}, {"quant_algo": None}, {"quant_algo": 8}])
def test_model_opts_format_must_be_named(settings: dict[str, object], folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "modelopt", **settings})
    refused(folder, CheckpointError, r"quantized by ModelOpt, and neither config\.json nor .* names the format")


@pytest.mark.parametrize(
    "suffix",
    ["qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight.quant_state.bitsandbytes__nf4", "SCB"],
)
def test_a_quantized_checkpoint_is_refused_by_its_tensors(suffix: str, folder: Path) -> None:
    tensors = read_tensors(folder)
    del tensors[f"{QUERY}.weight"]
    write_tensors(folder, {**tensors, f"{QUERY}.{suffix}": torch.ones(4, 4)})
    refused(folder, WeightsError, rf"Tensor {QUERY}\.{suffix} belongs to a quantized checkpoint: build from the orig")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_tensor_of_a_quantized_type_is_refused_when_it_is_read(dtype: torch.dtype, folder: Path) -> None:
    tensors = read_tensors(folder)
    write_tensors(folder, {**tensors, f"{QUERY}.weight": tensors[f"{QUERY}.weight"].to(dtype)})
    with (
        read(folder).weights() as weights,
        pytest.raises(WeightsError, match=rf"{QUERY}\.weight is .*8.*, not 16-.*Use the original"),
    ):
        weights.read("layers.0.attention.query.weight")


# Adapters.


@pytest.mark.parametrize("part", ["lora_A.default", "lora_A", "base_layer", "modules_to_save.default"])
def test_tensors_of_an_adapter_are_refused(part: str, folder: Path) -> None:
    write_tensors(folder, {**read_tensors(folder), f"{QUERY}.{part}.weight": torch.ones(4, HIDDEN)})
    refused(folder, WeightsError, rf"{QUERY}\.{part}\.weight belongs to an adapter\. Merge .*merge_and_unload")


@pytest.mark.parametrize("alone", [True, False])
def test_a_folder_with_an_adapter_beside_weights_is_refused(alone: bool, folder: Path) -> None:
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "owner/base"})
    if alone:
        (folder / "config.json").unlink()
    refused(folder, CheckpointError, r"holds an adapter beside the weights of a model.* --lora NAME=PATH")


# Tensors.


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_missing_tensor_is_named_as_the_file_would_spell_it(prefix: str, folder: Path) -> None:
    tensors = {f"{prefix}{name}": tensor for name, tensor in read_tensors(folder).items()}
    del tensors[f"{prefix}{QUERY}.bias"]
    write_tensors(folder, tensors)
    refused(folder, WeightsError, rf"^Tensor {prefix}{QUERY}\.bias is missing\. Download the checkpoint again\.$")


def test_a_missing_tensor_of_a_head_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, task="ForSequenceClassification", num_labels=2)
    tensors = read_tensors(tmp_path)
    del tensors["classifier.weight"]
    write_tensors(tmp_path, tensors)
    refused(tmp_path, WeightsError, r"^Tensor classifier\.weight is missing\.")


@pytest.mark.parametrize("name", ["MistralForSequenceClassification", "Qwen3Model", "Phi3Model", "ModernBertModel"])
@pytest.mark.parametrize("change", ["missing", "extra", "misshapen"])
def test_tensors_of_every_shape_of_family_are_checked(name: str, change: str, tmp_path: Path) -> None:
    saved(tmp_path, name)
    tensors = read_tensors(tmp_path)
    tensor = next(stored for stored in sorted(tensors) if "layers.1." in stored and tensors[stored].ndim == 2)
    if change == "missing":
        del tensors[tensor]
    elif change == "extra":
        tensor = tensor.replace("layers.1.", "layers.7.")
        tensors[tensor] = torch.ones(2)
    else:
        tensors[tensor] = tensors[tensor][:-1]
    write_tensors(tmp_path, tensors)
    said = {"missing": "is missing", "extra": "is not part of this architecture", "misshapen": "has shape"}[change]
    refused(tmp_path, WeightsError, rf"{tensor} {said}")


# Tied weights.


def test_a_masked_language_model_without_its_decoder_uses_its_embeddings(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "tied", task="ForMaskedLM", tie_word_embeddings=True)
    assert "cls.predictions.decoder.weight" not in read_tensors(folder)
    texts = random_encodings([5, 11], 50)
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    with running(artifact) as engine:
        rows = engine.run(PackedBatch.from_encodings(texts))["sparse"]
    for row, text in zip(rows, texts, strict=True):
        with torch.no_grad():
            scores = model(torch.from_numpy(text.input_ids.astype(np.int64))[None]).logits[0]
        np.testing.assert_allclose(row, torch.log1p(torch.relu(scores)).amax(0).numpy(), atol=1e-4)


def test_a_masked_language_model_that_is_not_tied_needs_its_decoder(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, task="ForMaskedLM", tie_word_embeddings=False)
    read(tmp_path).weights().close()
    without(tmp_path, "cls.predictions.decoder.weight")
    refused(tmp_path, WeightsError, r"^Tensor cls\.predictions\.decoder\.weight is missing\.")


# Configs.


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "su", "rope_theta": 1e4}, "rope_type 'su'. Supported: default, linear, dynamic, llama3, yarn"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "rope_type'='yarn'.*Download the checkpoint again"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "rope_type'='linear'.*Download the checkpoint again"),
    ],
)
def test_a_rotation_that_bei_does_not_have_is_refused(rope: dict[str, Any], message: str, tmp_path: Path) -> None:
    change_config(saved(tmp_path, "LlamaModel"), rope_parameters=rope)
    refused(tmp_path, CheckpointError, message)


@pytest.mark.parametrize("name", ["LlamaModel", "NomicBertModel", "BertModel", "DebertaV2Model", "MPNetModel"])
def test_a_length_beyond_the_positions_is_refused_in_every_family(name: str, tmp_path: Path) -> None:
    saved(tmp_path, name)
    longest = read(tmp_path).max_seq_len
    assert read(tmp_path, max_seq_len=longest).max_seq_len == longest == MAX_TOKENS
    with pytest.raises(CheckpointError, match=rf"{longest + 1} is beyond the {longest} positions .*: choose at most"):
        read(tmp_path, max_seq_len=longest + 1)


@pytest.mark.parametrize(
    ("model_type", "architecture", "nearest"),
    [
        ("qwen3_moe", "Qwen3MoeForCausalLM", "; the nearest one is 'qwen3'"),
        ("xlm-roberta-xxl", "XLMRobertaXXLModel", "; the nearest one is 'xlm-roberta-xl'"),
        ("ctrl", "CTRLModel", ""),
        ("mobilebert", "MobileBertModel", ""),
    ],
)
def test_an_unknown_type_names_the_nearest_of_its_stem_and_no_other(
    model_type: str, architecture: str, nearest: str, folder: Path
) -> None:
    change_config(folder, model_type=model_type, architectures=[architecture])
    message = (
        rf"no family for model_type '{model_type}' \(architecture {architecture}\){nearest}\. docs/models\.md lists"
    )
    refused(folder, UnsupportedArchitectureError, message)


@pytest.mark.parametrize(
    ("model_type", "architecture", "supported"),
    [
        ("qwen3", "Qwen3ForQuestionAnswering", "Qwen3ForSequenceClassification"),
        ("bert", "ColBERT", "HF_ColBERT"),
        ("roberta", "BertModel", "RobertaModel"),
    ],
)
def test_an_unknown_architecture_of_a_known_type_names_those_of_the_type(
    model_type: str, architecture: str, supported: str, folder: Path
) -> None:
    change_config(folder, model_type=model_type, architectures=[architecture])
    message = rf"{architecture} of model_type '{model_type}' is not supported; of this type bei builds .*{supported}"
    refused(folder, UnsupportedArchitectureError, message)


# Folders that are not checkpoints of transformers.


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("model.onnx", "an ONNX export"),
    ],
)
def test_a_folder_of_another_kind_is_named_as_what_it_is(file: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"")
    refused(tmp_path, CheckpointNotFoundError, rf"has no config\.json: .*, but {kind}")


def test_a_folder_with_nothing_known_asks_for_one_that_holds_a_config(tmp_path: Path) -> None:
    refused(tmp_path, CheckpointNotFoundError, r"has no config\.json.*Pass the folder that holds one\.$")


@pytest.mark.parametrize(
    ("file", "kind"), [("openvino_model.xml", "an OpenVINO export"), ("tf_model.h5", "weights of TensorFlow")]
)
def test_weights_of_another_kind_are_named(file: str, kind: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(b"")
    refused(folder, WeightsError, rf"has neither model\.safetensors nor .*, but {kind}")


def test_a_reward_model_whose_config_does_not_count_its_labels_is_told_how_many_there_are(tmp_path: Path) -> None:
    folder = saved(tmp_path, "MistralForSequenceClassification")
    change_config(folder, id2label=None, label2id=None, num_labels=None)
    tensors = read_tensors(folder)
    tensors["score.weight"] = tensors["score.weight"][:1]
    write_tensors(folder, tensors)
    refused(folder, WeightsError, r'score\.weight gives 1 scores, and config\.json says 2 .*write "num_labels": 1')


def test_a_tokenizer_with_more_tokens_than_the_embeddings_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Qwen3Model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {
            "id": 5000,
            "content": "<new>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    )
    write_json(folder / "tokenizer.json", tokenizer)
    refused(folder, TokenizerError, r"ids go up to \d+ \(.*\), but the embedding table has \d+ rows.*one source")


# Settings of the user.


@pytest.mark.parametrize("task", ["rerank", "classify", "classify_tokens", "embed_sparse", "embed_tokens"])
def test_an_embedder_has_no_other_task(task: str, folder: Path) -> None:
    refused(folder, ConfigError, f"BertModel has no head for the task {task}: choose one that it has, embed", task=task)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_tokens": ("no", "yes", "so")}, "score_tokens must be one or two tokens, such as no,yes; not 3"),
        ({"rerank_body": "{query}"}, r"rerank_body has no \{document\}"),
        ({"rerank_body": "{document}"}, r"rerank_body has no \{query\}"),
        ({"rerank_prefix": "<s>"}, r"rerank_prefix needs a rerank_body, .* \{query\} and \{document\}"),
        ({"rerank_instruction": "judge"}, "rerank_instruction needs a rerank_body"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_the_build(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BuildConfig(model="x", **settings)
    BuildConfig(model="x", score_tokens=("no", "yes"), rerank_prefix="a", rerank_body="{query} {document}")


def test_a_default_prompt_must_be_among_the_prompts(folder: Path, tmp_path: Path) -> None:
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "q: "}})
    with pytest.raises(ConfigError, match=r"default_prompt_name 'passage' is not among the prompts \(query, other\)"):
        build_artifact(folder, tmp_path / "artifact", prompts={"other": "x"}, default_prompt_name="passage")
    assert not (tmp_path / "artifact").exists()


# Any value of any setting.


def late_interaction(folder: Path) -> None:
    save_checkpoint(folder)
    kinds = ("Transformer", "Dense", "LayerNorm", "Normalize")
    modules = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.x.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    dense = {"in_features": HIDDEN, "out_features": 8, "bias": False, "activation_function": "torch.nn.Identity"}
    write_json(folder / "1_Dense" / "config.json", {**dense, "module_input_name": "token_embeddings"})
    write_tensors(folder / "1_Dense", {"linear.weight": torch.ones(8, HIDDEN)})
    write_json(folder / "2_LayerNorm" / "config.json", {"dimension": 8})
    write_tensors(folder / "2_LayerNorm", {"norm.weight": torch.ones(8), "norm.bias": torch.ones(8)})
    write_json(folder / "3_Normalize" / "config.json", {"module_output_name": "token_embeddings"})
    settings = {"query_prefix": "[Q] ", "document_prefix": "", "prompts": {"query": "x"}, "activation_fn": "a.Identity"}
    lengths = {"query_length": 16, "document_length": 20, "skiplist_words": ["."], "model_type": "ColBERT"}
    expansion = {"do_query_expansion": True, "attend_to_expansion_tokens": False}
    write_json(folder / "config_sentence_transformers.json", {**settings, **lengths, **expansion})


def multi_vector(folder: Path) -> None:
    """Files of sentence-transformers 6."""
    late_interaction(folder)
    modules = [*json.loads((folder / "modules.json").read_text()), {"idx": 4, "path": "4", "type": "MultiVectorMask"}]
    write_json(folder / "modules.json", modules)
    mask = {"skiplist_words": ["."], "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    write_json(folder / "4" / "config.json", mask)
    expansion = {"strategy": "min", "length": 16, "attend": False, "token": None}
    lengths = {"query_length": 24, "document_length": 20, "query_expansion": expansion}
    write_json(folder / "sentence_bert_config.json", lengths)


def splade(folder: Path) -> None:
    save_checkpoint(folder, task="ForMaskedLM")
    modules = [{"path": "", "type": "MLMTransformer"}, {"path": "1", "type": "SpladePooling"}]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1" / "config.json", {"pooling_strategy": "sum", "activation_function": "relu"})
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "fill-mask", "max_seq_length": 16})


def cross_encoder(folder: Path) -> None:
    save_checkpoint(folder, task="ForSequenceClassification", num_labels=1)
    change_config(
        folder,
        sentence_transformers={"activation_fn": "torch.nn.Sigmoid"},
        sbert_ce_default_activation_function="torch.nn.Sigmoid",
        function_to_apply="sigmoid",
        problem_type="regression",
    )


def language_model(folder: Path) -> None:
    saved(folder, "Qwen3ForCausalLM")
    change_config(folder, final_logit_softcapping=30.0)
    modules = [{"path": "", "type": "Transformer"}, {"path": "1", "type": "LogitScore"}]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1" / "config.json", {"true_token_id": 9, "false_token_id": 8})
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "text-generation"})
    eos = {"__type": "AddedToken", "content": "</s>"}
    tokens = {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": eos}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    write_json(folder / "special_tokens_map.json", {"bos_token": "<s>"})


def original_colbert(folder: Path) -> None:
    save_checkpoint(folder)
    write_tensors(folder, {**read_tensors(folder), "linear.weight": torch.ones(8, HIDDEN)})
    change_config(folder, architectures=["HF_ColBERT"])
    lengths = {"query_maxlen": 16, "doc_maxlen": 20, "attend_to_mask_tokens": False, "mask_punctuation": True}
    write_json(folder / "artifact.metadata", {"query_token_id": "[MASK]", "doc_token_id": "the", **lengths})


def remote_code(folder: Path) -> None:
    saved(folder, "GteModel")
    scaling = {"type": "ntk", "factor": 2.0, "mixed_b": None}
    settings = {"layer_norm_type": "layer_norm", "position_embedding_type": "rope", "rope_theta": 1e4}
    change_config(folder, architectures=["NewModel"], model_type="new", rope_scaling=scaling, **settings)


def static(folder: Path) -> None:
    save_static(folder, max_length=40, normalize=True, vocabulary_quantization=None)


def experts(folder: Path) -> None:
    nomic.save(folder)


def jina_code(folder: Path) -> None:
    jina.save(folder, code=jina.CODE)


def fp8_weights(folder: Path) -> None:
    quantize(save_checkpoint(folder), ("pooler*",))


VALUES = [None, 0, -1, 1, 1.5, float("nan"), "", "text", [], [1], ["text"], {}, {"a": 1}, {"type": "ntk"}, True, False]


# The first tier tries every third value with each key, and every value with some.
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "save",
    [
        *(multi_vector, language_model, remote_code, static, fp8_weights),
        *(
            pytest.param(save, marks=pytest.mark.slow)
            for save in (late_interaction, splade, cross_encoder, original_colbert, experts, jina_code)
        ),
    ],
)
def test_any_value_of_any_setting_is_understood_or_refused(
    save: Callable[[Path], None], stride: int, tmp_path: Path
) -> None:
    save(tmp_path)
    read(tmp_path).weights().close()
    paths = [
        path for path in tmp_path.rglob("*") if path.suffix in (".json", ".metadata") and "tokenizer." not in path.name
    ]
    tried = 0
    for path in sorted(paths):
        before = path.read_text()
        for target in range(len(json.loads(before)) if before.startswith("[") else 1):
            content = json.loads(before)
            settings = content[target] if isinstance(content, list) else content
            for place, key in enumerate(sorted(settings)):
                kept = settings[key]
                for value in VALUES[place % stride :: stride]:
                    settings[key] = value
                    path.write_text(json.dumps(content))
                    tried += 1
                    with contextlib.suppress(BeiError):  # the only way out but success: no traceback for a user
                        read(tmp_path).weights().close()
                settings[key] = kept
        path.write_text(before)
    assert tried > 50


@pytest.mark.parametrize("key", ["transformers_weights", "configuration_files"])
def test_other_files_that_transformers_would_read_are_refused_by_the_key_that_names_them(
    key: str, tmp_path: Path
) -> None:
    folder = change_config(save_checkpoint(tmp_path), **{key: "other.json"})
    refused(folder, CheckpointError, f"has {key}: transformers takes .* 'other.json'")
    change_config(folder, **{key: "model.safetensors" if key == "transformers_weights" else []})
    assert read(folder)
