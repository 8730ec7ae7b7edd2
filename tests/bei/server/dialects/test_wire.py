"""Every dialect answers to the letter what its file says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bei.config.settings import DIALECTS
from tests.bei.server.app import App
from tests.bei.server.dialects.wire import FOLDER, app_of_all_kinds, asked, error_table, exchanges, is_same

FILES = [name for name in DIALECTS if name != "bei"]
EXCHANGES = [(name, one) for name in FILES for one in exchanges(name)]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    app = app_of_all_kinds(tmp_path_factory.mktemp("wire"))
    yield app
    app.close()


@pytest.mark.parametrize(("_", "exchange"), EXCHANGES, ids=[f"{name}-{one['what']}" for name, one in EXCHANGES])
def test_an_exchange_is_what_the_file_says(app: App, _: str, exchange: dict[str, Any]) -> None:
    found = asked(app, exchange["request"])
    assert is_same(found, exchange["response"]), json.dumps(found, indent=1)


def test_every_error_has_the_dialect_s_status_and_body(app: App) -> None:
    expected = json.loads((FOLDER / "errors.json").read_text("utf-8"))
    found = {dialect.name: error_table(dialect, "/x") for dialect in app.dialects}
    tei = next(iter(app.dialects))
    assert {**found, "tei, OpenAI's routes": error_table(tei, "/v1/embeddings")} == expected
    assert list(found) == FILES
