"""The groups of routes in /openapi.json, and the order in which they stand there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

from bei.server.dialects.base import Dialect


class Group(NamedTuple):
    """``routes``: ``METHOD /path`` of each, in the order of the group."""

    name: str
    description: str
    routes: Seq[str] = ()


# Routes without a mount point. What is in no group is of the server's state, and comes last.
_OWN: Final = (
    Group(
        "OpenAI",
        "OpenAI's routes: `http://SERVER/v1` is the base URL of its clients.",
        (
            "POST /v1/embeddings",
            "POST /embeddings",
            "GET /v1/models",
            "GET /v1/models/{name}",
            "GET /models",
            "GET /models/{name}",
        ),
    ),
    Group(
        "Files and batches",
        "OpenAI's: a file of requests, which the server answers beside single queries. Needs the setting `batch_dir`.",
        (
            "POST /v1/files",
            "GET /v1/files",
            "GET /v1/files/{file_id}",
            "GET /v1/files/{file_id}/content",
            "DELETE /v1/files/{file_id}",
            "POST /v1/batches",
            "GET /v1/batches",
            "GET /v1/batches/{batch_id}",
            "POST /v1/batches/{batch_id}/cancel",
        ),
    ),
    Group(
        "Rerank",
        "Scores of pairs, by a reranker. `/v1/score` also compares vectors of an embedder.",
        (
            "POST /v1/rerank",
            "POST /v2/rerank",
            "POST /rerank",
            "POST /v1/score",
            "POST /score",
            "POST /v1/ranking",
        ),
    ),
    Group(
        "Classify",
        "Scores of labels: of texts, of pairs and of tokens; spans for labels of the request.",
        (
            "POST /predict",
            "POST /v1/classify",
            "POST /classify",
            "POST /predict_tokens",
            "POST /v1/extract",
            "POST /v1/extract/{model}",
        ),
    ),
    Group(
        "Decide",
        "A probability for every option of typed questions about a text.",
        ("POST /v1/decisions", "POST /v1/systemone"),
    ),
    Group(
        "Embed",
        "Dense, sparse and token vectors, as other servers than OpenAI answer them.",
        (
            "POST /embed",
            "POST /embed_sparse",
            "POST /embed_all",
            "POST /similarity",
            "POST /v1/embed",
            "POST /v2/embed",
            "POST /pooling",
        ),
    ),
    Group("Tokenize", "Token ids of texts, and back.", ("POST /tokenize", "POST /detokenize", "POST /decode")),
    Group(
        "Azure OpenAI",
        "OpenAI's routes as clients of Azure ask for them: `http://SERVER` is the endpoint.",
        (
            "POST /openai/deployments/{deployment}/embeddings",
            "POST /openai/v1/embeddings",
            "GET /openai/v1/models",
            "GET /openai/v1/models/{name}",
            "GET /openai/models",
            "GET /openai/models/{name}",
        ),
    ),
    Group(
        "By kind of model",
        "What the served model is for, for clients that know nothing but an address.",
        (
            "POST /",
            "POST /invocations",
            "POST /vertex",
            "POST /models/{name}",
            "POST /models/{name}/pipeline/{task}",
            "POST /pipeline/{task}/{name}",
        ),
    ),
)
_STATE: Final = Group("Server", "Its state, its models, and what it measures.")


class Groups:
    """The groups of a server: of routes without a mount point, of each dialect, and of the server's state."""

    def __init__(self, dialects: Iterable[Dialect]) -> None:
        self._places: dict[str, tuple[int, int]] = {
            route: (at, within) for at, group in enumerate(_OWN) for within, route in enumerate(group.routes)
        }
        mounts = [(one.name, _group_of(one)) for one in dialects]
        self._mounts: Mapping[str, int] = {name: at for at, (name, _) in enumerate(mounts, len(_OWN))}
        self._groups = (*_OWN, *(group for _, group in mounts), _STATE)

    def tags(self) -> list[dict[str, str]]:
        """Names and descriptions, in their order."""
        return [{"name": group.name, "description": group.description} for group in self._groups]

    def name_of(self, method: str, path: str) -> str:
        """The group that a route is in."""
        return self._groups[self.place_of(method, path)[0]].name

    def place_of(self, method: str, path: str) -> tuple[int, int]:
        """Where a route stands: its group, and its place there. Routes with equal places keep their order."""
        mount = self._mounts.get(path[1:].partition("/")[0])
        if mount is not None:
            return mount, method != "POST"
        return self._places.get(f"{method} {path}", (len(self._groups) - 1, 0))


def _group_of(dialect: Dialect) -> Group:
    name = dialect.name
    return Group(dialect.title, f"Routes under `/{name}`, with the fields, defaults and errors of {dialect.title}.")
