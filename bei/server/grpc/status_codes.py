"""The statuses of gRPC that calls end with (github.com/grpc/grpc, doc/statuscodes.md), and that of each error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum

from bei import errors
from bei.errors import BeiError


class StatusCode(IntEnum):
    """How a call ends."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


# The first that fits. What TEI's server has of them it has with these statuses.
_CODES: Mapping[type[BeiError], StatusCode] = {
    errors.UnauthorizedError: StatusCode.UNAUTHENTICATED,
    errors.ForbiddenError: StatusCode.PERMISSION_DENIED,
    errors.ModelNotFoundError: StatusCode.NOT_FOUND,
    errors.TaskNotSupportedError: StatusCode.UNIMPLEMENTED,
    errors.RouteNotFoundError: StatusCode.UNIMPLEMENTED,
    errors.EncodingNotSupportedError: StatusCode.UNIMPLEMENTED,
    errors.PayloadTooLargeError: StatusCode.RESOURCE_EXHAUSTED,
    errors.AnswerTooLargeError: StatusCode.RESOURCE_EXHAUSTED,
    errors.RequestTimeoutError: StatusCode.DEADLINE_EXCEEDED,
    errors.RequestError: StatusCode.INVALID_ARGUMENT,
    errors.OverloadedError: StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceededError: StatusCode.DEADLINE_EXCEEDED,
    errors.EngineDeadError: StatusCode.UNAVAILABLE,
    errors.NotReadyError: StatusCode.UNAVAILABLE,
    errors.ShuttingDownError: StatusCode.UNAVAILABLE,
    errors.TooManyConnectionsError: StatusCode.UNAVAILABLE,
    errors.EngineError: StatusCode.INTERNAL,
    errors.BeiError: StatusCode.INTERNAL,
}


def code_of(error: BeiError) -> StatusCode:
    """The status of a call that ends with ``error``."""
    return next(code for cls, code in _CODES.items() if isinstance(error, cls))


def error_metadata(error: BeiError) -> list[tuple[str, str]]:
    """What is to be known of ``error`` beside its message: its code, the field to blame, when to come back."""
    found = [("bei-code", error.code)]
    param = getattr(error, "param", None)
    if param is not None:
        found.append(("bei-param", ascii(param)[1:-1]))
    if isinstance(error, (errors.OverloadedError, errors.TooManyConnectionsError)):
        found.append(("retry-after", str(math.ceil(error.retry_after_s))))
        found.append(("retry-after-ms", str(math.ceil(error.retry_after_s * 1000))))
    return found
