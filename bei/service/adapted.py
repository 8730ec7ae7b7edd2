"""A served model as one of its adapters makes it: what "MODEL:ADAPTER" names."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, cast

import msgspec

from bei.service.admission import Ticket
from bei.service.call import InferenceResult, ModelRequest, Reduce
from bei.tokenizer.adapters import adapter_name

if TYPE_CHECKING:
    from bei.service.service import InferenceService


class AdaptedService:
    """``service``, all of whose requests are read by ``adapter``. Everything else is the service's own: its queue, its
    limits, and its life."""

    def __init__(self, service: InferenceService, adapter: int) -> None:
        self._service = service
        self.adapter = adapter
        self.name = f"{service.name}:{adapter_name(service.manifest, adapter)}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def infer(
        self, request: ModelRequest, *, ticket: Ticket, outputs: AbstractSet[str], reduce: Reduce | None = None
    ) -> InferenceResult:
        """As ``InferenceService`` has it."""
        request = msgspec.structs.replace(request, adapter=self.adapter)
        return await self._service.infer(request, ticket=ticket, outputs=outputs, reduce=reduce)


def adapted(service: InferenceService, adapter: int) -> InferenceService:
    """``service`` as ``adapter`` makes it, under a name of its own."""
    return cast("InferenceService", AdaptedService(service, adapter))
