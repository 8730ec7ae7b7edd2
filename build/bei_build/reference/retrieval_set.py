"""The bundled retrieval set, encoded for a model: with its prompts, roles, pairs or template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import cast, get_args

import msgspec
import numpy as np
from tokenizers import Tokenizer

from bei.artifact.manifest import Manifest, RerankTemplate
from bei.artifact.sides import Role
from bei.core import Encoding, expanded
from bei.errors import ConfigError
from bei.verification.retrieval import RetrievalQuestions, RetrievalRanking, Similarity
from bei_build.checkpoint.colbert import Side, prompt_of
from bei_build.checkpoint.heads import tasks_of
from bei_build.reference.held_out import encode, encode_pairs
from bei_build.spec.model_spec import ModelSpec

# Documents per query that a reranker scores: those that answer it, others on its subject, and the next subject's.
NUM_CANDIDATES = 10
# Queries for a reranker: every third, because with a query's pairs it costs ten times as much as an embedder.
_EVERY = 3
# For shorter limits most texts would be cut to a few words.
LEAST_SEQ_LEN = 32
_RANKING_TASKS = {"embed", "embed_sparse", "embed_tokens", "rerank"}
_OUTPUTS = ("embedding", "sparse", "token_weights", "token_embedding")


class _Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    grades: list[int]


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    documents: list[str]
    queries: list[_Query]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    about: str
    groups: list[_Group]


_file_decoder = msgspec.json.Decoder(_File)


@dataclass(frozen=True)
class RetrievalSet:
    """``grades[q]``: the documents that answer ``queries[q]``, with grade 2 (well) or 1. Documents on one subject are
    neighbours."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    grades: tuple[dict[int, int], ...]


def bundled_set() -> RetrievalSet:
    """The set in ``data/retrieval.json``."""
    content = (resources.files("bei_build") / "data" / "retrieval.json").read_bytes()
    queries: list[str] = []
    documents: list[str] = []
    grades: list[dict[int, int]] = []
    for group in _file_decoder.decode(content).groups:
        for query in group.queries:
            queries.append(query.text)
            of_group = zip(group.documents, query.grades, strict=True)
            grades.append({len(documents) + place: grade for place, (_, grade) in enumerate(of_group) if grade})
        documents += group.documents
    return RetrievalSet(tuple(queries), tuple(documents), tuple(grades))


def check_ranks(spec: ModelSpec, max_seq_len: int) -> None:
    """Raise ConfigError where the set does not suit the model."""
    tasks = {task for head in spec.heads for task in tasks_of(head, spec.hidden_size)}
    if not tasks & _RANKING_TASKS:
        raise ConfigError(
            f"--verify-retrieval: the model does not rank texts, it can {' and '.join(sorted(tasks))}. Leave it out."
        )
    if max_seq_len < LEAST_SEQ_LEN:
        raise ConfigError(
            f"--verify-retrieval: max_seq_len {max_seq_len} cuts the texts to a few words; it needs {LEAST_SEQ_LEN}."
        )


def ranking_output(manifest: Manifest) -> str | None:
    """The output by which a model ranks documents, the first of several; None where it does not rank, or where the
    engine encodes one side only."""
    if manifest.max_seq_len < LEAST_SEQ_LEN or any(role.table for role in manifest.roles.values()):
        return None
    if "rerank" in manifest.tasks:
        return "logits"
    return next((name for name in _OUTPUTS if manifest.dimension(name) is not None), None)


def retrieval_questions(
    manifest: Manifest, spec: ModelSpec, tokenizer: Tokenizer, asked: RetrievalSet
) -> RetrievalQuestions | None:
    """The set encoded for the model of ``manifest``; None where it does not rank, or has no tokens for the texts."""
    output, readable = ranking_output(manifest), _with_tokens(asked, tokenizer)
    if output is None or not readable.queries:
        return None
    if output == "logits":
        return _reranker_questions(manifest, spec, tokenizer, readable)
    ranking = RetrievalRanking(
        output=output,
        num_documents=len(readable.documents),
        grades=list(readable.grades),
        similarity=_similarity(manifest, output),
        unit_length=_is_unit(manifest, output),
        query_skip_ids=_skip_ids(manifest, output, "query", tokenizer),
        document_skip_ids=_skip_ids(manifest, output, "document", tokenizer),
    )
    encodings = [
        *_encode_side(manifest, spec, tokenizer, "query", readable.queries),
        *_encode_side(manifest, spec, tokenizer, "document", readable.documents),
    ]
    return RetrievalQuestions(ranking, encodings)


def _with_tokens(asked: RetrievalSet, tokenizer: Tokenizer) -> RetrievalSet:
    """The set without texts that have no tokens, and without queries that are left unanswered."""
    places: dict[int, int] = {}
    for document, text in enumerate(asked.documents):
        if tokenizer.encode(text).ids:
            places[document] = len(places)
    kept = [
        (query, {places[document]: grade for document, grade in grades.items() if document in places})
        for query, grades in zip(asked.queries, asked.grades, strict=True)
        if tokenizer.encode(query).ids
    ]
    kept = [(query, grades) for query, grades in kept if grades]
    return RetrievalSet(
        tuple(query for query, _ in kept),
        tuple(asked.documents[document] for document in places),
        tuple(grades for _, grades in kept),
    )


def _reranker_questions(
    manifest: Manifest, spec: ModelSpec, tokenizer: Tokenizer, asked: RetrievalSet
) -> RetrievalQuestions:
    queries, grades_of = asked.queries[::_EVERY], asked.grades[::_EVERY]
    candidates = [_candidates(grades, len(asked.documents)) for grades in grades_of]
    pairs = [
        (query, asked.documents[document])
        for query, documents in zip(queries, candidates, strict=True)
        for document in documents
    ]
    if manifest.rerank_template is None:
        before, _, behind = manifest.prompts.get(manifest.default_prompt_name or "", "").partition("{text}")
        prompted = [(before + query + behind, document) for query, document in pairs]
        encodings = encode_pairs(tokenizer, prompted, spec, manifest.max_seq_len)
    else:
        encodings = _encode_in_template(tokenizer, manifest.rerank_template, pairs, manifest.max_seq_len)
    ranking = RetrievalRanking(
        output="logits",
        num_documents=len(asked.documents),
        grades=list(grades_of),
        candidates=candidates,
    )
    return RetrievalQuestions(ranking, encodings)


def _candidates(grades: dict[int, int], num_documents: int) -> list[int]:
    """Documents with grades and their neighbours, in order."""
    first = min(grades)
    start = max(0, min(first - first % 5, num_documents - NUM_CANDIDATES))
    near = [document for document in range(start, num_documents) if document not in grades]
    return sorted([*grades, *near[: max(0, NUM_CANDIDATES - len(grades))]])


def _encode_in_template(
    tokenizer: Tokenizer, template: RerankTemplate, pairs: Sequence[tuple[str, str]], max_seq_len: int
) -> list[Encoding]:
    """Encodings of ``pairs`` in the template; truncation cuts only the body."""
    texts = [template.prefix, template.suffix, *(_fill(template, query, document) for query, document in pairs)]
    prefix, suffix, *bodies = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    if not isinstance(template.last_id, msgspec.UnsetType):
        suffix = [*suffix, template.last_id]
    room = max(1, max_seq_len - len(prefix) - len(suffix))
    return [Encoding(np.array([*prefix, *body[:room], *suffix], np.int32)) for body in bodies]


def _fill(template: RerankTemplate, query: str, document: str) -> str:
    """The template filled as ``bei.tokenizer.encoder`` does: a slot's name inside a text stays as it is."""
    parts = {"query": query, "document": document, "instruction": template.instruction}
    return re.sub(r"\{(query|document|instruction)\}", lambda slot: parts[slot[1]], template.body)


def _encode_side(
    manifest: Manifest, spec: ModelSpec, tokenizer: Tokenizer, side: Side, texts: Sequence[str]
) -> list[Encoding]:
    """Encodings of one side's texts. A prompt precedes a text, or surrounds it; texts that are too long lose their
    ends."""
    role = manifest.roles.get(side)
    before, _, behind = _prompt(manifest, side).partition("{text}")
    limit = min(role.max_tokens or manifest.max_seq_len, manifest.max_seq_len) if role else manifest.max_seq_len
    encodings = encode(tokenizer, [before + text + behind for text in texts], spec, limit)
    if before and not spec.pools_prompt:
        ids = tokenizer.encode(before).ids
        count = len(ids) - (ids[-1:] != [] and ids[-1] in _special_ids(tokenizer))
        encodings = [one._replace(num_unpooled=min(count, one.num_tokens - 1)) for one in encodings]
    if role is not None and role.expansion is not None:
        encodings = [expanded(one, role.expansion) for one in encodings]
    return encodings


def _prompt(manifest: Manifest, side: Side) -> str:
    """The side's own prompt; the default one where the prompts do not distinguish sides."""
    own = prompt_of(manifest.prompts, side)
    if own is not None:
        return own
    if any(prompt_of(manifest.prompts, other) is not None for other in get_args(Side)):
        return ""
    return manifest.prompts.get(manifest.default_prompt_name or "", "")


def _similarity(manifest: Manifest, output: str) -> Similarity:
    if output != "embedding" or manifest.embedding is None:
        return "dot"
    named = manifest.embedding.similarity
    return cast(Similarity, named) if named in get_args(Similarity) else "cosine"


def _is_unit(manifest: Manifest, output: str) -> bool:
    if output == "embedding":
        return manifest.embedding is not None and manifest.embedding.normalize
    return any(one.unit_length for one in manifest.outputs if one.name == output)


def _skip_ids(manifest: Manifest, output: str, side: Side, tokenizer: Tokenizer) -> list[int]:
    if output == "token_weights":
        return _special_ids(tokenizer)
    role: Role | None = manifest.roles.get(side)
    return list(role.skip_ids) if role and output == "token_embedding" else []


def _special_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens marked as special, and tokens that surround every text."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    return sorted(special | set(tokenizer.encode("").ids))
