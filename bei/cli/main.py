"""The command line: ``bei build | sign | serve | simulate | tune | verify | inspect | cache | doctor | bench``.

Flags of builds and servers are derived from the configuration classes.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import os
import signal
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from bei.config.kubernetes import injected
from bei.errors import BeiError, BrokenDependencyError, ConfigError, MissingDependencyError
from bei.service.resolve import artifact_for, build_config_class, cache_of, check_if_built, default_artifact
from bei.utils import libraries
from bei.utils.full_disk import naming_full_disk
from bei.utils.ranges import Range, shown
from bei.utils.scarce_resources import scarce_resource
from bei.utils.untrusted_files import printable
from bei.version import __version__

if TYPE_CHECKING:
    from bei.artifact.manifest import Artifact

# Limit for an error's message on the terminal.
_MOST_CHARS = 2000

# Of head sizes and compute capabilities.
_NUMBERS = Range(1, 65_536)

# Settings of bei serve that bei tune shares: the sources of artifacts, and what a measurement depends on.
_TUNE_SETTINGS = frozenset(
    (
        *("models", "engine_threads", "engine_streams", "graph_megabytes", "gpu_megabytes"),
        *("cache_dir", "cache_max_size", "precision", "require_signature"),
    )
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. Errors of arguments or of the machine are one line on stderr and exit code 2."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in arguments if not word.startswith("-")), None)
    # An interrupted build cleans up after itself, also as process 1 of a container; serving replaces the handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _write_whatever_the_locale()
    # The tokenizer pool's threads are the parallelism. Set here and not by TextEncoder, since other processes may
    # differ.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        options = vars(_parser(command, arguments).parse_args(arguments))
        run = options.pop("run")
        run(options)
        sys.stdout.flush()  # it may be a file on a full disk
    except (BeiError, OSError) as error:  # OSError: a read-only folder, a pipe that nobody reads
        _fail((None if isinstance(error, ConfigError) else scarce_resource(error)) or str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if (lack := scarce_resource(error)) is None:
            raise
        _fail(lack)


def _fail(message: str) -> NoReturn:
    """Say it in one line, and end with exit code 2."""
    print(f"error: {_one_line(message)}", file=sys.stderr)  # noqa: T201
    with suppress(OSError):
        sys.stdout.flush()
        sys.exit(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what cannot be written would be tried again at exit
    sys.exit(2)


def _write_whatever_the_locale() -> None:
    """Escape characters that the terminal's encoding lacks, instead of ending with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _for_stdout(content: str) -> str:
    """JSON with characters escaped that the terminal's encoding lacks."""
    try:
        content.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return json.dumps(json.loads(content), indent=2)
    return content


def _one_line(message: str) -> str:
    """``message`` in one safe line: messages of YAML and compilers have several, and files can hold megabytes or
    control codes."""
    text = " ".join(message.split())
    text = text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS // 2]} ... {text[-_MOST_CHARS // 2 :]}"
    return printable(text)


def _parser(command: str | None, arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser. Only the flags of ``command`` are added, since those of builds need the builder installed.
    ``arguments``: the whole command line."""
    parser = argparse.ArgumentParser(prog="bei", description="Embedding inference server, compiled ahead of time.")
    parser.add_argument("--version", action="version", version=f"bei {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    build = commands.add_parser("build", help="compile a checkpoint into an artifact")
    build.set_defaults(run=_build)
    if command == "build":
        _add_fields(build, build_config_class())
    sign = commands.add_parser("sign", help="sign an artifact, for bei serve --require-signature")
    sign.add_argument("artifact")
    sign.add_argument("--key", metavar="FILE", required=True, help="PEM file of an Ed25519 private key")
    sign.add_argument(
        "--passphrase-file", metavar="FILE", help="file whose first line is its passphrase (or BEI_SIGN_PASSPHRASE)"
    )
    sign.set_defaults(run=_sign)
    serve = commands.add_parser("serve", help="serve artifacts (or checkpoints, built first) over HTTP")
    serve.set_defaults(run=_serve)
    if command == "serve":
        from bei.config.settings import ServeConfig

        _add_fields(serve, ServeConfig)
    tune = commands.add_parser("tune", help="measure what artifacts cost on this machine, for bei serve")
    tune.set_defaults(run=_tune)
    if command == "tune":
        from bei.config.settings import ServeConfig

        _add_fields(tune, ServeConfig, only=_TUNE_SETTINGS)
    verify = commands.add_parser("verify", help="compare an artifact's engine with the reference, on its own device")
    verify.add_argument("artifact")
    verify.set_defaults(run=_verify)
    inspect = commands.add_parser("inspect", help="show what an artifact is, and its certificate")
    inspect.add_argument("artifact")
    inspect.add_argument("--json", action="store_true", help="machine-readable")
    inspect.add_argument("--certificate", action="store_true", help="the certificate alone, with all of its figures")
    inspect.set_defaults(run=_inspect)
    cache = commands.add_parser("cache", help="list or remove what bei serve keeps between starts")
    if command == "cache":
        from bei.cli.cache import add_arguments

        add_arguments(cache)
    doctor = commands.add_parser("doctor", help="show what this machine can build and serve, and what it lacks")
    doctor.set_defaults(run=_doctor)
    if command == "doctor":
        _add_doctor_arguments(doctor)
    simulate = commands.add_parser("simulate", help="compare schedulers on a trace of requests and simulated devices")
    simulate.set_defaults(run=_simulate)
    if command == "simulate":
        from bei.cli.simulate.command import add_arguments

        add_arguments(simulate)
    bench = commands.add_parser("bench", help="put load on servers and measure them; compare two such results")
    if command == "bench":
        _add_bench_arguments(bench, arguments)
    return parser


def _add_bench_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    libraries.load("hdrh.histogram", "hdrhistogram", "bench", "bei bench")
    from bei.cli.bench.compare import compare
    from bei.cli.bench.options import COMPARE, add_arguments, add_compare_arguments
    from bei.cli.bench.run import bench

    if [*arguments][arguments.index("bench") + 1 :][:1] == [COMPARE]:
        add_compare_arguments(parser)
        parser.set_defaults(run=lambda options: _exit(compare(options)))
    else:
        add_arguments(parser)
        parser.set_defaults(run=lambda options: _exit(bench(options, arguments)))


def _exit(code: int) -> None:
    if code:
        sys.exit(code)


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    from bei.cli.doctor.targets import ELSEWHERE, HEAD_SIZES, TARGETS

    sizes, elsewhere = (",".join(map(str, numbers)) for numbers in (HEAD_SIZES, ELSEWHERE))
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="examine this target only; exit code 1 if it can neither be built nor served here",
    )
    parser.add_argument(
        "--head-sizes",
        type=_numbers,
        metavar="N,N",
        default=HEAD_SIZES,
        help=f"head sizes of the attention layers to build (default: {sizes})",
    )
    parser.add_argument(
        "--compute-capability",
        type=_numbers,
        metavar="N,N",
        default=(),
        help=f"GPUs to build for with tensorrt-rtx (default: this machine's, else {elsewhere})",
    )
    parser.add_argument("--no-attention", action="store_true", help="build no attention layers, which takes seconds")


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers in ``64,128``."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 and int(part) in _NUMBERS for part in parts):
        raise argparse.ArgumentTypeError(f"must be whole numbers {_NUMBERS} separated by commas, not {shown(text)}")
    return tuple(map(int, parts))


def _add_fields(parser: argparse.ArgumentParser, config_class: type[Any], only: frozenset[str] | None = None) -> None:
    """Add an argument for each field, or for each field in ``only``.

    Flags that are not given are missing in the result, so that environment and file apply.
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
    config_class = build_config_class()
    from bei.config.sources import load
    from bei.engine.load import load_engine
    from bei_build.pipeline import build
    from bei_build.progress import Progress

    file = options.pop("config", None)
    build(load(config_class, options, file), load_engine, Progress())


def _serve(options: dict[str, Any]) -> None:
    from bei.utils.log_format import configure

    config = _serve_config(options)
    configure(config.log_format, "supervisor" if config.has_processes else "")
    for service, names in injected(os.environ).items():
        logging.getLogger(__name__).info(
            "not taken for settings, as Kubernetes injected them for a Service (%s): %s", service, ", ".join(names)
        )
    if config.has_processes:
        from bei.multiprocess.supervisor.supervisor import run
    else:
        from bei.server.run import run
    from bei.server.http.listen import Sockets

    # Bound before builds, which take minutes, and before gigabytes are loaded: a port may be taken.
    with closing(Sockets(config)) as sockets, _artifacts(config) as artifacts:
        run(artifacts, config, sockets)


def _tune(options: dict[str, Any]) -> None:
    config = _serve_config(options)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    from bei.cli.tune import tune

    with _artifacts(config) as artifacts:
        for artifact in artifacts:
            print(tune(artifact, config))  # noqa: T201


def _serve_config(options: dict[str, Any]) -> Any:
    """The ServeConfig of flags, environment and file."""
    from bei.config.settings import ServeConfig
    from bei.config.sources import load

    file = options.pop("config", None)
    if not options.get("models"):
        options.pop("models", None)  # argparse gives [] for none; then environment and file apply
    else:
        options["models"] = tuple(options["models"])
    return load(ServeConfig, options, file)


@contextmanager
def _artifacts(config: Any) -> Iterator[list[Path | Artifact]]:
    """The artifacts of ``config.models``; checkpoints are built first. Those in the cache are protected meanwhile."""
    for model in config.models:  # before builds, which take minutes
        check_if_built(model, config)
    with ExitStack() as held:
        found = [artifact_for(model, config, held) for model in config.models] or [default_artifact(config, held)]
        if not all(isinstance(one, Path) for one in found):
            cache_of(config).enforce_limit(config.cache_max_bytes)  # now that all of them are in use
        yield found


def _sign(options: dict[str, Any]) -> None:
    from bei.artifact.signing_keys import PASSPHRASE_VARIABLE, exposure, private_key
    from bei.artifact.store import load, sign

    key = private_key(options["key"], os.environ.get(PASSPHRASE_VARIABLE), options["passphrase_file"])
    if warning := exposure(options["key"]):
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201
    artifact = load(Path(options["artifact"]))
    with naming_full_disk(artifact.path):
        before, now = artifact.signed, sign(artifact, key).signed
    assert now is not None
    instead = f", and no longer by {before.key}" if before and before.key != now.key else ""
    print(f"{artifact.path} is signed by {now.key}{instead}")  # noqa: T201


def _verify(options: dict[str, Any]) -> None:
    from bei.cli.inspect_artifact import as_table
    from bei.errors import VerificationError
    from bei.verification.verify import failure_of, verify

    artifact, is_good = verify(Path(options["artifact"]))
    print(as_table(artifact))  # noqa: T201
    if not is_good:
        raise VerificationError(failure_of(artifact.manifest.name, artifact.certificate))


def _inspect(options: dict[str, Any]) -> None:
    from bei.artifact.store import load
    from bei.cli import certificate
    from bei.cli.inspect_artifact import as_json, as_table

    shown = (certificate.as_json, certificate.as_tables) if options["certificate"] else (as_json, as_table)
    text = shown[0 if options["json"] else 1](load(Path(options["artifact"])))
    print(_for_stdout(text) if options["json"] else text)  # noqa: T201


def _doctor(options: dict[str, Any]) -> None:
    from rich.console import Console

    from bei.cli.doctor.report import examine
    from bei.cli.doctor.targets import HEAD_SIZES
    from bei.cli.doctor.text import as_text, show

    if options["no_attention"] and options["head_sizes"] != HEAD_SIZES:
        raise ConfigError(
            "--head-sizes has no effect with --no-attention, which builds no attention layers: give one of them."
        )
    if options["compute_capability"] and options["target"] not in (None, "tensorrt-rtx"):
        raise ConfigError(
            f"--compute-capability works with target tensorrt-rtx only, not with {options['target']}: leave it out."
        )

    with Console(stderr=True).status("examining") as status:  # a no-op if stderr is no terminal
        report = examine(
            _builder_for_doctor(),
            target=options["target"],
            head_sizes=options["head_sizes"],
            capabilities=tuple(map(str, options["compute_capability"])),
            with_attention=not options["no_attention"],
            say=status.update,
        )
    if options["json"]:
        print(_for_stdout(msgspec.json.format(msgspec.json.encode(report), indent=2).decode()))  # noqa: T201
    elif sys.stdout.isatty():
        show(report, Console())
    else:
        print(as_text(report))  # noqa: T201
    if options["target"] and "yes" not in report.targets[0].verdicts:
        sys.exit(1)


def _simulate(options: dict[str, Any]) -> None:
    from bei.cli.simulate.command import run

    print(run(options))  # noqa: T201


def _builder_for_doctor() -> Any:
    """The builder for ``bei.cli.doctor``, or the error that names what it lacks."""
    from bei.cli.doctor.targets import Builder

    try:
        config_class = build_config_class()
    except (MissingDependencyError, BrokenDependencyError) as error:
        return error
    from bei_build.config import TARGETS
    from bei_build.targets.attention_probe import FORMS, PRECISIONS, ProbedLayer, probe_layers
    from bei_build.targets.choose import compiler_for

    return Builder(
        targets=TARGETS,
        compiler_for=lambda target, capabilities: compiler_for(
            config_class(model="bei doctor", target=target, compute_capability=capabilities)
        ),
        forms=FORMS,
        precisions=PRECISIONS,
        probed=lambda target, asked: probe_layers(target, [ProbedLayer(*one) for one in asked]),
    )


_METAVARS = {int: "N", float: "X"}


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING or field.default in (None, "", ()):
        return ""
    default = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f" (default: {default})"
