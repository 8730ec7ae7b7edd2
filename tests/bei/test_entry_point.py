"""The command ``bei`` until ``bei.cli.main`` has it."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

import bei.__main__


def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "bei.cli.main":
            raise KeyboardInterrupt
        return real_import(name, *arguments, **options)

    real_import = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupt)
    with pytest.raises(SystemExit) as caught:
        bei.__main__.main()
    assert caught.value.code == 130
