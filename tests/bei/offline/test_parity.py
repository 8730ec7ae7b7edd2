"""Every method of a Model returns what its route answers, and raises the errors that the route answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from bei import Model, Predictions
from bei.artifact.certificate.canary import canary_row
from bei.artifact.manifest import Classification, OutputInfo
from bei.core import Float32Array
from bei.errors import BeiError, MalformedRequestError, TaskNotSupportedError
from bei.tasks.entities import Entity
from tests.bei.server.app import App
from tests.bei.server.kinds import KINDS, KindEngine, answer, fake_output, post, save_kind
from tests.support.artifacts import CANARY_TEXT, save_artifact, token_ids

NLI = ["contradiction", "neutral", "entailment"]
LONG = "a " * 20 + "b " * 20
TEXTS = ["cat", "the cats", "hello world", LONG, "cat"]
SHORT = [text for text in TEXTS if text != LONG]


class Both:
    """A server and Models, of every kind."""

    def __init__(self, app: App, models: dict[str, Model]) -> None:
        self.app = app
        self.models = models

    def __getitem__(self, kind: str) -> Model:
        return self.models[kind]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("kinds")
    served = {kind: save_kind(folder / kind, kind, **canary_of(kind)) for kind in KINDS}
    nli = save_artifact(
        folder / "nli",
        name="nli",
        tasks=["classify"],
        outputs=[OutputInfo(name="logits", dimension=len(NLI))],
        classification=Classification(labels=NLI, function="softmax"),
        embedding=None,
        canary=canary("logits", len(NLI)),
        output="logits",
    )
    served["nli"] = nli, KindEngine({"logits": len(NLI)})
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        app = App(*served.values())
        stack.callback(app.close)
        models = {}
        for kind, (artifact, engine) in served.items():
            patch.setattr("bei.service.loader.load_engine", lambda *_, engine=engine: engine)
            models[kind] = stack.enter_context(Model(artifact.path, tune="off", tokenizer_threads=1))
        yield Both(app, models)


def canary_of(kind: str) -> dict[str, Any]:
    """Certificates by kind; the embedder's is the default."""
    ((name, width),) = KINDS[kind][1].items()
    return {} if kind == "embedder" else {"canary": canary(name, width), "output": name}


def canary(name: str, width: int) -> list[float]:
    ids = np.array(token_ids(CANARY_TEXT), np.int32)
    row: list[float] = canary_row(fake_output(name, ids, np.zeros_like(ids), width), name).tolist()
    return row


def floats(values: object) -> Float32Array:
    """JSON's numbers as float32."""
    return np.asarray(values, np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": False},
        {"dimensions": 3},
        {"dimensions": 3, "normalize": False},
        {"prompt_name": "cats"},
        {"input_type": "query"},
        {"prompt": "the {text} !"},
        {"truncation_direction": "left"},
        {"truncate_prompt_tokens": 5},
        {"truncate": True, "add_special_tokens": False},
        *({"output_dtype": dtype} for dtype in ("float32", "float16", "int8", "uint8", "binary", "ubinary")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:embedder does not say that its vectors may be cut")
def test_embed(both: Both, options: dict[str, Any]) -> None:
    options = {"prompt": "", **options} if not {"prompt_name", "input_type"} & options.keys() else options
    inputs: list[str | list[int]] = [*TEXTS, [2, 9, 3]]
    found = both["embedder"].embed(inputs, **options)
    body = {"model": "embedder", "input": inputs, **options}
    expected = [one["embedding"] for one in answer(both.app, "/v1/embeddings", **body)["data"]]
    assert found.dtype == np.dtype(numpy_name(options.get("output_dtype", "float32")))
    np.testing.assert_array_equal(floats(found), floats(expected))


def numpy_name(dtype: str) -> str:
    return {"binary": "int8", "ubinary": "uint8"}.get(dtype, dtype)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 2}, {"prompt_name": "cats", "truncation_direction": "left"}], ids=str
)
def test_embed_sparse(both: Both, options: dict[str, Any]) -> None:
    options = {"input_type": "query"} | options if "prompt_name" not in options else options
    found = both["splade"].embed_sparse(TEXTS, **options)
    expected = answer(both.app, "/embed_sparse", inputs=TEXTS, model="splade", **options)
    for vector, entries in zip(found, expected, strict=True):
        assert vector.indices.tolist() == [entry["index"] for entry in entries]
        np.testing.assert_array_equal(vector.values, floats([entry["value"] for entry in entries]))


@pytest.mark.parametrize(
    "options", [{"input_type": "query"}, {"input_type": "document"}, {"prompt_name": "cats"}], ids=str
)
def test_embed_all(both: Both, options: dict[str, Any]) -> None:
    found = both["colbert"].embed_all([*TEXTS, "hello !"], **options)
    expected = answer(both.app, "/embed_all", inputs=[*TEXTS, "hello !"], model="colbert", **options)
    assert len(found) == len(expected)
    for vectors, rows in zip(found, expected, strict=True):
        np.testing.assert_array_equal(vectors, floats(rows))


@pytest.mark.parametrize("raw", [False, True])
def test_classify(both: Both, raw: bool) -> None:
    inputs: list[str | tuple[str, str]] = [*TEXTS, ("cat", "the cats")]
    found = both["classifier"].classify(inputs, raw_scores=raw)
    body = [[one] if isinstance(one, str) else list(one) for one in inputs]
    expected = answer(both.app, "/predict", inputs=body, model="classifier", raw_scores=raw)
    assert len(found) == len(expected)
    for labels, rows in zip(found, expected, strict=True):
        assert [label.label for label in labels] == [row["label"] for row in rows]
        np.testing.assert_array_equal(floats([label.score for label in labels]), floats([r["score"] for r in rows]))


@pytest.mark.parametrize("options", [{}, {"multi_label": True}], ids=str)
def test_zero_shot(both: Both, options: dict[str, Any]) -> None:
    labels = ["a", "cat", "world"]
    found = both["nli"].zero_shot(TEXTS, labels, hypothesis_template="the {}", **options)
    assert (found.labels, found.scores.shape) == (labels, (len(TEXTS), 3))
    for index, text in enumerate(TEXTS):
        asked = {"candidate_labels": labels, "hypothesis_template": "the {}", **options}
        rows = answer(both.app, "/", inputs=text, model="nli", parameters=asked)
        assert [label.label for label in found[index]] == [row["label"] for row in rows]
        np.testing.assert_array_equal(floats([one.score for one in found[index]]), floats([r["score"] for r in rows]))


def test_one_label_is_no_list_of_letters_and_an_array_without_dimensions_no_names(both: Both) -> None:
    found = both["nli"].zero_shot(TEXTS, "cat", multi_label=True)
    expected = both["nli"].zero_shot(TEXTS, ["cat"], multi_label=True)
    assert found.labels == ["cat"]
    np.testing.assert_array_equal(found.scores, expected.scores)
    for labels in (np.array("cat"), 5):
        with pytest.raises(MalformedRequestError, match=r"labels has the type .*, and must be names in a list"):
            both["nli"].zero_shot(TEXTS, labels)  # type: ignore[arg-type]
    with pytest.raises(MalformedRequestError, match="labels has the type set, which has no order: give a list"):
        both["nli"].zero_shot(TEXTS, {"cat", "dog"})
    with pytest.raises(MalformedRequestError, match="query 0 has the type ndarray without dimensions"):
        both["reranker"].rerank(np.array("cat"), ["cat"])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["nli", "reranker"])
def test_decide(both: Both, kind: str) -> None:
    questions: dict[str, dict[str, Any]] = {
        "which": {"type": "choice", "instructions": "the", "criteria": {"cat": "hello", "world": None}},
        "how": {"type": "score", "instructions": "the", "criteria": ["cat", "cats", "hello"]},
        "is": {"type": "noul", "instructions": "the cat"},
    }
    for state, found in zip(SHORT, both[kind].decide(SHORT, questions), strict=True):
        asked = {"model": kind, "state": state, "questions": questions}
        expected = answer(both.app, "/v1/systemone", **asked)["answers"]
        which, how, yes = (found[name] for name in questions)
        assert which.choice == expected["which"]["choice"]  # type: ignore[union-attr]
        assert which.probabilities == pytest.approx(expected["which"]["probabilities"])  # type: ignore[union-attr]
        assert how.score == pytest.approx(expected["how"]["score"])  # type: ignore[union-attr]
        assert yes.noul == pytest.approx(expected["is"]["noul"])  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{}, {"raw_scores": True}, {"top_n": 2}, {"truncate_prompt_tokens": 9}], ids=str)
def test_rerank(both: Both, options: dict[str, Any]) -> None:
    found = both["reranker"].rerank("cat", TEXTS, **options)
    body = {"query": "cat", "documents": TEXTS, "model": "reranker", **options}
    expected = answer(both.app, "/v1/rerank", **body)["results"]
    assert [rank.index for rank in found] == [row["index"] for row in expected]
    np.testing.assert_array_equal(floats([r.score for r in found]), floats([r["relevance_score"] for r in expected]))


@pytest.mark.parametrize(("query", "texts"), [("cat", ["hello", ""]), ("", ["", "hello"])])
def test_pairs_with_an_empty_side(both: Both, query: str, texts: list[str]) -> None:
    found = both["reranker"].rerank(query, texts)
    expected = answer(both.app, "/rerank", query=query, texts=texts, model="reranker")
    assert [one.index for one in found] == [row["index"] for row in expected]
    np.testing.assert_array_equal(floats([one.score for one in found]), floats([row["score"] for row in expected]))
    pairs = [(query, text) for text in texts]
    predictions = both["classifier"].classify(pairs)
    expected = answer(both.app, "/predict", inputs=pairs, model="classifier")
    assert [predictions[index][0].label for index in range(2)] == [rows[0]["label"] for rows in expected]


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_predict_tokens(both: Both, strategy: Any) -> None:
    found = both["ner"].predict_tokens(TEXTS, aggregation_strategy=strategy)
    expected = answer(both.app, "/predict_tokens", inputs=TEXTS, model="ner", aggregation_strategy=strategy)
    rendered = [
        [
            {
                "token": one.text,
                "token_id": one.token_id,
                "start": one.start,
                "end": one.end,
                "results": {one.label: one.score},
            }
            for one in entities
        ]
        for entities in found
    ]
    assert rendered == expected


@pytest.mark.parametrize("options", [{}, {"add_special_tokens": False}, {"input_type": "query"}], ids=str)
def test_tokenize(both: Both, options: dict[str, Any]) -> None:
    found = both["colbert"].tokenize(TEXTS, **options)
    expected = answer(both.app, "/tokenize", inputs=TEXTS, model="colbert", **options)
    rendered = [[token._asdict() for token in tokens] for tokens in found]
    assert rendered == expected


@pytest.mark.parametrize(
    "options",
    [
        {"dimensions": 9},
        {"prompt_name": "x"},
        {"input_type": "x"},
        {"prompt": "a", "prompt_name": "query"},
        {"output_dtype": "int8", "normalize": False},
        {"output_dtype": "binary", "dimensions": 3},
        {"truncate": False},
        {"truncate": False, "truncate_prompt_tokens": 3},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": 2},
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured_are_refused_in_the_same_words(both: Both, options: dict[str, Any]) -> None:
    options = {"prompt": "", **options} if not {"prompt_name", "input_type"} & options.keys() else options
    with pytest.raises(BeiError) as caught:
        both["embedder"].embed(["cat", LONG], **options)
    response = post(both.app, "/embed", inputs=["cat", LONG], model="embedder", **options)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (str(caught.value), caught.value.code) == (error["message"], error["code"])
    assert getattr(caught.value, "param", None) == error["param"]


@pytest.mark.parametrize(
    ("kind", "path", "body", "ask"),
    [
        ("classifier", "/embed", {"inputs": ["a"]}, lambda model: model.embed(["a"])),
        ("embedder", "/embed_sparse", {"inputs": ["a"]}, lambda model: model.embed_sparse(["a"])),
        ("embedder", "/embed_all", {"inputs": ["a"]}, lambda model: model.embed_all(["a"])),
        ("embedder", "/predict", {"inputs": "a"}, lambda model: model.classify(["a"])),
        ("ner", "/rerank", {"query": "a", "texts": ["a"]}, lambda model: model.rerank("a", ["a"])),
        ("reranker", "/predict_tokens", {"inputs": ["a"]}, lambda model: model.predict_tokens(["a"])),
        ("classifier", "/v1/classify", {"input": ["a"], "labels": ["b"]}, lambda model: model.zero_shot(["a"], ["b"])),
        ("reranker", "/rerank", {"query": "a", "texts": ["a"], "instruction": "b"}, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_task_that_a_model_has_not_is_refused_in_the_same_words(
    both: Both, kind: str, path: str, body: dict[str, Any], ask: Callable[[Model], object] | None
) -> None:
    with pytest.raises(BeiError) as caught:
        both[kind].rerank("a", ["a"], instruction="b") if ask is None else ask(both[kind])
    assert isinstance(caught.value, TaskNotSupportedError) == (ask is not None)
    response = post(both.app, path, model=kind, **body)
    assert (response.status_code, response.json()["error"]["message"]) == (400, str(caught.value))


@pytest.mark.parametrize(
    ("kind", "name", "arguments", "is_stream"),
    [
        ("embedder", "embed", (TEXTS,), True),
        ("splade", "embed_sparse", (TEXTS,), True),
        ("colbert", "embed_all", (TEXTS,), True),
        ("classifier", "classify", (TEXTS,), True),
        ("ner", "predict_tokens", (TEXTS,), True),
        ("reranker", "rerank", ("cat", TEXTS), False),
        ("nli", "zero_shot", (TEXTS, ["a", "cat"]), False),
        ("nli", "decide", (SHORT, {"q": {"type": "noul", "instructions": "a"}}), False),
        ("ner", "tokenize", (TEXTS,), False),
    ],
)
def test_every_form_of_a_method_gives_the_same(
    both: Both, kind: str, name: str, arguments: tuple[Any, ...], is_stream: bool
) -> None:
    model = both[kind]
    options = {"prompt": ""} if name.startswith("embed") else {}
    expected = plain(getattr(model, name)(*arguments, **options))

    async def asynchronous() -> Any:
        return await getattr(model, f"a{name}")(*arguments, **options)

    async def chunks_of_two() -> list[Any]:
        return [chunk async for chunk in getattr(model, f"a{name}_iter")(*arguments, chunk_size=2, **options)]

    assert plain(asyncio.run(asynchronous())) == expected
    if is_stream:
        for chunks in (
            list(getattr(model, f"{name}_iter")(iter(arguments[0]), chunk_size=2, **options)),
            asyncio.run(chunks_of_two()),
        ):
            assert [chunk.inputs for chunk in chunks] == [TEXTS[:2], TEXTS[2:4], TEXTS[4:]]
            assert [one for chunk in chunks for one in plain(chunk.results)] == expected


def plain(result: object) -> Any:
    """``result`` as lists that can be compared: of Predictions, the labels of each input."""
    if isinstance(result, np.ndarray):
        return result.tolist()
    if isinstance(result, (list, tuple, Predictions)):
        return [plain(one) for one in result]
    return plain([*vars(result).values()]) if isinstance(result, Entity) else result
