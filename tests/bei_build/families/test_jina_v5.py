"""jina-embeddings-v5: two backbones, and adapters that PEFT saved, one of which is merged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from bei.core import Int32Array, PackedBatch
from bei.errors import BeiError, CheckpointError, ConfigError, WeightsError
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.weights.peft_adapter import CONFIG, WEIGHTS
from tests.support.builds import build_artifact, random_encodings, running
from tests.support.checkpoints import change_config, read_tensors, write_json, write_tensors
from tests.support.reading import saved

TASKS = ["retrieval", "text-matching"]
RANK, ALPHA = 4, 6
LENGTHS = (5, 17, 2)
# As PEFT 0.18 writes it.
SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "FEATURE_EXTRACTION",
    "base_model_name_or_path": "base",
    "r": RANK,
    "lora_alpha": ALPHA,
    "lora_dropout": 0.1,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "modules_to_save": None,
    "qalora_group_size": 16,
    "init_lora_weights": True,
}


def with_adapters(folder: Path, backbone: str, **config: Any) -> Path:
    """A checkpoint of ``backbone`` under the class of the remote code, with random adapters."""
    folder = change_config(
        saved(folder, backbone),
        model_type="jina_embeddings_v5",
        architectures=["JinaEmbeddingsV5Model"],
        auto_map={"AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"},
        task_names=TASKS,
        **config,
    )
    for seed, task in enumerate(TASKS):
        save_adapter(folder, task, factors(folder, seed))
    return folder


def factors(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Of all layers' query and down projections."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in read_tensors(folder).items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{module}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=random) / 4
            found[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=random) / 4
    return found


def save_adapter(folder: Path, task: str, tensors: Mapping[str, torch.Tensor], **settings: Any) -> None:
    (folder / "adapters" / task).mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapters" / task / CONFIG, {**SETTINGS, **settings})
    write_tensors(folder / "adapters" / task, dict(tensors), WEIGHTS)


def expected(folder: Path, task: str | None, scale: float, ids: Int32Array) -> torch.Tensor:
    """The last token's state of transformers' class, each adapted layer with its second path beside it, unmerged."""
    config = json.loads((folder / "config.json").read_text())
    native = "eurobert" if config.get("is_decoder") is False else "qwen3"
    plain = {key: value for key, value in config.items() if key not in ("auto_map", "task_names")}
    write_json(folder / "config.json", {**plain, "model_type": native})
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    write_json(folder / "config.json", config)
    tensors = read_tensors(folder / "adapters" / task, WEIGHTS) if task else {}
    for name, module in model.named_modules():
        a, b = (tensors.get(f"base_model.model.{name}.lora_{kind}.weight") for kind in "AB")
        if a is not None and b is not None:
            module.register_forward_hook(lambda _, given, out, a=a, b=b: out + given[0] @ a.T @ b.T * scale)
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.from_numpy(ids).long()[None]).last_hidden_state
    return states[0, -1]


BACKBONES = [("Qwen3Model", {}), ("EuroBertModel", {"is_decoder": False})]


@pytest.mark.parametrize(("backbone", "config"), BACKBONES, ids=["small", "nano"])
@pytest.mark.parametrize("task", [*TASKS, None])
def test_vectors_are_those_of_the_backbone_with_the_adapter(
    backbone: str, config: Mapping[str, Any], task: str | None, tmp_path: Path
) -> None:
    folder = with_adapters(tmp_path / "v5", backbone, **config)
    artifact = build_artifact(folder, tmp_path / "artifact", adapter=task or "none", normalize=False)
    assert artifact.manifest.spec.adapter == (task or "none")
    texts = random_encodings(LENGTHS, artifact.manifest.spec.vocab_size, seed=4)
    with running(artifact) as engine:
        rows = engine.run(PackedBatch.from_encodings(texts))["embedding"]
    for row, text in zip(rows, texts, strict=True):
        wanted = expected(folder, task, ALPHA / RANK, text.input_ids)
        torch.testing.assert_close(torch.from_numpy(row.copy()), wanted, atol=2e-5, rtol=0)


def test_a_rank_stabilized_adapter_has_its_scale(tmp_path: Path) -> None:
    folder = with_adapters(tmp_path / "v5", "Qwen3Model")
    save_adapter(folder, TASKS[0], factors(folder, 0), use_rslora=True)
    artifact = build_artifact(folder, tmp_path / "artifact", adapter=TASKS[0], normalize=False)
    (text,) = random_encodings((9,), artifact.manifest.spec.vocab_size, seed=4)
    with running(artifact) as engine:
        (row,) = engine.run(PackedBatch.from_encodings([text]))["embedding"]
    wanted = expected(folder, TASKS[0], ALPHA / math.sqrt(RANK), text.input_ids)
    torch.testing.assert_close(torch.from_numpy(row.copy()), wanted, atol=2e-5, rtol=0)


def test_an_adapter_that_there_is_not_is_refused(tmp_path: Path) -> None:
    folder = with_adapters(tmp_path / "v5", "Qwen3Model")
    with pytest.raises(ConfigError, match=r"each of its tasks: retrieval, text-matching\. 'clustering' .*--adapter"):
        read_checkpoint(locate(str(folder)), adapter="clustering")


@pytest.mark.parametrize(
    ("settings", "change", "error", "said"),
    [
        ({"use_dora": True}, {}, CheckpointError, "use_dora = true, which bei does not compute"),
        ({"rank_pattern": {"q_proj": 0}}, {}, CheckpointError, "no number above 0"),
        ({"modules_to_save": ["norm"]}, {}, CheckpointError, "modules_to_save = .* does not compute"),
        ({"peft_type": "IA3"}, {}, CheckpointError, "peft_type 'IA3'; bei computes LORA"),
        ({"r": 0}, {}, CheckpointError, "r = 0 and lora_alpha = 6"),
        ({"r": 8}, {}, WeightsError, r"factors of .* rank 8: the two are not from the same"),
        ({}, {"layers.0.self_attn.q_proj.lora_A.weight": None}, WeightsError, r"factors of \(\) and"),
        ({}, {"layers.9.self_attn.q_proj.lora_A.weight": (4, 32)}, WeightsError, "which the base model does not have"),
        ({}, {"embed_tokens.lora_embedding_A": (4, 9)}, WeightsError, r"factors of \(4, 9\) and \(\) for embed_tokens"),
        ({}, {"norm.lora_magnitude_vector.weight": (4, 9)}, WeightsError, "no factor of a linear layer"),
        ({"init_lora_weights": "pissa"}, {}, CheckpointError, "init_lora_weights = .* does not compute"),
        ({"alpha_pattern": {"((a+)+)+q": 8}}, {}, CheckpointError, "alpha_pattern for .* does not read"),
    ],
)
def test_other_adapters_are_refused_by_name(
    settings: Mapping[str, Any],
    change: Mapping[str, tuple[int, int] | None],
    error: type[BeiError],
    said: str,
    tmp_path: Path,
) -> None:
    folder = with_adapters(tmp_path / "v5", "Qwen3Model")
    tensors = factors(folder, 0)
    for name, shape in change.items():
        if shape is None:
            del tensors[f"base_model.model.{name}"]
        else:
            tensors[f"base_model.model.{name}"] = torch.zeros(shape)
    save_adapter(folder, TASKS[0], tensors, **settings)
    with pytest.raises(error, match=said), read_checkpoint(locate(str(folder)), adapter=TASKS[0]).weights():
        pass


def test_a_checkpoint_without_its_adapters_is_refused_and_a_merged_one_is_a_qwen3(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Qwen3Model")
    change_config(folder, task_names=TASKS)
    assert read_checkpoint(locate(str(folder))).adapter is None
    change_config(folder, model_type="jina_embeddings_v5", architectures=["JinaEmbeddingsV5Model"])
    with pytest.raises(CheckpointError, match="has no adapters"):
        read_checkpoint(locate(str(folder)))
