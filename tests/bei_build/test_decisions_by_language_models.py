"""Language models that decide: by tokens that stand for options, and by likelihoods of the options' texts, against
transformers' causal models, by ``bei.Model`` and over HTTP, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bei import Model
from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Encoding, Float32Array, PackedBatch
from bei.engine.shared_prefixes import sharing
from bei.errors import ConfigError, InputTooLongError, InvalidRequestError, TaskNotSupportedError
from bei.service.service import InferenceService
from bei.tasks.questions import ChoiceAnswer, NoulAnswer, ScoreAnswer
from bei_build.config import BuildConfig
from bei_build.onnx_graph import likelihood
from tests.bei.server.app import App
from tests.support.builds import build_artifact, open_engine, running
from tests.support.checkpoints import change_config
from tests.support.cpus import needs_bf16
from tests.support.reading import saved

TOLERANCE = 2e-4
TEXTS = [
    "hello the world",
    " ",
    "is {options} it? {question}",
    "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f600\u202e",
    "in the end " * 9,
]
TOKENS = ("t", "he", "a", "s")
LIKELIHOODS: dict[str, Any] = {"task": "decide", "decide_body": "{text}\nQ: {question}\nA:"}
BY_TOKENS: dict[str, Any] = {
    "task": "decide",
    "decide_body": "{text}\n{question}\n{options}\nA: ",
    "score_tokens": TOKENS,
}
QUESTIONS: dict[str, dict[str, Any]] = {
    "which": {
        "type": "choice",
        "instructions": "it is",
        "criteria": {"world": None, "the cat": "hello", "\u4e16": None},
    },
    "how": {"type": "score", "instructions": "it is", "criteria": ["world", "hello the end", "a"]},
    "is": {"type": "noul", "instructions": "a world?"},
}
# For templates without {options}, which say no descriptions.
NAMED = {**QUESTIONS, "which": {**QUESTIONS["which"], "criteria": dict.fromkeys(QUESTIONS["which"]["criteria"])}}
NAMES = ["Qwen3ForCausalLM", "LlamaForCausalLM", "GraniteForCausalLM", "CohereForCausalLM", "Gemma2ForCausalLM"]


def checkpoint_of(folder: Path, name: str) -> Path:
    """The tiny model ``name``, with room for a prompt."""
    checkpoint = saved(folder, name)
    change_config(checkpoint, max_position_embeddings=256)
    return checkpoint


class Reference:
    """transformers' causal model of a checkpoint."""

    def __init__(self, checkpoint: Path, artifact: Artifact) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()  # type: ignore[no-untyped-call]
        self._tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = self._model(torch.tensor([ids])).logits[0]
        return found

    def likelihood(self, prompt: str, answer: str) -> float:
        """The sum of the logarithms of the probabilities of the tokens of ``answer``."""
        before, behind = self.ids(prompt), self.ids(answer)
        rows = self.logits([*before, *behind])[len(before) - 1 : -1].double().log_softmax(1)
        return float(rows[torch.arange(len(behind)), behind].sum())

    def shares(self, prompt: str, tokens: tuple[str, ...]) -> Float32Array:
        last = self.logits(self.ids(prompt))[-1]
        found: Float32Array = torch.stack([last[self._tokenizer.token_to_id(one)] for one in tokens]).softmax(0).numpy()
        return found

    def of_texts(self, prompt: str, answers: list[str]) -> Float32Array:
        scores = torch.tensor([self.likelihood(prompt, f" {answer}") for answer in answers])
        found: Float32Array = scores.softmax(0).numpy()
        return found


def rows_of(answers: Mapping[str, Any]) -> dict[str, list[float]]:
    """The probabilities in the order of the options."""
    which, how, yes = (answers[name] for name in QUESTIONS)
    assert isinstance(which, ChoiceAnswer)
    assert isinstance(how, ScoreAnswer)
    assert isinstance(yes, NoulAnswer)
    names = [*QUESTIONS["which"]["criteria"]]
    return {
        "which": [which.probabilities[one] for one in names],
        "how": [*how.probabilities],
        "is": [1 - yes.noul, yes.noul],
    }


@pytest.mark.parametrize("name", NAMES)
def test_likelihoods_of_texts_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likelihood, "_ROWS", 17)  # several parts, the last one shorter
    checkpoint = checkpoint_of(tmp_path / "checkpoint", name)
    if name == "Gemma2ForCausalLM":
        change_config(checkpoint, final_logit_softcapping=0.7)
    artifact = build_artifact(checkpoint, tmp_path / "artifact", **LIKELIHOODS)
    assert (artifact.manifest.tasks, artifact.manifest.classification) == (["decide"], None)
    (agreement,) = artifact.certificate.outputs
    assert (agreement.output, agreement.failures) == ("token_likelihood", [])
    reference, spread = Reference(checkpoint, artifact), 0.0
    with Model(artifact.path, tune="off") as model:
        found = model.decide(TEXTS, NAMED)
    for text, answers in zip(TEXTS, found, strict=True):
        rows = rows_of(answers)
        for key, options in (("which", ["world", "the cat", "\u4e16"]), ("how", QUESTIONS["how"]["criteria"])):
            wanted = reference.of_texts(f"{text}\nQ: it is\nA:", options)
            np.testing.assert_allclose(rows[key], wanted, atol=TOLERANCE)
            spread = max(spread, float(wanted.max() - wanted.min()))
        wanted = reference.of_texts(f"{text}\nQ: a world?\nA:", ["no", "yes"])
        np.testing.assert_allclose(rows["is"], wanted, atol=TOLERANCE)
    assert spread > 20 * TOLERANCE


@needs_bf16
def test_bf16_is_certified(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path / "checkpoint", "Qwen3ForCausalLM")
    certificate = build_artifact(checkpoint, tmp_path / "artifact", precision="bf16", **LIKELIHOODS).certificate
    assert certificate.passed


@pytest.mark.parametrize("name", NAMES[:4])
def test_scores_of_tokens_that_stand_for_options_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path / "checkpoint", name)
    artifact = build_artifact(checkpoint, tmp_path / "artifact", **BY_TOKENS, verify=False)
    assert artifact.manifest.tasks == ["decide"]
    reference = Reference(checkpoint, artifact)
    with Model(artifact.path, tune="off") as model:
        found = model.decide(TEXTS, QUESTIONS)
    for text, answers in zip(TEXTS, found, strict=True):
        rows = rows_of(answers)
        shown = "t. the cat: hello\nhe. world\na. \u4e16"  # sorted
        shares = reference.shares(f"{text}\nit is\n{shown}\nA: ", TOKENS[:3])
        np.testing.assert_allclose(rows["which"], shares[[1, 0, 2]], atol=TOLERANCE)
        levels = "t. world\nhe. hello the end\na. a"
        np.testing.assert_allclose(
            rows["how"], reference.shares(f"{text}\nit is\n{levels}\nA: ", TOKENS[:3]), atol=TOLERANCE
        )
        prompt = f"{text}\na world?\nt. no\nhe. yes\nA: "
        np.testing.assert_allclose(rows["is"], reference.shares(prompt, TOKENS[:2]), atol=TOLERANCE)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """The same model by likelihoods, by those behind the shown options, and by tokens."""
    folder = tmp_path_factory.mktemp("built")
    checkpoint = checkpoint_of(folder / "checkpoint", "Qwen3ForCausalLM")
    showing = {**LIKELIHOODS, "decide_body": "{text}\n{question}\n{options}\nA:"}
    settings = {"likelihoods": LIKELIHOODS, "showing": showing, "tokens": BY_TOKENS}
    return {
        name: build_artifact(checkpoint, folder / name, max_seq_len=96, name=name, **given)
        for name, given in settings.items()
    }


@pytest.fixture(scope="module")
def app(built: dict[str, Artifact]) -> Iterator[App]:
    served = App(*[(one, open_engine(one.engine_dir, one.manifest)) for one in built.values()], max_client_batch_size=8)
    yield served
    served.close()


def post(app: App, path: str, **body: object) -> Any:
    response = app.request("POST", path, json.dumps(body).encode())
    return response.status_code, response.json()


@pytest.mark.parametrize("name", ["likelihoods", "showing", "tokens"])
def test_the_same_choices_in_another_order_have_the_same_probabilities(name: str, built: dict[str, Artifact]) -> None:
    orders = [["world", "cat", "hello"], ["hello", "world", "cat"], ["cat", "hello", "world"]]
    asked = {
        str(place): {"type": "choice", "instructions": "it is", "criteria": dict.fromkeys(order)}
        for place, order in enumerate(orders)
    }
    with Model(built[name].path, tune="off") as model:
        (found,) = model.decide(["the world"], asked)
    first, *others = (dict(answer.probabilities) for answer in found.values())  # type: ignore[union-attr,arg-type]
    assert len({*first.values()}) == 3
    assert all(other == pytest.approx(first, abs=1e-6) for other in others)
    assert len({answer.choice for answer in found.values()}) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["likelihoods", "showing", "tokens"])
def test_routes_answer_as_the_model_does(name: str, built: dict[str, Artifact], app: App) -> None:
    questions = [
        {"type": "choice", "name": "which", "instructions": "it is", "choices": [{"value": "world"}, {"value": "cat"}]},
        {"type": "score", "name": "how", "instructions": "it is", "levels": [{"label": "a"}, {"label": "the"}]},
        {"type": "predicate", "name": "is", "instructions": "a world?"},
    ]
    same: dict[str, dict[str, Any]] = {
        "which": {"type": "choice", "instructions": "it is", "criteria": {"world": None, "cat": None}},
        "how": {"type": "score", "instructions": "it is", "criteria": ["a", "the"]},
        "is": {"type": "noul", "instructions": "a world?"},
    }
    with Model(built[name].path, tune="off") as model:
        (expected,) = model.decide(["hello the cat"], same)
    shares = expected["which"].probabilities  # type: ignore[union-attr]
    status, found = post(app, "/v1/decisions", model=name, input="hello the cat", questions=questions)
    assert status == 200, found
    which, how, yes = found["answers"]
    assert {one["value"]: one["probability"] for one in which["probabilities"]} == pytest.approx(shares, abs=1e-6)
    assert how["score"] == pytest.approx(expected["how"].score, abs=1e-6)  # type: ignore[union-attr]
    assert yes["probability"] == pytest.approx(expected["is"].noul, abs=1e-6)  # type: ignore[union-attr]
    for path in ("/v1/systemone", "/ollama/v1/systemone", "/"):
        status, found = post(app, path, model=name, state="hello the cat", questions=same)
        assert status == 200, found
        assert found["answers"]["which"]["probabilities"] == pytest.approx(shares, abs=1e-6)
    for path, body in (("/predict", {"inputs": "a"}), ("/rerank", {"query": "a", "texts": ["b"]})):
        status, found = post(app, path, model=name, **body)
        assert (status, "decide" in found["error"]["message"]) == (400, True)


def test_an_option_that_another_begins_with_is_refused_by_name_before_the_engine_runs(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"q": {"type": "choice", "instructions": "it is", "criteria": {"cat": None, "he": None, "he he": None}}}
    assert post(app, "/v1/systemone", model="tokens", state="a", questions=asked)[0] == 200
    monkeypatch.delattr(InferenceService, "infer")
    status, found = post(app, "/v1/systemone", model="likelihoods", state="a", questions=asked)
    assert status == 400
    assert "'he' and 'he he', of which the second begins with the first" in found["error"]["message"]


def test_more_options_than_tokens_are_refused_by_name(app: App) -> None:
    asked = {"many": {"type": "score", "instructions": "it is", "criteria": [*"vwxyz"]}}
    status, found = post(app, "/v1/systemone", model="tokens", state="a", questions=asked)
    assert status == 400
    assert "'many' has 5 options, and tokens tells 4 apart: send fewer" in found["error"]["message"]
    assert post(app, "/v1/systemone", model="likelihoods", state="a", questions=asked)[0] == 200


def test_a_text_that_does_not_fit_is_refused_and_never_cut(built: dict[str, Artifact]) -> None:
    asked: dict[str, Any] = {"q": {"type": "noul", "instructions": "is it?"}}
    for name in ("likelihoods", "tokens"):
        with (
            Model(built[name].path, tune="off") as model,
            pytest.raises(InputTooLongError, match="nothing of it is cut"),
        ):
            model.decide(["in the end " * 96], asked)


def test_the_beginning_of_all_options_is_computed_once(built: dict[str, Artifact]) -> None:
    prompt = np.arange(20, dtype=np.int32)
    texts = [
        Encoding(np.append(prompt, np.array(answer, np.int32)), num_unpooled=len(prompt))
        for answer in ([3, 4], [3, 5, 6], [7])
    ]
    apart = PackedBatch.from_encodings(texts)
    together = sharing(apart)
    assert together.num_computed == len(prompt) + 2 + 2 + 1
    with running(built["likelihoods"]) as engine:
        assert engine.info.shares_prefixes
        expected, found = (engine.run(batch)["token_likelihood"] for batch in (apart, together))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (np.flatnonzero(found[:, 0]) == [20, 21, 42, 43, 44, 65]).all()


def test_an_option_may_end_with_a_token_of_its_own(tmp_path: Path, built: dict[str, Artifact]) -> None:
    checkpoint = checkpoint_of(tmp_path / "checkpoint", "Qwen3ForCausalLM")
    artifact = build_artifact(
        checkpoint, tmp_path / "artifact", decide_option=" {option}!", **LIKELIHOODS, verify=False
    )
    asked: dict[str, Any] = {"q": {"type": "choice", "instructions": "it is", "criteria": {"he": None, "he he": None}}}
    reference = Reference(checkpoint, artifact)
    with Model(artifact.path, tune="off") as model:
        answer = model.decide(["a"], asked)[0]["q"]
        with pytest.raises(TaskNotSupportedError, match="it can do: decide"):
            model.classify(["a"])
    scores = torch.tensor([reference.likelihood("a\nQ: it is\nA:", f" {one}!") for one in ("he", "he he")])
    np.testing.assert_allclose([*answer.probabilities.values()], scores.softmax(0), atol=TOLERANCE)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "decide"}, r"needs a decide_body, what the model reads before it answers, and \{text\} in it"),
        ({**LIKELIHOODS, "decide_body": "{text}"}, r"and \{question\} in it"),
        ({**BY_TOKENS, "decide_body": "{text} {question}"}, r"and \{options\} in it"),
        ({**BY_TOKENS, "score_tokens": ("t",)}, "leaves nothing to decide"),
        ({**BY_TOKENS, "decide_option": "{option}"}, "decide_option is read where no score_tokens"),
        ({**LIKELIHOODS, "decide_option": "x"}, r"decide_option has no \{option\}"),
        ({**LIKELIHOODS, "task": "auto"}, "decide_body is for language models that decide"),
        ({**LIKELIHOODS, "rerank_body": "{query} {document}"}, "rerank_body is for rerankers"),
        ({**BY_TOKENS, "score_labels": ("a", "b", "c", "d")}, "score_labels names what score_tokens say"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BuildConfig(model="m", target="cpu", **settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("BertModel", LIKELIHOODS, "need a language model; bert has no scores of tokens"),
        ("Qwen3ForCausalLM", {**BY_TOKENS, "score_tokens": ("t", "he", "t")}, "names a token twice"),
        ("Qwen3ForCausalLM", {**BY_TOKENS, "score_tokens": ("t", "unheard of")}, "is not one token of the vocabulary"),
        ("Qwen3ForCausalLM", {**LIKELIHOODS, "precision": "int8"}, "no quantization was measured for"),
        ("Qwen3ForCausalLM", {**LIKELIHOODS, "attention": "bidirectional"}, "needs a causal model"),
        ("Gemma2ForCausalLM", BY_TOKENS, "build with --task decide and none"),
    ],
)
def test_models_that_cannot_decide_are_refused(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "checkpoint", name)
    with pytest.raises(ConfigError, match=message):
        build_artifact(folder, tmp_path / "artifact", **settings)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"type": "choice", "instructions": "is", "criteria": {"cat": "a pet", "he": None}}, "with descriptions"),
        ({"type": "noul", "instructions": "is it?", "criteria": {"true": "it is", "false": None}}, "with descriptions"),
        ({"type": "noul", "criteria": {"true": "it is", "false": None}}, "with descriptions"),
        ({"type": "choice", "criteria": {"cat": None, "he": None}}, "no instructions"),
    ],
)
def test_what_a_template_without_options_would_not_say_is_refused(
    question: dict[str, Any], message: str, app: App
) -> None:
    status, found = post(app, "/v1/systemone", model="likelihoods", state="a", questions={"q": question})
    assert (status, "build it with {options}" in found["error"]["message"]) == (400, True), found
    assert message in found["error"]["message"]


def test_many_questions_about_a_long_state_are_refused_before_they_are_written_out(app: App) -> None:
    asked = {str(place): {"type": "noul", "instructions": "is it?"} for place in range(400)}
    status, found = post(app, "/v1/systemone", model="likelihoods", state="a" * 50_000, questions=asked)
    assert status == 400
    assert "400 questions about a state of 50000 characters" in found["error"]["message"]


def test_a_question_that_is_invalid_names_itself(built: dict[str, Artifact]) -> None:
    with Model(built["likelihoods"].path, tune="off") as model, pytest.raises(InvalidRequestError, match="'q'"):
        model.decide(["a"], {"q": {"type": "choice", "criteria": {"": None}}})
