"""A text and an image in one input: the vectors of transformers' classes for the parts in their order, over every route
that has such inputs, and refusals of models that read a text or an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import bei
from bei.artifact.image_sequence import MOST_IMAGES
from bei.artifact.manifest import Artifact
from bei.artifact.validation import manifest_fault
from bei.core import Float32Array
from bei.errors import InvalidImageError, InvalidRequestError, MalformedRequestError
from bei.image import encoder
from bei.image.decode import ImageLimits, decoded
from bei.image.header import check_sizes
from bei.image.source import ImageInput
from tests.support import qwen2_vl, qwen3_vl
from tests.support.builds import build_artifact
from tests.support.colqwen2 import save_colqwen2
from tests.support.served import Served
from tests.support.two_towers import data_url, drawn_files, png, save_clip

FILES = [*drawn_files()[:3], png(40, 90)]
# In order: texts and images.
INPUTS: list[Sequence[str | bytes]] = [
    (FILES[0], "what is in the picture?"),
    ("a page: ", FILES[1]),
    (" two  spaces ", FILES[2], "\n né"),
    ("one. ", "two. ", FILES[3], "!", " three"),
    (FILES[3], ""),
    (FILES[0], FILES[3]),
    ("first: ", FILES[3], " and second: ", FILES[1], "?"),
    (FILES[1], FILES[1], "the same twice", FILES[2]),
    (FILES[2], "the same twice", FILES[1], FILES[1]),
]
SEVERAL = 6  # the place of an input of several images
Vectors = Callable[..., list[Float32Array]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_vl.save_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl") / "qwen3_vl")


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "qwen3_vl", verify=False)


@pytest.fixture(scope="module")
def served(artifact: Artifact) -> Iterator[Served]:
    app = Served(artifact)
    yield app
    app.close()


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Float32Array]:
    return qwen3_vl.library_vectors(checkpoint, INPUTS)


def given(parts: Sequence[str | bytes]) -> dict[str, Any]:
    """As ``bei.Model`` takes them."""
    return {"content": [*parts]}


def assert_close(found: Any, expected: Sequence[Float32Array] | Float32Array) -> None:
    np.testing.assert_allclose(np.array(found, np.float32), np.array(expected), atol=2e-4)


@pytest.mark.parametrize(
    ("save", "vectors"),
    [
        (qwen3_vl.save_qwen3_vl, qwen3_vl.library_vectors),
        (lambda folder: qwen3_vl.save_qwen3_vl(folder, ends=False), qwen3_vl.library_vectors),
        (qwen2_vl.save_qwen2_vl, qwen2_vl.library_vectors),
        (qwen2_vl.save_gme, lambda folder, inputs: qwen2_vl.library_vectors(folder, inputs, as_text=True)),
    ],
    ids=["qwen3_vl", "qwen3_vl without an end", "qwen2_vl", "gme"],
)
def test_parts_in_order_have_the_librarys_vectors(
    save: Callable[[Path], Path], vectors: Vectors, tmp_path: Path
) -> None:
    folder = save(tmp_path / "checkpoint")
    wanted = vectors(folder, [*INPUTS, (FILES[0],), ("text",)])
    with bei.Model(build_artifact(folder, tmp_path / "out", verify=False).path, tune="off") as model:
        assert_close(model.embed([*map(given, INPUTS), FILES[0], "text"]), wanted)
    assert np.abs(wanted[0] - wanted[-2]).max() > 0.01  # else the text beside the image need not have been read


def test_a_model_in_process_reads_one_of_them(artifact: Artifact, expected: list[Float32Array]) -> None:
    with bei.Model(artifact.path, tune="off") as model:
        both = {"text": INPUTS[0][1], "image": FILES[0]}  # the image first
        assert_close(model.embed([both]), expected[:1])
        assert_close(model.encode(both, normalize_embeddings=True), expected[0])
        assert_close(model.encode([given(INPUTS[1]), both], normalize_embeddings=True), [expected[1], expected[0]])
        first, second = model.rerank(both, [given(INPUTS[1]), both], score_mode="dense")
        assert (first.index, second.index) == (1, 0)
        assert first.score == pytest.approx(1.0, abs=1e-3)
        assert second.score < 0.999
        assert_close(model.embed([{"content": [FILES[0], FILES[3]]}]), [expected[5]])
        with pytest.raises(InvalidImageError, match=rf"parts\. An input has {MOST_IMAGES + 1} images"):
            model.embed([{"content": [FILES[0]] * (MOST_IMAGES + 1)}])  # the place was said twice
        with pytest.raises(MalformedRequestError, match="no image in its content"):
            model.embed([{"content": ["text"]}])
        with pytest.raises(MalformedRequestError, match="an image beside its text"):
            model.embed([{"text": "a", "image": "b"}])
        with pytest.raises(MalformedRequestError, match="list of texts and images"):
            model.embed([{"content": "text"}])
        with pytest.raises(MalformedRequestError, match="inputs 1 has the type dict in its content"):
            model.embed(["a text", {"content": [{"text": "a"}, FILES[0]]}])
        with pytest.raises(MalformedRequestError, match=r"inputs 0 has the type dict, .* an image \(of Pillow"):
            model.embed([{"image": FILES[0]}])  # was told to be a text


def part(one: str | bytes) -> dict[str, Any]:
    return (
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": "image_url", "image_url": {"url": data_url(one)}}
    )


def parts_of(place: int) -> list[dict[str, Any]]:
    """As JSON has them."""
    return [part(one) for one in INPUTS[place]]


BOTH = {"text": INPUTS[0][1], "image": data_url(FILES[0])}
CONTENT = {"content": parts_of(SEVERAL)}


def _embeddings(answer: Any) -> Any:
    return [one["embedding"] for one in answer["data"]]


@pytest.mark.parametrize(
    ("path", "body", "vectors"),
    [
        ("/v1/embeddings", {"input": [BOTH, CONTENT]}, _embeddings),
        ("/v1/embeddings", {"input": BOTH}, _embeddings),
        ("/embed", {"inputs": [BOTH, CONTENT]}, lambda answer: answer),
        ("/embed", {"inputs": BOTH}, lambda answer: answer),
        (
            "/vertex",
            {"instances": [{"inputs": [BOTH]}, {"inputs": [CONTENT]}]},
            lambda answer: [rows[0] for rows in answer["predictions"]],
        ),
        ("/jina/v1/embeddings", {"model": "qwen3_vl", "input": [BOTH, CONTENT]}, _embeddings),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": parts_of(SEVERAL)}]}, _embeddings),
        ("/vllm/v1/embeddings", {"messages": [{"role": "user", "content": parts_of(SEVERAL)}]}, _embeddings),
        (
            "/pooling",
            {"messages": [{"role": "user", "content": parts_of(SEVERAL)}]},
            lambda answer: [one["data"] for one in answer["data"]],
        ),
        (
            "/v2/embed",
            {
                "model": "qwen3_vl",
                "inputs": [{"content": parts_of(0)}, CONTENT],
                "input_type": "search_document",
                "embedding_types": ["float"],
            },
            lambda answer: answer["embeddings"]["float"],
        ),
        (
            "/voyage/v1/multimodalembeddings",
            {
                "model": "qwen3_vl",
                "inputs": [
                    {"content": [{"type": "image_base64", "image_base64": data_url(FILES[0])}, parts_of(0)[1]]},
                    CONTENT,
                ],
            },
            _embeddings,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_routes_read_both(
    path: str, body: dict[str, Any], vectors: Callable[[Any], Any], served: Served, expected: list[Float32Array]
) -> None:
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    found = vectors(answer.json())
    places = [SEVERAL] if "messages" in body else [0, SEVERAL]
    assert_close(found, [expected[place] for place in places[: len(found)]])


def test_prices_of_voyage_tell_images_from_texts(served: Served) -> None:
    """The pixels of the image alone, as the model reads them, and its tokens out of those of texts."""
    asked = [[part(FILES[0])], parts_of(0), [part("text")], [part(FILES[0]), part("and"), part(FILES[0])]]
    used = [
        served.post("/voyage/v1/multimodalembeddings", {"inputs": [{"content": content}]}).json()["usage"]
        for content in asked
    ]
    assert used[0]["image_pixels"] == used[1]["image_pixels"] > 0
    assert used[0]["text_tokens"] == 0
    assert 0 < used[1]["text_tokens"] < used[1]["total_tokens"]
    num_states = used[1]["total_tokens"] - used[1]["text_tokens"]
    assert num_states * qwen3_vl.STEP**2 == used[1]["image_pixels"]
    assert used[2]["image_pixels"] == 0
    assert used[3]["image_pixels"] == 2 * used[0]["image_pixels"]
    assert used[3]["total_tokens"] - used[3]["text_tokens"] == 2 * num_states


def test_scores_compare_inputs_of_both(served: Served) -> None:
    answer = served.post("/score", {"data_1": CONTENT, "data_2": [CONTENT, {"content": parts_of(0)}]})
    assert answer.status_code == 200, answer.text
    scores = [one["score"] for one in answer.json()["data"]]
    assert scores[0] == pytest.approx(1.0, abs=1e-4)
    assert scores[1] < 0.999
    answer = served.post("/rerank", {"query": "a query", "documents": [BOTH, "text"], "score_mode": "dense"})
    assert answer.status_code == 200, answer.text


def test_faults_are_errors_of_that_input(served: Served, expected: list[Float32Array]) -> None:
    broken = {"content": [part(FILES[0]), part("and"), part(b"junk")]}
    many = {"content": [part(FILES[0])] * (MOST_IMAGES + 1)}
    long = {"content": [part(png(640, 640 + side)) for side in range(8)]}
    hostile: list[object] = [
        broken,
        many,
        long,
        {"text": "a", "image": data_url(b"junk")},
        {"text": "a <|image_pad|> b", "image": data_url(FILES[0])},
        {"text": "long " * 400, "image": data_url(FILES[0])},
    ]
    answer = served.post("/v1/embeddings", {"input": [*hostile, BOTH]}, **{"X-Bei-Report": "true"})
    assert answer.status_code == 200, answer.text
    assert_close(answer.json()["data"][len(hostile)]["embedding"], expected[0])
    for message in (f"reads {MOST_IMAGES} at most", "8 images and the texts", "<|image_pad|> in it", "is of no format"):
        assert message in answer.text
    for one in hostile:
        assert served.post("/v1/embeddings", {"input": one}).status_code == 400
    answer = served.post("/v1/embeddings", {"input": [BOTH, "text", broken]})
    assert answer.json()["error"]["message"].startswith("input 2, image 1: An image is of no format")
    for given, message in (
        (broken, "input, image 1: An image is of no format"),
        (["text", many], f"input 1: An input has {MOST_IMAGES + 1} images"),
        (hostile[3], "An image is of no format"),
    ):
        answer = served.post("/v1/embeddings", {"input": given})
        assert answer.json()["error"]["message"].startswith(message)


def test_a_prompt_stands_around_both(
    artifact: Artifact, checkpoint: Path, served: Served, expected: list[Float32Array]
) -> None:
    prompt = artifact.manifest.prompts["default"].replace(qwen3_vl.INSTRUCTION, "Find pages.")
    (wanted,) = qwen3_vl.library_vectors(checkpoint, INPUTS[:1], "Find pages.")
    answer = served.post("/v1/embeddings", {"input": BOTH, "prompt": prompt})
    assert answer.status_code == 200, answer.text
    assert_close(_embeddings(answer.json()), [wanted])
    assert np.abs(wanted - expected[0]).max() > 1e-3


@pytest.mark.parametrize("save", [save_clip, save_colqwen2], ids=["two towers", "token vectors"])
def test_models_that_read_one_of_them_say_so(save: Callable[[Path], Path], tmp_path: Path) -> None:
    artifact = build_artifact(save(tmp_path / "checkpoint"), tmp_path / "out", verify=False)
    by_token = "embed_tokens" in artifact.manifest.tasks
    app = Served(artifact)
    try:
        path, field = ("/embed_all", "inputs") if by_token else ("/v1/embeddings", "input")
        answer = app.post(path, {field: [BOTH, "a text"]})
        assert answer.status_code == 400
        assert "reads a text or an image in an input" in answer.text
        answer = app.post("/score", {"data_1": BOTH, "data_2": "a text"})
        assert answer.status_code == 400
        assert "ask a reranker that reads both" in answer.text
        if not by_token:
            answer = app.post(path, {field: [BOTH, "a text"]}, **{"X-Bei-Report": "true"})
            assert answer.status_code == 200
            answer = app.post("/voyage/v1/multimodalembeddings", {"inputs": [{"content": parts_of(0)}]})
            assert answer.status_code == 400
    finally:
        app.close()
    with bei.Model(artifact.path, tune="off") as model, pytest.raises(InvalidImageError, match="inputs 0 is an image"):
        (model.embed_all if by_token else model.embed)([{"text": "a", "image": FILES[0]}])


def test_a_text_model_reads_no_images(tmp_path: Path, checkpoint: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "texts", images=False, verify=False)
    with bei.Model(artifact.path, tune="off") as model, pytest.raises(InvalidRequestError, match="reads no images"):
        model.embed([{"text": "a", "image": FILES[0]}])


def test_a_template_that_writes_more_between_parts_reads_an_image_alone(tmp_path: Path) -> None:
    """Else texts beside an image would not be what the template writes."""
    folder = qwen3_vl.save_qwen3_vl(tmp_path / "qwen3_vl")
    path, end = folder / "chat_template.jinja", "{%- endfor -%}{%- endif -%}"
    path.write_text(qwen3_vl.TEMPLATE.replace(end, "{{ '\\n' if not loop.last }}" + end, 1))
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    assert artifact.manifest.images
    assert artifact.manifest.images.sequence
    assert not artifact.manifest.images.sequence.around
    with bei.Model(artifact.path, tune="off") as model, pytest.raises(InvalidImageError, match="a text or an image"):
        model.embed([{"text": "a", "image": FILES[0]}])


def test_a_template_that_numbers_images_reads_one(tmp_path: Path) -> None:
    folder = qwen3_vl.save_qwen3_vl(tmp_path / "qwen3_vl")
    path, loop, image = folder / "chat_template.jinja", "{%- for part in content -%}", "<|vision_start|>"
    counted = "{{ 'Picture 2: ' if not loop.first and loop.previtem.type == 'image' }}"
    path.write_text(qwen3_vl.TEMPLATE.replace(image, counted + image, 1))
    assert loop in qwen3_vl.TEMPLATE
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    assert artifact.manifest.images
    assert artifact.manifest.images.sequence
    assert artifact.manifest.images.sequence.around
    with bei.Model(artifact.path, tune="off") as model:
        model.embed([given(INPUTS[0])])
        with pytest.raises(InvalidImageError, match="has 2 images, and qwen3_vl reads one in an input"):
            model.embed([given(INPUTS[5])])


def test_images_that_do_not_fit_are_not_decoded(
    artifact: Artifact, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seventh image of 40 tokens is more than 256."""
    opened = []

    def counted(source: ImageInput, limits: ImageLimits) -> Any:
        opened.append(source)
        return decoded(source, limits)

    monkeypatch.setattr(encoder, "decoded", counted)
    content = [part(png(640, 640 + side)) for side in range(30)]
    answer = served.post("/v1/embeddings", {"input": {"content": content}})
    assert (answer.status_code, "30 images and the texts" in answer.text) == (400, True)
    assert 0 < len(opened) <= artifact.manifest.max_seq_len // 40


def test_the_pixels_of_an_input_are_bounded_together() -> None:
    images = [ImageInput(png(300, 400)), ImageInput(png(300, 400))]
    check_sizes(images, ImageLimits(1 << 20, 240_000))
    check_sizes(images[:1], ImageLimits(1 << 20, 1))  # which is refused as it is decoded
    with pytest.raises(InvalidImageError, match="2 images of an input have 240,000 pixels"):
        check_sizes(images, ImageLimits(1 << 20, 239_999))


def test_a_manifest_of_token_vectors_with_markers_is_refused(artifact: Artifact) -> None:
    assert manifest_fault(artifact.manifest) is None
    changed = msgspec.structs.replace(artifact.manifest, tasks=["embed_tokens"])
    fault = manifest_fault(changed)
    assert fault is not None
