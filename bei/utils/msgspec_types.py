"""Types that msgspec decodes."""

from __future__ import annotations

from typing import Any

import msgspec


def prepare_types(*types: Any) -> None:
    """Let msgspec make its description of ``types``, and of all types within, now: while their module is imported.

    msgspec makes the description of a class when it is first asked for it, stores it unfinished, and runs Python code
    before it has filled it in. Another thread that decodes this class meanwhile uses what is not there yet: 0.22 then
    ends the process with a segmentation fault, or decodes into nothing.
    """
    for kind in types:
        msgspec.msgpack.Decoder(kind)
