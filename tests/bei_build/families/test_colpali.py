"""ColPali: the token vectors of transformers' class for images and queries, in one batch, over every way to ask."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest
import torch
import transformers

import bei
from bei.artifact.manifest import Artifact
from bei.artifact.validation import manifest_fault
from bei.config.settings import ServeConfig
from bei.core import Encoding, Float32Array, PackedBatch, rows_of_sequences
from bei.engine.packing import graph_inputs
from bei.engine.postprocess import unit_length
from bei.errors import (
    BeiError,
    CheckpointError,
    ConfigError,
    InvalidImageError,
    TaskNotSupportedError,
)
from bei.image.source import ImageInput
from bei.metrics.registry import Metrics
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate
from bei.service.image_side import ImageSide
from bei.service.loader import load_model
from bei.tasks.compare import max_sim
from bei_build.checkpoint.image_tower import read_image_tower
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.torch_graph.model import packed_model, run
from bei_build.verification.images import encoder_of_tower
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_json
from tests.support.colpali import (
    HIDDEN,
    NUM_PATCHES,
    WIDTH,
    library_processor,
    library_rows,
    rename_tensors,
    save_colpali,
)
from tests.support.cpus import needs_bf16
from tests.support.reading import read
from tests.support.served import Served
from tests.support.two_towers import data_url, drawn_files, png

FILES = drawn_files()
TEXTS = ["hello world", "!", "what is in the picture? " * 3, " two  spaces ", "tokens <pad> and \n lines"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_colpali(tmp_path_factory.mktemp("colpali") / "colpali")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Float32Array]:
    return library_rows(checkpoint, FILES, TEXTS)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "colpali")


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[bei.Model]:
    with bei.Model(artifact.path, tune="off") as opened:
        yield opened


@pytest.fixture(scope="module")
def served(artifact: Artifact) -> Iterator[Served]:
    app = Served(artifact)
    yield app
    app.close()


def assert_close(found: list[Float32Array], expected: list[Float32Array], most: float = 2e-4) -> None:
    assert [rows.shape for rows in found] == [rows.shape for rows in expected]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=most)


def test_images_and_queries_have_the_librarys_vectors(model: bei.Model, expected: list[Float32Array]) -> None:
    assert_close(model.embed_all([*FILES, *TEXTS]), expected)


@needs_bf16
def test_in_bf16_they_are_near(checkpoint: Path, expected: list[Float32Array], tmp_path: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "bf16", precision="bf16")
    with bei.Model(artifact.path, tune="off") as model:
        found = model.embed_all([*FILES, *TEXTS])
    assert min((mine * theirs).sum(1).min() for mine, theirs in zip(found, expected, strict=True)) > 0.999


def test_an_image_changes_the_vectors_of_its_prompt(expected: list[Float32Array]) -> None:
    """Else the decoder need not have read it."""
    first, second = (rows[NUM_PATCHES:] for rows in expected[:2])
    assert np.abs(first - second).max() > 0.01


def test_the_certificate_compares_images_with_the_librarys_class(artifact: Artifact) -> None:
    images = artifact.certificate.images
    assert images
    assert images.reference.startswith("transformers, FP32")
    assert images.num_images == len(FILES[::7])  # those of ``build_artifact``
    assert images.output is not None
    assert images.output.output == "token_embedding"
    assert artifact.certificate.reference.startswith("transformers, FP32")
    tower = artifact.manifest.image_tower
    assert tower is not None
    assert tower.sequence
    assert tower.sequence.width == HIDDEN
    assert artifact.manifest.of_second.dimension("image_features") == HIDDEN


def test_the_certificates_own_reference_reads_images_too(checkpoint: Path, tmp_path: Path) -> None:
    images = build_artifact(checkpoint, tmp_path / "own", reference="engine").certificate.images
    assert images
    assert images.kind == "self-consistency"
    assert images.output is not None
    assert images.output.cosine_min > 0.9999


def test_a_build_without_verification_keeps_the_canary_image(checkpoint: Path, tmp_path: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "out", verify=False)
    assert artifact.certificate.images
    assert len(artifact.certificate.images.canary_row) == WIDTH
    with bei.Model(artifact.path, tune="off") as model:  # it answers its canaries
        assert len(model.embed_all([png()])[0]) > NUM_PATCHES


@pytest.mark.parametrize("core", [AttentionCore.MATMUL_SOFTMAX, AttentionCore.TRT_ATTENTION])
def test_both_graphs_give_the_librarys_vectors_outside_of_openvino(
    core: AttentionCore, checkpoint: Path, expected: list[Float32Array], tmp_path: Path
) -> None:
    """Images and queries in one step: ONNX Runtime, and PyTorch's module."""
    decoder = read(checkpoint)
    images = read_image_tower(decoder)
    assert images is not None
    pictures = encoder_of_tower(images).encode([ImageInput(content) for content in FILES[:5]])
    with images.checkpoint.weights() as weights:
        tower = packed_model(images.checkpoint.spec, weights.read, images.checkpoint.max_seq_len)
        batch = PackedBatch.from_encodings([one for encoding in pictures for one in encoding.of_tower])
        states = rows_of_sequences(run(tower, batch)["image_features"], batch, per_token=True)
    ids = [decoder.tokenizer.encode(f"Question: {text}").ids for text in TEXTS]
    read_images = [one.with_features([rows]) for one, rows in zip(pictures, states, strict=True)]
    texts = [Encoding(np.array(one, np.int32)) for one in ids]
    batch = PackedBatch.from_encodings([*read_images[:2], *texts, *read_images[2:]])
    with decoder.weights() as weights:
        module = packed_model(decoder.spec, weights.read, decoder.max_seq_len)
        types = GraphTypes(DType.FP32, DType.FP32)
        path = write_graph(decoder.spec, weights.read, tmp_path, types, core, decoder.max_seq_len)
    session = onnxruntime.InferenceSession(path)
    inputs = graph_inputs(batch, [one.name for one in session.get_inputs()])
    (of_graph,) = session.run(["token_embedding"], inputs)
    order = [*range(2), *range(len(FILES), len(FILES) + len(TEXTS)), *range(2, 5)]
    for rows in (run(module, batch)["token_embedding"], of_graph[: batch.num_tokens]):
        found = rows_of_sequences(unit_length(rows), batch, per_token=True)
        assert_close(found, [expected[place] for place in order])


@pytest.mark.parametrize(
    ("sequence", "named"),
    [
        ({"token_id": 10**6}, "no row for"),
        ({"after": [-1]}, "no row for"),
        ({"before": [2] * 500}, "more than max_seq_len"),
        ({"width": 0}, "no width of a model"),
    ],
    ids=["token", "prompt", "length", "width"],
)
def test_a_manifest_with_another_sequence_is_refused(sequence: dict[str, Any], named: str, artifact: Artifact) -> None:
    manifest, tower = artifact.manifest, artifact.manifest.image_tower
    assert manifest_fault(manifest) is None
    assert tower is not None
    assert tower.sequence
    other = msgspec.structs.replace(tower.sequence, **sequence)
    fault = manifest_fault(msgspec.structs.replace(manifest, images=msgspec.structs.replace(tower, sequence=other)))
    assert fault is not None
    assert named in fault


def test_token_ids_are_those_of_the_librarys_processor(checkpoint: Path, model: bei.Model) -> None:
    processor = library_processor(checkpoint)
    for text in TEXTS:
        ids = processor.process_queries(text=[text])["input_ids"][0].tolist()
        assert read(checkpoint).tokenizer.encode(f"Question: {text}").ids == ids
    tower = model.manifest.image_tower
    assert tower is not None
    assert tower.sequence
    ids = processor.process_images(images=[_opened()])["input_ids"][0].tolist()
    assert ids == [*[tower.sequence.token_id] * NUM_PATCHES, *tower.sequence.after]


def _opened() -> Any:
    from PIL import Image

    return Image.new("RGB", (60, 40), (10, 200, 30))


def test_prompts_of_the_processor_are_read(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "colpali")
    change_json(folder / "processor_config.json", query_prefix="Query: ", visual_prompt_prefix="What is this?")
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        found = model.embed_all([*FILES[:3], *TEXTS])
    assert_close(found, library_rows(folder, FILES[:3], TEXTS))


@pytest.mark.parametrize("name", ["attention_bias", "num_key_value_heads", "hidden_act", "rope_parameters"])
def test_settings_of_the_decoder_are_honoured(name: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "attention_bias": True,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    folder = save_colpali(tmp_path / "colpali", text={name: values[name]})
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        found = model.embed_all([*FILES[:3], *TEXTS[:2]])
    assert_close(found, library_rows(folder, FILES[:3], TEXTS[:2]))


@pytest.mark.parametrize(
    "vision",
    [{"vision_use_head": True}, {"hidden_act": "gelu"}, {"patch_size": 24}, {"layer_norm_eps": 0.1}],
    ids=lambda vision: next(iter(vision)),
)
def test_settings_of_the_image_tower_are_honoured(vision: dict[str, Any], tmp_path: Path) -> None:
    folder = save_colpali(tmp_path / "colpali", vision=vision)
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        found = model.embed_all([*FILES[:3], *TEXTS[:1]])
    assert_close(found, library_rows(folder, FILES[:3], TEXTS[:1]))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("vlm.vision_tower.", "vlm.vision_tower.vision_model."),
        ("vlm.language_model.model.", "vlm.language_model."),
    ],
    ids=["transformers 4", "as in memory"],
)
def test_tensors_under_the_names_of_other_versions_are_read(
    before: str, after: str, checkpoint: Path, expected: list[Float32Array], tmp_path: Path
) -> None:
    folder = rename_tensors(shutil.copytree(checkpoint, tmp_path / "colpali"), before, after)
    assert_close(library_rows(folder, FILES[:1], []), expected[:1])  # the library reads them too
    with bei.Model(build_artifact(folder, tmp_path / "out", verify=False).path, tune="off") as model:
        assert_close(model.embed_all(FILES[:2]), expected[:2])


def test_texts_alone_are_built_and_read_no_images(
    checkpoint: Path, expected: list[Float32Array], tmp_path: Path
) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "texts", images=False, verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed_all(TEXTS), expected[len(FILES) :])
        with pytest.raises(InvalidImageError, match="inputs 0 is an image"):
            model.embed_all([png()])


def test_equal_images_are_computed_once(model: bei.Model) -> None:
    first, second, other = model.embed_all([FILES[0], FILES[0], FILES[1]])
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 0.01


def test_a_broken_image_costs_the_others_nothing(model: bei.Model, expected: list[Float32Array]) -> None:
    report = bei.Report()
    found = model.embed_all([FILES[0], b"no image", TEXTS[0]], report=report)
    assert [*report.errors] == [1]
    assert found[1].shape == (0, 0)
    assert_close([found[0], found[2]], [expected[0], expected[len(FILES)]])


def test_the_route_of_every_token_reads_images(served: Served, expected: list[Float32Array]) -> None:
    answer = served.post("/embed_all", {"inputs": [{"image": data_url(FILES[0])}, TEXTS[0], {"text": TEXTS[1]}]})
    assert answer.status_code == 200, answer.text
    at = len(FILES)
    assert_close([np.array(rows, np.float32) for rows in answer.json()], [expected[0], expected[at], expected[at + 1]])


def test_jinas_multi_vectors_read_images(served: Served, expected: list[Float32Array]) -> None:
    asked = {"input": [{"image": data_url(FILES[1])}, {"text": TEXTS[0]}], "input_type": "document"}
    answer = served.post("/jina/v1/multi-vector", asked)
    assert answer.status_code == 200, answer.text
    found = [np.array(one["embeddings"], np.float32) for one in answer.json()["data"]]
    assert_close(found, [expected[1], expected[len(FILES)]])
    assert answer.json()["usage"]["total_tokens"] == sum(map(len, found))


def test_info_has_the_tokens_of_an_image(served: Served, expected: list[Float32Array]) -> None:
    assert served.get("/info").json()["images"]["tokens"] == len(expected[0])
    assert served.get("/ready").status_code == 200


def test_readiness_waits_for_an_image_as_long_as_it_may_take(artifact: Artifact) -> None:
    """18 layers and 1,030 tokens take tens of seconds on two cores, and a canary of texts has 10."""

    async def timeout_s(costs: CostModel) -> float:
        loaded = load_model(artifact.path, ServeConfig(tune="off"))
        assert loaded.second is not None
        assert isinstance(loaded.second.side, ImageSide)
        side = dataclasses.replace(loaded.second.side, costs=costs, decoder_costs=costs)
        loaded = loaded._replace(second=loaded.second._replace(side=side))
        service = loaded.service(ServeConfig(), Metrics(), DeviceGate())
        try:
            return service._canary_timeout_s()
        finally:
            service.close()

    assumed = CostModel.assumed(artifact.manifest.limits)
    slow = CostModel(artifact.manifest.limits, assumed.coefficients, speed=0.1)
    fast = CostModel(artifact.manifest.limits, assumed.coefficients, speed=1e-6)
    assert asyncio.run(timeout_s(assumed)) == 120
    assert asyncio.run(timeout_s(fast)) == 10
    assert asyncio.run(timeout_s(slow)) > 20


def test_scores_of_texts_are_the_librarys(checkpoint: Path, served: Served, expected: list[Float32Array]) -> None:
    at = len(FILES)
    answer = served.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:3]})
    assert answer.status_code == 200, answer.text
    query, *others = (torch.from_numpy(rows) for rows in expected[at : at + 3])
    theirs = library_processor(checkpoint).score_retrieval([query], others)[0]
    np.testing.assert_allclose([one["score"] for one in answer.json()["data"]], theirs, atol=1e-3)
    assert max_sim(expected[at], expected[at + 1]) == pytest.approx(float(theirs[0]), abs=1e-4)


def test_texts_of_one_content_are_joined_by_line_breaks(served: Served) -> None:
    parts = {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    both = [served.post("/score", {"data_1": TEXTS[0], "data_2": one}).json()["data"] for one in (parts, "a\nb")]
    assert both[0][0]["score"] == pytest.approx(both[1][0]["score"], abs=1e-5)


def content(file: bytes) -> dict[str, Any]:
    """An image as vLLM's clients score it."""
    return {"content": [{"type": "image_url", "image_url": {"url": data_url(file)}}]}


def test_scores_of_images_are_the_librarys(checkpoint: Path, served: Served, expected: list[Float32Array]) -> None:
    body = {"data_1": TEXTS[0], "data_2": [*map(content, FILES[:3]), {"content": [{"type": "text", "text": TEXTS[1]}]}]}
    answer = served.post("/score", body)
    assert answer.status_code == 200, answer.text
    at = len(FILES)
    query, *others = (torch.from_numpy(expected[place]) for place in (at, 0, 1, 2, at + 1))
    theirs = library_processor(checkpoint).score_retrieval([query], others)[0]
    np.testing.assert_allclose([one["score"] for one in answer.json()["data"]], theirs, atol=1e-3)
    tokens = sum(len(expected[place]) for place in (at, 0, 1, 2, at + 1))
    assert answer.json()["usage"]["total_tokens"] == tokens


@pytest.mark.parametrize(
    "part",
    [
        {"content": []},
        {"content": [{"type": "text", "text": "a"}, {"image": data_url(FILES[0])}]},
        {"content": [{"type": "image_url", "text": "a"}]},
        {"content": [{"image": data_url(b"junk")}]},
        {},
    ],
    ids=["nothing", "both", "another type", "junk", "no content"],
)
def test_what_is_no_text_or_image_is_not_scored(part: dict[str, Any], served: Served) -> None:
    assert served.post("/score", {"data_1": TEXTS[0], "data_2": part}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_dense_vectors_are_refused(path: str, served: Served) -> None:
    answer = served.post(path, {"input" if path.startswith("/v1") else "inputs": [{"image": data_url(FILES[0])}]})
    assert answer.status_code in (400, 404), answer.text
    assert "embed" in answer.text


def changed(folder: Path, **settings: Any) -> None:
    """Change config.json, names with dots below vlm_config."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for name, value in settings.items():
        *parents, last = name.split("__")
        place = raw
        for parent in parents:
            place = place[parent]
        place[last] = value
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vlm_config": None}, "no vlm_config"),
        ({"vlm_config__model_type": "llava"}, "vlm_config.model_type = 'llava'"),
        ({"vlm_config__text_config": 3}, "no text_config"),
        ({"vlm_config__text_config__model_type": "gemma2"}, "text_config.model_type = 'gemma2'"),
        ({"vlm_config__vision_config__model_type": "clip_vision_model"}, "vision_config.model_type"),
        ({"vlm_config__text_config__use_bidirectional_attention": False}, "use_bidirectional_attention = False"),
        ({"vlm_config__projection_dim": 32}, "projection_dim = 32"),
        ({"vlm_config__image_token_index": 10**6}, "image_token_index = 1000000"),
        ({"vlm_config__image_token_index": 5}, "<image> is 600"),
        ({"vlm_config__text_config__sliding_window": 16}, "sliding_window = 16"),
        ({"vlm_config__vision_config__num_channels": 1}, "num_channels = 1"),
        ({"vlm_config__vision_config__image_size": 64}, "image_seq_length|image_size = 64"),
        ({"embedding_dim": 8}, "embedding_proj_layer"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_other_configs_are_refused_by_name(
    settings: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "colpali")
    changed(folder, **settings)
    with pytest.raises(BeiError, match=message) as info:
        build_artifact(folder, tmp_path / "out")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"query_prefix": 3}, "query_prefix = '3'"),
        ({"chat_template": "x"}, "chat_template = 'x'"),
        ({"processor_class": "PaliGemmaProcessor"}, "processor_class = 'PaliGemmaProcessor'"),
    ],
    ids=["prefix", "template", "class"],
)
def test_other_processors_are_refused_by_name(
    settings: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "colpali")
    change_json(folder / "processor_config.json", **settings)
    with pytest.raises(CheckpointError, match=message):
        build_artifact(folder, tmp_path / "out")


def test_an_image_of_other_tokens_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "colpali")
    path = folder / "processor_config.json"
    raw = json.loads(path.read_text())
    raw["image_processor"]["image_seq_length"] = NUM_PATCHES + 1
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=f"image_seq_length.*{NUM_PATCHES} patches"):
        build_artifact(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, "not quantized"),
        ({"texts": False}, "--no-texts"),
        ({"task": "embed"}, "leave task and pooling out"),
        ({"pooling": "mean"}, "leave task and pooling out"),
        ({"max_seq_len": 20}, "tokens of an image"),
        ({"attention": "causal"}, "no causal attention"),
        ({"score_tokens": ("a",)}, "no scores of tokens"),
    ],
    ids=["int8", "images alone", "task", "pooling", "length", "attention", "score tokens"],
)
def test_other_builds_are_refused_by_name(
    options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(checkpoint, tmp_path / "out", **options)


def test_dense_vectors_of_images_are_refused_in_the_process(model: bei.Model) -> None:
    with pytest.raises(TaskNotSupportedError, match="it can do: embed_tokens"):
        model.embed([png()])


def test_the_class_sees_later_tokens(checkpoint: Path) -> None:
    """Else the spec without a causal mask would be wrong: the class decides by the processor's token types."""
    model_class: Any = transformers.ColPaliForRetrieval
    model, processor = model_class.from_pretrained(checkpoint).eval(), library_processor(checkpoint)
    short, long = (processor.process_queries(text=[text]) for text in ("a b", "a c"))
    with torch.inference_mode():
        rows = [model(**one).embeddings[0, 0] for one in (short, long)]
    assert (rows[0] - rows[1]).abs().max() > 1e-3
