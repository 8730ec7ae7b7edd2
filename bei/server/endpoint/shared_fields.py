"""Fields that many routes share: which model, how inputs are cut, the prompt; and other servers' words for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, cast, get_args

import msgspec
from msgspec import UNSET, Meta

from bei.errors import InvalidRequestError
from bei.server.auth.priority import TIER_NAMES
from bei.server.endpoint.field_schema import Limits, any_of, limits, one_of
from bei.server.endpoint.refused_fields import (
    FormerActivation,
    OfChats,
    Padding,
    PairTemplateOptions,
    ProcessorOptions,
    QueryLimit,
    Refused,
    refused,
)
from bei.server.endpoint.truncation_fields import CONTRADICTIONS, Direction, TokenLimit, Truncate
from bei.server.endpoint.vector_encoding import DType
from bei.service.call import ModelInput
from bei.tasks.embed import EmbedTask
from bei.tasks.mixed import Given
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions
from bei.tokenizer.truncation import encoding_options

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's, of Python 3.11

Model: TypeAlias = Annotated[str, Meta(description="May be left out where one served model has the task.")]
Dimensions: TypeAlias = Annotated[int, Meta(ge=1, description="Vectors are cut to their first components.")]

RawScores: TypeAlias = Annotated[bool, Meta(description="Logits instead of probabilities.")]

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
            raise contradiction("truncation_direction", direction, "truncation_side", side)
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

    def embed_task(self, inputs: Seq[Given], **asked: Any) -> EmbedTask:
        """For the vectors of ``inputs``; ``asked`` are other fields of EmbedTask."""
        return EmbedTask(
            cast("Seq[ModelInput]", inputs),  # which ``check_task`` makes of them
            self.encoding_options(),
            prompt_name=self.prompt_name,
            input_type=self.input_type,
            prompt=self.prompt,
            **asked,
        )


RAW_OR_ACTIVATED: Limits = (
    any_of(
        "`raw_scores` and `use_activation` may not be both true or both false.",
        *({"raw_scores": one_of([raw]), "use_activation": one_of([not raw])} for raw in (True, False)),
    ),
)


def is_raw(raw_scores: bool | None, use_activation: bool | None) -> bool:
    """True if logits are asked for. Raises InvalidRequestError where two fields contradict each other."""
    if raw_scores is not None and raw_scores is use_activation:
        raise contradiction("raw_scores", raw_scores, "use_activation", use_activation)
    return bool(raw_scores) or use_activation is False


class ScoreControls(Controls, kw_only=True):
    """Of requests that are answered with scores."""

    raw_scores: RawScores | None = None
    use_activation: Annotated[bool | None, Meta(description="vLLM's word: false asks for logits.")] = None
    padding: Padding = UNSET
    mm_processor_kwargs: ProcessorOptions = UNSET

    _limits: ClassVar[Limits] = RAW_OR_ACTIVATED

    def is_raw(self) -> bool:
        return is_raw(self.raw_scores, self.use_activation)


class InputControls(Controls, kw_only=True):
    """Controls, and vLLM's words in requests that have an ``input`` here, and there may have ``messages`` in its place:
    how these are written and read, and how scores are activated."""

    use_activation: bool | None = None
    softmax: FormerActivation = UNSET
    activation: FormerActivation = UNSET
    padding: Padding = UNSET
    mm_processor_kwargs: ProcessorOptions = UNSET
    messages: Annotated[Refused, refused("send input; no chat template is applied")] = UNSET
    add_generation_prompt: OfChats = UNSET
    continue_final_message: OfChats = UNSET
    chat_template: OfChats = UNSET
    chat_template_kwargs: OfChats = UNSET
    media_io_kwargs: ProcessorOptions = UNSET


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
            raise contradiction(str(first), found, name, value)
    return found


def contradiction(first: str, found: object, name: str, value: object) -> InvalidRequestError:
    """The error of two words for one thing that differ; it blames ``name``."""
    return InvalidRequestError(f"{first} {found} and {name} {value} contradict each other: send one.", name)


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
    endianness: Annotated[Refused, refused("vectors in base64 are little-endian; leave it out", "little", "native")] = (
        UNSET
    )
    modality: Annotated[Literal["text", "image"] | None, Meta(description="Infinity's and NIM's.")] = None
    late_chunking_params: Annotated[Refused, refused("send late_chunking with the chunks as inputs", False, {}, [])] = (
        UNSET
    )
    padding: Padding = UNSET
    mm_processor_kwargs: ProcessorOptions = UNSET

    def settled(self) -> Self:
        """The request with each thing under one name, ours.

        Raises InvalidRequestError that names a field which contradicts another.
        """
        self.dimensions = self.dimensions or None  # 0: of Infinity's clients
        if _others_of_embeddings(self) == _NOTHING_ELSE:
            return self  # as of nearly all clients
        self.dimensions = agreed(self, "dimensions", "output_dimension")
        self.normalize = agreed(self, "normalize", "normalized", "use_activation")
        self.truncate = agreed(self, "truncate", "truncation")
        self.input_type = agreed(self, "input_type", "task")
        return self


# What ``settled`` looks at beside our own names.
_OTHERS = ("output_dimension", "normalized", "use_activation", "truncation", "task")
_others_of_embeddings = attrgetter(*_OTHERS)
_NOTHING_ELSE = (None,) * len(_OTHERS)


class PairControls(ScoreControls, kw_only=True):
    """ScoreControls, and fields of Voyage, Cohere v1, Jina and vLLM."""

    truncation: Annotated[bool | None, Meta(description="Voyage's word for truncate.")] = None
    top_k: Annotated[Refused, refused("send top_n, or point Voyage's client at /voyage")] = UNSET
    max_chunks_per_doc: Annotated[Refused, refused("leave it out; documents are not read in chunks", 1)] = UNSET
    max_doc_length: Annotated[Refused, refused("send max_tokens_per_doc")] = UNSET
    max_query_length: Annotated[Refused, refused("leave it out; the longer text is cut")] = UNSET
    max_tokens_per_query: QueryLimit = UNSET
    return_embeddings: Annotated[Refused, refused("leave it out; ask /v1/embeddings", False)] = UNSET
    chat_template_kwargs: PairTemplateOptions = UNSET

    def settled(self) -> Self:
        self.truncate = agreed(self, "truncate", "truncation")
        return self
