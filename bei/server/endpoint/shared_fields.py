"""Fields that many routes share: which model, how inputs are cut, the prompt; and those of other servers' requests.

A field of another server that would change what the answer means, and that bei does not honour, has a rule: a value
that asks for what is done anyway is accepted, as clients send their defaults; any other is a 400 that names the field.
Fields that no answer depends on (``user``, ``priority``, ``request_id``) are ignored like unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec import Meta

from bei.errors import InvalidRequestError
from bei.server.auth.priority import TIER_NAMES
from bei.server.endpoint.field_schema import Limits, any_of, limits, one_of
from bei.server.endpoint.truncation_fields import CONTRADICTIONS, Direction, TokenLimit, Truncate
from bei.server.endpoint.vector_encoding import DType
from bei.service.call import ModelInput
from bei.tasks.embed import EmbedTask
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions
from bei.tokenizer.truncation import encoding_options

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's, of Python 3.11

Model: TypeAlias = Annotated[str, Meta(description="May be left out where one served model has the task.")]
Dimensions: TypeAlias = Annotated[int, Meta(ge=1, description="Vectors are cut to their first components.")]

ServiceTier: TypeAlias = Annotated[
    str,
    Meta(
        description="OpenAI's word for the lane: priority is interactive, flex is bulk, the others name none.",
        extra_json_schema={"enum": [*TIER_NAMES]},
    ),
]

# What ``Controls.encoding_options`` looks at, of nearly all clients.
_NOT_ASKED = (None, None, None, None, True)


class Tiered(msgspec.Struct, kw_only=True):
    """A request that a model answers. The endpoint reads its field: see ``RequestContext.ask_tier``."""

    service_tier: ServiceTier | None = None


class Controls(Tiered, kw_only=True):
    """What every inference request may say beside its inputs. Fields that are not known are ignored."""

    model: Model | None = None
    truncate: Annotated[Truncate | None, Meta(description="Null: as the server is configured.")] = None
    truncation_direction: Direction | None = None
    truncation_side: Annotated[Direction | None, Meta(description="vLLM's word for truncation_direction.")] = None
    truncate_prompt_tokens: Annotated[TokenLimit | None, Meta(description="-1: the model's limit.")] = None
    add_special_tokens: bool = True

    _limits: ClassVar[Limits] = CONTRADICTIONS

    def encoding_options(self) -> EncodingOptions:
        """Raises InvalidRequestError where two fields contradict each other."""
        direction, side = self.truncation_direction, self.truncation_side
        asked = (self.truncate, direction, side, self.truncate_prompt_tokens, self.add_special_tokens)
        if asked == _NOT_ASKED:
            return AS_CONFIGURED
        if direction is not None and side is not None and direction.lower() != side.lower():
            raise _contradiction("truncation_direction", direction, "truncation_side", side)
        return encoding_options(
            self.truncate,
            direction or side,
            self.truncate_prompt_tokens,
            add_special_tokens=self.add_special_tokens,
        )


class PromptControls(Controls, kw_only=True):
    """Of requests whose texts may get a prompt."""

    prompt_name: Annotated[str | None, Meta(description="A prompt of the model's: see /v1/models.")] = None
    input_type: Annotated[str | None, Meta(description="query, document, or the name of a prompt.")] = None
    prompt: Annotated[str | None, Meta(description="The prompt itself, in front of texts, or around {text}.")] = None

    def embed_task(self, inputs: Seq[ModelInput], **asked: Any) -> EmbedTask:
        """For the vectors of ``inputs``; ``asked`` are other fields of EmbedTask."""
        return EmbedTask(
            inputs,
            self.encoding_options(),
            prompt_name=self.prompt_name,
            input_type=self.input_type,
            prompt=self.prompt,
            **asked,
        )


class ScoreControls(Controls, kw_only=True):
    """Of requests that are answered with scores."""

    raw_scores: Annotated[bool | None, Meta(description="Logits instead of probabilities.")] = None
    use_activation: Annotated[bool | None, Meta(description="vLLM's word: false asks for logits.")] = None

    _limits: ClassVar[Limits] = (
        any_of(
            "`raw_scores` and `use_activation` may not be both true or both false.",
            *({"raw_scores": one_of([raw]), "use_activation": one_of([not raw])} for raw in (True, False)),
        ),
    )

    def is_raw(self) -> bool:
        """True if logits are asked for. Raises InvalidRequestError where two fields contradict each other."""
        if self.raw_scores is not None and self.raw_scores is self.use_activation:
            raise _contradiction("raw_scores", self.raw_scores, "use_activation", self.use_activation)
        return bool(self.raw_scores) or self.use_activation is False


def agreed(body: msgspec.Struct, *names: str) -> Any:
    """The value of the fields ``names``, which mean the same. Raises InvalidRequestError where they contradict."""
    first = found = None
    for name in names:
        value = getattr(body, name)
        if value is None:
            continue
        if found is None:
            first, found = name, value
        elif value != found or type(value) is not type(found):
            raise _contradiction(str(first), found, name, value)
    return found


def _contradiction(first: str, found: object, name: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{first} {found} and {name} {value} contradict each other: send one.", name)


class _Rule(NamedTuple):
    """``accepted`` asks for what is done anyway; ``remedy`` says what can be sent instead."""

    accepted: tuple[object, ...]
    remedy: str

    @property
    def meta(self) -> Meta:
        """The field's schema, for /openapi.json."""
        return Meta(description=f"Not supported: {self.remedy}.", extra_json_schema=one_of(self.accepted))


_OFF: tuple[object, ...] = (False, {}, [])

_OF_EMBEDDINGS: Mapping[str, _Rule] = {
    "endianness": _Rule(("little", "native"), "vectors in base64 are little-endian; leave it out"),
    "modality": _Rule(("text", "image"), "bei reads texts and images"),
    "late_chunking_params": _Rule(_OFF, "leave it out, and send late_chunking with the chunks as inputs"),
}

_OF_PAIRS: Mapping[str, _Rule] = {
    "top_k": _Rule((), "send top_n, or point Voyage's client at /voyage"),
    "max_chunks_per_doc": _Rule((1,), "leave it out; documents are not read in chunks"),
    "max_doc_length": _Rule((), "send max_tokens_per_doc"),
    "max_query_length": _Rule((), "leave it out; of a pair the longer side is cut"),
    "max_tokens_per_query": _Rule((-1, 0), "leave it out; of a pair the longer side is cut"),
    "return_embeddings": _Rule((False,), "leave it out; ask /v1/embeddings"),
    "chat_template_kwargs": _Rule(_OFF, "leave it out; the model's template is fixed when it is built"),
}

_NO_CHATS = "leave it out; no chat template is applied to messages"

# Of vLLM's requests with messages.
OF_CHATS: Mapping[str, _Rule] = {
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "chat_template"), _Rule((False,), _NO_CHATS)),
    "chat_template_kwargs": _Rule(_OFF, _NO_CHATS),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), _Rule(_OFF, "leave it out; images are read as built")),
}

# Of a request with texts and of one with documents: what the other one has on the same paths.
_ELSEWHERE = "send documents in the place of texts"

OF_DOCUMENTS: Mapping[str, _Rule] = {
    "return_documents": _Rule((False,), "send return_text"),
    "rank_fields": _Rule(_OFF, _ELSEWHERE),
    "max_tokens_per_doc": _Rule((), _ELSEWHERE),
}

# Of Cohere's first version.
_NEWER = "send it to /v2/embed"

OF_COHERE_V2: Mapping[str, _Rule] = {
    "inputs": _Rule((), _NEWER),
    "output_dimension": _Rule((), _NEWER),
    "max_tokens": _Rule((), _NEWER),
}

# Of requests that are answered with probabilities alone.
OF_SCORES: Mapping[str, _Rule] = {
    "raw_scores": _Rule((False,), "labels of the request have probabilities; leave it out"),
    "use_activation": _Rule((True,), "labels of the request have probabilities; leave it out"),
}

# Of requests for vectors that are neither cut nor written in another form.
OF_WIDE_VECTORS: Mapping[str, _Rule] = {
    "dimensions": _Rule((), "these vectors keep their width; leave it out"),
    "output_dtype": _Rule(("float", "float32"), "these vectors are written as numbers; leave it out"),
}

OF_TEXTS: Mapping[str, _Rule] = {"return_text": _Rule((False,), "send return_documents")}

_FORMS = ("base64", "float32", *get_args(DType))

FormName: TypeAlias = Annotated[str, limits(enum=_FORMS)]

# Several times the same is one form.
FormNames: TypeAlias = Annotated[list[str], limits(anyOf=[{"items": {"const": form}} for form in _FORMS])]


class EmbeddingControls(PromptControls, kw_only=True):
    """PromptControls, and fields of Jina, Voyage, Cohere, Mistral, NIM, Infinity and vLLM."""

    dimensions: Dimensions | None = None
    normalize: Annotated[bool | None, Meta(description="Unit length; null: as the checkpoint says.")] = None
    output_dtype: Annotated[FormName | None, Meta(description="Voyage's and Mistral's.")] = None
    embedding_type: Annotated[FormName | FormNames | None, Meta(description="Jina's and NIM's.")] = None
    embedding_types: Annotated[FormNames | None, Meta(description="Cohere's; one of them here.")] = None
    output_dimension: Annotated[Dimensions | None, Meta(description="Voyage's word for dimensions.")] = None
    normalized: Annotated[bool | None, Meta(description="Jina's word for normalize.")] = None
    use_activation: Annotated[bool | None, Meta(description="vLLM's word for normalize.")] = None
    truncation: Annotated[bool | None, Meta(description="Voyage's word for truncate.")] = None
    task: Annotated[str | None, Meta(description="Jina's word for input_type.")] = None
    encoding_type: Annotated[FormName | None, Meta(description="LlamaIndex's word, for Jina.")] = None
    embed_dtype: Annotated[FormName | None, Meta(description="vLLM's.")] = None
    endianness: Annotated[Any, _OF_EMBEDDINGS["endianness"].meta] = None
    modality: Annotated[Any, _OF_EMBEDDINGS["modality"].meta] = None
    late_chunking_params: Annotated[Any, _OF_EMBEDDINGS["late_chunking_params"].meta] = None

    _rules: ClassVar[Mapping[str, _Rule]] = _OF_EMBEDDINGS

    def settled(self) -> Self:
        """The request with each thing under one name, ours.

        Raises InvalidRequestError that names a field which is asked for and not honoured, or two that contradict.
        """
        self.dimensions = self.dimensions or None  # 0: of Infinity's clients
        if _others_of_embeddings(self) == _NOTHING_ELSE:
            return self  # as of nearly all clients
        check_rules(self, self._rules)
        self.dimensions = agreed(self, "dimensions", "output_dimension")
        self.normalize = agreed(self, "normalize", "normalized", "use_activation")
        self.truncate = agreed(self, "truncate", "truncation")
        self.input_type = agreed(self, "input_type", "task")
        return self


# What ``settled`` looks at beside our own names.
_OTHERS = (*_OF_EMBEDDINGS, "output_dimension", "normalized", "use_activation", "truncation", "task")


_others_of_embeddings = attrgetter(*_OTHERS)

_NOTHING_ELSE = (None,) * len(_OTHERS)


class PairControls(ScoreControls, kw_only=True):
    """ScoreControls, and fields of Voyage, Cohere v1, Jina and vLLM."""

    truncation: Annotated[bool | None, Meta(description="Voyage's word for truncate.")] = None
    top_k: Annotated[Any, _OF_PAIRS["top_k"].meta] = None
    max_chunks_per_doc: Annotated[Any, _OF_PAIRS["max_chunks_per_doc"].meta] = None
    max_doc_length: Annotated[Any, _OF_PAIRS["max_doc_length"].meta] = None
    max_query_length: Annotated[Any, _OF_PAIRS["max_query_length"].meta] = None
    max_tokens_per_query: Annotated[Any, _OF_PAIRS["max_tokens_per_query"].meta] = None
    return_embeddings: Annotated[Any, _OF_PAIRS["return_embeddings"].meta] = None
    chat_template_kwargs: Annotated[Any, _OF_PAIRS["chat_template_kwargs"].meta] = None

    _rules: ClassVar[Mapping[str, _Rule]] = _OF_PAIRS
    _own_rules: ClassVar[Mapping[str, _Rule]] = {}

    def settled(self) -> Self:
        """As ``EmbeddingControls.settled``."""
        check_rules(self, self._rules)
        check_rules(self, self._own_rules)
        self.truncate = agreed(self, "truncate", "truncation")
        return self


def check_rules(body: msgspec.Struct, rules: Mapping[str, _Rule]) -> None:
    """Raise InvalidRequestError that names a field of ``rules`` which is asked for and not honoured."""
    for name, rule in rules.items():
        value = getattr(body, name)
        if value is not None and not any(_is_same(value, same) for same in rule.accepted):
            raise _error(name, value, rule.remedy)


def _is_same(value: object, same: object) -> bool:
    """True if they are the same value of JSON, which has one kind of numbers."""
    return value == same and (type(value) is type(same) or {type(value), type(same)} == {int, float})


def _error(name: str, value: object, remedy: str) -> InvalidRequestError:
    if isinstance(value, (list, dict)) and value:  # of megabytes, perhaps
        shown = f"({'an object' if isinstance(value, dict) else 'a list'})"
    else:
        text = str(value)
        shown = text if len(text) <= 40 else f"{text[:40]}..."
    return InvalidRequestError(f"{name} {shown} is not supported here: {remedy}.", name)
