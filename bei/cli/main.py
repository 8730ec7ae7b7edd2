"""The command line, ``bei COMMAND``. ``_parser`` lists the commands and their flags."""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from bei.cli.completion import SHELLS, completion_script
from bei.cli.help_texts import BUILD_GROUPS, EXAMPLES, SERVE_GROUPS, USAGES
from bei.cli.other_servers_flags import check_no_variable_names_a_model
from bei.cli.parser import Parser, add_fields, numbers
from bei.config.kubernetes import injected
from bei.errors import BeiError, BrokenDependencyError, ConfigError, MissingDependencyError
from bei.printable import one_line
from bei.service.resolve import (
    artifact_for,
    build_config_class,
    built_artifact,
    cache_of,
    check_if_built,
    check_is_checkpoint,
    default_artifact,
)
from bei.utils import libraries
from bei.utils.full_disk import naming_full_disk
from bei.utils.scarce_resources import scarce_resource
from bei.version import __version__

if TYPE_CHECKING:
    from bei.artifact.cache import ModelCache
    from bei.artifact.manifest import Artifact

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
    except BrokenPipeError:  # whoever reads the output has seen enough: bei inspect X | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail at exit again
        sys.exit(128 + signal.SIGPIPE)
    except (BeiError, OSError) as error:  # OSError: a read-only folder
        _fail((None if isinstance(error, ConfigError) else scarce_resource(error)) or _sentence(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # a lack shows as any error of any library; others are raised again
        if (lack := scarce_resource(error)) is None:
            raise
        _fail(lack)


def _fail(message: str) -> NoReturn:
    """Say it in one line, and end with exit code 2."""
    print(f"error: {one_line(message)}", file=sys.stderr)  # noqa: T201
    with suppress(OSError):
        sys.stdout.flush()
        sys.exit(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what cannot be written would be tried again at exit
    sys.exit(2)


def _sentence(error: Exception) -> str:
    """What happened and what to do, also where it is the system that refused a file."""
    if not isinstance(error, OSError) or not error.filename or not error.strerror:
        return str(error)
    return (
        f"{os.fsdecode(error.filename)} cannot be used ({error.strerror}): check that path, its owner and its "
        "permissions, or name another."
    )


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


def _parser(command: str | None, arguments: Sequence[str] = (), also: Collection[str] = ()) -> argparse.ArgumentParser:
    """The parser. Only the flags of ``command``, and of those in ``also``, are added, since those of builds need the
    builder installed. ``arguments``: the whole command line."""
    wanted = {command, *also}
    parser = Parser(
        prog="bei", description="Embedding inference server, compiled ahead of time.", epilog=EXAMPLES["bei"]
    )
    parser.add_argument("--version", action="version", version=f"bei {__version__}")
    parser.set_defaults(run=lambda _: _without_command(parser))
    commands = parser.add_subparsers(metavar="command")

    def add(name: str, text: str, run: Callable[[dict[str, Any]], None] | None = None) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, usage=USAGES.get(name), epilog=EXAMPLES.get(name))
        made.set_defaults(run=run or (lambda _: _without_command(made)))
        return made

    build = add("build", "compile a checkpoint into an artifact", _build)
    if "build" in wanted:
        add_fields(build, build_config_class(), BUILD_GROUPS)
    sign = add("sign", "sign an artifact, for bei serve --require-signature (extra: sign)", _sign)
    _add_artifact(sign)
    sign.add_argument("--key", metavar="FILE.pem", required=True, help="an Ed25519 private key, PEM")
    sign.add_argument(
        "--passphrase-file", metavar="FILE", help="file whose first line is its passphrase (or BEI_SIGN_PASSPHRASE)"
    )
    serve = add("serve", "serve artifacts (or checkpoints, built first) over HTTP", _serve)
    embed = add("embed", "answer every row of files, once, without a server (extra: bulk)", _embed)
    if "embed" in wanted:
        _add_embed_arguments(embed)
    tune = add("tune", "measure what artifacts cost on this machine, for bei serve", _tune)
    if wanted & {"serve", "tune"}:
        from bei.config.settings import ServeConfig

        add_fields(serve, ServeConfig, SERVE_GROUPS)
        add_fields(tune, ServeConfig, SERVE_GROUPS, only=_TUNE_SETTINGS)
    batch = add("run-batch", "answer a file of OpenAI's batch lines, without a server", _run_batch)
    if "run-batch" in wanted:
        from bei.cli import run_batch
        from bei.config.settings import ServeConfig

        run_batch.add_arguments(batch)
        add_fields(batch, ServeConfig, SERVE_GROUPS, only=run_batch.SETTINGS)
    _add_artifact(add("verify", "compare an artifact's engine with the reference, on its own device", _verify))
    calibrate = add("calibrate", "fit the temperature of probabilities on labelled texts", _calibrate)
    _add_artifact(calibrate)
    calibrate.add_argument("--data", metavar="FILE.jsonl", required=True, help="lines with a text and its label")
    calibrate.add_argument("--question", metavar="FILE.json", help="fit decisions: the question, as in /v1/systemone")
    inspect = add("inspect", "show what an artifact is, and its certificate", _inspect)
    _add_artifact(inspect)
    inspect.add_argument("--json", action="store_true", help="machine-readable")
    inspect.add_argument("--certificate", action="store_true", help="the certificate alone, with all of its figures")
    cache = add("cache", "list or remove what bei serve keeps between starts")
    if "cache" in wanted:
        from bei.cli.cache import add_arguments

        add_arguments(cache)
    doctor = add("doctor", "show what this machine can build and serve, and what it lacks", _doctor)
    if "doctor" in wanted:
        _add_doctor_arguments(doctor)
    simulate = add("simulate", "compare schedulers on a trace of requests and simulated devices", _simulate)
    if "simulate" in wanted:
        from bei.cli.simulate.command import add_arguments

        add_arguments(simulate)
    bench = add("bench", "put load on servers and measure them; compare two such results (extra: bench)")
    if "bench" in wanted:
        _add_bench_arguments(bench, arguments)
    completion = add("completion", "print a script that completes commands and flags (extra: completion)", _completion)
    completion.add_argument("shell", choices=SHELLS, help="the shell that is to source it")
    return parser


def _add_artifact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="its folder, or the name of a model that bei serve has built")


def _without_command(parser: argparse.ArgumentParser) -> None:
    parser.print_help(sys.stderr)
    sys.exit(2)


def _completion(options: dict[str, Any]) -> None:
    names = ("build", "serve", "tune", "run-batch", "cache", "doctor", "simulate", "bench", "embed")
    whole = [name for name in names if _has_what_it_needs(name)]
    print(completion_script(options["shell"], _parser(None, ("bench",), whole)))  # noqa: T201


def _has_what_it_needs(command: str) -> bool:
    try:
        _parser(command, (command,))
    except MissingDependencyError as error:
        print(f"note: without the flags of 'bei {command}': {error}", file=sys.stderr)  # noqa: T201
        return False
    return True


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


def _add_embed_arguments(parser: argparse.ArgumentParser) -> None:
    for library in ("fsspec", "pyarrow"):
        libraries.load(library, library, "bulk", "bei embed")
    from bei.cli.embed.arguments import SETTINGS, add_arguments
    from bei.config.settings import ServeConfig

    add_arguments(parser)
    add_fields(parser, ServeConfig, SERVE_GROUPS, only=SETTINGS)


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
        type=numbers,
        metavar="N,N",
        default=HEAD_SIZES,
        help=f"head sizes of the attention layers to build (default: {sizes})",
    )
    parser.add_argument(
        "--compute-capability",
        type=numbers,
        metavar="N,N",
        default=(),
        help=f"GPUs to build for with tensorrt-rtx (default: this machine's, else {elsewhere})",
    )
    parser.add_argument("--no-attention", action="store_true", help="build no attention layers, which takes seconds")


def _build(options: dict[str, Any]) -> None:
    config_class = build_config_class()
    from bei.config.sources import load
    from bei.engine.load import load_engine
    from bei_build.pipeline import build
    from bei_build.progress import Progress

    file = options.pop("config", None)
    config = load(config_class, options, file)
    check_is_checkpoint(config.model, _cache)
    artifact = build(config, load_engine, Progress())
    print(_next_steps(artifact), file=sys.stderr)  # noqa: T201


def _next_steps(artifact: Artifact) -> str:
    """What to do with an artifact that has just been built."""
    path = artifact.path
    shown = shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
    if artifact.certificate.kind == "pending":
        steps = {f"bei verify {shown}": "on a machine with its device", f"bei serve {shown}": "there, over HTTP"}
    else:
        steps = {f"bei serve {shown}": "over HTTP", f"bei inspect {shown}": "what it is, and how exact"}
    width = max(map(len, steps))
    return "\n".join(["Next:", *(f"  {command:<{width}}   {text}" for command, text in steps.items())])


def _serve(options: dict[str, Any]) -> None:
    from bei.utils.log_format import configure

    config = _serve_config(options)
    configure(config.log_format, "supervisor" if config.has_processes else "")
    faulthandler.enable(2)  # where a native library ends the process
    for service, names in injected(os.environ).items():
        logging.getLogger(__name__).info(
            "not taken for settings, as Kubernetes injected them for a Service (%s): %s", service, ", ".join(names)
        )
    if config.has_processes:
        from bei.multiprocess.supervisor.supervisor import run
    else:
        from bei.server.run import run
    from bei.server.http.listen import Sockets
    from bei.server.start_checks import check_named_files

    check_named_files(config)
    if config.grpc_port is not None:
        from bei.server.grpc.server import check_grpc

        check_grpc(config)
    # Bound before builds, which take minutes, and before gigabytes are loaded: a port may be taken.
    with closing(Sockets(config)) as sockets, _artifacts(config) as artifacts:
        run(artifacts, config, sockets)


def _embed(options: dict[str, Any]) -> None:
    from bei.cli.embed.arguments import SETTINGS
    from bei.cli.embed.command import embed

    settings = {name: options.pop(name) for name in (*SETTINGS, "config") if name in options}
    _exit(embed(options, _serve_config({**settings, "models": [options["model"]]}), _artifacts))


def _tune(options: dict[str, Any]) -> None:
    config = _serve_config(options)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    from bei.cli.tune import tune

    with _artifacts(config) as artifacts:
        for artifact in artifacts:
            print(tune(artifact, config))  # noqa: T201


def _run_batch(options: dict[str, Any]) -> None:
    from bei.cli.run_batch import run_batch

    files = {name: options.pop(name) for name in ("input_file", "output_file", "errors")}
    config = _serve_config(options)
    _exit(run_batch(files, config, lambda: _artifacts(config)))


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


def _cache() -> ModelCache:
    """The cache of ``bei serve``, as the environment says."""
    return cache_of(_serve_config({}))


@contextmanager
def _artifacts(config: Any) -> Iterator[list[Path | Artifact]]:
    """The artifacts of ``config.models``; checkpoints are built first. Those in the cache are protected meanwhile."""
    if not config.models:
        check_no_variable_names_a_model()
    for model in config.models:  # before builds, which take minutes
        check_if_built(model, config)
    with ExitStack() as held:
        found = [artifact_for(model, config, held, apart=True) for model in config.models]
        found = found or [default_artifact(config, held, apart=True)]
        if not all(isinstance(one, Path) for one in found):
            cache_of(config).enforce_limit(config.cache_max_bytes)  # now that all of them are in use
        yield found


def _sign(options: dict[str, Any]) -> None:
    from bei.artifact.signing_keys import PASSPHRASE_VARIABLE, exposure, private_key
    from bei.artifact.store import load, sign

    key = private_key(options["key"], os.environ.get(PASSPHRASE_VARIABLE), options["passphrase_file"])
    if warning := exposure(options["key"]):
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201
    with ExitStack() as held:
        artifact = load(built_artifact(options["artifact"], _cache, held))
        held.enter_context(naming_full_disk(artifact.path))
        before, now = artifact.signed, sign(artifact, key).signed
    assert now is not None
    instead = f", and no longer by {before.key}" if before and before.key != now.key else ""
    print(f"{artifact.path} is signed by {now.key}{instead}")  # noqa: T201


def _verify(options: dict[str, Any]) -> None:
    from bei.cli.console_text import shown_share
    from bei.cli.inspect_artifact import as_table
    from bei.errors import VerificationError
    from bei.verification.verify import failure_of, verify

    with ExitStack() as held, shown_share("verifying") as tell:
        artifact, is_good = verify(built_artifact(options["artifact"], _cache, held), tell)
    print(as_table(artifact))  # noqa: T201
    if not is_good:
        raise VerificationError(failure_of(artifact.manifest.name, artifact.certificate))


def _calibrate(options: dict[str, Any]) -> None:
    from bei.cli.calibrate import calibrate, shown

    question = Path(options["question"]) if options["question"] else None
    with ExitStack() as held:
        path = built_artifact(options["artifact"], _cache, held)
        print(shown(*calibrate(path, Path(options["data"]), question)))  # noqa: T201


def _inspect(options: dict[str, Any]) -> None:
    from bei.artifact.store import load
    from bei.cli import certificate
    from bei.cli.inspect_artifact import as_json, as_table

    shown = (certificate.as_json, certificate.as_tables) if options["certificate"] else (as_json, as_table)
    with ExitStack() as held:
        artifact = load(built_artifact(options["artifact"], _cache, held))
    text = shown[0 if options["json"] else 1](artifact)
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
