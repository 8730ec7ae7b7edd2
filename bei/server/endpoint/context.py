"""One request on its way through a handler."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from bei.errors import AnswerTooLargeError, BeiError, EmptyInputError, OverloadedError, RateLimitedError
from bei.image.source import ImageInput, ImagesInText
from bei.server.auth.keys import Key
from bei.server.auth.priority import TIERS, ServedTier, Urgency, in_tier
from bei.server.endpoint.models import UNNAMED, Models
from bei.server.endpoint.parse import too_many_inputs
from bei.server.endpoint.render import INLINE_BYTES
from bei.server.http.memory_budgets import AnswerAccount, AnswerMemory, Body
from bei.server.process_tuning import MemoryRelease
from bei.server.telemetry.request_record import RequestRecord
from bei.service.admission import Ticket
from bei.service.call import ModelInput
from bei.service.service import InferenceService
from bei.tokenizer.label_encoder import LabelText

_SHOWN_CHARS = 100  # of what a client sent


@dataclass(frozen=True)
class Context:
    """Shared by the requests of a server."""

    models: Models
    max_client_batch_size: int
    answer_limit: int
    answers: AnswerMemory
    compresses: bool = False
    memory: MemoryRelease = field(default_factory=MemoryRelease)


class RequestContext:
    """One request on its way through a handler: the served models, its urgency, and its tickets.

    ``asked``: what its headers ask for. Tickets are held until ``close``, when the last byte of the answer is rendered.
    ``any_model``: a name that no model has is ignored. ``key``: its rate limit counts the admitted tokens. ``flow``: of
    the key, or of the connection. ``work`` records what is admitted. ``body`` counts against ``body_memory`` until the
    request is admitted, since what was read of it may wait for a thread; with images until it is answered, since these
    wait for one as files.
    """

    def __init__(
        self,
        shared: Context,
        asked: Urgency,
        work: RequestRecord,
        body: Body | None = None,
        key: Key | None = None,
        flow: int = 0,
        *,
        any_model: bool = False,
        has_report: bool = False,
    ) -> None:
        self.models = shared.models
        self.has_report = has_report  # the answer reports the result or error of each input
        self._any_model = any_model
        self._max_inputs = shared.max_client_batch_size
        self._answer_limit = shared.answer_limit
        self._answers = shared.answers
        self._answer: AnswerAccount | None = None  # counted there
        self._asked = asked
        self._names_tier = False
        self._found: dict[str, InferenceService] = {}  # and held
        self._tickets: list[Ticket] = []
        self._whole: Ticket | None = None
        self.timing = work.timing
        self._key = key
        self._flow = flow
        self._body = body
        self._work = work
        self.warnings: list[str] = []  # for the client, in a header
        self.unreadable: Mapping[int, BeiError] = {}  # errors of inputs that could not be parsed, by index

    def able(self, task: str, name: str | None) -> InferenceService:
        """The model that is called ``name`` and can do ``task``. Raises what ``Models.able`` raises."""
        return self._noted(self.models.able(task, self._known(name)), name)

    def named(self, name: str | None) -> InferenceService:
        """The model that is called ``name``. Raises what ``Models.named`` raises."""
        return self._noted(self.models.named(self._known(name)), name)

    def _known(self, name: str | None) -> str | None:
        return None if self._any_model and name not in self.models else name

    def _noted(self, service: InferenceService, name: str | None) -> InferenceService:
        """Hold the model, and tell the client where one answers that has another name.

        A request is answered by one service of a name, even if another takes its place between two questions.
        """
        if service.name in self._found:
            service = self._found[service.name]
        else:
            service.hold()
            self._found[service.name] = service
        if name != service.name and name not in UNNAMED and name not in self.models:
            self.warn(f"no model is called {str(name)[:_SHOWN_CHARS]}: {service.name} has answered")
        return service

    def ask_tier(self, tier: str | None) -> None:
        """Before the request is admitted: put it into the lane of ``service_tier``, which its body may name in several
        places. Raises InvalidRequestError."""
        if tier is not None:
            self._asked = in_tier(self._asked, tier)
            self._names_tier = True

    @property
    def _urgency(self) -> Urgency:
        """Raises ForbiddenError."""
        return self._asked if self._key is None else self._key.urgency(self._asked)

    @property
    def served_tier(self) -> ServedTier | None:
        """The tier that the request is served in; None: it did not ask for one."""
        return TIERS[self._urgency.lane] if self._names_tier else None

    def warn(self, text: str) -> None:
        """Tell the client, in a header, once."""
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def max_inputs(self) -> int:
        """Most inputs of one request."""
        return self._max_inputs

    def check_inputs(self, inputs: Seq[object], param: str) -> None:
        """Reject an empty list, too many inputs, an unreadable input, or an empty text.

        Raises InvalidRequestError that blames ``param``.
        """
        self.check_count(inputs, param)
        for error in self.unreadable.values():
            raise error
        if "" in inputs:
            raise empty_text(inputs.index(""), param)

    def check_count(self, inputs: Seq[object], param: str) -> None:
        """Reject an empty list, or too many inputs. Raises InvalidRequestError that blames ``param``."""
        if not inputs:
            raise EmptyInputError(f"{param} is an empty list: send at least one input.", param)
        if len(inputs) > self._max_inputs:
            raise too_many_inputs(len(inputs), self._max_inputs, param)

    def check_answer(self, num_bytes: int) -> None:
        """Reject an answer of about ``num_bytes``, as early as they are known.

        Raises AnswerTooLargeError, and OverloadedError where large answers take all memory that they may; of an
        accepted request only the first.
        """
        if num_bytes > self._answer_limit:
            raise AnswerTooLargeError(
                f"The answer would have about {num_bytes} bytes, the limit is {self._answer_limit}: send fewer or "
                "shorter inputs at a time, or start the server with a larger --answer-limit."
            )
        if num_bytes > INLINE_BYTES:
            self._hold(num_bytes)

    def _hold(self, num_bytes: int) -> None:
        if num_bytes > INLINE_BYTES:
            self.answer.grow(num_bytes, may_exceed=bool(self._tickets))

    @property
    def answer(self) -> AnswerAccount:
        """The account of a large answer."""
        if self._answer is None:
            self._answer = AnswerAccount(self._answers)
        return self._answer

    def admit(
        self,
        service: InferenceService,
        inputs: Seq[ModelInput],
        *,
        bytes_per_token: int = 0,
        whole: bool = False,
        num_around: int = 0,
        labels: Seq[LabelText] = (),
    ) -> Ticket:
        """Accept the request with all of its inputs. ``whole``, ``num_around``, ``labels``, and what it raises: as
        ``InferenceService.admit``.

        ``bytes_per_token``: what the answer grows by with every token; it is checked while the inputs are tokenized.
        """
        ticket = self._whole
        if ticket is None:
            ticket = self._admitted(service, inputs, whole=whole, num_around=num_around, labels=labels)
        if bytes_per_token:
            try:
                self._hold(min(ticket.admitted.num_tokens * bytes_per_token, self._answer_limit))
            except OverloadedError:
                ticket.close()
                raise
            _ = self.answer  # made now: threads count tokens in it, some of them when the request has ended
            ticket.check_tokens = lambda num_tokens: self.check_answer(num_tokens * bytes_per_token)
        self._tickets.append(ticket)
        return ticket

    def admit_whole(self, service: InferenceService, inputs: Seq[ModelInput], num_around: int = 0) -> None:
        """Accept the inputs of all parts of the request: what its parts ``admit`` later is of this ticket."""
        self._whole = self._admitted(service, inputs, num_around=num_around)

    def _admitted(
        self,
        service: InferenceService,
        inputs: Seq[ModelInput],
        *,
        whole: bool = False,
        num_around: int,
        labels: Seq[LabelText] = (),
    ) -> Ticket:
        self._work.asks(service.name, inputs)
        urgency = self._urgency
        ticket = service.admit(
            inputs,
            lane=urgency.lane,
            deadline_s=urgency.deadline_s,
            flow=self._flow,
            whole=whole,
            num_around=num_around,
            labels=labels,
        )
        self._work.lane = ticket.lane
        kinds = (ImageInput, ImagesInText)
        has_images = bool(service.manifest.images) and any(isinstance(one, kinds) for one in inputs)
        if self._body is not None and not has_images:
            self._body.release()
        if self._key is not None:
            try:
                self._key.take_tokens(ticket.admitted.num_tokens)
            except RateLimitedError:
                ticket.close()
                raise
        if self.timing is not None:
            self.timing.admitted(inputs, service.manifest.target, ticket.accepted_s)
            ticket.timing = self.timing
        return ticket

    def let_go(self) -> None:
        """The handler has ended: no model is asked any more."""
        while self._found:
            self._found.popitem()[1].let_go()

    def close(self) -> None:
        """Give back what was admitted."""
        for ticket in self._tickets if self._whole is None else [self._whole]:
            ticket.close()
        if self._answer is not None:
            self._answer.release()


def empty_text(index: int, param: str) -> EmptyInputError:
    """The error of input ``index`` of ``param``."""
    return EmptyInputError(f"{param} {index} is an empty text: leave it out.", param)
