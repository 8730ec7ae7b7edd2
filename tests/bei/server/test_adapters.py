"""Adapters over HTTP: by the model's name, by task, in one step, in the row cache, and through a swap."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bei import Model
from bei.artifact.manifest import Adapters, Artifact
from bei.core import Float32Array
from bei.engine.fake import FakeEngine, fake_row
from bei.engine.postprocess import unit_length
from bei.errors import ConfigError, InvalidRequestError
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import post
from tests.bei.server.lifecycle.test_swap import Bench, loaded
from tests.support.artifacts import LIMITS, save_artifact, token_ids

NAMES = ["retrieval.query", "text-matching", "separation", "mine"]
TASKS = NAMES[:3]
PROMPTS = {"retrieval.query": "query : "}
ROUTE = "/v1/embeddings"


def save(folder: Path, **fields: Any) -> Artifact:
    adapters = Adapters(names=NAMES, tasks=TASKS, is_required=False)
    return save_artifact(folder, **{"adapters": adapters, "prompts": PROMPTS, **fields})


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(LIMITS)


@pytest.fixture
def app(engine: FakeEngine, tmp_path: Path) -> Iterator[App]:
    app = App((save(tmp_path / "artifact"), engine), cache_megabytes=8)
    yield app
    app.close()


def vector(text: str, adapter: int) -> Float32Array:
    """What the fake engine gives for ``text`` read by ``adapter``."""
    ids = np.array(token_ids(text, LIMITS.max_seq_len), np.int32)
    row: Float32Array = unit_length(fake_row(ids, None, adapter)[None])[0]
    return row


def answered(app: App, text: Any, **fields: Any) -> Float32Array:
    answer = post(app, ROUTE, input=text, encoding_format="base64", **fields)
    assert answer.status_code == 200, answer.text
    return np.frombuffer(base64.b64decode(answer.json()["data"][0]["embedding"]), np.float32)


@pytest.mark.parametrize(("number", "name"), [*enumerate(NAMES, 1)])
def test_the_models_name_chooses_an_adapter(number: int, name: str, app: App) -> None:
    wanted = vector(PROMPTS.get(name, "") + "hello", number)
    np.testing.assert_allclose(answered(app, "hello", model=f"tiny:{name}"), wanted, rtol=1e-6)
    ids = token_ids("hello")
    np.testing.assert_allclose(answered(app, ids, model=f"tiny:{name}"), vector("hello", number), rtol=1e-6)


@pytest.mark.parametrize(("number", "name"), [*enumerate(NAMES, 1)])
def test_sglangs_field_chooses_an_adapter_for_all_inputs_or_one_for_each(number: int, name: str, app: App) -> None:
    ids, wanted = token_ids("hello"), vector("hello", number)
    for fields in ({"lora_path": name}, {"lora_path": [name]}, {"lora_path": name, "model": f"tiny:{name}"}):
        np.testing.assert_allclose(answered(app, ids, **fields), wanted, rtol=1e-6)
    assert post(app, ROUTE, input=["a", "b"], lora_path=[name, name]).json()["model"] == f"tiny:{name}"


def test_an_adapter_of_sglangs_field_that_cannot_be_used_is_refused(app: App) -> None:
    np.testing.assert_allclose(answered(app, token_ids("hello"), lora_path=[None]), vector("hello", 0), rtol=1e-6)
    both = {"input": ["a", "b"]}
    for fields, message in (
        ({"lora_path": "other"}, f"tiny has no adapter 'other'. Its adapters: {', '.join(NAMES)}"),
        ({"lora_path": "mine", "model": "tiny:separation"}, "model tiny:separation and lora_path mine contradict"),
        ({"lora_path": ["mine", "separation"]}, "names several adapters"),
        ({"lora_path": ["mine", None]}, "names several adapters"),
        ({"lora_path": ["mine"]}, "1 names for 2 inputs"),
    ):
        check_error(post(app, ROUTE, **both, **fields), 400, message, param="lora_path")
    task = {"lora_path": "mine", "task": "separation"}
    check_error(post(app, ROUTE, **both, **task), 400, "several adapters (separation, mine)", param="input_type")


def test_the_answer_has_the_name_that_was_asked_for(app: App) -> None:
    assert post(app, ROUTE, input="hello", model="tiny:mine").json()["model"] == "tiny:mine"


@pytest.mark.parametrize(("field", "route"), [("task", ROUTE), ("input_type", ROUTE), ("task", "/jina/v1/embeddings")])
@pytest.mark.parametrize(("number", "task"), [*enumerate(TASKS, 1), (0, "none")])
def test_the_task_chooses_an_adapter_and_its_prompt(field: str, route: str, number: int, task: str, app: App) -> None:
    if route != ROUTE:
        return check_jina(app, task, number)
    wanted = vector(PROMPTS.get(task, "") + "hello", number)
    np.testing.assert_allclose(answered(app, "hello", **{field: task}), wanted, rtol=1e-6)
    return None


def check_jina(app: App, task: str, number: int) -> None:
    answer = post(app, "/jina/v1/embeddings", input=["hello"], task=task)
    if answer.status_code == 404:
        pytest.skip("the dialect is not served here")
    wanted = vector(PROMPTS.get(task, "") + "hello", number)
    np.testing.assert_allclose(answer.json()["data"][0]["embedding"], wanted, rtol=1e-5)


def test_without_a_name_the_base_model_answers(app: App) -> None:
    np.testing.assert_allclose(answered(app, "hello"), vector("hello", 0), rtol=1e-6)


def test_equal_texts_of_different_adapters_are_neither_one_entry_nor_one_row_of_the_cache(app: App) -> None:
    for _ in range(2):  # computed, then from the cache
        for number, name in enumerate(NAMES, 1):
            found = answered(app, token_ids("hello"), model=f"tiny:{name}")
            np.testing.assert_allclose(found, vector("hello", number), rtol=1e-6)
        np.testing.assert_allclose(answered(app, "hello"), vector("hello", 0), rtol=1e-6)


def test_64_requests_of_4_adapters_at_once_get_their_own_vectors(app: App, engine: FakeEngine) -> None:
    texts = [f"{'hello ' * (index % 5 + 1)}{index % 10}" for index in range(64)]

    async def ask_all() -> list[httpx.Response]:
        bodies = ({"input": token_ids(text), "model": f"tiny:{NAMES[index % 4]}"} for index, text in enumerate(texts))
        return await asyncio.gather(*(app.client.post(ROUTE, json=body) for body in bodies))

    for index, answer in enumerate(app.run(ask_all())):
        found = answer.json()["data"][0]["embedding"]
        np.testing.assert_allclose(found, vector(texts[index], index % 4 + 1), rtol=1e-5)
    mixed = [batch for batch in engine.batches if batch.adapters is not None and len(set(batch.adapters.tolist())) > 1]
    assert mixed, "no step had two adapters"


def test_models_lists_every_adapter(app: App) -> None:
    listed = {model["id"]: model for model in app.get("/v1/models").json()["data"]}
    assert [*listed] == ["tiny", *(f"tiny:{name}" for name in NAMES)]
    assert listed["tiny"]["adapters"] == NAMES
    assert listed["tiny:mine"]["adapter_of"] == "tiny"
    assert app.get("/v1/models/tiny:mine").json() == listed["tiny:mine"]


def test_an_adapter_that_there_is_not_is_404_with_the_names_of_those_there_are(app: App) -> None:
    answer = post(app, ROUTE, input="hello", model="tiny:other")
    check_error(
        answer, 404, f"tiny has no adapter 'other', but {', '.join(NAMES)}", param="model", code="model_not_found"
    )


def test_a_task_that_there_is_not_is_400_with_the_names_of_those_there_are(app: App) -> None:
    check_error(post(app, ROUTE, input="hello", task="other"), 400, ", ".join(TASKS), param="input_type")


def test_a_name_and_a_task_may_not_contradict_each_other(app: App) -> None:
    asked = {"input": "hello", "model": "tiny:separation", "task": "text-matching"}
    check_error(post(app, ROUTE, **asked), 400, "several adapters (text-matching, separation)", param="input_type")
    assert answered(app, "hello", model="tiny:separation", task="separation").any()


def test_a_model_that_needs_an_adapter_says_which_there_are(tmp_path: Path) -> None:
    adapters = Adapters(names=TASKS, tasks=TASKS, is_required=True)
    app = App((save(tmp_path / "needs", adapters=adapters), FakeEngine(LIMITS)))
    try:
        check_error(post(app, ROUTE, input="hello"), 400, f"Tasks: {', '.join(TASKS)}", param="input_type")
        assert app.get("/health").status_code == 200  # the canary is the base model's
        np.testing.assert_allclose(answered(app, "hello", task="none"), vector("hello", 0), rtol=1e-6)
    finally:
        app.close()


def test_a_swap_under_load_gives_no_request_another_adapter(tmp_path: Path) -> None:
    first, second = (
        save(tmp_path / name, bei_version=version) for name, version in (("first", "0.0.1"), ("second", "0.0.2"))
    )
    former, new = FakeEngine(LIMITS), FakeEngine(LIMITS)
    bench = Bench((first, former))
    bench.next["tiny"] = lambda: loaded(second, new)
    texts = [f"hello {'abcdefgh'[index % 8]}" for index in range(160)]

    async def ask(index: int) -> None:
        body = {"input": token_ids(texts[index]), "model": f"tiny:{NAMES[index % 4]}"}
        answer = await bench.app.client.post(ROUTE, json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()["data"][0]["embedding"]
        np.testing.assert_allclose(found, vector(texts[index], index % 4 + 1), rtol=1e-5)

    async def test() -> None:
        asked = [asyncio.ensure_future(ask(index)) for index in range(80)]
        await asyncio.sleep(0)
        await bench.swapping.reload()
        asked += [asyncio.ensure_future(ask(index)) for index in range(80, 160)]
        await asyncio.gather(*asked)
        await bench.swapping.wait_closed()
        await ask(0)

    try:
        bench.run(test)
        assert bench.swaps("swapped") == 1
        assert any(batch.adapters is not None for batch in former.batches)
        assert any(batch.adapters is not None for batch in new.batches)
    finally:
        bench.app.close()


def test_bei_model_reads_all_inputs_with_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "artifact").path
    monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: FakeEngine(LIMITS))
    with Model(path, adapter="mine", tune="off", tokenizer_threads=1) as model:
        np.testing.assert_allclose(model.embed("hello", prompt="")[0], vector("hello", 4), rtol=1e-6)
        with pytest.raises(InvalidRequestError, match="several adapters"):
            model.embed("hello", input_type="separation")
    with Model(path, tune="off", tokenizer_threads=1) as model:
        np.testing.assert_allclose(model.embed("hello", input_type="separation")[0], vector("hello", 3), rtol=1e-6)
    with pytest.raises(ConfigError, match=f"no adapter 'other'\\. Its adapters: {', '.join(NAMES)}"):
        Model(path, adapter="other", tune="off", tokenizer_threads=1)
