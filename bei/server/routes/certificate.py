"""``GET /certificate``: a served model's certificate as a page. The live one: a start may have completed it."""

from __future__ import annotations

from starlette.responses import Response

from bei.artifact.store import certificate_html
from bei.errors import InvalidRequestError, ModelNotFoundError
from bei.server.endpoint.get_responses import answers
from bei.server.endpoint.models import Models
from bei.server.http.routing import ApiRouter

_MEDIA_TYPE = "text/html; charset=utf-8"
# The page says as much of itself; here it also keeps others from framing it.
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


_EXAMPLE = '<!DOCTYPE html>\n<html lang="en">...</html>\n'


def certificate_router(models: Models) -> ApiRouter:
    """The route, bound to the served models."""
    router = ApiRouter()

    @router.get("/certificate", summary="The certificate as a page")
    @answers(InvalidRequestError, ModelNotFoundError, bodies={200: str}, example=_EXAMPLE, media_type=_MEDIA_TYPE)
    async def certificate(model: str | None = None) -> Response:
        """How far the engine is from its reference; where several models are served, the query names one."""
        service = models.named(model)
        page = certificate_html(service.manifest, service.certificate)
        return Response(page, headers=_HEADERS, media_type=_MEDIA_TYPE)

    return router
