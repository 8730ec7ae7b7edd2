"""Fields that many routes share: which model, how inputs are cut, what stands in front of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from bei.errors import InvalidRequestError
from bei.server.endpoint.field_schema import Limits, not_both
from bei.server.endpoint.truncation_fields import CONTRADICTIONS, Direction, TokenLimit, Truncate
from bei.service.call import ModelInput
from bei.tasks.embed import EmbedTask
from bei.tokenizer.encoder import EncodingOptions
from bei.tokenizer.truncation import encoding_options

Model: TypeAlias = Annotated[str, Meta(description="May be left out where one served model has the task.")]
Dimensions: TypeAlias = Annotated[int, Meta(ge=1, description="Vectors are cut to their first components.")]


class Controls(msgspec.Struct, kw_only=True):
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

    _limits: ClassVar[Limits] = tuple(
        not_both("raw_scores", {"enum": [asked]}, "use_activation", {"enum": [asked]}) for asked in (True, False)
    )

    def is_raw(self) -> bool:
        """Whether logits are asked for. Raises InvalidRequestError where two fields contradict each other."""
        if self.raw_scores is not None and self.raw_scores is self.use_activation:
            raise _contradiction("raw_scores", self.raw_scores, "use_activation", self.use_activation)
        return bool(self.raw_scores) or self.use_activation is False


def agreed(body: msgspec.Struct, *names: str) -> Any:
    """What the fields ``names``, which mean the same, ask for. Raises InvalidRequestError where they contradict."""
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
