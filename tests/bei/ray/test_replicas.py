"""Replicas of Ray Serve under load: more of them, fewer, killed, replaced, ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bei.ray.conftest import Scenario
from tests.support.artifacts import save_artifact

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model called tiny, whose vectors have unit length."""
    return save_artifact(tmp_path_factory.mktemp("replicas") / "artifact").path


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same model, whose vectors have other lengths."""
    return save_artifact(tmp_path_factory.mktemp("replicas") / "rebuilt", embedding={"normalize": False}).path


def test_replicas_follow_the_load_up_and_down_and_answer_everything(scenario: Scenario, artifact: Path) -> None:
    found = scenario("replicas", "follow_the_load", artifact, artifact)
    assert found["statuses"].keys() == {"200"}
    assert found["norms"].keys() == {"unit"}
    peak = found["replicas"].index(3)
    assert found["replicas"][: peak + 1] in ([1, 3], [1, 2, 3])
    assert found["replicas"][peak:] in ([3, 1], [3, 2, 1])


def test_what_a_killed_replica_had_is_an_error_that_clients_ask_again(scenario: Scenario, artifact: Path) -> None:
    found = scenario("replicas", "one_is_killed", artifact, artifact)
    assert (found["before"], found["kept"], found["refused"]) == (2, True, [])
    # Each of eight clients had one question under way.
    assert 1 <= found["statuses"].pop("500") <= 8
    assert found["statuses"].keys() == {"200"}


def test_a_replica_that_gets_sigterm_answers_what_it_has_accepted(scenario: Scenario, artifact: Path) -> None:
    found = scenario("replicas", "one_is_terminated", artifact, artifact)
    assert (found["before"], found["kept"]) == (2, True)
    assert found["statuses"].keys() == {"200"}


def test_another_artifact_takes_the_place_of_the_first_one_without_a_failed_request(
    scenario: Scenario, artifact: Path, rebuilt: Path
) -> None:
    found = scenario("replicas", "another_artifact", artifact, rebuilt)
    assert found["statuses"].keys() == {"200"}
    assert found["norms"].keys() == {"unit", "other"}
    assert found["after"].keys() == {"other"}
    assert 0 not in found["replicas"]  # not a moment without a replica that answers


def test_an_application_that_is_deleted_answers_what_it_has_accepted(scenario: Scenario, artifact: Path) -> None:
    found = scenario("replicas", "deleted", artifact, artifact)
    assert found["statuses"].keys() == {"200"}


def test_several_models_stand_behind_one_ingress_and_applications_behind_prefixes(
    scenario: Scenario, artifact: Path, tmp_path: Path
) -> None:
    other = save_artifact(tmp_path / "other", name="other", embedding={"normalize": False}).path
    found = scenario("replicas", "several_models", artifact, other)
    assert (found["models"], found["second"]) == (["other", "tiny"], ["other"])
    assert found["norms"] == [pytest.approx(1.0), found["norms"][2], pytest.approx(17.66, abs=0.01)]
    assert found["unknown"] == "model_not_found"
    assert (found["ready"], found["ids"], found["no_route"]) == (200, ["mine"], "route_not_found")
