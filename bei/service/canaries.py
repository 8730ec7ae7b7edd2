"""The canaries of a model's towers, asked through a service."""

from __future__ import annotations

from collections.abc import Callable

from bei.artifact.certificate.canary import check_canary, check_image_canary
from bei.artifact.certificate.record import Certificate
from bei.service.admission import Ticket
from bei.service.call import ModelInput, ModelRequest
from bei.service.image_side import ImageSide
from bei.service.model_service import ModelService
from bei.tokenizer.label_encoder import LabelText


async def ask_canaries(
    service: ModelService, certificate: Certificate, images: ImageSide | None, ticket: Ticket
) -> Callable[[], None]:
    """Ask every tower of the model. What is returned raises EngineError where one does not answer what it did at build
    time. Raises as ``infer`` does."""
    output, labels = certificate.canary_output, certificate.labels
    asked: list[ModelInput] = [certificate.canary_text] if service.manifest.reads_texts else []
    if images is not None:
        asked.append(images.canary)
    answer = await service.infer(ModelRequest(asked), ticket=ticket, outputs={output})
    of_labels = None
    if labels:
        request = ModelRequest([LabelText(labels.canary_text)])
        of_labels = await service.infer(request, ticket=ticket, outputs={labels.canary_output})

    def check() -> None:
        if service.manifest.reads_texts:
            check_canary(service.name, certificate, answer.rows[0][output])
        if certificate.images:
            rows, tower = answer.rows[-1][output], service.manifest.image_tower
            seen = tower.sequence.of_image(rows) if tower is not None and tower.sequence else rows
            is_score = "rerank" in service.manifest.tasks
            check_image_canary(service.name, certificate.images, seen, is_score=is_score)
        if labels and of_labels is not None:
            check_canary(service.name, labels, of_labels.rows[0][labels.canary_output])

    return check
