"""hadolint has nothing to say about the Dockerfile."""

from __future__ import annotations

import subprocess

import pytest

from tests.deploy.files import ROOT


def complaints(text: str) -> str:
    command = ["hadolint", "--no-color", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60).stdout


def test_there_is_no_complaint() -> None:
    assert complaints((ROOT / "Dockerfile").read_text("utf-8")) == ""


@pytest.mark.parametrize(
    ("there", "instead", "rule"),
    [
        ("USER 10001:10001", "USER bei", "DL3066"),
        ("--no-cache-dir ", "", "DL3042"),
        ("install --yes", "install", "DL3014"),
        ("--no-install-recommends ", "", "DL3015"),
        ('CMD ["serve"]', "CMD serve", "DL3025"),
    ],
)
def test_mistakes_are_found(there: str, instead: str, rule: str) -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    assert there in text
    assert rule in complaints(text.replace(there, instead))
