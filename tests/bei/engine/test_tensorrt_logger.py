"""One log for builds and engines: a build's lines are collected, an engine's go to Python's log."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from bei.engine.tensorrt_logger import process_logger


class ILogger:
    """In the place of the library's class."""


def said(logger: object, severity: str, message: str) -> None:
    logger.log(SimpleNamespace(name=severity), message)  # type: ignore[attr-defined]


@pytest.fixture
def logger() -> object:
    return process_logger(type("ILogger", (ILogger,), {}))  # a class of its own: other tests' lines stay out


def test_a_class_has_one_logger() -> None:
    assert process_logger(ILogger) is process_logger(ILogger)


def test_errors_are_kept_for_the_thread_that_finds_the_failure(
    logger: object, caplog: pytest.LogCaptureFixture
) -> None:
    other = threading.Thread(target=said, args=(logger, "ERROR", "another thread's"))
    other.start()
    other.join()
    with caplog.at_level(logging.WARNING):
        said(logger, "ERROR", "no\n  memory")
        said(logger, "WARNING", "slow")
        said(logger, "INFO", "chatter")
    assert logger.said() == "no memory"  # type: ignore[attr-defined]
    assert logger.said() == "it gave no reason"  # type: ignore[attr-defined]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING][-2:] == [
        "TensorRT: no memory",
        "TensorRT: slow",
    ]


def test_a_recording_has_the_lines_of_all_threads_and_passes_none_on(
    logger: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), logger.recording() as lines:  # type: ignore[attr-defined]
        worker = threading.Thread(target=said, args=(logger, "ERROR", "in the build's thread"))
        worker.start()
        worker.join()
        said(logger, "WARNING", "an input\nis unused")
        said(logger, "VERBOSE", "one of seven hundred")
    assert lines == [("ERROR", "in the build's thread"), ("WARNING", "an input is unused")]
    assert not caplog.records
    assert logger.said() == "it gave no reason"  # type: ignore[attr-defined]
    with logger.recording() as lines:  # type: ignore[attr-defined]
        assert lines == [], "the lines of one build are not held against the next"
