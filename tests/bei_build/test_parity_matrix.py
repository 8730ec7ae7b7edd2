"""Every case of ``tests.support.zoo``, saved, built and run, against its Hugging Face class; and each feature
matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from bei.artifact.manifest import Manifest
from bei.core import Encoding, Float32Array
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.families.base import Family
from bei_build.families.table import FAMILIES, VISION_FAMILIES
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import AttentionSpec, LayerSpec, RopeSpec
from bei_build.targets.base import Numerics
from bei_build.targets.openvino import OpenVINOCompiler
from tests.model_matrix import (
    DOCUMENT,
    LENGTHS,
    build_bf16,
    build_fp32,
    default_pooling,
    difference,
    least_cosine,
    pooled,
    poolings_of,
    row_start,
    run,
)
from tests.support.builds import build_artifact, embed, open_engine
from tests.support.cpus import needs_bf16
from tests.support.reading import read
from tests.support.zoo import (
    CASES,
    FIRST_OF_FAMILY,
    MAX_TOKENS,
    SPECIAL,
    Case,
    by_tier,
    encodings_of,
    hf_outputs,
    save_case,
)

TOLERANCE = 2e-4
BY_NAME = {case.name: case for case in CASES}
# An encoder, a decoder, and a case that is asked text by text.
POOLED_OTHERWISE = ("BertModel", "LlamaModel", "Phi3Model")


@dataclass(frozen=True)
class Saved:
    """A case on disk; ``rows`` are those of the HF class for ``encodings``."""

    case: Case
    folder: Path
    encodings: list[Encoding]
    rows: list[Float32Array]


def save(case: Case, folder: Path) -> Saved:
    encodings = encodings_of(case, LENGTHS, case.tokenizer().get_vocab_size())
    save_case(folder, case)
    return Saved(case, folder, encodings, hf_outputs(folder, case, encodings))


class Saves:
    """Cases that are saved once each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[str, Saved] = {}

    def of(self, case: Case) -> Saved:
        if case.name not in self._kept:
            self._kept[case.name] = save(case, self._folder / case.name)
        return self._kept[case.name]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module", params=by_tier(*FIRST_OF_FAMILY, *SPECIAL))
def saved(request: pytest.FixtureRequest, saves: Saves) -> Saved:
    return saves.of(request.param)


def test_every_case_is_read_with_all_its_weights(saved: Saved) -> None:
    checkpoint = read(saved.folder)
    with checkpoint.weights() as weights:
        for name, shape in checkpoint.spec.weights():
            assert weights.read(name).shape == shape


def test_the_fp32_engine_equals_the_hf_class_in_batches_and_alone(saved: Saved, tmp_path: Path) -> None:
    check_fp32(saved, tmp_path, None)


# Three in the first tier: how states are pooled is not decided by a family.
@pytest.mark.parametrize("saved", by_tier(*map(BY_NAME.__getitem__, POOLED_OTHERWISE)), indirect=True)
def test_the_fp32_engine_pools_in_another_way_too(saved: Saved, tmp_path: Path) -> None:
    for pooling in poolings_of(saved.case)[1:]:
        check_fp32(saved, tmp_path, pooling)


def check_fp32(saved: Saved, folder: Path, pooling: str | None) -> None:
    case = saved.case
    expected = pooled(case, saved.rows, pooling)
    artifact = build_fp32(saved.folder, folder / "artifact", pooling)
    assert artifact.manifest.dimension(case.output) == expected[0].shape[-1]
    in_one_batch, alone = run(artifact, case.output, saved.encodings)
    assert difference(in_one_batch, expected) <= TOLERANCE
    assert difference(alone, expected) <= TOLERANCE
    if embedding := artifact.manifest.embedding:
        assert embedding.pooling == (pooling or default_pooling(case))
    # The builder has verified it in its own way: other texts, one at a time, another class of transformers.
    assert artifact.certificate.reference.startswith("transformers, FP32")
    assert artifact.certificate.outputs[0].cosine_mean >= 0.99999


# A third of the families in the first tier: which type a graph computes in is not decided by a family.
@needs_bf16
@pytest.mark.parametrize("saved", by_tier(*FIRST_OF_FAMILY[::3]), indirect=True)
def test_the_bf16_engine_stays_close_to_the_hf_class(saved: Saved, tmp_path: Path) -> None:
    case = saved.case
    artifact = build_bf16(saved.folder, tmp_path / "artifact")
    actual, _ = run(artifact, case.output, saved.encodings)
    expected = pooled(case, saved.rows, None)
    assert least_cosine(case, actual, expected) >= 0.999
    assert difference(actual, expected) > 1e-5  # it is not FP32 under another name


@needs_bf16
@pytest.mark.parametrize("name", ["BartForSequenceClassification", "CLIPTextModelWithProjection", "EsmModel"])
def test_ids_and_places_beyond_256_stay_exact_in_bf16(name: str, tmp_path: Path) -> None:
    """BF16 has 8 bits: a graph must not compute token ids or indices of a batch in it."""
    case = next(case for case in CASES if case.name == name)
    case = replace(case, settings={**case.settings, "vocab_size": 40_000})
    checkpoint = save_case(tmp_path / "checkpoint", case)
    encodings = encodings_of(case, [MAX_TOKENS, 33, 2, 47] * 20, 40_000)
    in_one_batch, _ = run(build_bf16(checkpoint, tmp_path / "bf16"), case.output, encodings)
    _, alone = run(build_fp32(checkpoint, tmp_path / "fp32", None), case.output, encodings)
    assert least_cosine(case, in_one_batch, alone) >= 0.999


# Each feature matters: an engine without it is off by more than the tolerance, so the tests above would have failed.

Change = Callable[[AttentionSpec], AttentionSpec]


def with_rope(change: Callable[[RopeSpec], RopeSpec]) -> Change:
    return lambda attention: replace(attention, rope=change(attention.rope)) if attention.rope else attention


def plain(theta: float) -> Change:
    """The rotation without any scaling."""

    def unscaled(rope: RopeSpec) -> RopeSpec:
        exponents = np.arange(len(rope.inv_freq)) / len(rope.inv_freq)
        return RopeSpec(tuple((theta**-exponents).tolist()))

    return with_rope(unscaled)


def without_term(name: str) -> Change:
    def change(attention: AttentionSpec) -> AttentionSpec:
        assert attention.disentangled is not None
        return replace(attention, disentangled=replace(attention.disentangled, **{name: False}))  # type: ignore[arg-type]

    return change


def without_buckets(attention: AttentionSpec) -> AttentionSpec:
    assert attention.disentangled is not None
    return replace(attention, disentangled=replace(attention.disentangled, buckets=False))


def with_positions(attention: AttentionSpec) -> AttentionSpec:
    return attention if attention.rope else replace(attention, rope=RopeSpec((1.0,)))


def narrower(attention: AttentionSpec) -> AttentionSpec:
    return replace(attention, window=attention.window - 1) if attention.window else attention


ATTENTION_FEATURES: list[tuple[str, str, Change]] = [
    ("BertModel", "score scale", lambda attention: replace(attention, scale=1.0)),
    ("ModernBertModel", "window", lambda attention: replace(attention, window=None)),
    ("ModernBertModel", "rotation", lambda attention: replace(attention, rope=None)),
    ("NomicBertModel", "rotation", lambda attention: replace(attention, rope=None)),
    ("GteModel", "rotation", lambda attention: replace(attention, rope=None)),
    ("RoFormerModel", "neighbours", with_rope(lambda rope: replace(rope, interleaved=False))),
    ("EsmModel", "rotation", lambda attention: replace(attention, rope=None)),
    ("JinaEmbeddingsV3Model", "rotation", lambda attention: replace(attention, rope=None)),
    ("MPNetModel", "relative bias", lambda attention: replace(attention, relative_bias=None)),
    ("DebertaV2Model", "disentangled scores", lambda attention: replace(attention, disentangled=None)),
    ("DebertaV2Model", "content to position", without_term("content_to_position")),
    ("DebertaV2Model", "position to content", without_term("position_to_content")),
    ("DebertaV2Model", "buckets", without_buckets),
    ("LlamaModel", "causal mask", lambda attention: replace(attention, causal=False)),
    ("LlamaModel-llama3_rope_and_biases", "scaled rotation", plain(100.0)),
    ("LlamaModel-yarn_rope", "scaled rotation", plain(100.0)),
    ("LlamaModel-yarn_rope", "factor of the rotation", with_rope(lambda rope: replace(rope, factor=1.0))),
    ("LlamaModel-linear_rope", "scaled rotation", plain(100.0)),
    ("LlamaModel-bidirectional", "no causal mask", lambda attention: replace(attention, causal=True)),
    ("MistralModel", "window", lambda attention: replace(attention, window=None)),
    ("Qwen2Model", "window", lambda attention: replace(attention, window=None)),
    ("Qwen2ForCausalLM-bidirectional", "no causal mask", lambda attention: replace(attention, causal=True)),
    ("Qwen3Model", "norms of query and key", lambda attention: replace(attention, qk_norm=None)),
    ("Phi3Model", "scaled rotation", plain(100.0)),
    ("Phi3Model", "rotation of long texts", with_rope(lambda rope: replace(rope, long_inv_freq=None, long_from=0))),
    (
        "Phi3Model-partial_rotation_and_window",
        "partial rotation",
        with_rope(lambda rope: RopeSpec(rope.inv_freq + rope.inv_freq)),
    ),
    ("Phi3Model-partial_rotation_and_window", "window", lambda attention: replace(attention, window=None)),
    ("Olmo2Model", "norms of query and key", lambda attention: replace(attention, qk_norm=None)),
    ("OlmoModel", "clipped projections", lambda attention: replace(attention, clip=None)),
    ("Olmo3Model", "rotations by layer", plain(100.0)),
    ("Olmo3Model", "window", lambda attention: replace(attention, window=None)),
    ("ModernBertDecoderModel", "window", lambda attention: replace(attention, window=None)),
    ("ModernBertDecoderModel", "causal mask", lambda attention: replace(attention, causal=False)),
    ("MinistralModel", "window", lambda attention: replace(attention, window=None)),
    ("CohereModel", "neighbours that turn", with_rope(lambda rope: replace(rope, interleaved=False))),
    ("Cohere2Model", "layers without positions", with_positions),
    ("SmolLM3Model", "layers without positions", with_positions),
    ("Exaone4Model", "layers without positions", with_positions),
    ("GlmModel", "partial rotation", with_rope(lambda rope: RopeSpec(rope.inv_freq * 2, interleaved=True))),
    ("GPTNeoModel", "window", lambda attention: replace(attention, window=None)),
    ("GPTNeoModel", "unscaled scores", lambda attention: replace(attention, scale=attention.head_dim**-0.5)),
    ("GPTJModel", "neighbours that turn", with_rope(lambda rope: replace(rope, interleaved=False))),
    ("GraniteModel", "score scale", lambda attention: replace(attention, scale=attention.head_dim**-0.5)),
    ("Gemma2Model", "soft cap", lambda attention: replace(attention, softcap=None)),
    ("Gemma2Model", "window", lambda attention: replace(attention, window=None)),
    ("Gemma2Model", "score scale", lambda attention: replace(attention, scale=attention.head_dim**-0.5)),
    ("Gemma3TextModel", "window", lambda attention: replace(attention, window=None)),
    ("Gemma3TextModel", "norms of query and key", lambda attention: replace(attention, qk_norm=None)),
    ("Gemma3TextModel-bidirectional", "no causal mask", lambda attention: replace(attention, causal=True)),
    ("EmbeddingGemma2TextModel", "norms of values", lambda attention: replace(attention, value_norm=None)),
    ("EmbeddingGemma2TextModel", "the token at the end of the window", narrower),
    ("Gemma3TextModel-scaled_global_rope", "scaled rotation", plain(100.0)),
]


def with_relu(layer: LayerSpec) -> LayerSpec:
    return replace(layer, mlp=replace(layer.mlp, activation="relu"))


def with_kernel(layer: LayerSpec, **changes: Any) -> LayerSpec:
    return replace(layer, convolution=replace(layer.convolution, **changes)) if layer.convolution else layer


SPEC_FEATURES: list[tuple[str, str, Callable[[ModelSpec], ModelSpec]]] = [
    ("Gemma2Model", "scale of embeddings", lambda spec: replace(spec, embeddings=replace(spec.embeddings, scale=1.0))),
    (
        "Gemma3TextModel",
        "offset of norms",
        lambda spec: replace(spec, final_norm=replace(spec.final_norm, offset=0.0) if spec.final_norm else None),
    ),
    ("GraniteModel", "scale of embeddings", lambda spec: replace(spec, embeddings=replace(spec.embeddings, scale=1.0))),
    (
        "GraniteModel",
        "scale of residual sums",
        lambda spec: replace(spec, layers=tuple(replace(layer, residual_scale=1.0) for layer in spec.layers)),
    ),
    (
        "EsmModel",
        "dropped mask tokens",
        lambda spec: replace(spec, embeddings=replace(spec.embeddings, mask_dropout=None)),
    ),
    ("BigBirdModel", "scale of embeddings", lambda spec: replace(spec, embeddings=replace(spec.embeddings, scale=1.0))),
    (
        "ErnieModel",
        "row of the task",
        lambda spec: replace(spec, embeddings=replace(spec.embeddings, task_vocab_size=0)),
    ),
    ("DebertaV2Model-convolution", "convolution", lambda spec: replace(spec, convolution=None)),
    (
        "EmbeddingGemma2TextModel",
        "vectors of tokens for each layer",
        lambda spec: replace(
            spec, layer_inputs=None, layers=tuple(replace(each, layer_input=None) for each in spec.layers)
        ),
    ),
    (
        "EmbeddingGemma2TextModel",
        "scales of layers",
        lambda spec: replace(spec, layers=tuple(replace(each, scaled=False) for each in spec.layers)),
    ),
    (
        "Lfm2Model",
        "tokens before",
        lambda spec: replace(spec, layers=tuple(with_kernel(each, causal=False) for each in spec.layers)),
    ),
    (
        "Lfm2Model-biases",
        "biases of convolutions",
        lambda spec: replace(spec, layers=tuple(with_kernel(each, bias=False) for each in spec.layers)),
    ),
    (
        "NemotronModel",
        "squared ReLU",
        lambda spec: replace(spec, layers=tuple(with_relu(each) for each in spec.layers)),
    ),
    ("AlbertModel", "groups of layers", lambda spec: replace(spec, weights_of=(0, 1, 1))),
    ("ModernBertModel", "final norm", lambda spec: replace(spec, final_norm=None)),
    (
        "BertModel",
        "positions",
        lambda spec: replace(spec, embeddings=replace(spec.embeddings, max_positions=0)),
    ),
]


def in_every_layer(change: Change) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(
        spec,
        layers=tuple(
            replace(layer, attention=change(layer.attention)) if layer.attention else layer for layer in spec.layers
        ),
    )


FEATURES = [
    *((name, feature, in_every_layer(change)) for name, feature, change in ATTENTION_FEATURES),
    *SPEC_FEATURES,
]


@pytest.fixture(scope="module")
def manifest_of(saves: Saves, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Manifest]:
    """The manifest of a case by name, with the pooling of its class."""
    folder, kept = tmp_path_factory.mktemp("features"), dict[str, Manifest]()

    def of(name: str) -> Manifest:
        if name not in kept:
            checkpoint = saves.of(BY_NAME[name]).folder
            kept[name] = build_artifact(checkpoint, folder / name, verify=False).manifest
        return kept[name]

    return of


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(
            name,
            change,
            id=f"{name}-{feature}".replace(" ", "_"),
            marks=pytest.mark.slow if number % 3 else (),
        )
        for number, (name, feature, change) in enumerate(FEATURES)
    ],
)
def test_an_engine_without_a_feature_is_another_model(
    name: str,
    change: Callable[[ModelSpec], ModelSpec],
    saves: Saves,
    manifest_of: Callable[[str], Manifest],
    tmp_path: Path,
) -> None:
    saved, manifest = saves.of(BY_NAME[name]), manifest_of(name)
    checkpoint = read_checkpoint(locate(str(saved.folder)))
    spec = change(checkpoint.spec)
    assert spec != checkpoint.spec
    with checkpoint.weights() as weights:
        OpenVINOCompiler().compile(spec, weights, Numerics("fp32"), manifest.limits, tmp_path, print)
    engine = open_engine(tmp_path, manifest)
    try:
        actual = list(embed(engine, saved.encodings))
    finally:
        engine.close()
    assert difference(actual, pooled(saved.case, saved.rows, None)) > 5 * TOLERANCE


# The document.


def test_every_case_has_a_row_in_the_document() -> None:
    tables = DOCUMENT.read_text().split("\n## ")[1:]
    assert len(tables) == 3
    for table, cases in zip(tables, (CASES, CASES, FIRST_OF_FAMILY), strict=True):
        missing = [case.name for case in cases if row_start(case) not in table]
        assert not missing, f"measure them: python -m tests.model_matrix ({table.splitlines()[0]})"
        assert table.count("\n| ") == len(cases) + 1  # and none of a case that is gone


def test_the_text_above_the_tables_names_the_lengths() -> None:
    assert f"Sequences have {', '.join(map(str, LENGTHS))} tokens" in DOCUMENT.read_text().split("\n## ")[0]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: next(iter(family.architectures)))
def test_every_class_of_a_family_is_in_the_document(family: Family) -> None:
    document = DOCUMENT.read_text()
    missing = [name for name in family.architectures if f"`{name}`" not in document]
    assert not missing, "add a case to tests.zoo for each and measure it: python -m tests.model_matrix --missing"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: next(iter(family.architectures)))
def test_every_family_has_a_case(family: Family) -> None:
    native = {name for name in family.architectures if hasattr(transformers, name)}
    # Filled texts are of one length, which the matrix's are not, and images are none of its inputs.
    reads_images = any(vision.is_read_by_decoder for name, vision in VISION_FAMILIES.items() if name in native)
    if native and not family.fills_texts and not reads_images:
        assert native & {case.architecture for case in CASES}
    else:  # also remote code: a test of its own holds it to an implementation in torch
        here = Path(__file__)
        tests = [file.read_text() for file in here.parent.rglob("test_*.py") if file != here]
        assert any(f'"{name}"' in test for name in family.architectures for test in tests)
