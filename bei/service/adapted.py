"""A served model as one of its adapters makes it: what "MODEL:ADAPTER" names."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, TypeVar, cast

import msgspec

from bei.service.admission import Ticket
from bei.service.call import InferenceResult, ModelRequest, Reduce
from bei.service.model_service import ModelService
from bei.tokenizer.adapters import adapter_name

ServiceT = TypeVar("ServiceT", bound=ModelService)


class AdaptedService:
    """``service``, all of whose requests are read by ``adapter``. Everything else is the service's own: its queue, its
    limits, and its life."""

    def __init__(self, service: ModelService, adapter: int) -> None:
        self._service = service
        self.adapter = adapter
        self.name = f"{service.name}:{adapter_name(service.manifest, adapter)}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def infer(
        self, request: ModelRequest, *, ticket: Ticket, outputs: AbstractSet[str], reduce: Reduce | None = None
    ) -> InferenceResult:
        request = msgspec.structs.replace(request, adapter=self.adapter)
        return await self._service.infer(request, ticket=ticket, outputs=outputs, reduce=reduce)


def adapted(service: ServiceT, adapter: int) -> ServiceT:
    """``service`` as ``adapter`` makes it, under a name of its own."""
    return cast("ServiceT", AdaptedService(service, adapter))
