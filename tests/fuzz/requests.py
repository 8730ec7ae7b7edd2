"""What clients send: bodies of all routes, and headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from bei.config.settings import ServeConfig
from bei.metrics.registry import Metrics
from bei.server.auth.key_file import KeySpec
from bei.server.auth.keys import Keyring
from bei.server.auth.priority import TIER_NAMES, in_tier, urgency_of
from bei.server.dialects.base import Dialects
from bei.server.dialects.table import all_dialects
from bei.server.endpoint.models import Models
from bei.server.http.accept import answer_form
from bei.server.http.message_head import checked_headers
from bei.server.status.whole_server import WholeServer
from tests.bei.server.test_fuzz import PARSERS, check, seeds_of
from tests.fuzz.mutation import changed_body, changed_bytes
from tests.fuzz.trial import Trial

_VALUES: dict[bytes, Sequence[bytes]] = {
    b"x-bei-lane": (b"interactive", b" Bulk "),
    b"request-timeout-ms": (b"1500", b"1e3"),
    b"request-deadline-ms": (b"1764111111111", b"0"),
    b"x-request-timeout": (b"0.5", b"inf"),
    b"accept": (b"application/json, application/octet-stream;q=0.5, */*;q=0.1", b"text/html;level=1"),
    b"accept-encoding": (b"zstd, gzip;q=0.8, identity;q=0", b"br;q=1.0, *;q=0"),
    b"x-bei-report": (b"true", b"0"),
    b"x-bei-dialect": (b"tei", b"cohere"),
    b"authorization": (b"Bearer a-secret-key", b"api-key x"),
    b"x-api-key": (b"a-secret-key",),
    b"host": (b"localhost:8000", b"[::1]:80"),
    b"transfer-encoding": (b"chunked", b"gzip, chunked"),
}


def bodies(_: Path) -> Trial:
    """Each of some parser."""
    names = [*PARSERS]

    def trial(random: Random) -> None:
        name = random.choice(names)
        error = check(name, changed_body(random, seeds_of(name)), in_part=random.random() < 0.5)
        if error is not None:
            raise error

    return trial


def headers(_: Path) -> Trial:
    """Some headers, read by one of their readers."""
    config, models = ServeConfig(), Models([])
    dialects = Dialects(all_dialects(models, config, WholeServer(models, Metrics())))
    keys = Keyring(lambda: [KeySpec("search", ("a-secret-key",))])
    readers: tuple[Callable[[list[tuple[bytes, bytes]]], object], ...] = (
        urgency_of,
        answer_form,
        lambda given: dialects.of(given, "/embed"),
        lambda given: keys.check({"headers": given}),
        lambda given: checked_headers("1.1", given),
    )

    def trial(random: Random) -> None:
        names = random.choices([*_VALUES], k=random.randrange(1, 5))
        given = [(name, changed_bytes(random, random.choice(_VALUES[name]), (b",", b";q=", b"*"))) for name in names]
        if random.random() < 0.1:
            tier = changed_bytes(random, random.choice(TIER_NAMES).encode()).decode(errors="replace")
            in_tier(urgency_of([]), tier)
        random.choice(readers)(given)

    return trial
