"""Target trtllm: the files written for each model, refusals, and that the files hold the checkpoint."""

from __future__ import annotations

import json
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file

from bei.artifact.manifest import EngineRequirements
from bei.artifact.store import load
from bei.core import Limits
from bei.errors import BuildError, CompileError, ConfigError, UnsupportedArchitectureError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.config import BuildConfig
from bei_build.families.bert import FAMILY as BERT
from bei_build.families.qwen import QWEN2_FAMILY, QWEN3_FAMILY
from bei_build.targets.base import Numerics
from bei_build.targets.choose import compiler_for
from bei_build.targets.trtllm import CLASSES, TRTLLMCompiler
from bei_build.targets.trtllm_checkpoint import Tensor, write_checkpoint
from tests.support import trtllm
from tests.support.builds import build_artifact
from tests.support.checkpoints import (
    Dense,
    Normalize,
    add_modules,
    change_config,
    read_tensors,
    save_checkpoint,
    write_tensors,
)
from tests.support.reading import read, saved
from tests.support.trtllm_checkpoints import bert_classifier, qwen3_embedder, reward_model

LIMITS = Limits(max_num_tokens=256, max_batch_size=8, max_seq_len=40)
MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "Qwen3ForTextEmbedding": (qwen3_embedder, "bf16"),
    "BertForSequenceClassification": (bert_classifier, "fp16"),
    "Qwen2ForRewardModel": (reward_model, "bf16"),
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = torch.float8_e4m3fn


def write(checkpoint: Checkpoint, folder: Path, precision: str) -> EngineRequirements:
    folder.mkdir(exist_ok=True)
    with checkpoint.weights() as weights:
        return TRTLLMCompiler().compile(checkpoint.spec, weights, Numerics(precision), LIMITS, folder, lambda _: None)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return config


def refusal(folder: Path, tmp_path: Path, precision: str = "bf16", **choice: Any) -> str:
    """The reason why ``folder`` is refused, in one line; nothing may have been written."""
    with pytest.raises(BuildError) as info:
        write(read(folder, **choice), tmp_path / "refused", precision)
    assert not list((tmp_path / "refused").iterdir())
    assert "\n" not in str(info.value)
    assert isinstance(info.value, UnsupportedArchitectureError)
    return str(info.value)


@pytest.mark.parametrize("name", MODELS)
def test_the_class_is_named_and_every_tensor_keeps_its_name_and_values(name: str, tmp_path: Path) -> None:
    make, precision = MODELS[name]
    folder = make(tmp_path / "checkpoint")
    write(read(folder), tmp_path / "engine", precision)
    assert config_of(tmp_path / "engine")["architectures"] == [name]
    stored = {key: tensor for key, tensor in read_tensors(folder).items() if not key.startswith("lm_head")}
    if name == "Qwen3ForTextEmbedding":  # the hub's have no prefix; the language model's class and ModelOpt's files do
        stored = {f"model.{key}": tensor for key, tensor in stored.items()}
    written = load_file(tmp_path / "engine" / "model.safetensors")
    assert written.keys() == stored.keys()
    for key, tensor in written.items():
        assert tensor.dtype == TYPES[precision]
        torch.testing.assert_close(tensor, stored[key].to(tensor.dtype), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "family"), [*zip(MODELS, (QWEN3_FAMILY, BERT, QWEN2_FAMILY), strict=True)])
def test_transformers_reads_the_written_config_as_the_same_model(name: str, family: Any, tmp_path: Path) -> None:
    make, precision = MODELS[name]
    checkpoint = read(make(tmp_path / "checkpoint"))
    write(checkpoint, tmp_path / "engine", precision)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "engine")
    spec = family.spec_from_config(config, checkpoint.spec.architecture)
    ours = checkpoint.spec
    assert spec == replace(ours, heads=spec.heads, unpooled_id=None)
    if family is not QWEN3_FAMILY:
        assert family.architectures[name](config) == ours.heads


def test_an_artifact_says_what_it_needs(tmp_path: Path) -> None:
    needs = write(read(qwen3_embedder(tmp_path / "qwen3")), tmp_path / "embedder", "bf16")
    assert (needs.compiler, needs.compiler_version, needs.unit_vectors) == (
        "TensorRT-LLM (experimental)",
        ">=1.3.0rc27",
        True,
    )
    assert not write(read(bert_classifier(tmp_path / "bert")), tmp_path / "classifier", "fp16").unit_vectors


def test_equal_builds_are_equal_bytes(tmp_path: Path) -> None:
    checkpoint = read(qwen3_embedder(tmp_path / "checkpoint"))
    for name in ("one", "two"):
        write(checkpoint, tmp_path / name, "fp8")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert files[0] == files[1]
    assert files[0].keys() == {"config.json", "hf_quant_config.json", "model.safetensors"}


@pytest.mark.parametrize("make", [qwen3_embedder, reward_model])
def test_fp8_has_a_scale_a_matrix_and_one_for_matrices_that_are_joined(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path / "checkpoint")
    write(read(folder), tmp_path / "engine", "fp8")
    tensors = load_file(tmp_path / "engine" / "model.safetensors")
    original = {key.removeprefix("model."): value.float() for key, value in read_tensors(folder).items()}
    quantized = {key for key, tensor in tensors.items() if tensor.dtype == FP8}
    names = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    parts = [*(f"self_attn.{name}" for name in names[0]), *(f"mlp.{name}" for name in names[1])]
    num_layers = config_of(tmp_path / "engine")["num_hidden_layers"]
    assert quantized == {f"model.layers.{i}.{part}.weight" for i in range(num_layers) for part in parts}
    assert {key for key in tensors if key.endswith("_scale")} == {f"{key}_scale" for key in quantized}
    for layer in range(num_layers):
        for group in (parts[:3], parts[3:4], parts[4:6], parts[6:]):
            keys = [f"layers.{layer}.{part}.weight" for part in group]
            largest = max(original[key].abs().max() for key in keys)
            for key in keys:
                scale = tensors[f"model.{key}_scale"]
                assert (scale.shape, scale.dtype) == ((), torch.float32)
                torch.testing.assert_close(scale, largest / 448)
                matrix = tensors[f"model.{key}"].float()
                assert matrix.shape == original[key].shape
                # Half a step of 3 bits of mantissa, or of the smallest numbers.
                error, bound = (matrix * scale - original[key]).abs(), original[key].abs() / 16 + scale * 2**-10
                assert (error <= bound * 1.001).all()
            assert max(tensors[f"model.{key}"].float().abs().max() for key in keys) == 448
    assert all(tensor.dtype == torch.bfloat16 for key, tensor in tensors.items() if key not in quantized | {
        f"{key}_scale" for key in quantized
    })  # fmt: skip


def test_fp8_is_said_in_both_of_model_opts_places(tmp_path: Path) -> None:
    write(read(reward_model(tmp_path / "checkpoint")), tmp_path / "engine", "fp8")
    inline = config_of(tmp_path / "engine")["quantization_config"]
    settings = json.loads((tmp_path / "engine" / "hf_quant_config.json").read_bytes())["quantization"]
    excluded = ["lm_head", "model.embed_tokens", "score*", "pooler*", "classifier*"]
    assert settings == {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": excluded}
    assert (inline["quant_method"], inline["quant_algo"], inline["ignore"]) == ("modelopt", "FP8", excluded)
    assert inline["config_groups"]["group_0"]["input_activations"]["dynamic"] is True


def test_a_matrix_of_zeros_has_the_scale_one(tmp_path: Path) -> None:
    tensor = Tensor("w", "w", (2, 3), scale_group=("w",))
    write_checkpoint(tmp_path, {}, [tensor], lambda _: np.zeros((2, 3), np.float32), "BF16", (), {})
    tensors = load_file(tmp_path / "model.safetensors")
    assert float(tensors["w_scale"]) == 1.0
    assert not tensors["w"].float().any()


def test_large_checkpoints_are_sharded_and_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0

    class Tracked(np.ndarray):
        pass

    def read_tensor(name: str) -> npt.NDArray[np.float32]:
        nonlocal most
        array = np.full((4, 8), int(name), np.float32).view(Tracked)
        alive.append(weakref.ref(array))
        most = max(most, sum(each() is not None for each in alive))
        return array

    tensors = [Tensor(str(index), f"t{index}", (4, 8)) for index in range(5)]
    write_checkpoint(tmp_path, {}, tensors, read_tensor, "BF16", (), {}, most_bytes=2 * 4 * 8 * 2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["metadata"]["total_size"] == 5 * 4 * 8 * 2
    for name, file in index["weight_map"].items():
        assert float(load_file(tmp_path / file)[name].float().mean()) == int(name[1:])
    assert most == 1


def test_a_weight_beyond_the_type_is_named(tmp_path: Path) -> None:
    folder = bert_classifier(tmp_path / "checkpoint")
    tensors = {key: tensor.float() for key, tensor in read_tensors(folder).items()}
    tensors["classifier.weight"][0, 0] = 1e6
    with pytest.raises(CompileError, match=r"cannot be written in fp16: weight classifier.weight is not finite"):
        write(read(write_tensors(folder, tensors)), tmp_path / "engine", "fp16")


UNKNOWN = {
    "BertModel": "no class that bei knows to compute BertModel of model_type 'bert'",
    "RobertaForSequenceClassification": "no class .* RobertaForSequenceClassification of model_type 'roberta'",
    "ModernBertModel": "no class .* ModernBertModel of model_type 'modernbert'",
    "Qwen2Model": "no class .* Qwen2Model of model_type 'qwen2'",
    "Qwen2ForSequenceClassification": "no class .* Qwen2ForSequenceClassification",
    "Qwen3ForSequenceClassification": "no class .* Qwen3ForSequenceClassification of model_type 'qwen3'",
    "LlamaForCausalLM": "no class .* LlamaForCausalLM of model_type 'llama'",
    "BertForTokenClassification": "no class .* BertForTokenClassification",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_model_without_a_class_is_refused_with_the_list_of_those_that_have_one(name: str, tmp_path: Path) -> None:
    message = refusal(saved(tmp_path / "checkpoint", name), tmp_path)
    assert re.search(UNKNOWN[name], message)
    for (_, architecture), model_class in CLASSES.items():
        assert f"{architecture} ({model_class.name})" in message
    assert message.endswith("Build with --target cpu or tensorrt.")


def _yarn(folder: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 12}
    change_config(folder, rope_parameters=rope)


OTHERWISE: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "mean pooling": (lambda _: None, {"pooling": "mean"}, "heads[0].pooling is mean in the checkpoint, and last"),
    "states of tokens": (
        lambda _: None,
        {"token_states": True},
        "heads is embedding, token_embedding in the checkpoint, and embedding",
    ),
    "a dense layer behind": (
        lambda folder: add_modules(folder, ("last",), (Dense(16), Normalize())),
        {},
        "heads[0].layers is a linear layer 32 to 16 (tail.0) in the checkpoint, and none",
    ),
    "scores of tokens": (
        lambda _: None,
        {"score_tokens": ("t", "he")},
        "heads[0].output is logits in the checkpoint, and emb",
    ),
    "both directions": (
        lambda folder: change_config(folder, is_causal=False),
        {},
        "layers[0].attention.causal is False in the checkpoint, and True",
    ),
    "a window": (
        lambda folder: change_config(
            folder,
            sliding_window=8,
            use_sliding_window=True,
            layer_types=["full_attention"] * 2 + ["sliding_attention"],
        ),
        {},
        "layers[2].attention.window is 7 in the checkpoint, and None",
    ),
    "scaled rotations": (_yarn, {}, "numbers of layers[0].attention.rope.inv_freq differ"),
    "another activation": (
        lambda folder: change_config(folder, hidden_act="gelu"),
        {},
        "layers[0].mlp.activation is gelu in the checkpoint, and silu",
    ),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_what_the_class_computes_otherwise_is_refused_by_name(what: str, tmp_path: Path) -> None:
    change, choice, words = OTHERWISE[what]
    folder = qwen3_embedder(tmp_path / "checkpoint", causal_lm="score_tokens" in choice)
    change(folder)
    message = refusal(folder, tmp_path, **choice)
    assert "TensorRT-LLM's Qwen3ForTextEmbedding computes something else than this checkpoint: " in message
    assert words in message


def test_a_classifier_with_another_activation_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "bert", task="ForSequenceClassification", num_labels=3, hidden_act="gelu_new")
    assert "layers[0].mlp.activation is gelu_tanh in the checkpoint, and gelu" in refusal(folder, tmp_path, "fp16")


def test_a_reward_model_with_a_window_is_refused(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 3}
    folder = change_config(reward_model(tmp_path / "checkpoint"), **changes)
    assert "layers[0].attention.window is 7 in the checkpoint, and None" in refusal(folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "precision", "message"),
    [
        ("BertForSequenceClassification", "bf16", r"computes in fp16, not in bf16 \(it casts .*--precision fp16\."),
        ("BertForSequenceClassification", "fp8", r"computes in fp16, not in fp8 \(.*has no FP8\): build with"),
        ("Qwen3ForTextEmbedding", "fp16", r"computes in bf16 or fp8, not in fp16: build with --precision bf16 or fp8"),
        ("Qwen2ForRewardModel", "fp16", "computes in bf16 or fp8, not in fp16"),
    ],
)
def test_a_precision_that_the_class_does_not_compute_in_is_refused(
    name: str, precision: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=message):
        write(read(MODELS[name][0](tmp_path / "checkpoint")), tmp_path / "engine", precision)


def test_a_cpu_refuses_fp8_by_name_and_this_one_what_it_has_not() -> None:
    with pytest.raises(ConfigError, match="Target cpu has no precision 'fp8'"):
        compiler_for(BuildConfig(model="m", target="cpu")).resolve_precision("fp8")
    compiler = compiler_for(BuildConfig(model="m", target="trtllm"))
    assert compiler.resolve_precision("auto") == "bf16"
    for precision in ("fp32", "int8"):
        with pytest.raises(ConfigError, match=f"Target trtllm has no precision '{precision}'. Precisions: auto, bf16"):
            compiler.resolve_precision(precision)


def test_vectors_that_keep_their_lengths_are_refused(tmp_path: Path) -> None:
    folder = add_modules(qwen3_embedder(tmp_path / "checkpoint"), ("last",))
    with pytest.raises(CompileError, match=r"vectors keep their lengths, and engines for trtllm make them unit length"):
        build_artifact(folder, tmp_path / "artifact", target="trtllm", precision="bf16")
    assert not (tmp_path / "artifact").exists()


def test_without_tensorrt_llm_or_a_gpu_the_build_is_pending_and_says_which(tmp_path: Path) -> None:
    compiler = TRTLLMCompiler()
    compiler.check_able()
    assert compiler.cannot_run() == "TensorRT-LLM is not installed here"
    with trtllm.installed():
        assert compiler.cannot_run() is None
        runtime: Any = sys.modules["cuda.bindings.runtime"]
        runtime.cudaGetDeviceCount = lambda: (SimpleNamespace(value=100, name="cudaErrorNoDevice"), None)
        assert "no NVIDIA GPU that CUDA can use (CUDA finds no NVIDIA GPU" in str(compiler.cannot_run())
    build_artifact(qwen3_embedder(tmp_path / "checkpoint"), tmp_path / "artifact", target="trtllm", precision="bf16")
    artifact = load(tmp_path / "artifact")
    assert (artifact.certificate.kind, artifact.manifest.precision) == ("pending", "bf16")
    assert {info.path for info in artifact.manifest.files} >= {"engine/config.json", "reference/answers.npz"}
