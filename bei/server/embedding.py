"""What every route that answers one vector an input does: from its inputs to their vectors."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from bei.server.endpoint import Call
from bei.server.vectors import FLOATS, VectorForm
from bei.service import InferenceService, ModelInput
from bei.tasks import Embeddings, embed_inputs, prompt_of
from bei.tokenization import AS_CONFIGURED, EncodingOptions


async def embedded(
    call: Call,
    service: InferenceService,
    inputs: Seq[ModelInput],
    *,
    param: str,
    forms: Seq[VectorForm] = (FLOATS,),
    around_bytes: int = 0,
    prompt_name: str | None = None,
    input_type: str | None = None,
    dimensions: int | None = None,
    normalize: bool | None = None,
    options: EncodingOptions = AS_CONFIGURED,
) -> Embeddings:
    """The vectors of ``inputs``, which the field ``param`` holds.

    ``forms`` are those in which each vector will be written, ``around_bytes`` what stands around it. Raises what
    ``embed_inputs`` and the checks of ``call`` raise.
    """
    call.check_inputs(inputs, param)
    width = service.manifest.dimension("embedding") or 0
    width = min(width, dimensions or width)
    for form in forms:
        form.check_width(width, "dimensions")
    call.check_answer(len(inputs) * (around_bytes + sum(form.num_bytes(width) for form in forms)))
    prompt = prompt_of(service.manifest, prompt_name, input_type)
    return await embed_inputs(
        service,
        inputs,
        ticket=call.admit(service, inputs),
        prompt=prompt,
        dimensions=dimensions,
        normalize=normalize,
        options=options,
    )
