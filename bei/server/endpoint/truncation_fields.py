"""The types of the fields that say what to do with inputs that are too long: TEI's, Cohere's, NIM's and vLLM's words.

``bei.tokenizer.truncation`` makes one form of them.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from bei.server.endpoint.field_schema import NULL, any_of, one_of

# TEI and BEI: a boolean. Cohere and NIM: which end is cut.
Truncate: TypeAlias = bool | Literal["NONE", "START", "END"]
Direction: TypeAlias = Literal["Left", "Right", "left", "right"]
TokenLimit: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, extra_json_schema={"not": {"const": 0}})]

_LEFT, _RIGHT = ("Left", "left"), ("Right", "right")

# What ``encoding_options`` refuses.
CONTRADICTIONS = (
    any_of(
        "`truncate` as a string contradicts `truncation_direction` and `truncation_side`.",
        {"truncate": {"type": ["boolean", "null"]}},
        {"truncation_direction": NULL, "truncation_side": NULL},
    ),
    any_of(
        "`truncation_direction` and `truncation_side` may not name different sides.",
        *(dict.fromkeys(("truncation_direction", "truncation_side"), one_of(side)) for side in (_LEFT, _RIGHT)),
    ),
    any_of(
        '`truncate` false or "NONE" contradicts `truncate_prompt_tokens`.',
        {"truncate": {"not": {"enum": [False, "NONE"]}}},
        {"truncate_prompt_tokens": NULL},
    ),
)
