"""Whatever bytes come, every route's parser returns a request or refuses it with a 4xx, in bounded time and memory.

Seeds are the golden requests of the dialects. Answers to good and bad requests are tested elsewhere: nothing here asks
a model.
"""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache, partial
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.config.settings import DIALECTS, ServeConfig
from bei.errors import BeiError
from bei.metrics.registry import Metrics
from bei.server.app import inference_routes
from bei.server.dialects.base import mounted
from bei.server.dialects.table import all_dialects
from bei.server.endpoint import parse
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.models import Models
from bei.server.endpoint.route import Route
from bei.server.http.errors import ErrorForm, own_form, status_of
from bei.server.routes.root import REQUESTS, by_kind
from bei.server.status.whole_server import WholeServer
from bei.tasks.support import PHRASES
from tests.bei.server.dialects.wire import exchanges, has_path
from tests.bei.server.endpoint.test_route import GOOD
from tests.fuzz.mutation import BYTES, NASTY, changed_body

Parse = Callable[[bytes], Any]

# A message may name what is wrong, but must not repeat a body.
LONGEST_MESSAGE = 2_000

# Of processor time, for bodies of at most 60 kB. The slowest takes 0.1 s, and on a busy machine 1.0 s;
# a parser whose time grows with the square of 20,000 items takes far longer.
LONGEST_S = 10.0

# Empty lists are worst, of which Python has an object for every three bytes.
MEMORY_FACTOR = 32
MEMORY_BYTES = 500_000


class _WasParsed(Exception):
    """The handler has its request."""


def _root_parser(task: str) -> Parse:
    """``POST /`` of a model for ``task``, which decides how a body is read."""

    def reached(*_: object) -> None:
        raise _WasParsed

    service = SimpleNamespace(manifest=SimpleNamespace(tasks=[task]))
    limit = ServeConfig.max_client_batch_size
    models = {"named": lambda _: service, "able": reached}
    stub = SimpleNamespace(**models, ask_tier=lambda _: None, max_inputs=limit, has_report=False)

    def parse(content: bytes) -> None:
        try:
            asyncio.run(cast(Any, by_kind(content, cast(RequestContext, stub))))
        except _WasParsed:
            return

    return parse


def _routes() -> Iterator[tuple[Route[Any], ErrorForm]]:
    config = ServeConfig(openai_token_ids="accept")
    yield from ((route, own_form) for route in inference_routes(config))
    for dialect in all_dialects(Models([]), config, WholeServer(Models([]), Metrics())):
        yield from ((route, dialect.error_form) for route in mounted(dialect))


ROUTES = list(_routes())
SEEDS: dict[str, list[Any]] = {path: [body] for path, (body, _, _) in GOOD.items()}
SEEDS["/v1/extract/spans"] = [{"items": [{"text": "a", "id": "b"}], "params": {"labels": ["c"], "options": {}}}]
SEEDS["/voyage/v1/contextualizedembeddings"] = [{"inputs": [["a", "the cat"]], "model": "tiny"}]
SEEDS["/voyage/v1/multimodalembeddings"] = [
    {"inputs": [{"content": [{"type": "text", "text": "a"}]}], "model": "tiny"},
    {"inputs": [{"content": [{"type": "image_base64", "image_base64": "data:image/png;base64,AAAA"}]}]},
]
for _name in DIALECTS:
    for _one in exchanges(_name) if _name != "bei" else ():
        if "body" in _one["request"]:
            SEEDS.setdefault(_one["request"]["path"], []).append(_one["request"]["body"])

# The parsers of all requests, by the path of the first route that has them.
PARSERS: dict[str, Parse] = {
    **{
        route.path: route.parse
        for route in {id(route.request): route for route, _ in reversed(ROUTES) if route.parse is not bytes}.values()
    },
    **{f"/ ({task})": _root_parser(task) for task in PHRASES},
}


@cache
def seeds_of(name: str) -> list[Any]:
    """Good bodies, and those of the goldens that are refused."""
    request = next((route.request for route, _ in ROUTES if route.parse is PARSERS[name]), REQUESTS)
    paths = [route.path for route, _ in ROUTES if route.request is request] + ["/rerank"] * (request is REQUESTS)
    return [seed for asked, seeds in SEEDS.items() if any(has_path(path, asked) for path in paths) for seed in seeds]


def check(name: str, body: bytes, *, in_part: bool = False) -> BeiError | None:
    """Parse ``body``, as routes do; the error, if it is refused as it may be."""
    started_s = time.process_time()
    try:
        parse.read_now(PARSERS[name], body, in_part)
        error = None
    except BeiError as refused:
        error = refused
    assert time.process_time() - started_s < LONGEST_S
    if error is not None:
        assert 400 <= status_of(error) < 500
        assert len(str(error)) <= LONGEST_MESSAGE
        for route, form in ROUTES:
            if route.parse is PARSERS[name]:
                assert 400 <= form(error, status_of(error), route.path)[0] < 500
    return error


def test_every_parser_has_a_seed_that_it_takes() -> None:
    for name in PARSERS:
        assert any(check(name, json.dumps(seed).encode()) is None for seed in seeds_of(name)), name


def _body(random: Random, name: str) -> bytes:
    """A changed seed of a parser."""
    return changed_body(random, seeds_of(name))


def check_many(random: Random) -> None:
    """A body for each parser. Not drawn by hypothesis value by value: that takes 20 ms a body, and this 0.2."""
    for name in PARSERS:
        body = _body(random, name)
        try:
            check(name, body, in_part=random.random() < 0.5)
        except BaseException as error:
            raise AssertionError(f"{name} of {body!r}") from error


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=True))
def test_changed_bodies_are_parsed_or_refused(random: Random) -> None:
    check_many(random)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(st.randoms(use_true_random=True))
def test_many_changed_bodies_are_parsed_or_refused(random: Random) -> None:
    check_many(random)


def test_bodies_are_of_both_kinds() -> None:
    """Most are refused, but not all: what is parsed is tested too."""
    random = Random(0)
    refused = [check(name, _body(random, name)) is not None for name in PARSERS for _ in range(20)]
    assert 0.2 < sum(refused) / len(refused) < 0.95


# Bodies of one kind of thing, about 60 kB: what is deep, what is long, what is many.


def _in_field(value: bytes, seed: dict[str, Any], field: str) -> bytes:
    others = {name: given for name, given in seed.items() if name != field}
    rest = json.dumps(others)[1:]
    return b"{" + json.dumps(field).encode() + b":" + value + (b"," if others else b"") + rest.encode()


def _many(item: bytes, size: int = 60_000) -> bytes:
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


LARGE: dict[str, bytes] = {
    "deep lists": b"[" * 30_000 + b"]" * 30_000,
    "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "an open list": b"[" * 60_000,
    "a long number": b"9" * 60_000,
    "a long fraction": b"0." + b"9" * 60_000,
    "a long text": b'"' + b"a" * 60_000 + b'"',
    "a text of escapes": b'"' + b"\\u00e9" * 10_000 + b'"',
    "a text that ends in half a character": b'"' + "é".encode() * 30_000 + b'\xc3"',
    "empty lists": _many(b"[]"),
    "empty objects": _many(b"{}"),
    "small objects": _many(b'{"text":"a"}'),
    "short texts": _many(b'"ab"'),
    "empty texts": _many(b'""'),
    "numbers": _many(b"300"),
    "lists of numbers": _many(b"[300]"),
    "lists of texts": _many(b'["ab"]'),
    "nulls": _many(b"null"),
    "blanks": b"[" + b" " * 60_000 + b"]",
    "lists among blanks": b"[[1]" + b" " * 30_000 + b",[2]" + b" " * 30_000 + b"]",
    "an object of many keys": b"{" + b",".join(b'"%d":1' % index for index in range(6_000)) + b"}",
    "the same key again and again": b"{" + b'"inputs":[[1]],' * 4_000 + b'"inputs":[[1]]}',
}


def _fields_of(name: str) -> list[tuple[dict[str, Any], str]]:
    """Every field of the seeds once, with a seed that has it."""
    found: dict[str, dict[str, Any]] = {}
    for seed in seeds_of(name):
        if isinstance(seed, dict):
            for field in seed:
                found.setdefault(field, seed)
    return [(seed, field) for field, seed in found.items()]


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_body_takes_little_time_and_memory(kind: str) -> None:
    tracemalloc.start()
    try:
        for name in PARSERS:
            for seed, field in _fields_of(name)[:1]:
                body = _in_field(LARGE[kind], seed, field)
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                check(name, body)
                peak = tracemalloc.get_traced_memory()[1] - before
                assert peak < MEMORY_FACTOR * len(body) + MEMORY_BYTES, (name, field, peak / len(body))
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_every_field_may_hold_anything(name: str) -> None:
    for seed, field in _fields_of(name):
        for value in (*LARGE.values(), *map(partial(bytes, encoding="utf-8"), NASTY), *BYTES):
            check(name, _in_field(value, seed, field))
