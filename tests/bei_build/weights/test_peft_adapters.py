"""PEFT's LoRA adapters of any model, computed beside its weights: against peft itself, and what is refused by name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from bei.artifact.adapter_scales import AdapterScale
from bei.artifact.manifest import CERTIFICATE_PAGE, Adapters, Artifact
from bei.cli.inspect_artifact import as_table
from bei.core import Encoding, Float32Array, PackedBatch
from bei.engine.packing import graph_inputs
from bei.errors import CheckpointError, CompileError, ConfigError, WeightsError
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.config import BuildConfig
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.weights.lora import NONE, Adapter, AdapterSet, StoredFactors
from bei_build.weights.peft_adapter import CONFIG, WEIGHTS, PeftAdapter, read_adapter
from tests.bei_build.targets.rtx import needs_rtx
from tests.support.builds import build_artifact, random_encodings, running
from tests.support.checkpoints import read_tensors, write_json, write_tensors
from tests.support.cpus import BF16
from tests.support.reading import saved

HAS_PEFT = importlib.util.find_spec("peft") is not None
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "fan_in_fan_out": False}
LENGTHS = (5, 17, 2, 9, 30, 1)
# Patterns as users write them: whole names, ends, and one with a repetition.
PATTERNS: dict[str, Any] = {
    "BertModel": {"rank_pattern": {"encoder.layer.0.attention.self.query": 2, "key": 3}, "alpha_pattern": {"value": 9}},
    "Qwen3Model": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, r"layers.\d+.mlp.up_proj": 3},
        "alpha_pattern": {"down_proj": 2.5},
    },
}
MODULES = {
    "BertModel": ("query", "key", "value", "dense", "word_embeddings"),
    "Qwen3Model": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"),
}


def targets(folder: Path, model: str) -> list[str]:
    """The adapted modules of the checkpoint."""
    names = (name.removesuffix(".weight") for name, tensor in read_tensors(folder).items() if tensor.ndim == 2)
    return [name for name in names if name.rpartition(".")[2] in MODULES[model] and "pooler" not in name]


def save_lora(folder: Path, base: Path, model: str, seed: int, **settings: Any) -> Path:
    """A random adapter of all matrices and of the word table, as PEFT writes one."""
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, {**SETTINGS, **settings})
    adapter, tensors, random = read_adapter(folder), {}, torch.Generator().manual_seed(seed)
    weights = read_tensors(base)
    for module in targets(base, model):
        rows, columns = weights[f"{module}.weight"].shape
        rank = adapter.rank_of(module)
        is_table = module.endswith(("embed_tokens", "word_embeddings"))
        shapes = ((rank, rows), (columns, rank)) if is_table else ((rank, columns), (rows, rank))
        ends = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
        for end, shape in zip(ends, shapes, strict=True):
            tensors[f"base_model.model.{module}.{end}"] = torch.randn(shape, generator=random) / 4
    write_tensors(folder, tensors, WEIGHTS)
    return folder


def rows_of(artifact: Artifact, texts: list[Encoding]) -> Float32Array:
    with running(artifact) as engine:
        return engine.run(PackedBatch.from_encodings(texts))["embedding"]


def by_hand(base: Path, adapter: Path | None, text: Encoding) -> Float32Array:
    """The mean of transformers' states with each adapted module's second path beside it, unmerged."""
    model = AutoModel.from_pretrained(base, attn_implementation="eager").eval()
    if adapter is not None:
        found, tensors = read_adapter(adapter), read_tensors(adapter, WEIGHTS)
        for name, module in model.named_modules():
            is_table = isinstance(module, torch.nn.Embedding)
            ends = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
            a, b = (tensors.get(f"base_model.model.{name}.{end}") for end in ends)
            if a is not None and b is not None:
                module.register_forward_hook(term(a, b, float(found.scale_of(name)), is_table=is_table))
    return mean_state(model, text)


def term(a: torch.Tensor, b: torch.Tensor, scale: float, *, is_table: bool) -> Any:
    def hook(_: Any, given: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return out + (a.T[given[0]] if is_table else given[0] @ a.T) @ b.T * scale

    return hook


def mean_state(model: Any, text: Encoding) -> Float32Array:
    with torch.inference_mode():
        states = model(input_ids=torch.from_numpy(text.input_ids).long()[None]).last_hidden_state
    rows: Float32Array = states[0].mean(0).numpy()
    return rows


def scale_of(settings: dict[str, Any], **others: Any) -> AdapterScale:
    return AdapterScale(rank=settings["r"], alpha=settings["lora_alpha"], **others)


def test_the_scale_of_what_is_merged_is_that_of_its_own_factors() -> None:
    merged = Adapter("a", ("a", "b"), StoredFactors(4, 8.0))
    assert merged.scales == {"a": AdapterScale(rank=4, alpha=8.0)}
    assert Adapter(NONE, ("a", "b"), StoredFactors(4, 8.0)).scales == {}
    beside = Adapter("c", ("c",), PeftAdapter(Path("x"), 16, 4.0, True, {}, {}), merged)
    assert AdapterSet(merged, {"c": beside}).scales == merged.scales | {
        "c": AdapterScale(rank=16, alpha=4.0, is_rank_stabilized=True)
    }
    assert str(AdapterScale(rank=16, alpha=4.0, is_rank_stabilized=True)) == "alpha / sqrt(rank) = 4 / sqrt(16) = 1"


@pytest.mark.parametrize("stabilized", [False, True], ids=["", "rslora"])
@pytest.mark.parametrize("model", MODULES)
def test_mixed_adapters_of_one_step_are_each_that_of_peft(model: str, stabilized: bool, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", model)
    loras = [
        save_lora(tmp_path / "one", base, model, 1, use_rslora=stabilized, **PATTERNS[model]),
        save_lora(tmp_path / "two", base, model, 2, lora_alpha=3, use_rslora=stabilized),
    ]
    asked = tuple(f"{path.name}={path}" for path in loras)
    artifact = build_artifact(base, tmp_path / "artifact", lora=asked, pooling="mean", normalize=False)
    assert artifact.manifest.adapters == Adapters(names=["one", "two"], tasks=[], is_required=False)
    first, second = SETTINGS, {**SETTINGS, "lora_alpha": 3}
    assert artifact.manifest.spec.adapter_scales == {
        "one": scale_of(first, is_rank_stabilized=stabilized, **PATTERNS[model]),
        "two": scale_of(second, is_rank_stabilized=stabilized),
    }
    root, alpha = "sqrt" if stabilized else "", SETTINGS["lora_alpha"]
    shown = f"alpha / {root}(rank) = {alpha} / {root}({SETTINGS['r']}) = "
    assert shown in as_table(artifact)
    assert shown in (artifact.path / CERTIFICATE_PAGE).read_text()
    assert artifact.certificate.reference == (
        "transformers, FP32, one text at a time, with each adapter merged (one, two) and with none"
    )
    texts = random_encodings(LENGTHS, artifact.manifest.spec.vocab_size, seed=4)
    texts = [text._replace(adapter=index % 3) for index, text in enumerate(texts)]
    for row, text in zip(rows_of(artifact, texts), texts, strict=True):
        adapter = None if text.adapter == 0 else loras[text.adapter - 1]
        np.testing.assert_allclose(row, by_hand(base, adapter, text), atol=2e-5, rtol=0)
        if HAS_PEFT and adapter is not None:
            np.testing.assert_allclose(row, by_peft(base, adapter, model, text), atol=2e-5, rtol=0)
    assert np.abs(by_hand(base, loras[0], texts[1]) - by_hand(base, None, texts[1])).max() > 0.1  # they do something


def by_peft(base: Path, adapter: Path, model: str, text: Encoding) -> Float32Array:
    """peft's own model. Its config needs the names of the modules, which ours does not."""
    PeftModel = importlib.import_module("peft").PeftModel  # not a dependency

    config = json.loads((adapter / CONFIG).read_text())
    named = {**config, "task_type": "FEATURE_EXTRACTION", "target_modules": targets(base, model)}
    write_json(adapter / CONFIG, named)
    plain = AutoModel.from_pretrained(base, attn_implementation="eager").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of what peft asks of it
        adapted = PeftModel.from_pretrained(plain, adapter).eval()
    return mean_state(adapted, text)


@pytest.mark.parametrize("precision", [BF16, "int8"])
def test_precisions_are_verified_with_every_adapter(precision: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "BertModel")
    lora = save_lora(tmp_path / "one", base, "BertModel", 1)
    artifact = build_artifact(base, tmp_path / "artifact", lora=(f"one={lora}",), precision=precision, min_cosine=0.9)
    assert artifact.certificate.passed


@pytest.mark.parametrize(
    ("entries", "error", "said"),
    [
        (("one",), ConfigError, "must be NAME=PATH"),
        (("one={lora}", "one={lora}"), ConfigError, "gives the name 'one' twice"),
        (("none={lora}",), ConfigError, "stands for the weights without an adapter"),
        (("a b={lora}",), ConfigError, "must be of up to 100 letters"),
        (("one={base}",), CheckpointError, "has no adapter_config.json"),
    ],
)
def test_names_and_folders_that_cannot_be_are_refused(
    entries: tuple[str, ...], error: type[Exception], said: str, tmp_path: Path
) -> None:
    base = saved(tmp_path / "base", "BertModel")
    lora = save_lora(tmp_path / "one", base, "BertModel", 1)
    given = tuple(entry.format(lora=lora, base=base) for entry in entries)
    with pytest.raises(error, match=said):
        build_artifact(base, tmp_path / "artifact", lora=given)
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize(
    ("module", "shapes", "said"),
    [
        ("pooler.other", ((4, 32), (32, 4)), "which the base model does not have"),
        ("embeddings.position_embeddings", ((4, 64), (32, 4)), r"changes .*position_embeddings.* no linear layer"),
    ],
)
def test_changes_of_what_is_no_product_are_refused_by_name(
    module: str, shapes: tuple[tuple[int, int], ...], said: str, tmp_path: Path
) -> None:
    base = saved(tmp_path / "base", "BertModel")
    lora = save_lora(tmp_path / "one", base, "BertModel", 1)
    ends = ("lora_A.weight", "lora_B.weight")
    if "embeddings" in module:
        ends = ("lora_embedding_A", "lora_embedding_B")
        rows, columns = read_tensors(base)[f"{module}.weight"].shape
        shapes = ((4, rows), (columns, 4))
    added = {f"base_model.model.{module}.{end}": torch.zeros(shape) for end, shape in zip(ends, shapes, strict=True)}
    write_tensors(lora, {**read_tensors(lora, WEIGHTS), **added}, WEIGHTS)
    with pytest.raises(WeightsError, match=said):
        read_checkpoint(locate(str(base)), loras={"one": lora})


def test_a_budget_of_verification_is_refused(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "BertModel")
    lora = save_lora(tmp_path / "one", base, "BertModel", 1)
    with pytest.raises(ConfigError, match="verify_budget: each adapter"):
        build_artifact(base, tmp_path / "artifact", lora=(f"one={lora}",), verify_budget=5.0)


def test_a_changed_adapter_is_another_checkpoint(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "BertModel")
    sources = []
    for seed in (1, 2):
        lora = save_lora(tmp_path / f"of{seed}", base, "BertModel", seed)
        artifact = build_artifact(base, tmp_path / "artifact", lora=(f"one={lora}",), verify=False)
        sources.append(artifact.manifest.source.sha256)
    assert sources[0] != sources[1]


def test_lora_paths_are_read_from_the_setting() -> None:
    assert BuildConfig(model="x", lora=("a=b", "c=d=e")).lora_paths == {"a": "b", "c": "d=e"}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A base model and four adapters of it."""
    folder = tmp_path_factory.mktemp("four")
    base = saved(folder / "base", "BertModel")
    names = [f"task{seed}" for seed in range(4)]
    return base, {name: save_lora(folder / name, base, "BertModel", seed) for seed, name in enumerate(names)}


def test_64_texts_of_4_adapters_in_one_step_are_what_each_is_alone(
    four: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    base, loras = four
    asked = tuple(f"{name}={path}" for name, path in loras.items())
    artifact = build_artifact(base, tmp_path / "artifact", lora=asked, normalize=False)
    lengths = [1 + 7 * index % 40 for index in range(64)]
    texts = random_encodings(lengths, artifact.manifest.spec.vocab_size, seed=4)
    texts = [text._replace(adapter=index % 4 + 1) for index, text in enumerate(texts)]
    with running(artifact) as engine:
        together = engine.run(PackedBatch.from_encodings(texts))["embedding"]
        alone = [engine.run(PackedBatch.from_encodings([text]))["embedding"][0] for text in texts]
        plain = engine.run(PackedBatch.from_encodings([text._replace(adapter=0) for text in texts]))["embedding"]
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
    assert np.abs(together - plain).max(axis=1).min() > 0.05  # of every text


def test_onnx_runtime_gives_the_same(four: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    base, loras = four
    checkpoint = read_checkpoint(locate(str(base)), HeadChoice(pooling="mean"), loras=loras)
    with checkpoint.weights() as weights:
        types = GraphTypes(DType.FP32, DType.FP32)
        path = write_graph(checkpoint.spec, weights.read, tmp_path, types, AttentionCore.MATMUL_SOFTMAX, 64)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    texts = random_encodings(LENGTHS, checkpoint.spec.embeddings.vocab_size)
    texts = [text._replace(adapter=index % 5) for index, text in enumerate(texts)]
    inputs = graph_inputs(PackedBatch.from_encodings(texts), [one.name for one in session.get_inputs()])
    (rows,) = session.run(["embedding"], inputs)
    for row, text in zip(rows, texts, strict=False):
        adapter = loras[f"task{text.adapter - 1}"] if text.adapter else None
        np.testing.assert_allclose(row, by_hand(base, adapter, text), atol=2e-5, rtol=0)


@needs_rtx
def test_tensorrt_compiles_the_network(four: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    base, loras = four
    asked = tuple(f"{name}={path}" for name, path in loras.items())
    settings: dict[str, Any] = {"target": "tensorrt-rtx", "compute_capability": ("89",), "precision": "auto"}
    artifact = build_artifact(base, tmp_path / "artifact", lora=asked, **settings)
    assert artifact.certificate.kind == "pending"


def test_trtllm_refuses_adapters_by_name(four: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    base, loras = four
    with pytest.raises(CompileError, match="no adapters beside the weights: merge one with --adapter"):
        build_artifact(base, tmp_path / "artifact", lora=(f"one={loras['task0']}",), target="trtllm", precision="auto")
