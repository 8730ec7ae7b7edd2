"""Compose's file is one, by the types of the Compose specification; all YAML below deploy/ is tidy."""

from __future__ import annotations

import pytest
import yamllint.linter
from compose_spec import PyCompose
from yamllint.config import YamlLintConfig

from tests.deploy.files import CHART, COMPOSE, DEPLOY

RULES = YamlLintConfig("""
extends: default
rules:
  line-length: {max: 130}
  document-start: disable
  braces: {max-spaces-inside: 0}
  truthy: {allowed-values: ["true", "false"]}
""")
FILES = [path for path in sorted(DEPLOY.rglob("*.yaml")) if CHART / "templates" not in path.parents]


def test_the_file_fits_the_specification() -> None:
    compose = PyCompose.from_yaml(COMPOSE.read_text("utf-8"))
    compose.validate()
    assert set(compose.service_names()) == {"bei", "prometheus", "grafana"}


@pytest.mark.parametrize(
    ("there", "instead", "message"),
    [
        ("read_only:", "readonly:", "extension key `readonly`"),
        ("condition: service_healthy", "condition: healthy", "unknown variant `healthy`"),
        ("restart: unless-stopped", "restart: sometimes", "services.bei.restart"),
        ("tmpfs: [/tmp]", "tmpfs: [tmp]", "services.bei.tmpfs"),
    ],
)
def test_mistakes_are_found(there: str, instead: str, message: str) -> None:
    text = COMPOSE.read_text("utf-8")
    assert there in text
    with pytest.raises(ValueError, match=message):
        PyCompose.from_yaml(text.replace(there, instead, 1)).validate()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yaml_is_tidy(path: object) -> None:
    with open(str(path), encoding="utf-8") as file:
        problems = [str(problem) for problem in yamllint.linter.run(file, RULES)]
    assert problems == []
    assert len(FILES) >= 6
