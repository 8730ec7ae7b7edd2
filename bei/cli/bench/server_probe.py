"""The first requests to a server: checks that it answers the load's requests, and identifies it."""

from __future__ import annotations

import http.client
import json
import random
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from bei.cli.bench.arrivals import LoadPlan
from bei.cli.bench.bounded_http import MOST_JSON_BYTES, AnswerTooLongError, most_answer_bytes
from bei.cli.bench.dialects import DIALECTS, BenchDialect
from bei.cli.bench.metrics_scraper import TIMEOUT_S
from bei.cli.bench.options import BenchPlan
from bei.cli.bench.result import ServerFacts
from bei.cli.bench.target import BenchTarget, merged_headers
from bei.cli.bench.texts import GeneratedTexts
from bei.errors import BenchError

_SHOWN = 300  # characters of an answer in messages
_OTHER_TEXTS = 1 << 30  # first number of the probe's texts: a run never reaches it
_MODELS = ("/v1/models", "/models")


class ServerProbe:
    """Probes one server."""

    def __init__(self, plan: BenchPlan, target: BenchTarget, model: str | None) -> None:
        self._plan = plan
        self._target = target
        self._tls = plan.tls.context_for(target)
        self._dialect: BenchDialect = DIALECTS[plan.setup.dialect]
        self._model = model
        self.path = target.path(plan.path or self._dialect.path)

    def examine(self) -> ServerFacts:
        """Send one request of each load. Raises BenchError with a remedy."""
        model = self._model or (self._only_model() if self._dialect.needs_model else None)
        header = ""
        texts = GeneratedTexts(0, _OTHER_TEXTS, 1)
        for load in self._plan.setup.loads:
            header = self._ask(load, texts, model) or header
        query = f"?model={quote(model)}" if model is not None else ""  # bei requires it if it serves several models
        info = self._json_of(f"/info{query}")
        return ServerFacts(
            name=self._target.name,
            url=self._target.url,
            model=model,
            software=_software(info, header),
            is_local=self._target.host in ("localhost", "::1") or self._target.host.startswith("127."),
            info=info if is_bei(info) else None,
        )

    def _ask(self, load: LoadPlan, texts: GeneratedTexts, model: str | None) -> str:
        """Send one request of ``load``; returns the answer's header ``server``."""
        count = load.lengths("inputs").draw(random.Random(0))
        query = texts.take(load.lengths("query_words")) if self._dialect.has_query else ""
        body = self._dialect.body([texts.take(load.lengths("words")) for _ in range(count)], query, model)
        status, answer, server = self._post(
            body, merged_headers(self._plan.headers, load.lane), most_answer_bytes(count)
        )
        if status != 200:
            raise BenchError(f"{self._where} answered {status}: {_shown(answer)}{_REMEDIES.get(status, '')}")
        if problem := self._dialect.check(answer, count):
            raise BenchError(
                f"{self._where} answered 200, but not what the dialect {self._dialect.name} asks for: {problem}."
            )
        return server

    @property
    def _where(self) -> str:
        scheme, host = self._target.url.split("://")[0], self._target.authority
        return f"{scheme}://{host}{self.path}"

    def _post(self, body: bytes, headers: Mapping[str, str], most_bytes: int) -> tuple[int, bytes, str]:
        timeout_s, headers = self._plan.setup.timeout_s, {**headers, "content-type": "application/json"}
        try:
            return self._target.request("POST", self.path, headers, self._tls, timeout_s, most_bytes, body)
        except AnswerTooLongError as error:
            raise AnswerTooLongError(f"{self._where} cannot be measured: {error}.") from error
        except ssl.SSLError as error:
            raise BenchError(
                f"TLS with {self._target.url} failed: {error}. --tls-ca FILE names an authority to trust, --insecure "
                "trusts whoever answers."
            ) from error
        except TimeoutError as error:
            raise BenchError(f"{self._where} gave no answer within {timeout_s:g} s (--timeout).") from error
        except http.client.HTTPException as error:
            raise BenchError(f"{self._where} does not answer as an HTTP server: {error!r}.") from error
        except OSError as error:
            raise BenchError(f"Nothing answers at {self._target.url}: {error}.") from error

    def _only_model(self) -> str:
        for route in _MODELS:
            content = self._json_of(route)
            rows = content.get("data") if content else None
            if isinstance(rows, list):
                names = [str(row.get("id")) for row in rows if isinstance(row, dict)]
                if len(names) == 1:
                    return names[0]
                raise BenchError(
                    f"{self._target.url} serves {len(names)} models: --model names one of {', '.join(names)}."
                )
        raise BenchError(f"{self._target.url} does not say which models it serves: name one with --model.")

    def _json_of(self, route: str) -> dict[str, Any] | None:
        """The JSON object that GET ``route`` returns, or None."""
        try:
            path, headers = self._target.path(route), self._plan.headers
            status, body, _ = self._target.request("GET", path, headers, self._tls, TIMEOUT_S, MOST_JSON_BYTES)
            content = json.loads(body) if status == 200 else None
        except ssl.SSLError as error:
            raise BenchError(f"TLS with {self._target.url} failed: {error}. See --tls-ca and --insecure.") from error
        except ConnectionError as error:
            raise BenchError(f"Nothing answers at {self._target.url}: {error}.") from error
        except (OSError, http.client.HTTPException, ValueError, RecursionError, AnswerTooLongError):
            return None
        return content if isinstance(content, dict) else None


_REMEDIES = {
    401: ". --api-key-env VARIABLE or --api-key-file FILE gives an API key.",
    403: ". The API key, if one was given, does not allow this.",
    404: ". Is it the right --dialect, --path and --model?",
    429: ". The server is under load already.",
    503: ". The server is not ready, or under load already.",
}


def is_bei(info: Mapping[str, Any] | None) -> bool:
    """True if ``info`` is that of a bei server."""
    return info is not None and isinstance(info.get("certificate"), dict) and "target" in info


def _software(info: Mapping[str, Any] | None, header: str) -> str | None:
    if is_bei(info):
        assert info is not None
        return f"bei {info.get('version')}"
    if info is not None and "max_client_batch_size" in info:
        return f"text-embeddings-inference {info.get('version')}"
    return header or None


def _shown(answer: bytes) -> str:
    return " ".join(answer[:_SHOWN].decode(errors="replace").split()) or "nothing"
