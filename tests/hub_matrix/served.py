"""Answers of an artifact by bei's service and tasks: a server without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import chain
from unittest.mock import patch

import numpy as np

from bei import Model
from bei.artifact.manifest import TOKENIZER, Artifact
from bei.config.settings import ServeConfig
from bei.core import Float32Array, Int32Array
from bei.metrics.registry import Metrics
from bei.scheduler.cost_model import CostModel
from bei.service.loader import local_port
from bei.service.service import InferenceService
from bei.tasks import classify, embed, extract
from bei.tasks.embed import EmbedTask
from bei.tasks.questions import Answer, NoulAnswer
from bei.tasks.rerank import RerankTask, rerank
from bei.tasks.schema_spans import Instance, Value
from bei.tasks.span_choice import Candidates
from bei.tasks.token_classification import TokenTask, classify_tokens
from bei.tokenizer import prompts
from bei.tokenizer.encoder import TextEncoder
from bei.tokenizer.special_tokens import TextFrame
from tests.hub_matrix.expected import PAIRS, RELATED, TEXTS, Answers
from tests.hub_matrix.structures import IMAGE_QUERY, LABELS, QUESTIONS, Structure
from tests.support.builds import open_engine
from tests.support.gliner_reference import entities_of
from tests.support.two_towers import drawn_files


def served_answers(structure: Structure, artifact: Artifact) -> Answers:
    """Answers to TEXTS, to PAIRS, or to drawn images, by task; the tasks are those that the artifact has and the list
    compares."""
    if structure.images:
        with Model(artifact.path, tune="off", engine_threads=1) as model:
            if structure.task == "rerank":
                ranks = model.rerank(IMAGE_QUERY, drawn_files())
                return {"rerank": [np.array([rank.score]) for rank in sorted(ranks, key=lambda rank: rank.index)]}
            ask = model.embed_all if structure.task == "embed_tokens" else model.embed
            return {structure.task: list(ask(drawn_files()))}

    if structure.spans:
        with Model(artifact.path, tune="off", engine_threads=1) as model, patch.object(extract, "choose", _every):
            found = model.extract(list(TEXTS), LABELS, threshold=0.0)
        return {structure.task: [np.array([span.score for span in spans], np.float32) for spans in found]}

    if structure.relations:
        with Model(artifact.path, tune="off", engine_threads=1) as model:
            related = model.extract_relations(RELATED, map(entities_of, RELATED), LABELS, threshold=0.0)
        return {structure.task: [np.array([*map(_of_head, chain(*one.values()))], np.float32) for one in related]}

    if structure.decides:
        with Model(artifact.path, tune="off", engine_threads=1) as model:
            decided = model.decide(list(TEXTS), QUESTIONS)
        return {structure.task: [_shares(answers[name]) for answers in decided for name in QUESTIONS]}

    async def main() -> Answers:
        service = _service(artifact)
        try:
            wanted = [structure.task, *(("embed_sparse", "embed_tokens") if structure.linear_files else ())]
            return {task: await _answer(service, task, structure) for task in wanted}
        finally:
            await asyncio.get_running_loop().run_in_executor(None, service.close)

    return asyncio.run(main())


def _shares(answer: Answer) -> Float32Array:
    """Of the options, choices sorted."""
    if isinstance(answer, NoulAnswer):
        return np.array([1 - answer.noul, answer.noul], np.float32)
    shares = answer.probabilities
    return np.array([shares[name] for name in sorted(shares)] if isinstance(shares, Mapping) else shares, np.float32)


def _service(artifact: Artifact) -> InferenceService:
    manifest = artifact.manifest
    config = ServeConfig(tokenizer_threads=1)
    template = manifest.rerank_template or manifest.classify_template
    frame = TextFrame(template.prefix, template.suffix) if template else TextFrame()
    encoder = TextEncoder(artifact.path / TOKENIZER, manifest.max_seq_len, frame=frame)
    engine = open_engine(artifact.engine_dir, manifest)
    costs = CostModel.assumed(engine.info.limits)
    return InferenceService(artifact, encoder, config, Metrics(), local_port(engine, costs, config), costs)


async def _answer(service: InferenceService, task: str, structure: Structure) -> Sequence[Float32Array]:
    texts, manifest = list(TEXTS), service.manifest
    prompt = prompts.prompt_of(manifest, next(iter(structure.prompts), None)) if structure.prompts else ""
    if task == "rerank":
        return [await _score(service, *pair, raw=structure.function == "none") for pair in PAIRS]
    inputs = list(PAIRS) if structure.pairs else texts
    with service.admit(inputs) as ticket:
        if task == "embed":
            dense = embed.check_task(service, EmbedTask(texts, prompt=prompt), "embed")
            return list((await embed.embed_inputs(service, dense, ticket=ticket)).vectors)
        if task == "classify":
            return list((await classify.classify(service, classify.ClassifyTask(inputs), ticket=ticket)).values)
        if task == "classify_tokens":
            return (await classify_tokens(service, TokenTask(texts), ticket=ticket)).logits
        if task == "embed_sparse":
            bare = embed.CheckedTask(EmbedTask(texts), prompt, None, 0, ())
            sparse = (await embed.embed_sparse(service, bare, ticket=ticket)).vectors
            return [_dense(service, indices, weights) for indices, weights in sparse]
    return await _token_embeddings(service, structure)


def _of_head(instance: Instance) -> float:
    """The score of a pair, which both of its ends have."""
    head = instance["head"]
    assert isinstance(head, Value)
    return head.score


def _every(found: Candidates, **_: object) -> list[tuple[int, int, int, float]]:
    """In place of a choice."""
    return [(*place, found[place]) for place in sorted(found)]


async def _score(service: InferenceService, query: str, document: str, *, raw: bool) -> Float32Array:
    with service.admit([(query, document)]) as ticket:
        (row,) = (await rerank(service, RerankTask.of(query, [document], raw=raw), ticket=ticket)).values
        return np.asarray(row)


def _dense(service: InferenceService, indices: Int32Array, weights: Float32Array) -> Float32Array:
    width = service.manifest.dimension("sparse") or service.manifest.spec.vocab_size
    row = np.zeros(width, np.float32)
    row[indices] = weights
    return row


async def _token_embeddings(service: InferenceService, structure: Structure) -> Sequence[Float32Array]:
    """Vectors of queries and of documents; of texts if the model has no sides (BGE-M3)."""
    vectors: list[Float32Array] = []
    for side in ("query", "document") if structure.late else (None,):
        task = embed.check_task(service, EmbedTask(list(TEXTS), input_type=side), "embed_tokens")
        with service.admit(list(TEXTS)) as ticket:
            vectors += (await embed.embed_tokens(service, task, ticket=ticket)).vectors
    return vectors
