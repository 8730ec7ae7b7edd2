"""Fields of other servers' requests that bei does not honour, and that would change what the answer means.

A value that asks for what is done anyway is accepted, as clients send their defaults; any other is a 400 that names the
field. Fields that no answer depends on (``user``, ``priority``, ``request_id``) are ignored like unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from bei.errors import InvalidRequestError
from bei.server.controls import PromptControls, ScoreControls

_Any: TypeAlias = Annotated[Any, Meta(description="Not supported; what is done anyway may be sent.")]


class _Rule(NamedTuple):
    """``accepted`` asks for what is done anyway; ``remedy`` says what can be sent instead."""

    accepted: tuple[object, ...]
    remedy: str


_FLOATS = "vectors are float32; leave it out, and choose the form with encoding_format"
_OFF: tuple[object, ...] = (False, {}, [])


class EmbeddingControls(PromptControls, kw_only=True):
    """PromptControls, and fields of Jina, Voyage, Cohere, Mistral, NIM, Infinity and vLLM."""

    output_dtype: _Any = None
    embedding_type: _Any = None
    embedding_types: _Any = None
    embed_dtype: _Any = None
    endianness: _Any = None
    output_dimension: _Any = None
    task: _Any = None
    modality: _Any = None
    truncation: _Any = None
    normalized: _Any = None
    use_activation: _Any = None
    late_chunking_params: _Any = None

    _rules: ClassVar[Mapping[str, _Rule]] = {
        "output_dtype": _Rule(("float",), _FLOATS),
        "embedding_type": _Rule(("float", ["float"]), _FLOATS),
        "embedding_types": _Rule(("float", ["float"]), _FLOATS),
        "embed_dtype": _Rule(("float32", "float"), _FLOATS),
        "endianness": _Rule(("little", "native"), "vectors in base64 are little-endian; leave it out"),
        "task": _Rule((), "leave it out, and name the kind of text with input_type or prompt_name"),
        "modality": _Rule(("text",), "bei reads texts; leave it out"),
        "truncation": _Rule((True,), "send truncate false for an error where an input is too long"),
        "late_chunking_params": _Rule(_OFF, "leave it out, and send late_chunking with the chunks as inputs"),
    }

    def check_unsupported(self, width: int, *, normalize: bool) -> None:
        """Raise InvalidRequestError unless ``width`` components, of unit length if ``normalize``, are what is asked."""
        _check(self, self._rules)
        if self.output_dimension not in (None, width):
            raise _error("output_dimension", self.output_dimension, "send dimensions")
        for name in ("normalized", "use_activation"):
            if getattr(self, name) not in (None, normalize):
                raise _error(name, getattr(self, name), "send normalize")


class PairControls(ScoreControls, kw_only=True):
    """ScoreControls, and fields of Voyage, Cohere v1, Jina and vLLM."""

    top_k: _Any = None
    truncation: _Any = None
    max_chunks_per_doc: _Any = None
    max_doc_length: _Any = None
    max_query_length: _Any = None
    max_tokens_per_query: _Any = None
    return_embeddings: _Any = None
    chat_template_kwargs: _Any = None

    _rules: ClassVar[Mapping[str, _Rule]] = {
        "top_k": _Rule((), "send top_n"),
        "truncation": _Rule((True,), "send truncate false for an error where a pair is too long"),
        "max_chunks_per_doc": _Rule((), "leave it out; documents are not read in chunks"),
        "max_doc_length": _Rule((), "send max_tokens_per_doc"),
        "max_query_length": _Rule((), "leave it out; of a pair the longer side is cut"),
        "max_tokens_per_query": _Rule((-1, 0), "leave it out; of a pair the longer side is cut"),
        "return_embeddings": _Rule((False,), "leave it out; ask /v1/embeddings"),
        "chat_template_kwargs": _Rule(_OFF, "leave it out; the model's template is fixed when it is built"),
    }

    def check_unsupported(self) -> None:
        """Raise InvalidRequestError that names a field which is asked for and not honoured."""
        _check(self, self._rules)


def _check(body: msgspec.Struct, rules: Mapping[str, _Rule]) -> None:
    for name, rule in rules.items():
        value = getattr(body, name)
        if value is not None and not any(type(value) is type(same) and value == same for same in rule.accepted):
            raise _error(name, value, rule.remedy)


def _error(name: str, value: object, remedy: str) -> InvalidRequestError:
    shown = str(value) if len(str(value)) <= 40 else f"{str(value)[:40]}..."
    return InvalidRequestError(f"{name} {shown} is not supported here: {remedy}.", name)
