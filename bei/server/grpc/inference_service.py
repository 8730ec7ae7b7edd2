"""The Open Inference Protocol over gRPC, on the functions of its HTTP routes. Outputs come as raw bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bei.errors import InvalidRequestError
from bei.server.dialects import oip
from bei.server.dialects.oip_tensors import InputTensor, texts_of
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.models import Models
from bei.server.endpoint.parse import INLINE_BODY_BYTES
from bei.server.endpoint.render import INLINE_BYTES
from bei.server.grpc.calls import RpcAnswer, RpcMethod, struct_of
from bei.server.grpc.messages import INFERENCE, field_head, message
from bei.server.status.whole_server import WholeServer
from bei.service.service import InferenceService
from bei.utils.threads import off_loop
from bei.version import __version__

_TIER = "service_tier"
_TEXTS = "bytes_contents"
_RAW_OUTPUT_CONTENTS = 6  # the number of the field


def _type(name: str) -> Any:
    return message(f"{INFERENCE}.{name}")


def _parameters(given: Any) -> dict[str, Any]:
    """The values by name. Raises InvalidRequestError for one that has none."""
    found = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequestError(
                f"The parameter {name[:40]!r} has no value: set one, or leave it out.", "parameters"
            )
        found[name] = getattr(parameter, kind)
    return found


def _inputs(request: Any, max_inputs: int) -> oip.Texts:
    if len(request.inputs) != 1:
        raise InvalidRequestError(f"inputs must have one tensor, text, not {len(request.inputs)}.", "inputs")
    given, raw = request.inputs[0], request.raw_input_contents
    is_raw = len(raw) == 1
    if len(raw) > 1 or (is_raw and given.HasField("contents")):
        raise InvalidRequestError("The tensor must be in contents, or alone in raw_input_contents.", "inputs")
    others = [field.name for field, _ in given.contents.ListFields() if field.name != _TEXTS]
    if others:
        message = f"The tensor's contents have {', '.join(others)}: send texts, in {_TEXTS} alone."
        raise InvalidRequestError(message, "inputs")
    if given.parameters:
        raise InvalidRequestError("The tensor takes no parameters: leave them out.", "inputs")
    tensor = struct_of(
        InputTensor,
        name=given.name,
        shape=[*given.shape],
        datatype=given.datatype,
        data=None if is_raw else [_text(content) for content in given.contents.bytes_contents],
        parameters={"binary_data_size": len(raw[0])} if is_raw else None,
    )
    return texts_of(tensor, memoryview(raw[0]) if is_raw else None, max_inputs)


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"A text is not valid UTF-8: {error.reason}.", "inputs") from error


async def _infer(request: Any, context: RequestContext, _: str | None) -> RpcAnswer:
    """The outputs, in the order in which they are asked for."""
    _check_version(request.model_version)
    parameters = _parameters(request.parameters)
    tier = parameters.pop(_TIER, None)
    context.ask_tier(None if tier is None else str(tier))  # a number is refused as a text that is no tier
    for output in request.outputs:
        if _parameters(output.parameters).keys() - {"binary_data"}:
            raise InvalidRequestError("An output takes no parameters: leave them out.", "outputs")
    body = oip.InferRequest(
        inputs=[],
        outputs=[oip.RequestedOutput(name=output.name) for output in request.outputs] or None,
        parameters=struct_of(oip.InferParameters, **parameters),
    )
    read = partial(_inputs, request, context.max_inputs)
    inputs = await off_loop(read) if request.ByteSize() > INLINE_BODY_BYTES else read()
    parsed = oip.ParsedInfer(body, inputs, request.model_name or None)
    service, tensors, truncated = await oip.inferred(parsed, context)

    def made() -> bytes:
        """The numbers behind the other fields, without a copy of theirs between."""
        head = _type("ModelInferResponse")(model_name=service.name, id=request.id)
        for tensor in tensors:
            head.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        contents = [tensor.octets() for tensor in tensors]
        fields = (part for one in contents for part in (field_head(_RAW_OUTPUT_CONTENTS, len(one)), one))
        return b"".join((head.SerializeToString(), *fields))

    is_large = sum(tensor.data().num_bytes for tensor in tensors) > INLINE_BYTES
    return RpcAnswer(made if is_large else made(), truncated)


def _check_version(version: str) -> None:
    if version:
        raise InvalidRequestError("Models have no versions here: leave the version out.", "model_version")


def _named(models: Models, request: Any) -> InferenceService:
    _check_version(request.version)
    return models.named(request.name or None)


def inference_methods(models: Models, server: WholeServer) -> Iterator[RpcMethod]:
    """All methods of the service."""

    async def live(_: Any, __: RequestContext, ___: str | None) -> RpcAnswer:
        return RpcAnswer(_type("ServerLiveResponse")(live=not await server.dead()))

    async def ready(_: Any, __: RequestContext, ___: str | None) -> RpcAnswer:
        return RpcAnswer(_type("ServerReadyResponse")(ready=not await server.problems()))

    async def model_ready(request: Any, _: RequestContext, __: str | None) -> RpcAnswer:
        name = _named(models, request).name
        return RpcAnswer(_type("ModelReadyResponse")(ready=name not in await server.problems()))

    async def metadata(_: Any, __: RequestContext, ___: str | None) -> RpcAnswer:
        return RpcAnswer(_type("ServerMetadataResponse")(name="bei", version=__version__))

    async def model_metadata(request: Any, _: RequestContext, __: str | None) -> RpcAnswer:
        return RpcAnswer(_type("ModelMetadataResponse")(**oip.metadata_of(_named(models, request))))

    def method(name: str, handle: Any, *, is_open: bool = False) -> RpcMethod:
        return RpcMethod(f"/{INFERENCE}.GRPCInferenceService/{name}", _type(f"{name}Request"), handle, is_open=is_open)

    yield method("ServerLive", live, is_open=True)
    yield method("ServerReady", ready, is_open=True)
    yield method("ModelReady", model_ready)
    yield method("ServerMetadata", metadata)
    yield method("ModelMetadata", model_metadata)
    yield method("ModelInfer", _infer)
