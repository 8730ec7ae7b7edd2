"""GLiREL models: built, served by ``bei.Model`` and HTTP, and against the glirel library where it is installed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bei import Model, Value
from bei.artifact.manifest import Artifact
from bei.bulk import row_task
from bei.engine.entity_pairs import MOST_ENTITIES
from bei.errors import CheckpointError, InvalidRequestError, MalformedRequestError
from bei.service.service import InferenceService
from bei.tasks import entity_relations
from bei.tasks.extract import Span
from tests.bei.server.app import App, check_error
from tests.bei_build.families.test_gliner import PARTS, TEXT
from tests.support.builds import build_artifact, open_engine
from tests.support.checkpoints import change_json
from tests.support.cpus import needs_bf16
from tests.support.glirel_models import MAX_WORDS, save_glirel

RELATIONS = ["works for", "日本", "located in"]


def built(folder: Path, kind: str = "deberta-v2", precision: str = "fp32", **settings: Any) -> Artifact:
    checkpoint = save_glirel(folder / "checkpoint", kind, **settings)
    return build_artifact(checkpoint, folder / "artifact", name="glirel", precision=precision)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("glirel"))


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def places(*spans: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"start": start, "end": end} for start, end in spans]


def scores_of(found: dict[str, list[Any]]) -> dict[tuple[Any, ...], float]:
    """By label and places, in any order."""
    pairs = [(name, one["head"], one["tail"]) for name, instances in found.items() for one in instances]
    assert all(head.score == tail.score for _, head, tail in pairs)
    return {(name, head.start, head.end, tail.start, tail.end): head.score for name, head, tail in pairs}


def test_the_engine_agrees_with_the_module_that_computes_every_pair_whole(artifact: Artifact) -> None:
    (output,) = artifact.certificate.outputs
    assert (output.output, output.failures) == ("span_logits", [])
    assert output.max_abs_difference < 1e-3
    assert output.score_difference is not None
    assert output.score_difference < 2e-4
    assert artifact.manifest.tasks == ["extract"]
    assert artifact.manifest.spec.architecture == "GLiREL"


def test_other_texts_and_entities_of_a_step_change_nothing(model: Model) -> None:
    texts = [TEXT, "cat", "the \u200b cat sat", "hello world " * 15]
    entities = [
        places((0, 7), (8, 11), (4, 20)),
        places((0, 3)),
        places((4, 5), (6, 9), (0, 3)),
        places((0, 5), (6, 90)),
    ]
    together = model.extract_relations(texts, entities, RELATIONS, threshold=0.0)
    assert [sum(map(len, found.values())) for found in together] == [18, 0, 18, 6]
    for text, own, found in zip(texts, entities, together, strict=True):
        (alone,) = model.extract_relations([text], [own], RELATIONS, threshold=0.0)
        assert scores_of(alone) == pytest.approx(scores_of(found), abs=1e-4)
    assert model.extract_relations(texts, [[]] * 4, RELATIONS) == [{name: [] for name in RELATIONS}] * 4
    with pytest.raises(InvalidRequestError, match="relations has the type set, which has no order"):
        model.extract_relations(texts, entities, {*RELATIONS}, threshold=0.0)


def test_texts_are_read_so_many_at_once_that_their_scores_fit_into_memory(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, entities = ["the cat sat", "a", "on the mat"], [places((0, 3), (4, 7)), [], places((3, 6), (7, 10))]
    together = model.extract_relations(texts, entities, RELATIONS, threshold=0.0)
    monkeypatch.setattr(entity_relations, "MOST_SCORES", 1)
    for one, other in zip(together, model.extract_relations(texts, entities, RELATIONS, threshold=0.0), strict=True):
        assert scores_of(one) == pytest.approx(scores_of(other), abs=1e-4)
    assert [*map(len, map(scores_of, together))] == [6, 0, 6]
    shapes = []
    infer = InferenceService.infer

    async def noted(self: InferenceService, request: Any, **asked: Any) -> Any:
        answer = await infer(self, request, **asked)
        shapes.append([row["span_logits"].shape for row in answer.rows])
        return answer

    monkeypatch.setattr(InferenceService, "infer", noted)
    most = 2 * len(RELATIONS) * MOST_ENTITIES  # a text's, of two entities
    for scores, texts_each in ((most, [1, 1]), (2 * most, [2])):
        shapes.clear()
        monkeypatch.setattr(entity_relations, "MOST_SCORES", scores)
        model.extract_relations(texts, entities, RELATIONS, threshold=0.0)
        assert [*map(len, shapes)] == texts_each
        assert all(count == 2 for some in shapes for count, _ in some)  # of all its tokens before
    for name, said in (("MOST_CANDIDATES", "5 relations of a text"), ("MOST_OF_REQUEST", "5 relations of the request")):
        with monkeypatch.context() as patch:
            patch.setattr(entity_relations, name, 5)
            with pytest.raises(InvalidRequestError, match=said):
                model.extract_relations(texts, entities, RELATIONS, threshold=0.0)


def test_an_entity_is_the_words_that_it_touches_and_stays_as_it_was_named(model: Model) -> None:
    inside, whole = places((5, 6), (9, 10)), places((4, 7), (8, 11))
    answers = [model.extract_relations([TEXT], [own], RELATIONS, threshold=0.0)[0] for own in (inside, whole)]
    found, wanted = ([*scores_of(answer).values()] for answer in answers)
    assert found == pytest.approx(wanted, abs=1e-6)
    head = answers[0][RELATIONS[0]][0]["head"]
    assert isinstance(head, Value)
    assert (head.text, head.start, head.end) == ("a", 5, 6)


def test_spans_of_a_model_are_entities_as_they_are_and_thresholds_may_be_a_relations_own(model: Model) -> None:
    spans = [Span(0, 7, "the cat", "animal", 0.9), Span(19, 20, "t", "thing", 0.8)]
    (every,) = model.extract_relations(TEXT, [spans], RELATIONS, threshold=0.0)
    least = sorted(scores_of(every).values())[-1]
    (none,) = model.extract_relations(TEXT, [spans], RELATIONS, threshold=least)
    assert scores_of(none) == {}
    (own,) = model.extract_relations(TEXT, [spans], {RELATIONS[0]: {"threshold": 0.0}, "b": {}}, threshold=1.0)
    assert {name: len(instances) for name, instances in own.items()} == {RELATIONS[0]: 2, "b": 0}


WRONG: list[tuple[Any, Any, dict[str, Any], str]] = [
    ([[(0, 3)]], [], {}, "relations is missing or empty"),
    ([[(0, 3)]], ["a", "a"], {}, "relations has 'a' twice"),
    ([[(0, 3), (4, 5)]], ["a [REL]"], {}, r"relations 0 has '\[REL\]'"),
    ([[(0, 3)]], {"a": "what it means"}, {}, "reads names of relations alone"),
    ([[(0, 3)]], [f"relation {place}" for place in range(97)], {}, "97 relations, and a text is scored for 96"),
    ([[(0, 3), (4, 5)]], ["long " * 300], {}, "The labels take"),
    ([[(0, 3)]], ["a"], {"threshold": 1.5}, "from 0 to 1"),
    ([[(0, 3)]], ["a"], {"flat": False}, "no option 'flat'"),
    ([], ["a"], {}, "entities has 0 lists for 1 texts"),
    ([[(3, 3)]], ["a"], {}, "entities 0 has one from 3 to 3"),
    ([[(0, 999)]], ["a"], {}, "from 0 to 999, in a text of"),
    ([[(3, 4), (0, 3)]], ["a"], {}, "entities 0 has one from 3 to 4, where no word is"),
    ([[(0, 1)] * 33], ["a"], {}, "has 33 entities, and the model scores all pairs of up to 32"),
    ([[(0, 1)] * 32], ["a"], {}, "entities 0 has 32 entities, and .* words that have tokens"),
    ([[{"start": 0, "end": 3, "text": "cat"}]], ["a"], {}, "'the' stands and not 'cat': count in code points"),
    ([[{"start": 0, "end": 3, "type": "x"}]], ["a"], {}, "type"),
    ([[{"start": -1, "end": 3}]], ["a"], {}, "start"),
]


@pytest.mark.parametrize(("entities", "relations", "options", "said"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_what_does_not_fit_is_refused_by_name(
    entities: Any, relations: Any, options: dict[str, Any], said: str, model: Model
) -> None:
    given = [[places(one)[0] if isinstance(one, tuple) else one for one in own] for own in entities]
    with pytest.raises((InvalidRequestError, MalformedRequestError), match=said):
        model.extract_relations([TEXT], given, relations, **options)


ELSEWHERE = "entities is missing: glirel scores .* as entities to POST /v1/extract or to bei.Model.extract_relations"


def test_files_and_sie_s_form_have_no_place_for_entities_and_say_what_has(artifact: Artifact, model: Model) -> None:
    pytest.importorskip("pyarrow")
    for asked in ({"relations": RELATIONS}, {"labels": ["person"]}):
        with pytest.raises(InvalidRequestError, match=ELSEWHERE):
            row_task.extract(model._runner.service, asked)  # type: ignore[arg-type]  # refused before it is used
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        body = json.dumps({"items": [{"text": TEXT}], "params": {"labels": RELATIONS}}).encode()
        check_error(app.request("POST", "/v1/extract/glirel", body), 400, "POST /v1/extract", param="entities")
        assert app.get("/v1/models/glirel").json()["max_entities"] == 32
    finally:
        app.close()


def test_a_message_has_the_beginnings_of_texts_that_differ(model: Model) -> None:
    text = "the cat " * 100_000
    wrong = {"start": 0, "end": len(text), "text": text[1:]}
    with pytest.raises(InvalidRequestError, match=r"'the cat .*'\.\.\. stands and not 'he cat") as caught:
        model.extract_relations([text], [[wrong]], RELATIONS)
    assert len(str(caught.value)) < 300


def test_texts_without_entities_other_questions_and_long_texts_are_refused(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match=ELSEWHERE):
        model.extract([TEXT], ["person"])
    for asked in ({"relations": RELATIONS}, {"structures": {"a": ["b"]}}, {"labels": ["person"]}):
        with pytest.raises(InvalidRequestError, match=ELSEWHERE):
            model.extract_schema([TEXT], **asked)
    for text in ("word " * (MAX_WORDS + 1), "x" * 5000 + " cat"):
        own = places((0, 1), (len(text) - 4, len(text)))
        with pytest.raises(InvalidRequestError, match=r"input 1 .*send the part in which the entities stand"):
            model.extract_relations([TEXT, text], [places((0, 3), (4, 7)), own], RELATIONS)


def test_the_route_has_the_same_relations(artifact: Artifact, model: Model) -> None:
    text = "the 👍🏽 cat sat in 東京"
    cat, town = {"start": 7, "end": 10, "text": "cat"}, {"start": 18, "end": 20, "text": "東京"}
    body = {"input": [text, "cat"], "entities": [[cat, {**town, "label": "city", "score": 0.9}], []]}
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        response = send(app, {**body, "relations": ["in", "eats"], "threshold": 0.0})
        check_error(send(app, {"input": text, "relations": ["in"]}), 400, "entities is missing", param="entities")
        check_error(send(app, {**body, "labels": ["person"]}), 400, "leave labels out", param="labels")
        check_error(send(app, {**body, "relations": ["in"], "flat": False}), 400, "flat is of spans", param="flat")
        check_error(send(app, {**body, "entities": [[cat]], "relations": ["in"]}), 400, "1 lists for 2 texts")
        wrong = {**body, "entities": [[{**cat, "text": "dog"}, town], []], "relations": ["in"]}
        check_error(send(app, wrong), 400, "'cat' stands and not 'dog'", param="entities")
    finally:
        app.close()
    (scores,) = (
        scores_of(one) for one in model.extract_relations([text], [[cat, town]], ["in", "eats"], threshold=0.0)
    )
    assert response.status_code == 200, response.text
    first, second = response.json()["data"]
    assert second == {"index": 1, "spans": [], "relations": {"in": [], "eats": []}}
    for name in ("in", "eats"):
        for instance, (one, other) in zip(first["relations"][name], ((cat, town), (town, cat)), strict=True):
            score = pytest.approx(scores[name, one["start"], one["end"], other["start"], other["end"]], abs=1e-4)
            assert instance == {"head": {**one, "score": score}, "tail": {**other, "score": score}}
    assert first["spans"] == []
    assert response.json()["usage"]["prompt_tokens"] > 10


def send(app: App, body: dict[str, Any]) -> Any:
    return app.request("POST", "/v1/extract", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"span_marker_mode": "markerv2"}, "span_marker_mode = 'markerv2'"),
        ({"scorer": "dot_thresh"}, "scorer = 'dot_thresh'"),
        ({"refine_relation": True}, "refine_relation = True"),
        ({"max_entity_pair_distance": 50}, "max_entity_pair_distance = 50"),
        ({"max_entity_pair_distance": 0}, "max_entity_pair_distance = 0"),
        ({"scorer": ""}, "scorer = ''"),
        ({"label_embed_strategy": None}, "label_embed_strategy = None"),
        ({"hidden_size": 25}, "hidden_size = 25"),
        ({"max_len": "many"}, "max_len = 'many'"),
        ({"model_name": "./nowhere"}, r"glirel_config.json names './nowhere' as the encoder"),
        ({"encoder_config": {"model_type": "bert"}}, "an encoder of model_type 'bert'"),
    ],
)
def test_models_that_are_computed_otherwise_are_refused(tmp_path: Path, settings: Any, message: str) -> None:
    folder = save_glirel(tmp_path / "checkpoint")
    change_json(folder / "glirel_config.json", **settings)
    with pytest.raises(CheckpointError, match=message):
        build_artifact(folder, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "labels"), [("modernbert", "label"), ("deberta-v2", "ent_token")])
def test_other_encoders_and_labels_agree_with_their_modules(tmp_path: Path, kind: str, labels: str) -> None:
    artifact = built(tmp_path, kind, width=32, label_embed_strategy=labels)
    (output,) = artifact.certificate.outputs
    assert output.max_abs_difference < 1e-3


@pytest.mark.slow
@needs_bf16
def test_bf16_is_certified(tmp_path: Path) -> None:
    artifact = built(tmp_path, precision="bf16", spread=0.1)
    assert artifact.certificate.passed
    assert artifact.certificate.outputs[0].score_difference < 0.001  # type: ignore[operator]


def loaded(library: Any, folder: Path) -> Any:
    """As its from_pretrained, which calls for arguments that huggingface_hub has no more."""
    model = library.GLiREL(library.model.load_config_as_namespace(folder / "glirel_config.json"))
    model.load_state_dict(torch.load(folder / "pytorch_model.bin"), strict=True)
    return model.to("cpu").eval()


def asked(rng: random.Random) -> tuple[str, list[tuple[int, int]], list[list[Any]]]:
    """A text, its words, and as the library has them entities of it."""
    while True:
        text = "".join(rng.choice(PARTS) + rng.choice([" ", " ", "", ", "]) for _ in range(rng.randint(1, 7)))
        words = [found.span() for found in re.finditer(r"\w+(?:[-_]\w+)*|\S", text)]  # the library's
        if 4 <= len(words) <= MAX_WORDS:
            break
    spans = {tuple(sorted(rng.choices(range(len(words)), k=2))) for _ in range(rng.randint(2, len(words) // 2))}
    return text, words, [[first, last, "any"] for first, last in sorted(spans)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("deberta-v2", {}),
        ("deberta-v2", {"width": 32, "label_embed_strategy": "ent_token"}),
        ("modernbert", {"spread": 0.2, "factor": 0.5, "label_embed_strategy": "label"}),
    ],
)
def test_relations_and_scores_are_the_glirel_librarys(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    library = pytest.importorskip("glirel")
    artifact = built(tmp_path, kind, **settings)
    theirs = loaded(library, tmp_path / "checkpoint")
    rng, compared = random.Random(39), list[float]()
    with Model(artifact.path, tune="off") as model:
        questions = [asked(rng) for _ in range(500)]
        entities = [places(*((words[one[0]][0], words[one[1]][1]) for one in ner)) for _, words, ner in questions]
        ours = model.extract_relations([text for text, _, _ in questions], entities, RELATIONS, threshold=0.0)
    for (text, words, ner), found in zip(questions, ours, strict=True):
        if len(ner) < 2:
            assert not scores_of(found)
            continue
        tokens = [text[start:end] for start, end in words]
        expected = theirs.predict_relations(tokens, RELATIONS, threshold=0.0, ner=ner)
        wanted = {}
        for one in expected:
            (first, stop), (start, end) = one["head_pos"], one["tail_pos"]
            wanted[one["label"], words[first][0], words[stop - 1][1], words[start][0], words[end - 1][1]] = one["score"]
        assert scores_of(found) == pytest.approx(wanted, abs=2e-4), text
        compared += wanted.values()
    assert len(compared) > 5000
    assert float(np.ptp(np.quantile(compared, [0.1, 0.9]))) > 0.3
