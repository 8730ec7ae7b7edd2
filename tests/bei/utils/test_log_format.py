"""The log as JSON: a line a record, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bei.utils import log_format
from bei.utils.log_format import FIELDS, JsonFormatter


def line(message: str, *arguments: object, **attributes: Any) -> dict[str, Any]:
    """The output for a record, which must be one line of ASCII."""
    exc_info = attributes.pop("exc_info", None)
    record = logging.LogRecord("bei.x", logging.WARNING, "x.py", 1, message, arguments, exc_info)
    for name, value in attributes.items():
        setattr(record, name, value)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert text.isascii()
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_record_has_time_level_logger_and_message() -> None:
    found = line("a %s of %d", "word", 2)
    assert found.pop("time").endswith("+00:00")
    assert found == {"level": "warning", "logger": "bei.x", "message": "a word of 2"}


@pytest.mark.parametrize("text", ['"quoted"\n{"level": "fake"}', "\u2028\x1b[31m\x00", "ümläut \U0001f600", "\udcff"])
def test_whatever_is_in_a_message_it_stays_one_line(text: str) -> None:
    assert line("%s", text)["message"] == text


def test_fields_stand_in_the_place_of_the_message() -> None:
    found = line("%s", object(), **{FIELDS: {"message": "request", "status": 200, "lane": None}})
    assert {name: found[name] for name in ("message", "status", "lane")} == {
        **{"message": "request", "status": 200},
        **{"lane": None},
    }


def test_a_traceback_is_within_the_line() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        found = line("failed", exc_info=sys.exc_info())
    assert found["message"] == "failed"
    assert found["exception"].splitlines()[-1] == "ValueError: wrong"


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is as it was after the test."""
    levels = {name: logging.getLogger(name).level for name in ("", "uvicorn", "uvicorn.error")}
    yield logging.getLogger()
    logging.captureWarnings(False)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_whole_log_has_the_form_asked_for_also_uvicorn_s(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(root, "handlers", [])  # without pytest's
    log_format.configure(form)
    logging.getLogger("bei.server").info("one")
    logging.getLogger("bei.server").debug("too much")
    logging.getLogger("uvicorn.error").info("too much")
    logging.getLogger("uvicorn.error").error("two")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    if form == "json":
        assert [json.loads(one)["message"] for one in lines] == ["one", "two"]
    else:
        assert lines[0].endswith(" INFO one")
        assert lines[1].endswith(" ERROR two")


MANY_LINES = """
import logging, sys
from bei.utils.log_format import configure
configure("json", sys.argv[1])
for number in range(100):
    logging.getLogger("test").info("%d %s", number, sys.argv[1] * (100_000 if number % 3 == 0 else 1))
"""


def test_lines_of_several_processes_are_whole_and_name_them() -> None:
    reading, writing = os.pipe()
    processes = [subprocess.Popen([sys.executable, "-c", MANY_LINES, name], stderr=writing) for name in ("a", "b")]
    os.close(writing)
    with os.fdopen(reading) as written:
        lines = [json.loads(line) for line in written]
    assert [process.wait() for process in processes] == [0, 0]
    for name in ("a", "b"):
        messages = [line["message"] for line in lines if line["process"] == name]
        assert messages == [f"{number} {name * (100_000 if number % 3 == 0 else 1)}" for number in range(100)]


def test_a_named_process_stands_before_its_messages(capfd: pytest.CaptureFixture[str]) -> None:
    configured = "from bei.utils.log_format import configure; configure('text', 'front-1')"
    code = f"import logging; {configured}; logging.info('a \\u00e9')"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert capfd.readouterr().err.endswith(" INFO front-1: a \\xe9\n")
