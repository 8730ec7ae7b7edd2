"""A request on its way through a handler: what it holds until it is admitted, and until it is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bei.image.source import ImageInput
from bei.server.auth.priority import Urgency
from bei.server.endpoint.context import Context, RequestContext
from bei.server.http.memory_budgets import AnswerMemory, Body, BodyMemory
from bei.service.call import ModelInput


@pytest.mark.parametrize(
    ("inputs", "held"), [(["cat"], 0), (["cat", ImageInput("data:,")], 100)], ids=["texts", "an image"]
)
def test_a_body_counts_until_its_texts_are_admitted_and_its_images_answered(
    inputs: list[ModelInput], held: int
) -> None:
    ticket = SimpleNamespace(lane="interactive", close=lambda: None)
    manifest = SimpleNamespace(images=object())
    service: Any = SimpleNamespace(name="clip", manifest=manifest, admit=lambda *_, **__: ticket)
    work: Any = SimpleNamespace(timing=None, asks=lambda *_: None)
    memory = BodyMemory(1000)
    body = Body(memory)
    body.add(100)
    models: Any = ()
    context = RequestContext(Context(models, 10, 1000, AnswerMemory(1000)), Urgency(), work, body)
    context.admit(service, inputs)
    assert memory.held == held
    body.end()
    assert memory.held == 0
