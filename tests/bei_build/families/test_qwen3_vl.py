"""Qwen3-VL as an embedder: the vectors of transformers' classes for the turns that the model's own code writes, of
texts and of images of many sizes, in one batch."""

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
from bei.artifact.certificate.canary import canary_levels
from bei.artifact.manifest import Artifact
from bei.core import Encoding, Float32Array, PackedBatch, rows_of_sequences
from bei.engine.packing import graph_inputs
from bei.engine.postprocess import unit_length
from bei.errors import BeiError, CheckpointError, ConfigError, TaskNotSupportedError
from bei.image.source import ImageInput
from bei.tokenizer.prompts import apply_prompt, split_prompt
from bei_build.checkpoint.image_tower import read_image_tower
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.tokenizer.chat_template import ChatSettings, derive_frame
from bei_build.torch_graph.model import packed_model, run
from bei_build.verification.images import encoder_of_tower
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_json, read_tensors, write_json, write_tensors
from tests.support.cpus import needs_bf16
from tests.support.qwen3_vl import HIDDEN, INSTRUCTION, STEP, TEMPLATE, library_rows, rope, save_qwen3_vl
from tests.support.reading import read
from tests.support.served import Served
from tests.support.two_towers import data_url, drawn_files, png

FILES = [*drawn_files(), png(1, 1), png(3, 600), png(900, 5), png(2000, 1400)]
TEXTS = ["hello world", "!", "what is in the picture? " * 3, " two  spaces ", "tokens <|im_end|> and \n lines", "\n né"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl") / "qwen3_vl")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Float32Array]:
    return library_rows(checkpoint, FILES, TEXTS)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "qwen3_vl")


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[bei.Model]:
    with bei.Model(artifact.path, tune="off") as opened:
        yield opened


@pytest.fixture(scope="module")
def served(artifact: Artifact) -> Iterator[Served]:
    app = Served(artifact)
    yield app
    app.close()


def vectors_of(folder: Path, inputs: list[Any], out: Path, **options: Any) -> Float32Array:
    """Of a build that is not verified."""
    with bei.Model(build_artifact(folder, out, verify=False, **options).path, tune="off") as model:
        return model.embed(inputs)


def assert_close(found: Any, expected: list[Float32Array]) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-4)


def test_texts_and_images_of_many_sizes_have_the_librarys_vectors(
    model: bei.Model, expected: list[Float32Array]
) -> None:
    assert_close(model.embed([*FILES, *TEXTS]), expected)
    assert np.abs(expected[0] - expected[1]).max() > 0.01  # else the decoder need not have read the images


@needs_bf16
def test_in_bf16_they_are_near(checkpoint: Path, expected: list[Float32Array], tmp_path: Path) -> None:
    found = vectors_of(checkpoint, [*FILES, *TEXTS], tmp_path / "bf16", precision="bf16")
    assert (found * np.array(expected)).sum(1).min() > 0.999


def test_the_certificate_compares_both_with_the_librarys_class(artifact: Artifact, model: bei.Model) -> None:
    images, tower = artifact.certificate.images, artifact.manifest.image_tower
    assert images
    assert images.reference.startswith("transformers, FP32")
    assert images.output is not None
    assert images.output.output == "embedding"
    assert artifact.certificate.reference.startswith("transformers, FP32")
    assert tower is not None
    assert tower.sequence
    assert tower.sequence.width == 3 * HIDDEN  # with two layers' further parts
    canary = model.embed([png(), *[_canary(tower.image_size)]])[1]
    np.testing.assert_allclose(images.canary_row, canary, atol=1e-4)


def _canary(size: tuple[int, int]) -> Any:
    from PIL import Image

    return Image.fromarray(canary_levels(*size))


@pytest.mark.parametrize("core", [AttentionCore.MATMUL_SOFTMAX, AttentionCore.TRT_ATTENTION])
def test_both_graphs_give_the_librarys_vectors_outside_of_openvino(
    core: AttentionCore, checkpoint: Path, expected: list[Float32Array], tmp_path: Path
) -> None:
    decoder = read(checkpoint)
    images = read_image_tower(decoder)
    assert images is not None
    pictures = encoder_of_tower(images).encode([ImageInput(content) for content in FILES[:5]])
    with images.checkpoint.weights() as weights:
        tower = packed_model(images.checkpoint.spec, weights.read, images.checkpoint.max_seq_len)
        types = GraphTypes(DType.FP32, DType.FP32)
        longest = images.checkpoint.max_seq_len
        (tmp_path / "tower").mkdir()
        tower_path = write_graph(images.checkpoint.spec, weights.read, tmp_path / "tower", types, core, longest)
    batch = PackedBatch.from_encodings([one for encoding in pictures for one in encoding.of_tower])
    states = run(tower, batch)["image_features"]
    session = onnxruntime.InferenceSession(tower_path)
    (of_graph,) = session.run(["image_features"], graph_inputs(batch, [one.name for one in session.get_inputs()]))
    np.testing.assert_allclose(of_graph[: batch.num_tokens], states, atol=2e-4)
    rows = rows_of_sequences(states, batch, per_token=True)
    read_images = [one.with_features([own]) for one, own in zip(pictures, rows, strict=True)]
    turns = apply_prompt(decoder.files.prompts["default"], TEXTS)
    texts = [Encoding(np.array(decoder.tokenizer.encode(text).ids, np.int32)) for text in turns]
    batch = PackedBatch.from_encodings([*read_images[:2], *texts, *read_images[2:]])
    with decoder.weights() as weights:
        module = packed_model(decoder.spec, weights.read, decoder.max_seq_len)
        path = write_graph(decoder.spec, weights.read, tmp_path, types, core, decoder.max_seq_len)
    session = onnxruntime.InferenceSession(path)
    (of_graph,) = session.run(["embedding"], graph_inputs(batch, [one.name for one in session.get_inputs()]))
    order = [*range(2), *range(len(FILES), len(FILES) + len(TEXTS)), *range(2, 5)]
    for found in (run(module, batch)["embedding"], of_graph[: batch.batch_size]):
        assert_close(unit_length(found), [expected[place] for place in order])


@pytest.mark.parametrize(
    "text",
    [
        {"rope_parameters": rope([3, 1, 2], 500.0)},
        pytest.param({"rope_parameters": rope([2, 2, 1])}, marks=pytest.mark.slow),
        pytest.param({"attention_bias": True}, marks=pytest.mark.slow),
        pytest.param({"head_dim": 16, "rope_parameters": rope([4, 2, 2])}, marks=pytest.mark.slow),
        pytest.param({"num_hidden_layers": 2}, marks=pytest.mark.slow),
    ],
    ids=["sections", "a short one", "bias", "heads", "layers"],
)
def test_settings_of_the_decoder_are_honoured(text: dict[str, Any], tmp_path: Path) -> None:
    folder = save_qwen3_vl(tmp_path / "qwen3_vl", text=text)
    assert_close(
        vectors_of(folder, [*FILES[:3], *TEXTS[:2]], tmp_path / "out"), library_rows(folder, FILES[:3], TEXTS[:2])
    )


@pytest.mark.parametrize(
    "vision",
    [
        pytest.param({"hidden_act": "gelu"}, marks=pytest.mark.slow),
        pytest.param({"patch_size": 6}, marks=pytest.mark.slow),
        {"num_position_embeddings": 4},
        pytest.param({"num_position_embeddings": 144}, marks=pytest.mark.slow),
        {"deepstack_visual_indexes": [3]},
        pytest.param({"deepstack_visual_indexes": []}, marks=pytest.mark.slow),
        pytest.param({"num_heads": 2}, marks=pytest.mark.slow),
    ],
    ids=["act", "patch", "small table", "large table", "last layer", "no layer", "heads"],
)
def test_settings_of_the_image_tower_are_honoured(vision: dict[str, Any], tmp_path: Path) -> None:
    folder = save_qwen3_vl(tmp_path / "qwen3_vl", vision=vision)
    found = vectors_of(folder, [*FILES[:4], TEXTS[0]], tmp_path / "out")
    assert_close(found, library_rows(folder, FILES[:4], TEXTS[:1]))


def test_states_of_further_layers_matter(checkpoint: Path, expected: list[Float32Array], tmp_path: Path) -> None:
    """Else the vectors would not show that they are added where they should."""
    folder = shutil.copytree(checkpoint, tmp_path / "qwen3_vl")
    tensors = read_tensors(folder)
    for number in (0, 1):
        changed = {name: own.clone() for name, own in tensors.items()}
        name = next(name for name in tensors if name.endswith(f"deepstack_merger_list.{number}.linear_fc2.bias"))
        changed[name] += 1.0
        write_tensors(folder, changed)
        assert np.abs(library_rows(folder, FILES[:1], [])[0] - expected[0]).max() > 1e-3


def test_the_base_class_is_read(tmp_path: Path) -> None:
    folder = save_qwen3_vl(tmp_path / "qwen3_vl", hf_class="Qwen3VLModel")
    artifact = build_artifact(folder, tmp_path / "out")  # verified with transformers' class
    assert artifact.manifest.spec.architecture == "Qwen3VLModel"


def test_a_tokenizer_that_ends_no_text_is_followed(tmp_path: Path) -> None:
    folder = save_qwen3_vl(tmp_path / "qwen3_vl", ends=False)
    assert_close(vectors_of(folder, [FILES[0], *TEXTS], tmp_path / "out"), library_rows(folder, FILES[:1], TEXTS))


def save_modules(folder: Path, *, arguments: dict[str, Any] | None = None, **settings: Any) -> Path:
    """sentence-transformers' files of such a model (6.2). ``settings`` of config_sentence_transformers.json."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    entry = {"method": "forward", "method_output_name": "last_hidden_state"}
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {
                **dict.fromkeys(("text", "image", "video"), entry),
                "message": {**entry, "format": "structured"},
            },
            "module_output_name": "token_embeddings",
            **({"processing_kwargs": {"chat_template": arguments}} if arguments else {}),
        },
    )
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"embedding_dimension": HIDDEN, "pooling_mode": "lasttoken"})
    write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine", **settings})
    return folder


@pytest.mark.parametrize("generates", [False, True])
def test_with_the_librarys_files_turns_are_those_of_the_template(
    generates: bool, checkpoint: Path, tmp_path: Path
) -> None:
    """sentence-transformers leaves the system's turn to the template unless there is a prompt."""
    arguments = {"add_generation_prompt": True} if generates else None
    folder = save_modules(shutil.copytree(checkpoint, tmp_path / "qwen3_vl"), arguments=arguments)
    found = vectors_of(folder, [*FILES[:2], *TEXTS], tmp_path / "out")
    assert_close(found, library_rows(folder, FILES[:2], TEXTS, None, generates=generates))


def test_prompts_of_the_librarys_files_are_turns_of_the_system(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "qwen3_vl")
    prompts = {"query": "Find pages.", "document": ""}
    save_modules(folder, prompts=prompts, default_prompt_name=None)
    with bei.Model(build_artifact(folder, tmp_path / "out", verify=False).path, tune="off") as model:
        queries = model.embed(TEXTS, prompt_name="query")
        others = model.embed([FILES[0], *TEXTS[:2]])
    assert_close(queries, library_rows(folder, [], TEXTS, "Find pages.", generates=False))
    assert_close(others, library_rows(folder, FILES[:1], TEXTS[:2], None, generates=False))


def test_texts_alone_are_built(checkpoint: Path, expected: list[Float32Array], tmp_path: Path) -> None:
    assert_close(vectors_of(checkpoint, TEXTS, tmp_path / "out", images=False), expected[len(FILES) :])


def test_routes_read_images_and_texts(checkpoint: Path, served: Served, expected: list[Float32Array]) -> None:
    at = len(FILES)
    wanted = [expected[0], expected[at], expected[3]]
    answer = served.post("/embed", {"inputs": [{"image": data_url(FILES[0])}, TEXTS[0], {"image": data_url(FILES[3])}]})
    assert answer.status_code == 200, answer.text
    assert_close(answer.json(), wanted)
    image = {"type": "image_url", "image_url": {"url": data_url(FILES[0])}}
    answer = served.post("/v1/embeddings", {"input": [image, {"type": "text", "text": TEXTS[0]}]})
    assert answer.status_code == 200, answer.text
    assert_close([one["embedding"] for one in answer.json()["data"]], wanted[:2])
    answer = served.post("/score", {"data_1": TEXTS[0], "data_2": {"content": [image]}})
    assert answer.status_code == 200, answer.text
    (bare,) = library_rows(checkpoint, [], TEXTS[:1], bare=True)  # vLLM reads texts of scores as they stand
    assert answer.json()["data"][0]["score"] == pytest.approx(float(bare @ expected[0]), abs=1e-3)
    assert served.get("/ready").status_code == 200


def test_hostile_images_and_texts_are_errors_of_that_input(served: Served) -> None:
    hostile: list[object] = [{"image": data_url(png(1, 201))}, {"image": data_url(b"junk")}, "a <|image_pad|> b"]
    answer = served.post("/embed", {"inputs": [*hostile, TEXTS[0]]}, **{"X-Bei-Report": "true"})
    assert answer.status_code == 200, answer.text
    for one in hostile:
        assert served.post("/embed", {"inputs": [one]}).status_code == 400


def test_vectors_of_tokens_are_refused(model: bei.Model, served: Served) -> None:
    with pytest.raises(TaskNotSupportedError):
        model.embed_all([png()])
    assert served.post("/embed_all", {"inputs": [{"image": data_url(png())}]}).status_code in (400, 404)


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        ("", {"text_config": None}, "no text_config"),
        ("text_config", {"model_type": "qwen3"}, "text_config.model_type = 'qwen3'"),
        ("vision_config", {"model_type": "qwen2_vl_vision"}, "vision_config.model_type"),
        ("text_config", {"rope_parameters": rope([1, 2])}, "mrope_section"),
        ("", {"image_token_id": 10**6}, "image_token_id = 1000000"),
        ("", {"image_token_id": 9}, "image_token_id = 9"),
        ("vision_config", {"in_channels": 1}, "in_channels = 1"),
        ("vision_config", {"temporal_patch_size": 1}, "temporal_patch_size = 1"),
        ("vision_config", {"spatial_merge_size": 1}, "spatial_merge_size = 1"),
        ("vision_config", {"out_hidden_size": 32}, "out_hidden_size = 32"),
        ("vision_config", {"num_position_embeddings": 24}, "num_position_embeddings = 24"),
        ("vision_config", {"deepstack_visual_indexes": [2, 0]}, "must ascend"),
        ("vision_config", {"deepstack_visual_indexes": [0, 9]}, "must ascend below depth"),
        ("vision_config", {"deepstack_visual_indexes": [0, 1, 2, 3]}, "more than the decoder has layers"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_other_configs_are_refused_by_name(
    part: str, settings: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "qwen3_vl")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    (raw[part] if part else raw).update(settings)
    path.write_text(json.dumps(raw))
    with pytest.raises(BeiError, match=message) as info:
        build_artifact(folder, tmp_path / "out")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_a_template_in_a_file_of_the_processor_comes_before_the_others(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    """``Qwen3VLProcessor.get_processor_dict`` reads these first; the tokenizer alone would not."""
    folder = shutil.copytree(checkpoint, tmp_path / "qwen3_vl")
    expected = derive_frame(folder, ChatSettings(), None, "<|image_pad|>")
    (folder / "chat_template.jinja").write_text("no frame")
    settings = json.loads(path.read_text()) if (path := folder / name).is_file() else {}
    path.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    assert derive_frame(folder, ChatSettings(), None, "<|image_pad|>") == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        (TEMPLATE.replace("{{ part.text }}", "{{ part.text | trim }}"), "treats some texts|as it is"),
        (TEMPLATE.replace("<|image_pad|>", ""), "one image of a user"),
        (TEMPLATE.replace("<|image_pad|>", "<|image_pad|><|image_pad|>"), "one image of a user"),
        (TEMPLATE + "{{ strftime_now('%Y') }}", "current time"),
        (TEMPLATE + "{{ '{' + 'text}' }}", "the place of the text"),
    ],
    ids=["none", "trims", "no image", "two images", "time", "place"],
)
def test_templates_that_are_no_frame_are_refused(
    template: str | None, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = save_modules(shutil.copytree(checkpoint, tmp_path / "qwen3_vl"), prompts={"query": "Find."})
    path = folder / "chat_template.jinja"
    if template is None:
        path.unlink()
    else:
        path.write_text(template)
    with pytest.raises(CheckpointError, match=message):
        build_artifact(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": False}, "--no-texts"),
        ({"pooling": "mean"}, "last token's state alone"),
        ({"token_embeddings": True}, "leave task and pooling out"),
        ({"max_seq_len": 40}, "tokens of an image"),
        ({"score_tokens": ("y",)}, "give it as rerank_body"),
    ],
    ids=["images alone", "pooling", "tokens", "length", "scores"],
)
def test_other_builds_are_refused_by_name(
    options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(checkpoint, tmp_path / "out", **options)


def test_sizes_of_images_are_those_of_the_models_own_code_where_no_file_says_them(tmp_path: Path) -> None:
    """Else images of the base model's 16 million pixels would be read; with the library's files they would be."""
    folder = save_qwen3_vl(tmp_path / "qwen3_vl", text={"max_position_embeddings": 4096})
    change_json(folder / "preprocessor_config.json", min_pixels=None, max_pixels=None)
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    tower = artifact.manifest.image_tower
    assert tower is not None
    assert tower.processor.bounds
    assert (tower.processor.bounds.fewest, tower.processor.bounds.most) == (4 * STEP**2, 1800 * STEP**2)
    images = read_image_tower(read(folder))
    assert images is not None
    (large,) = encoder_of_tower(images).encode([ImageInput(png(700, 900))])  # more than the most
    assert 1750 < large.of_tower[0].num_tokens / 4 <= 1800
    files = [png(200, 300), png(2, 2)]
    with bei.Model(artifact.path, tune="off") as model:
        found = model.embed(files)
    change_json(folder / "preprocessor_config.json", min_pixels=4 * STEP**2, max_pixels=1800 * STEP**2)
    assert_close(found, library_rows(folder, files, []))
    change_json(folder / "preprocessor_config.json", min_pixels=None, max_pixels=None)
    save_modules(folder)
    with pytest.raises(CheckpointError, match="16384 at most: build with --max-image-pixels 1048576,"):
        build_artifact(folder, tmp_path / "other", verify=False)
    with pytest.raises(ConfigError, match="of fewer pixels") as info:
        build_artifact(folder, tmp_path / "other", verify=False, max_image_pixels=1048576)
    fits = int(str(info.value).split("--max-image-pixels ")[1].split(")")[0])
    tower = build_artifact(folder, tmp_path / "other", verify=False, max_image_pixels=fits).manifest.image_tower
    assert tower is not None
    assert tower.processor.bounds
    assert tower.processor.bounds.most == fits


def test_fewer_pixels_are_read_where_the_build_asks_for_them(checkpoint: Path, tmp_path: Path) -> None:
    fewer, own = 12 * STEP**2, tmp_path / "fewer"
    artifact = build_artifact(checkpoint, tmp_path / "out", max_image_pixels=fewer)
    assert artifact.certificate.images
    assert artifact.certificate.images.reference.startswith("transformers, FP32")
    shutil.copytree(checkpoint, own)
    change_json(own / "preprocessor_config.json", max_pixels=fewer)
    files = [png(700, 900), png(2, 2), png(3, 600)]
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed(files), library_rows(own, files, []))


@pytest.mark.parametrize("options", [{"max_image_pixels": 10**7}, {"max_image_pixels": 3}], ids=["more", "too few"])
def test_other_numbers_of_pixels_are_refused(options: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a number of those"):
        build_artifact(checkpoint, tmp_path / "out", **options)


def test_numbers_of_pixels_are_of_images(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none are built"):
        build_artifact(checkpoint, tmp_path / "out", images=False, max_image_pixels=10_000)


def test_the_default_turn_is_that_of_the_models_own_code(artifact: Artifact, checkpoint: Path) -> None:
    turns = f"<|im_start|>system\n{INSTRUCTION}<|im_end|>\n<|im_start|>user\n{{text}}<|im_end|>\n"
    assert set(artifact.manifest.prompts.values()) == {f"{turns}<|im_start|>assistant\n"}
    assert read(checkpoint).tokenizer.encode("x").tokens[-1] == "<|endoftext|>"


def test_a_long_text_keeps_the_turns_around_it(model: bei.Model, checkpoint: Path) -> None:
    """As sentence-transformers does: its end is what the vector is of."""
    tokenizer, limit = read(checkpoint).tokenizer, model.manifest.max_seq_len
    before, behind = split_prompt(model.manifest.prompts["default"])
    long = "a" * 2000
    room = limit - len(tokenizer.encode(before + behind).ids)
    kept = tokenizer.encode(long, add_special_tokens=False)
    text = long[: kept.offsets[room - 1][1]]
    assert len(tokenizer.encode(before + text + behind).ids) == limit
    assert_close(model.embed([long], truncate=True), library_rows(checkpoint, [], [text]))
