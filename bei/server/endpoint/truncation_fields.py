"""The types of the fields that say what to do with inputs that are too long: TEI's, Cohere's, NIM's and vLLM's words.

``bei.tokenizer.truncation`` makes one form of them.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from bei.server.endpoint.field_schema import not_both

# TEI and BEI: a boolean. Cohere and NIM: which end is cut.
Truncate: TypeAlias = bool | Literal["NONE", "START", "END"]
Direction: TypeAlias = Literal["Left", "Right", "left", "right"]
TokenLimit: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, extra_json_schema={"not": {"const": 0}})]

# What ``encoding_options`` refuses.
CONTRADICTIONS = (
    not_both("truncate", {"type": "string"}, "truncation_direction", {"type": "string"}),
    not_both("truncate", {"type": "string"}, "truncation_side", {"type": "string"}),
    not_both("truncation_direction", {"enum": ["Left", "left"]}, "truncation_side", {"enum": ["Right", "right"]}),
    not_both("truncation_direction", {"enum": ["Right", "right"]}, "truncation_side", {"enum": ["Left", "left"]}),
    not_both("truncate", {"enum": [False, "NONE"]}, "truncate_prompt_tokens", {"type": "integer"}),
)
