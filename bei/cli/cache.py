"""``bei cache list`` and ``bei cache prune``: shows and removes artifacts and measurements in the cache."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Seq
from datetime import datetime, timezone
from typing import Any

from bei.artifact.cache import CacheEntry, ModelCache
from bei.cli.console_text import console_text
from bei.config.settings import UNLIMITED, ServeConfig
from bei.config.sources import load
from bei.errors import ConfigError
from bei.printable import printable
from bei.utils.units import parsed_duration, parsed_size, shown_age, shown_size
from bei.utils.untrusted_files import home_expanded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their flags."""
    commands = parser.add_subparsers(metavar="list | prune")
    listing = commands.add_parser("list", help="what is kept, how large it is, when it was last used")
    listing.add_argument("--json", action="store_true", help="machine-readable")
    listing.set_defaults(run=_list)
    pruning = commands.add_parser(
        "prune", help="remove what is over the bound (cache_max_size), and what killed builds have left"
    )
    pruning.add_argument("--max-size", metavar="SIZE", help="bound instead of cache_max_size, as 20GB")
    pruning.add_argument("--older-than", metavar="TIME", help="remove what was not used for so long, as 30d, instead")
    pruning.add_argument("--all", action="store_true", help="remove all that is not in use")
    pruning.add_argument("--dry-run", action="store_true", help="say what would be removed")
    pruning.set_defaults(run=_prune)
    for command in (listing, pruning):
        command.add_argument("--cache-dir", metavar="FOLDER", help="cache folder (default: as for bei serve)")
        command.add_argument("--config", metavar="FILE", help="YAML file with the settings of bei serve")


def _list(options: dict[str, Any]) -> None:
    config, cache = _cache(options)
    entries = cache.entries()
    show = _as_json if options["json"] else _as_text
    print(show(cache, entries, config.cache_max_bytes))  # noqa: T201


def _prune(options: dict[str, Any]) -> None:
    config, cache = _cache(options)
    given = [name for name in ("max_size", "older_than") if options[name] is not None]
    if options["all"] and given:
        raise ConfigError(f"--all removes everything: leave --{given[0].replace('_', '-')} out.")
    max_bytes = None if given else config.cache_max_bytes
    if options["max_size"] is not None:
        max_bytes = parsed_size("--max-size", options["max_size"])
    older_than_s = None if options["older_than"] is None else parsed_duration("--older-than", options["older_than"])
    is_dry = options["dry_run"]
    removed = cache.prune(max_bytes=max_bytes, older_than_s=older_than_s, everything=options["all"], dry_run=is_dry)
    for entry in removed:
        word = "would remove" if is_dry else "removed"
        print(f"{word} {printable(str(entry.path))}, {shown_size(entry.size_bytes)}")  # noqa: T201
    gone = {entry.path for entry in removed}
    left = [entry for entry in cache.entries() if entry.path not in gone]
    in_use = sum(entry.in_use for entry in left)
    freed = f"{_total(removed)} {'to free' if is_dry else 'freed'}"
    print(f"{freed}, {_total(left)} {'would be ' if is_dry else ''}left{f', {in_use} in use' if in_use else ''}")  # noqa: T201


def _cache(options: dict[str, Any]) -> tuple[ServeConfig, ModelCache]:
    flags = {} if options["cache_dir"] is None else {"cache_dir": options["cache_dir"]}
    config = load(ServeConfig, flags, options["config"])
    return config, ModelCache(home_expanded(config.cache_dir))


def _total(entries: Seq[CacheEntry]) -> str:
    return shown_size(sum(entry.size_bytes for entry in entries))


def _as_json(cache: ModelCache, entries: Seq[CacheEntry], max_bytes: int | None) -> str:
    rows = [
        {
            "kind": entry.kind,
            "name": entry.name,
            "path": str(entry.path),
            "size_bytes": entry.size_bytes,
            "last_used": datetime.fromtimestamp(entry.last_used_s, timezone.utc).isoformat(timespec="seconds"),
            "in_use": entry.in_use,
        }
        for entry in entries
    ]
    size = sum(entry.size_bytes for entry in entries)
    found = {"cache_dir": str(cache.folder), "size_bytes": size, "max_size_bytes": max_bytes, "entries": rows}
    return json.dumps(found, indent=2)


def _as_text(cache: ModelCache, entries: Seq[CacheEntry], max_bytes: int | None) -> str:
    """A table, in which all cost measurements share a row."""
    from rich import box
    from rich.table import Table

    bound = UNLIMITED if max_bytes is None else shown_size(max_bytes)
    head = f"{cache.folder}: {_total(entries)}, cache_max_size {bound}"
    if not entries:
        return printable(head)
    now_s = time.time()
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("artifact", overflow="fold")
    for title in ("size", "last used"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    costs = [entry for entry in entries if entry.kind == "costs"]
    for entry in entries:
        if entry.kind != "costs":
            table.add_row(entry.name, shown_size(entry.size_bytes), shown_age(now_s - entry.last_used_s), _state(entry))
    if costs:
        age = shown_age(now_s - costs[0].last_used_s)
        table.add_row(f"costs/ (measurements: {len(costs)})", _total(costs), age, "")
    return "\n".join(printable(line) for line in (head, *console_text(table).rstrip().splitlines()))


def _state(entry: CacheEntry) -> str:
    if entry.kind == "leftover":
        return "being built" if entry.in_use else "left by a killed build"
    return "in use" if entry.in_use else ""
