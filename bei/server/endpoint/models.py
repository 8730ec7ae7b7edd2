"""The served models by name, and ``GET /v1/models``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Literal, TypedDict

from bei.artifact.model_names import matching
from bei.errors import (
    BeiError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    TaskNotSupportedError,
)
from bei.server.endpoint.aliases import alias_names
from bei.server.endpoint.examples import CREATED, EMBEDDER
from bei.server.endpoint.get_responses import answers
from bei.server.http.routing import ApiRouter
from bei.service.adapted import adapted
from bei.service.loader import check_names
from bei.service.service import InferenceService
from bei.tasks.support import PHRASES, has_task, require

# No model is named: by nobody, or by Infinity's client, which sends this where its user names none.
UNNAMED = frozenset((None, "default/not-specified"))

# What users of TEI send, which has no names.
_OF_TEI = frozenset(("tei", "text-embeddings-inference"))


# Of clients whose model cannot be set.
_REMEDY = " Name one of them, or start the server with --alias or --any-model-name."

_LONGEST_NAME = 512  # characters
_MOST_KEPT = 1000  # names whose model was found


class Models:
    """Services by the name that clients use. Names are unique.

    ``started_s``: when the server was started, in seconds since the epoch; None: now. ``aliases``: see
    ``alias_names``, which raises ConfigError.
    """

    def __init__(
        self, services: list[InferenceService], started_s: int | None = None, aliases: Iterable[str] = ()
    ) -> None:
        check_names(service.name for service in services)
        self._services = {service.name: service for service in services}
        self._aliases = alias_names(aliases, [service.manifest for service in services])
        self._replaced: list[InferenceService] = []
        self._able: dict[tuple[str, str | None], InferenceService] = {}  # by task and name, what was found
        self.started_s = int(time.time()) if started_s is None else started_s

    def __iter__(self) -> Iterator[InferenceService]:
        return iter(self._services.values())

    def __contains__(self, name: object) -> bool:
        """True if ``named`` finds one or several models by it."""
        return name in self._services or (isinstance(name, str) and bool(self._meant(name) or self._adapted(name)))

    @property
    def listed(self) -> Iterator[tuple[str, InferenceService]]:
        """Every model by its name, by its aliases, and by its name with each of its adapters."""
        yield from self._services.items()
        for alias, name in self._aliases.items():
            yield alias, self._services[name]
        for service in self:
            for number in range(len(service.manifest.adapter_names)):
                one = adapted(service, number + 1)
                yield one.name, one

    def __getitem__(self, name: str) -> InferenceService:
        """The service of exactly this name. Raises KeyError."""
        return self._services[name]

    def is_alias(self, name: str) -> bool:
        """True if the operator has given this name to a model beside its own."""
        return name in self._aliases

    def named(self, name: str | None) -> InferenceService:
        """The service that ``name`` means (``bei.artifact.model_names``); None is the only one.

        Raises ModelNotFoundError, and InvalidRequestError where it means several.
        """
        if name is not None and len(name) > _LONGEST_NAME:
            raise ModelNotFoundError(
                f"A model with a name of {len(name)} characters is not served here. Served: {self._names()}.", "model"
            )
        if name is None or self._is_unnamed(name):
            return _the_only(list(self), "Several models are served")
        service = self._services.get(name)
        if service is not None:
            return service
        found = self._meant(name) or self._adapted(name)
        if not found:
            advice = self._adapters_of(name) or _REMEDY
            raise ModelNotFoundError(f"Model {name!r} is not served here. Served: {self._names()}.{advice}", "model")
        return _the_only(found, f"{name!r} means several served models")

    def able(self, task: str, name: str | None) -> InferenceService:
        """The service called ``name``, which can do ``task``; None is the only one that can, or whose first task it is.

        So a client whose dialect has no model names works beside models of other kinds. Raises ModelNotFoundError,
        InvalidRequestError, and TaskNotSupportedError, which names what there is.
        """
        found = self._able.get((task, name))
        if found is None:
            found = self._find_able(task, name)
            if len(self._able) >= _MOST_KEPT:  # many names mean the same model
                self._able.clear()
            self._able[task, name] = found
        return found

    def _find_able(self, task: str, name: str | None) -> InferenceService:
        if self._is_unnamed(name) and len(self._services) > 1:
            able = [service for service in self if has_task(service, task)]
            if not able:
                tasks = "; ".join(f"{service.name}: {', '.join(service.manifest.tasks)}" for service in self)
                raise TaskNotSupportedError(f"No served model can {PHRASES[task]}. They can do: {tasks}.", "model")
            first = (task, "classify") if task == "zero_shot" else (task,)
            made_for_it = [service for service in able if service.manifest.tasks[0] in first]
            return _the_only(made_for_it or able, f"Several served models can {PHRASES[task]}")
        service = self.named(name)
        require(service, task)
        return service

    def replace(self, new: InferenceService) -> InferenceService:
        """Give requests that come from now on ``new``, which has the name of a model that is served.

        Returns the one that was there. It answers those that have found it until it is ``removed``.
        """
        former = self._services[new.name]
        self._services[new.name] = new
        self._able.clear()
        self._replaced.append(former)
        return former

    def is_replaced(self, service: InferenceService) -> bool:
        """True if another service has replaced ``service``, which is not ``removed`` yet."""
        return any(service is other for other in self._replaced)

    def removed(self, former: InferenceService) -> None:
        """Forget ``former``, which nothing holds any more, and which has been closed."""
        self._replaced.remove(former)

    def _meant(self, name: str) -> list[InferenceService]:
        if name in self._aliases:
            return [self._services[self._aliases[name]]]
        return matching(name, {service: service.manifest for service in self})

    def _adapted(self, name: str) -> list[InferenceService]:
        """Models as an adapter makes them, by "MODEL:ADAPTER"; MODEL may be any of a model's names."""
        model, _, adapter = name.rpartition(":")
        names = {service: service.manifest.adapter_names for service in self._meant(model)}
        return [adapted(one, known.index(adapter) + 1) for one, known in names.items() if adapter in known]

    def _adapters_of(self, name: str) -> str:
        """The end of a message about "MODEL:ADAPTER" where the model has others."""
        model, _, adapter = name.rpartition(":")
        known = [each for service in self._meant(model) for each in service.manifest.adapter_names]
        return f" {model} has no adapter {adapter!r}, but {', '.join(known)}." if known else ""

    def _is_unnamed(self, name: str | None) -> bool:
        return name in UNNAMED or (name in _OF_TEI and name not in self._services)

    async def problems(self) -> dict[str, str]:
        """Reasons why models do not answer as they did at build time, by name."""
        found = {}
        for service in self:
            try:
                await service.check_ready()
            except OverloadedError:
                continue  # a full queue in front of a path that works: 429 tells clients, not this
            except BeiError as error:
                found[service.name] = str(error)
        return found

    def dead(self) -> list[str]:
        """Models of which a thread has died, or whose engine hangs."""
        return [service.name for service in self if not service.is_alive]

    def begin_drain(self) -> None:
        """Refuse new work on every model."""
        for service in self._all():
            service.begin_drain()

    def abandon(self) -> None:
        """Answer everything that waits with ShuttingDownError."""
        for service in self._all():
            service.abandon()

    async def wait_drained(self) -> None:
        """Return when nothing accepted is unanswered."""
        await asyncio.gather(*(service.wait_drained() for service in self._all()))

    def close(self) -> None:
        """End all threads and free all engines."""
        for service in self:
            service.close()

    def _all(self) -> list[InferenceService]:
        """Those that were replaced and still have requests, too."""
        return [*self, *self._replaced]

    def _names(self) -> str:
        return ", ".join((*self._services, *self._aliases))


def _the_only(services: list[InferenceService], otherwise: str) -> InferenceService:
    if len(services) > 1:
        names = ", ".join(service.name for service in services)
        raise InvalidRequestError(f"{otherwise}; set model to one of {names}.", "model")
    return services[0]


class ModelEntry(TypedDict):
    """OpenAI's fields first. ``created`` is when the server was started. ``alias_of``: the model that the id is another
    name of, or null. ``adapter_of``: the model with the adapter that the id names (MODEL:ADAPTER).
    ``input_modalities``: text, image, or both. ``max_entities``: of a text (GLiREL)."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["bei"]
    alias_of: str | None
    adapter_of: str | None
    adapters: list[str]
    max_model_len: int
    max_entities: int | None
    embedding_dimension: int | None
    tasks: list[str]
    input_modalities: list[str]
    prompts: list[str]
    labels: list[str] | None
    target: str
    precision: str


class ModelList(TypedDict):
    """Every served model."""

    object: Literal["list"]
    data: list[ModelEntry]


_EXAMPLE = {
    "id": EMBEDDER,
    "object": "model",
    "created": CREATED,
    "owned_by": "bei",
    "alias_of": None,
    "adapter_of": None,
    "adapters": [],
    "max_model_len": 256,
    "max_entities": None,
    "embedding_dimension": 384,
    "tasks": ["embed"],
    "input_modalities": ["text"],
    "prompts": [],
    "labels": None,
    "target": "cpu",
    "precision": "bf16",
}


def models_router(models: Models) -> ApiRouter:
    """``GET /v1/models`` and ``GET /v1/models/{name}`` in OpenAI's form."""
    router = ApiRouter()

    @router.get("/models", summary="List the served models")
    @router.get("/v1/models", summary="List the served models")
    @answers(example={"object": "list", "data": [_EXAMPLE]})
    async def list_models() -> ModelList:
        """Every served model."""
        return {
            "object": "list",
            "data": [_describe(name, service, models.started_s) for name, service in models.listed],
        }

    @router.get("/models/{name:path}", summary="Describe a model")
    @router.get("/v1/models/{name:path}", summary="Describe a model")
    @answers(InvalidRequestError, ModelNotFoundError, example=_EXAMPLE)
    async def get_model(name: str) -> ModelEntry:
        """One served model."""
        service = models.named(name)
        return _describe(name if models.is_alias(name) else service.name, service, models.started_s)

    return router


def _describe(name: str, service: InferenceService, created: int) -> ModelEntry:
    manifest, extraction = service.manifest, service.manifest.extraction
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "bei",
        "alias_of": None if service.adapter or name == manifest.name else manifest.name,
        "adapter_of": manifest.name if service.adapter else None,
        "adapters": [] if service.adapter else [*manifest.adapter_names],
        "max_model_len": manifest.max_seq_len,
        "max_entities": (extraction.max_entities or None) if extraction else None,
        "embedding_dimension": manifest.dimension("embedding"),
        "tasks": manifest.tasks,
        "input_modalities": [*manifest.modalities],
        "prompts": sorted(manifest.prompts),
        "labels": manifest.classification.labels if manifest.classification else None,
        "target": manifest.target,
        "precision": manifest.precision,
    }
