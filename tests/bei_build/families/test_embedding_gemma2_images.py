"""EmbeddingGemma 2's image tower: the vectors of transformers' class for texts and images of many sizes, and what is
refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import bei
from bei.artifact.manifest import Artifact
from bei.core import Float32Array, PackedBatch
from bei.engine.packing import graph_inputs
from bei.errors import BeiError, CheckpointError, ConfigError, InvalidImageError, InvalidRequestError
from bei.image.source import ImageInput
from bei_build.checkpoint.image_tower import ImageCheckpoint, read_image_tower
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.torch_graph.model import packed_model, run
from bei_build.verification.images import encoder_of_tower
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_json, read_tensors, write_json, write_tensors
from tests.support.cpus import needs_bf16
from tests.support.embedding_gemma2 import (
    HIDDEN,
    PROMPTS,
    STEP,
    TEMPLATE,
    TOKENS,
    WIDTH,
    add_audio,
    library_rows,
    library_vectors,
    save_embedding_gemma2,
    save_modules,
)
from tests.support.reading import read
from tests.support.served import Served
from tests.support.two_towers import data_url, drawn_files, png

FILES = [*drawn_files()[:5], png(1, 1), png(3, 600), png(900, 5)]
TEXTS = ["hello world", "!", "what is in the picture? " * 3, " two  spaces "]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_embedding_gemma2(tmp_path_factory.mktemp("embedding_gemma2") / "checkpoint")
    add_audio(folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Float32Array]:
    return library_rows(checkpoint, FILES, TEXTS)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "embedding_gemma2")


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[bei.Model]:
    with bei.Model(artifact.path, tune="off") as opened:
        yield opened


def vectors_of(folder: Path, inputs: list[Any], out: Path, **options: Any) -> Float32Array:
    """Of a build that is not verified."""
    with bei.Model(build_artifact(folder, out, verify=False, **options).path, tune="off") as model:
        return model.embed(inputs)


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-4)


def test_texts_and_images_of_many_sizes_have_the_librarys_vectors(
    model: bei.Model, expected: list[Float32Array]
) -> None:
    assert_close(model.embed([*FILES, *TEXTS]), expected)
    assert np.abs(expected[0] - expected[1]).max() > 0.01  # else the text model need not have read the images


@pytest.mark.slow
def test_two_hundred_images_have_the_librarys_vectors(checkpoint: Path, model: bei.Model) -> None:
    sizes = np.exp(np.random.default_rng(0).uniform(0, 7, (152, 2))).astype(int).tolist()
    colors = np.random.default_rng(1).integers(0, 256, (152, 3)).tolist()
    plain = [png(width, height, tuple(color)) for (width, height), color in zip(sizes, colors, strict=True)]
    files = [*drawn_files(), *plain]
    assert_close(model.embed(files), library_rows(checkpoint, files, []))


@needs_bf16
def test_in_bf16_they_are_near(checkpoint: Path, expected: list[Float32Array], tmp_path: Path) -> None:
    found = vectors_of(checkpoint, [*FILES, *TEXTS], tmp_path / "bf16", precision="bf16")
    assert (found * np.array(expected)).sum(1).min() > 0.999


def test_texts_and_images_in_one_input_have_the_librarys_vectors(checkpoint: Path, model: bei.Model) -> None:
    given = [(FILES[0], "a page"), ("first: ", FILES[1], " and second: ", FILES[6], "?"), (FILES[2], FILES[2])]
    assert_close(model.embed([{"content": [*one]} for one in given]), library_vectors(checkpoint, given))


def test_the_certificate_compares_both_with_the_librarys_class(artifact: Artifact) -> None:
    images, tower = artifact.certificate.images, artifact.manifest.image_tower
    assert images
    assert images.reference.startswith("transformers, FP32")
    assert artifact.certificate.reference.startswith("transformers, FP32")
    assert tower is not None
    assert tower.sequence
    assert tower.processor.budget
    assert (tower.sequence.width, tower.sequence.merged_side, tower.max_seq_len) == (HIDDEN, 3, 9 * TOKENS)
    assert artifact.manifest.dimension("embedding") == WIDTH


def _tower(folder: Path) -> ImageCheckpoint:
    images = read_image_tower(read(folder))
    assert images is not None
    return images


@pytest.mark.parametrize("core", [AttentionCore.MATMUL_SOFTMAX, AttentionCore.TRT_ATTENTION])
def test_both_graphs_give_equal_states_and_leave_filler_out(
    core: AttentionCore, checkpoint: Path, tmp_path: Path
) -> None:
    """The numbers of tokens that the graphs get are no multiples of a block's nine."""
    images = _tower(checkpoint)
    pictures = encoder_of_tower(images).encode([ImageInput(content) for content in FILES])
    batch = PackedBatch.from_encodings([one for encoding in pictures for one in encoding.of_tower])
    spec, longest = images.checkpoint.spec, images.checkpoint.max_seq_len
    with images.checkpoint.weights() as weights:
        module = packed_model(spec, weights.read, longest)
        path = write_graph(spec, weights.read, tmp_path, GraphTypes(DType.FP32, DType.FP32), core, longest)
    states = run(module, batch)["image_features"]
    session = onnxruntime.InferenceSession(path)
    given = graph_inputs(batch, [one.name for one in session.get_inputs()])
    assert len(given["row_ids_of_blocks_3"]) % 9
    (of_graph,) = session.run(["image_features"], given)
    np.testing.assert_allclose(of_graph[: batch.num_tokens], states[: batch.num_tokens], atol=2e-4)
    assert states.shape[1] == -(-HIDDEN // 9)


@pytest.mark.parametrize(
    ("vision", "text"),
    [
        ({"pooling_kernel_size": 2, "position_embedding_size": 140}, {"num_hidden_layers": 2, "sliding_window": 3}),
        ({"patch_size": 6, "head_dim": 12, "num_key_value_heads": 2}, {}),
        pytest.param({"hidden_activation": "gelu", "rms_norm_eps": 1e-3}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"rope_parameters": {"rope_type": "axial", "rope_theta": 7.0}}, {"hidden_size": 36}, marks=pytest.mark.slow
        ),
    ],
    ids=["blocks of four", "heads", "activation and eps", "rotations"],
)
def test_settings_are_honoured(vision: dict[str, Any], text: dict[str, Any], tmp_path: Path) -> None:
    folder = save_embedding_gemma2(tmp_path / "checkpoint", vision=vision, text=text)
    files = [*FILES[:3], png(3, 600)]
    assert_close(vectors_of(folder, [*files, TEXTS[0]], tmp_path / "out"), library_rows(folder, files, TEXTS[:1]))


@pytest.mark.parametrize(
    "part",
    ["position_embedding_table", "self_attn.q_norm.weight", "encoder.layers.1.mlp.down_proj", "embed_vision"],
)
def test_parts_of_the_tower_matter(part: str, checkpoint: Path, expected: list[Float32Array], tmp_path: Path) -> None:
    """Else the vectors would not show that they are read as they should."""
    folder = shutil.copytree(checkpoint, tmp_path / "other")
    tensors = read_tensors(folder)
    for name in [name for name in tensors if part in name]:
        tensors[name] = tensors[name].flip(-1).contiguous()
    write_tensors(folder, tensors)
    assert np.abs(library_rows(folder, FILES[:1], [])[0] - expected[0]).max() > 1e-3


def test_prompts_of_the_librarys_files_stand_before_texts_and_mixed_inputs(checkpoint: Path, tmp_path: Path) -> None:
    folder = save_modules(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    assert artifact.manifest.prompts == PROMPTS
    mixed = (FILES[0], "a page")
    with bei.Model(artifact.path, tune="off") as model:
        queries = model.embed([TEXTS[0], {"content": [*mixed]}], prompt_name="query")
        with pytest.warns(UserWarning, match="has prompts and got none"):
            bare = model.embed([FILES[0], TEXTS[0]])
    assert_close(queries, library_vectors(folder, [TEXTS[:1], mixed], PROMPTS["query"]))
    assert_close(bare, library_rows(folder, FILES[:1], TEXTS[:1]))


@pytest.mark.slow
def test_without_a_chat_template_images_are_read_alone(
    checkpoint: Path, expected: list[Float32Array], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (folder / "chat_template.jinja").unlink()
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed([FILES[0], TEXTS[0]]), [expected[0], expected[len(FILES)]])
        with pytest.raises(InvalidRequestError, match=r"text or an image|beside"):
            model.embed([{"content": [FILES[0], "a page"]}])


def test_settings_of_images_beside_the_processors_file_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """sentence-transformers would give them to the processor."""
    folder = save_modules(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    change_json(folder / "sentence_bert_config.json", processing_kwargs={"image": {"max_soft_tokens": 140}})
    with pytest.raises(CheckpointError, match="processing_kwargs with image"):
        build_artifact(folder, tmp_path / "out")


def test_a_checkpoint_without_an_image_tower_is_built_for_texts(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    raw = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**raw, "vision_config": None})
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    assert artifact.manifest.image_tower is None
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed(TEXTS), library_rows(checkpoint, [], TEXTS))


@pytest.mark.slow
def test_texts_alone_are_built_without_images_among_them(checkpoint: Path, tmp_path: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "out", images=False)
    assert artifact.manifest.image_tower is None
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed(TEXTS), library_rows(checkpoint, [], TEXTS))


def test_routes_read_images_and_refuse_what_is_none(artifact: Artifact, expected: list[Float32Array]) -> None:
    served = Served(artifact)
    try:
        image = {"type": "image_url", "image_url": {"url": data_url(FILES[0])}}
        answer = served.post("/v1/embeddings", {"input": [image, {"type": "text", "text": TEXTS[0]}]})
        assert answer.status_code == 200, answer.text
        assert_close([one["embedding"] for one in answer.json()["data"]], [expected[0], expected[len(FILES)]])
        hostile: list[object] = [{"image": data_url(b"junk")}, {"image": data_url(png()[:40])}]
        hostile += ["a <|image|> b", "a <|video|> b", "<|audio|>", {"text": "<|audio|>", "image": data_url(FILES[0])}]
        for one in hostile:
            assert served.post("/embed", {"inputs": [one]}).status_code == 400
        for kind in ("audio", "video"):
            part = {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(FILES[0])}}
            refused = served.post("/v1/embeddings", {"input": [{"content": [part]}]})
            assert refused.status_code == 400, refused.text
    finally:
        served.close()


def test_token_ids_do_not_stand_for_images(model: bei.Model) -> None:
    """The library's class would read padding in their place, and bei the token's own row."""
    with pytest.raises(InvalidRequestError, match="Token id 6 stands for an image in"):
        model.embed([[2, 6, 1]])


def test_more_tokens_than_the_model_reads_are_an_error(model: bei.Model) -> None:
    with pytest.raises((InvalidImageError, InvalidRequestError), match="cannot be cut"):
        model.embed([{"content": [png(500, 500)] * 20}])


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        ("", {"text_config": None}, "lacks text_config"),
        ("vision_config", {"model_type": "siglip_vision_model"}, "vision_config.model_type = 'siglip_vision_model'"),
        ("vision_config", {"use_clipped_linears": True}, "use_clipped_linears = True"),
        ("vision_config", {"standardize": True}, "standardize = True"),
        ("vision_config", {"head_dim": 6}, "head_dim = 6"),
        ("vision_config", {"position_embedding_size": 8}, "position_embedding_size = 8"),
        ("vision_config", {"pooling_kernel_size": 2}, "pooling_kernel_size"),
        ("vision_config", {"pooling_kernel_size": 1}, "pooling_kernel_size = 1"),
        ("vision_config", {"hidden_activation": "laplace"}, "Activation 'laplace'"),
        ("vision_config", {"patch_size": 5}, "patch_size"),
        ("", {"image_token_id": 10**6}, "image_token_id = 1000000"),
        ("", {"image_token_id": 9}, "image_token_id = 9"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_other_configs_are_refused_by_name(
    part: str, settings: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    raw = json.loads((folder / "config.json").read_text())
    (raw[part] if part else raw).update(settings)
    write_json(folder / "config.json", raw)
    with pytest.raises(BeiError, match=message) as info:
        build_artifact(folder, tmp_path / "out")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_soft_tokens": 71}, "max_soft_tokens = '71': it must be one of 70, 140"),
        ({"do_resize": False}, "do_resize"),
        ({"size": {"height": 48, "width": 48}}, "size"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"pooling_kernel_size": "3"}, "pooling_kernel_size"),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_other_image_processors_are_refused_by_name(
    settings: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    raw = json.loads((folder / "processor_config.json").read_text())
    raw["image_processor"].update(settings)
    write_json(folder / "processor_config.json", raw)
    with pytest.raises(CheckpointError, match=message):
        build_artifact(folder, tmp_path / "out")


@pytest.mark.slow
def test_normalization_of_the_processor_is_honoured(tmp_path: Path) -> None:
    settings = {"do_normalize": True, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    folder = save_embedding_gemma2(tmp_path / "checkpoint", processor=settings)
    assert_close(vectors_of(folder, [*FILES[:2]], tmp_path / "out"), library_rows(folder, FILES[:2], []))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{{ part.text }}", "{{ part.text | trim }}", "treats some texts|as it is"),
        ("{{ part.text }}", "query: {{ part.text }}", "more around a text than its prompt"),
        ("not in written -%}<|image|>", "not in written -%}", "one image of a user"),
    ],
    ids=["trims", "writes more", "no image"],
)
def test_other_templates_are_refused(old: str, new: str, message: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = save_modules(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        build_artifact(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, "are not quantized"),
        ({"texts": False}, "--no-texts"),
        ({"pooling": "last"}, "mean of its tokens' states alone"),
        ({"token_embeddings": True}, "leave it out for this model"),
        ({"max_seq_len": 40}, "tokens of an image"),
        ({"max_image_pixels": 1000}, f"may have {TOKENS * STEP**2} pixels"),
    ],
    ids=["precision", "images alone", "pooling", "tokens", "length", "pixels"],
)
def test_other_builds_are_refused_by_name(
    options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(checkpoint, tmp_path / "out", **options)


@pytest.mark.slow
def test_fewer_pixels_are_read_where_the_build_asks_for_them(tmp_path: Path) -> None:
    folder = save_embedding_gemma2(tmp_path / "checkpoint", processor={"max_soft_tokens": 140})
    artifact = build_artifact(folder, tmp_path / "out", max_image_pixels=TOKENS * STEP**2)  # verified
    assert artifact.certificate.images
    assert artifact.certificate.images.passed
    fewer = save_embedding_gemma2(tmp_path / "fewer")
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed(FILES), library_rows(fewer, FILES, []))
