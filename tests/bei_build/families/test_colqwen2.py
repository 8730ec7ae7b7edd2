"""ColQwen2: the token vectors of transformers' class for images of many sizes and queries, in one batch."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest
from PIL import Image

import bei
from bei.artifact.certificate.canary import canary_levels
from bei.artifact.manifest import Artifact
from bei.artifact.validation import manifest_fault
from bei.core import Encoding, Float32Array, PackedBatch, rows_of_sequences
from bei.engine.packing import graph_inputs
from bei.engine.postprocess import unit_length
from bei.errors import BeiError, ConfigError
from bei.image.source import ImageInput
from bei_build.checkpoint.image_tower import read_image_tower
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.torch_graph.model import packed_model, run
from bei_build.verification.images import encoder_of_tower
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_json, read_tensors, write_tensors
from tests.support.colqwen2 import HIDDEN, STEP, library_processor, library_rows, rope, save_colqwen2
from tests.support.cpus import needs_bf16
from tests.support.reading import read
from tests.support.served import Served
from tests.support.two_towers import data_url, drawn_files, png

FILES = [*drawn_files(), png(1, 1), png(3, 600), png(900, 5), png(2000, 1400)]
TEXTS = ["hello world", "!", "what is in the picture? " * 3, " two  spaces ", "tokens <|im_end|> and \n lines", "né"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_colqwen2(tmp_path_factory.mktemp("colqwen2") / "colqwen2")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Float32Array]:
    return library_rows(checkpoint, FILES, TEXTS)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "colqwen2")


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


def test_images_of_many_sizes_and_queries_have_the_librarys_vectors(
    model: bei.Model, expected: list[Float32Array]
) -> None:
    assert len({len(rows) for rows in expected}) > 8
    assert_close(model.embed_all([*FILES, *TEXTS]), expected)


@needs_bf16
def test_in_bf16_they_are_near(checkpoint: Path, expected: list[Float32Array], tmp_path: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "bf16", precision="bf16")
    with bei.Model(artifact.path, tune="off") as model:
        found = model.embed_all([*FILES, *TEXTS])
    assert min((mine * theirs).sum(1).min() for mine, theirs in zip(found, expected, strict=True)) > 0.999


def test_the_certificate_compares_images_with_the_librarys_class(artifact: Artifact) -> None:
    images = artifact.certificate.images
    assert images
    assert images.reference.startswith("transformers, FP32")
    assert images.output is not None
    assert images.output.output == "token_embedding"
    tower = artifact.manifest.image_tower
    assert tower is not None
    assert tower.sequence
    assert (tower.sequence.width, tower.sequence.merged_side) == (HIDDEN, 2)
    assert artifact.manifest.of_second.dimension("image_features") == HIDDEN // 4


def test_the_canary_is_a_vector_that_has_seen_the_image(
    checkpoint: Path, artifact: Artifact, model: bei.Model, tmp_path: Path
) -> None:
    """Those of the tokens in front of it are the same whatever the image tower gives."""
    tower, images = artifact.manifest.image_tower, artifact.certificate.images
    assert tower is not None
    assert tower.sequence
    assert images
    found = model.embed_all([Image.fromarray(canary_levels(*tower.image_size)), FILES[0]])
    first = len(tower.sequence.before)
    np.testing.assert_allclose(images.canary_row, found[0][first], atol=1e-4)
    np.testing.assert_allclose(found[0][:first], found[1][:first], atol=1e-5)
    assert np.abs(found[0][first] - found[1][first]).max() > 1e-3
    unverified = build_artifact(checkpoint, tmp_path / "out", verify=False).certificate.images
    assert unverified
    np.testing.assert_allclose(unverified.canary_row, images.canary_row, atol=1e-4)


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
    ids = [decoder.tokenizer.encode(f"Query: {text}").ids for text in TEXTS]
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


def test_token_ids_are_those_of_the_librarys_processor(checkpoint: Path, model: bei.Model) -> None:
    processor = library_processor(checkpoint)
    for text in TEXTS:
        ids = processor.process_queries(text=[text])["input_ids"][0].tolist()
        assert read(checkpoint).tokenizer.encode(f"Query: {text}").ids == ids
    tower = model.manifest.image_tower
    assert tower is not None
    assert tower.sequence
    ids = processor.process_images(images=[Image.new("RGB", (6 * STEP, 4 * STEP))])["input_ids"][0].tolist()
    assert ids == [*tower.sequence.before, *[tower.sequence.token_id] * 24, *tower.sequence.after]


def test_positions_of_an_image_matter(checkpoint: Path, expected: list[Float32Array]) -> None:
    """Else the vectors would not show on which axes tokens are counted. The class alone counts as in a text."""
    import torch
    import transformers

    model_class: Any = transformers.ColQwen2ForRetrieval
    model, processor = model_class.from_pretrained(checkpoint).eval(), library_processor(checkpoint)
    with torch.inference_mode():
        image = Image.open(io.BytesIO(FILES[0])).convert("RGB")
        rows = model(**processor.process_images(images=image)).embeddings[0].numpy()
    assert np.abs(rows - expected[0]).max() > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": rope([1, 2, 3], 500.0)},
        {"rope_parameters": rope([0, 3, 3])},
        {"num_key_value_heads": 1},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_the_decoder_are_honoured(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = save_colqwen2(tmp_path / "colqwen2", text=settings)
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed_all([*FILES[:3], *TEXTS[:2]]), library_rows(folder, FILES[:3], TEXTS[:2]))


@pytest.mark.parametrize(
    "vision",
    [{"hidden_act": "gelu"}, {"patch_size": 6}, {"mlp_ratio": 2}, {"num_heads": 2}],
    ids=lambda vision: next(iter(vision)),
)
def test_settings_of_the_image_tower_are_honoured(vision: dict[str, Any], tmp_path: Path) -> None:
    folder = save_colqwen2(tmp_path / "colqwen2", vision=vision)
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed_all([*FILES[:3], *TEXTS[:1]]), library_rows(folder, FILES[:3], TEXTS[:1]))


@pytest.mark.parametrize(
    "images",
    [{"image_mean": [0.5, 0.4, 0.3]}, {"resample": 2}, {"max_pixels": 9 * STEP**2}, {"min_pixels": 30 * STEP**2}],
    ids=lambda images: next(iter(images)),
)
def test_settings_of_the_image_processor_are_honoured(images: dict[str, Any], tmp_path: Path) -> None:
    folder = save_colqwen2(tmp_path / "colqwen2", images=images)
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed_all(FILES[:4]), library_rows(folder, FILES[:4], []))


def test_tensors_and_config_of_other_versions_are_read(
    checkpoint: Path, expected: list[Float32Array], tmp_path: Path
) -> None:
    """Both towers below ``vlm`` itself, and settings of the decoder beside those of the tower."""
    folder = shutil.copytree(checkpoint, tmp_path / "colqwen2")
    tensors = {
        name.replace("vlm.model.", "vlm.") if name.startswith("vlm.model.") else name.replace("vlm.", "vlm.model."): own
        for name, own in read_tensors(folder).items()
    }
    assert tensors.keys() != read_tensors(folder).keys()
    write_tensors(folder, tensors)
    raw = json.loads((folder / "config.json").read_text())
    whole = raw["vlm_config"]
    text = {key: value for key, value in whole.pop("text_config").items() if key != "model_type"}
    scaling = text.pop("rope_parameters")
    whole.update(text, rope_theta=scaling.pop("rope_theta"), rope_scaling={**scaling, "type": "mrope"})
    (folder / "config.json").write_text(json.dumps(raw))
    assert_close(library_rows(folder, FILES[:1], []), expected[:1])  # the library reads them too
    with bei.Model(build_artifact(folder, tmp_path / "out", verify=False).path, tune="off") as model:
        assert_close(model.embed_all(FILES[:2]), expected[:2])


def test_texts_alone_are_built_and_read_no_images(
    checkpoint: Path, expected: list[Float32Array], tmp_path: Path
) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "texts", images=False, verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed_all(TEXTS), expected[len(FILES) :])


def test_routes_read_images_and_texts(served: Served, expected: list[Float32Array]) -> None:
    at = len(FILES)
    answer = served.post("/embed_all", {"inputs": [{"image": data_url(FILES[0])}, TEXTS[0], {"text": TEXTS[1]}]})
    assert answer.status_code == 200, answer.text
    assert_close([np.array(rows, np.float32) for rows in answer.json()], [expected[0], expected[at], expected[at + 1]])
    asked = {"input": [{"image": data_url(FILES[1])}, {"text": TEXTS[0]}], "input_type": "document"}
    answer = served.post("/jina/v1/multi-vector", asked)
    assert answer.status_code == 200, answer.text
    found = [np.array(one["embeddings"], np.float32) for one in answer.json()["data"]]
    assert_close(found, [expected[1], expected[at]])
    assert answer.json()["usage"]["total_tokens"] == sum(map(len, found))
    assert served.get("/ready").status_code == 200
    assert served.get("/info").json()["images"]["tokens"] >= max(map(len, expected[:at]))


def test_hostile_images_and_texts_are_errors_of_that_input(served: Served, expected: list[Float32Array]) -> None:
    hostile: list[object] = [{"image": data_url(png(1, 201))}, {"image": data_url(b"junk")}, "a <|image_pad|> b"]
    answer = served.post("/embed_all", {"inputs": [*hostile, TEXTS[0]]}, **{"X-Bei-Report": "true"})
    assert answer.status_code == 200, answer.text
    assert answer.text.count("200 times the shorter") == 1
    assert answer.text.count("<|image_pad|> in it") == 1
    for one in hostile:
        assert served.post("/embed_all", {"inputs": [one]}).status_code == 400


def test_the_place_of_an_image_in_a_text_is_refused_by_the_library_too(checkpoint: Path) -> None:
    with pytest.raises(Exception, match=r"image|StopIteration|subscriptable|None"):
        library_processor(checkpoint).process_queries(text=["a <|image_pad|> b"])


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
        ({"vlm_config__model_type": "qwen3_vl"}, "model_type = 'qwen3_vl'"),
        ({"vlm_config__vision_config": 3}, "vision_config"),
        ({"vlm_config__vision_config__model_type": "siglip_vision_model"}, "model_type = 'siglip_vision_model'"),
        ({"vlm_config__text_config": 3}, "text_config"),
        ({"vlm_config__text_config__rope_parameters": rope([1, 1, 1])}, "mrope_section"),
        ({"vlm_config__image_token_id": 10**6}, "image_token_id = 1000000"),
        ({"vlm_config__image_token_id": 9}, "image_token_id = 9"),
        ({"vlm_config__vision_config__in_channels": 1}, "in_channels = 1"),
        ({"vlm_config__vision_config__temporal_patch_size": 1}, "temporal_patch_size = 1"),
        ({"vlm_config__vision_config__spatial_merge_size": 1}, "spatial_merge_size = 1"),
        ({"vlm_config__vision_config__hidden_size": 32}, "hidden_size = 32"),
        ({"vlm_config__vision_config__patch_size": 4}, "patch_size"),
        ({"embedding_dim": 8}, "embedding_proj_layer"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_other_configs_are_refused_by_name(
    settings: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "colqwen2")
    changed(folder, **settings)
    with pytest.raises(BeiError, match=message) as info:
        build_artifact(folder, tmp_path / "out")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"query_prefix": 3}, "query_prefix = '3'"),
        ({"processor_class": "Qwen2VLProcessor"}, "processor_class = 'Qwen2VLProcessor'"),
        ({"visual_prompt_prefix": "no place"}, "0 places of an image"),
        ({"visual_prompt_prefix": "<|image_pad|><|image_pad|>"}, "2 places of an image"),
        ({"image_processor__max_pixels": 10**8}, "max_pixels = '100000000'"),
        ({"image_processor__do_resize": False}, "do_resize"),
        ({"image_processor__temporal_patch_size": 1}, "temporal_patch_size"),
        ({"image_processor__merge_size": 4}, "merge_size"),
        ({"image_processor__fps": 2}, "fps"),
        ({"image_processor__image_processor_type": "Qwen3VLImageProcessor"}, "image_processor_type"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_other_processors_are_refused_by_name(
    settings: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "colqwen2")
    path = folder / "processor_config.json"
    raw = json.loads(path.read_text())
    for name, value in settings.items():
        *parents, last = name.split("__")
        place = raw
        for parent in parents:
            place = place[parent]
        place[last] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(BeiError, match=message):
        build_artifact(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": False}, "--no-texts"),
        ({"task": "embed"}, "leave task and pooling out"),
        ({"max_seq_len": 40}, "tokens of an image"),
    ],
    ids=["images alone", "task", "length"],
)
def test_other_builds_are_refused_by_name(
    options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(checkpoint, tmp_path / "out", **options)


def test_prompts_of_the_processor_are_read(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "colqwen2")
    own = {"query_prefix": "Find: ", "visual_prompt_prefix": "<|vision_start|><|image_pad|> What?"}
    change_json(folder / "processor_config.json", **own)
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed_all([*FILES[:3], *TEXTS]), library_rows(folder, FILES[:3], TEXTS))


@pytest.mark.parametrize(
    ("sequence", "named"),
    [
        ({"merged_side": 4}, "merges patches"),
        ({"merged_side": 3}, "merges patches"),
        ({"width": 0}, "no width of a model"),
    ],
    ids=["side", "odd side", "width"],
)
def test_a_manifest_that_merges_otherwise_is_refused(sequence: dict[str, Any], named: str, artifact: Artifact) -> None:
    tower = artifact.manifest.image_tower
    assert manifest_fault(artifact.manifest) is None
    assert tower is not None
    assert tower.sequence
    other = msgspec.structs.replace(tower.sequence, **sequence)
    changed = msgspec.structs.replace(artifact.manifest, images=msgspec.structs.replace(tower, sequence=other))
    fault = manifest_fault(changed)
    assert fault is not None
    assert named in fault
