"""Command line of ``bei bench``, checked and turned into a plan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bei.cli.bench.arrivals import LoadPlan, check_words, load_of
from bei.cli.bench.dialects import DIALECTS
from bei.cli.bench.result import BenchSetup
from bei.cli.bench.target import BenchTarget, TlsPlan, headers_of, key_of, target_of
from bei.cli.bench.texts import TextsPlan, plan_of
from bei.errors import ConfigError
from bei.utils.ranges import Range, shown

COMPARE = "compare"

_CONCURRENCY = 16  # the default load
_WORDS = "20"
_QUERY_WORDS = "8"
_MOST_INTERVALS = 600

# Seeds are sent to the workers in 64 bits.
_RANGES = {
    "duration": Range(1, 86_400, "seconds"),
    "warmup": Range(0, 3600, "seconds"),
    "timeout": Range(0.001, 3600, "seconds"),
    "workers": Range(1, 64),
    "repeat_texts": Range(1, 1_000_000),
    "seed": Range(0, 2**63 - 1),
}

_EPILOG = """examples:
  bei bench http://127.0.0.1:8000 --concurrency 64 --duration 30
  bei bench http://127.0.0.1:8000 --rates 50,100,200,400 --out sweep
  bei bench bei=http://127.0.0.1:8000 peer=http://127.0.0.1:7997 --rates 20,40
  bei bench http://127.0.0.1:8000 --load interactive:rate=20 \\
      --load bulk:concurrency=4,inputs=32,words=lognormal:58:0.85
  bei bench compare before.json after.json --html compared.html
docs/bench.md says what the figures mean."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``bei bench URL...``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("servers", nargs="+", metavar="URL", help="servers to measure (or NAME=URL), in turn and with the same texts")
    add("--dialect", choices=DIALECTS, default="openai", help="API that requests use (default: openai)")
    add(
        "--model",
        action="append",
        metavar="NAME",
        help="model to ask for; several times: one for each server (default: the only one that is served)",
    )
    add("--path", help="route, in place of the dialect's")
    loads = parser.add_argument_group("load")
    add = loads.add_argument
    add("--concurrency", type=int, metavar="N", help=f"closed loop: so many requests at once (default: {_CONCURRENCY})")
    add("--rate", type=float, metavar="X", help="open loop: so many requests a second, however long answers take")
    add("--rates", metavar="X,X", help="open loop at one rate after the other")
    add(
        "--arrivals",
        choices=("poisson", "constant"),
        default="poisson",
        help="how requests of open loops arrive (default: poisson)",
    )
    add("--inputs", default="1", metavar="LENGTH", help="texts of a request (default: 1)")
    add(
        "--words",
        default=_WORDS,
        metavar="LENGTH",
        help="words of a text: N, uniform:LEAST:MOST or lognormal:MEAN:SIGMA[:MOST] (default: 20)",
    )
    add("--query-words", default=_QUERY_WORDS, metavar="LENGTH", help="words of a reranker's query (default: 8)")
    add("--lane", choices=("interactive", "bulk"), help="send X-Bei-Lane")
    add(
        "--max-connections",
        type=int,
        default=1000,
        metavar="N",
        help="most connections of an open loop (default: 1000)",
    )
    add(
        "--load",
        action="append",
        metavar="NAME:KEY=VALUE,...",
        help="one of several loads at the same time; keys as the flags above",
    )
    texts = parser.add_argument_group("texts")
    add = texts.add_argument
    add("--texts", type=Path, metavar="FILE", help="file with a text a line (default: random English words)")
    add(
        "--repeat-texts",
        type=int,
        metavar="N",
        help="use only so many texts, again and again (default: no two are alike)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of texts and arrivals (default: 0)")
    run = parser.add_argument_group("run")
    add = run.add_argument
    add(
        "--duration",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time that is measured at each point, after the warm-up (default: 30)",
    )
    add(
        "--warmup",
        type=float,
        default=3.0,
        metavar="SECONDS",
        help="time under load before each point that is not counted (default: 3)",
    )
    add(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="longest wait for an answer, from when its request was due (default: 30)",
    )
    add(
        "--obey-retry-after",
        action="store_true",
        help="send refused requests (429, 503) again, after the time in Retry-After",
    )
    add("--workers", type=int, default=1, metavar="N", help="processes that make load (default: 1)")
    add("--no-scrape", action="store_true", help="do not read /metrics of bei servers meanwhile")
    add("--out", metavar="PATH", help="write PATH.json and PATH.html")
    add("--fail-on-errors", action="store_true", help="exit code 1 if a request failed")
    access = parser.add_argument_group("access")
    add = access.add_argument
    add(
        "--api-key-env",
        metavar="VARIABLE",
        help="environment variable with an API key, sent as a bearer to all servers",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="file with an API key")
    add(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="one more header; results keep its name only",
    )
    add("--tls-ca", metavar="FILE", help="PEM file of authorities that are trusted")
    add("--tls-cert", metavar="FILE", help="PEM file of the client's certificate")
    add("--tls-key", metavar="FILE", help="PEM file of the certificate's key")
    add("--insecure", action="store_true", help="do not check the servers' certificates")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``bei bench compare``."""
    parser.add_argument(COMPARE, choices=(COMPARE,), help=argparse.SUPPRESS)
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page too")


@dataclass(frozen=True)
class BenchPlan:
    """A checked plan of a run. ``models``: one for each server; None: determined by the probe."""

    setup: BenchSetup
    targets: list[BenchTarget]
    models: list[str | None]
    path: str | None
    tls: TlsPlan
    headers: dict[str, str]
    seed: int
    scrapes: bool
    out: Path | None
    fails_on_errors: bool


def plan_from(options: dict[str, Any]) -> BenchPlan:
    """The plan for ``options``. Raises ConfigError for invalid or contradicting ones."""
    targets = _targets(options["servers"])
    models = options["model"] or [None]
    if len(models) not in (1, len(targets)):
        raise ConfigError(f"--model: give one for all servers, or {len(targets)}, one each; not {len(models)}.")
    for name, within in _RANGES.items():
        if options[name] is not None:
            within.check(f"--{name.replace('_', '-')}", options[name])
    if options["path"] is not None and not options["path"].startswith("/"):
        raise ConfigError(f"--path must begin with a slash, not {options['path']!r}.")
    texts = plan_of(options["texts"], options["seed"], options["repeat_texts"])
    return BenchPlan(
        setup=_setup(options, texts),
        targets=targets,
        models=models * len(targets) if len(models) == 1 else models,
        path=options["path"],
        tls=_tls(options),
        headers=headers_of(options["header"], key_of(options["api_key_env"], options["api_key_file"])),
        seed=options["seed"],
        scrapes=not options["no_scrape"],
        out=_out(options["out"]),
        fails_on_errors=options["fail_on_errors"],
    )


def _targets(given: Sequence[str]) -> list[BenchTarget]:
    targets = [target_of(text, number) for number, text in enumerate(given, 1)]
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise ConfigError(f"Servers need names of their own, not {', '.join(names)}.")
    return targets


def _setup(options: dict[str, Any], texts: TextsPlan) -> BenchSetup:
    duration_s = options["duration"]
    return BenchSetup(
        dialect=options["dialect"],
        loads=_loads(options, texts),
        texts=texts,
        rates=_rates(options["rates"]),
        warmup_s=options["warmup"],
        duration_s=duration_s,
        interval_s=duration_s / min(_MOST_INTERVALS, max(1, round(duration_s))),
        timeout_s=options["timeout"],
        workers=options["workers"],
        obeys_retry_after=options["obey_retry_after"],
        header_names=sorted(text.partition(":")[0].strip().lower() for text in options["header"]),
    )


def _loads(options: dict[str, Any], texts: TextsPlan) -> list[LoadPlan]:
    names = ("rate", "concurrency", "arrivals", "inputs", "words", "query_words", "lane", "max_connections")
    flags = {name: options[name] for name in names}
    is_sweep = options["rates"] is not None
    if is_sweep and (flags["rate"] is not None or flags["concurrency"] is not None):
        raise ConfigError("--rates is an open loop at one rate after the other: leave out --rate and --concurrency.")
    if not options["load"]:
        if not is_sweep and flags["rate"] is None and flags["concurrency"] is None:
            flags["concurrency"] = _CONCURRENCY
        loads = [LoadPlan(name="all", **flags)]
    else:
        loads = [load_of(text, flags) for text in options["load"]]
    if len({load.name for load in loads}) < len(loads):
        raise ConfigError("Every --load needs a name of its own.")
    swept = [load.name for load in loads if load.is_swept]
    if not is_sweep and swept:
        raise ConfigError(f"Load {swept[0]} has neither a rate nor a concurrency (nor is there a --rates).")
    if is_sweep and len(swept) != 1:
        raise ConfigError("--rates needs exactly one --load without a rate and a concurrency: that one gets the rates.")
    for load in loads:
        if texts.file is None:
            check_words(load)
        elif (load.words, load.query_words) != (_WORDS, _QUERY_WORDS):
            raise ConfigError(
                f"Load {load.name}: words and query_words are for random texts and have no effect with --texts: "
                "leave them out."
            )
    return loads


def _rates(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate <= 1e6 for rate in rates) or len(set(rates)) < len(rates):
        raise ConfigError(
            f"--rates must be different numbers above 0 separated by commas, each at most a million, not {shown(text)}."
        )
    return sorted(rates)


def _tls(options: dict[str, Any]) -> TlsPlan:
    if options["tls_key"] is not None and options["tls_cert"] is None:
        raise ConfigError("--tls-key needs --tls-cert.")
    if options["insecure"] and options["tls_ca"] is not None:
        raise ConfigError("--insecure and --tls-ca: give one.")
    return TlsPlan(options["tls_ca"], options["tls_cert"], options["tls_key"], options["insecure"])


def _out(text: str | None) -> Path | None:
    """The path of the results, checked before the measurement."""
    if text is None:
        return None
    path = Path(text)
    if path.suffix in (".json", ".html"):
        path = path.with_suffix("")
    if not path.name or not path.parent.is_dir():
        raise ConfigError(f"--out {text}: there is no folder {path.parent}.")
    return path
