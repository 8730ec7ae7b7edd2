"""The command line in process: flags, errors, what each command calls. Real processes are in tests/e2e/."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bei import __version__
from bei.artifact.cache import EntryUse, ModelCache
from bei.artifact.manifest import Artifact, Manifest
from bei.artifact.model_names import DEFAULT_MODEL
from bei.artifact.signature import SIGNATURE
from bei.artifact.signing_keys import fingerprint
from bei.artifact.store import load as load_artifact
from bei.cli import main
from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.engine.fake import FakeEngine
from bei.errors import BeiError, CheckpointNotFoundError, VerificationError
from bei.scheduler.cost_measurement import StreamChoice
from bei_build.config import BuildConfig
from tests.support.artifacts import save_artifact
from tests.support.keys import make_keys

Served = list[tuple[list[Path | Artifact], ServeConfig]]


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BEI_MODELS", "BEI_PORT", "BEI_HOST", "BEI_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Records the calls of ``bei serve`` instead of serving."""
    calls: Served = []
    monkeypatch.setattr("bei.server.run.run", lambda paths, config, _: calls.append((paths, config)))
    return calls


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return save_artifact(tmp_path / "artifact").path


def fails_with(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main.main(list(arguments))
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"bei {__version__}\n"


@pytest.mark.parametrize("variable", ["MODEL_ID", "INFINITY_MODEL_ID"])
def test_a_model_that_a_variable_of_another_server_names_is_not_replaced_by_the_default(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "BAAI/bge-small-en-v1.5")
    assert f"{variable}, a variable of another server, names 'BAAI/bge-small-en-v1.5'" in fails_with(capsys, "serve")


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"    {command} " in shown for command in ("build", "serve", "tune", "inspect"))


def _actions(command: str) -> dict[str, argparse.Action]:
    parsers = next(action for action in main._parser(command)._actions if action.choices)
    assert isinstance(parsers.choices, dict)
    return {action.dest: action for action in parsers.choices[command]._actions}


@pytest.mark.parametrize(("command", "config_class"), [("serve", ServeConfig), ("build", BuildConfig)])
def test_every_field_of_the_configuration_has_a_flag_and_a_help_text(command: str, config_class: type[Any]) -> None:
    actions = _actions(command)
    fields = [field for field in dataclasses.fields(config_class) if not field.metadata.get("file_only")]
    assert set(actions) == {"help", "config", *(field.name for field in fields)}
    for field in fields:
        action = actions[field.name]
        assert field.metadata["help"] in str(action.help)
        if not field.metadata.get("positional"):
            assert f"--{field.name.replace('_', '-')}" in action.option_strings


def test_a_list_on_the_command_line_is_separated_by_commas() -> None:
    options = vars(main._parser("build").parse_args(["build", "model", "--score-tokens", "no, yes"]))
    del options["run"], options["config"]
    assert load(BuildConfig, options, env={}).score_tokens == ("no", "yes")


@pytest.mark.parametrize("command", ["serve", "build", "tune"])
def test_the_help_of_a_command_can_be_printed(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main([command, "--help"])
    assert caught.value.code == 0
    assert "--precision" in capsys.readouterr().out


# Errors


def test_a_message_of_several_lines_becomes_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(options: object) -> None:
        raise BeiError("first\n  second\tline")

    monkeypatch.setattr(main, "_inspect", broken)
    assert fails_with(capsys, "inspect", "x") == "error: first second line"


def test_what_the_machine_refuses_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/model.bin")

    monkeypatch.setattr(main, "_inspect", broken)
    said = fails_with(capsys, "inspect", "x")
    assert said == (
        "error: /cache/model.bin cannot be used (No space left on device): check that path, its owner and its "
        "permissions, or name another."
    )


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_inspect", interrupted)
    with pytest.raises(SystemExit) as caught:
        main.main(["inspect", "x"])
    assert caught.value.code == 130


@pytest.mark.parametrize("command", ["serve", "build"])
def test_without_the_builder_a_build_names_the_extra_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "bei_build"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    error = fails_with(capsys, command, str(tmp_path))
    assert "'ml_dtypes'" in error
    assert "pip install 'bei[cpu]', or in a container the image cpu-build" in error


# serve


def test_artifacts_are_served_in_the_order_given(served: Served, artifact: Path, tmp_path: Path) -> None:
    other = save_artifact(tmp_path / "other").path
    main.main(["serve", str(other), str(artifact), "--port", "0"])
    paths, config = served[0]
    assert paths == [other, artifact]
    assert config.models == (str(other), str(artifact))


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--host", "0.0.0.0"], "host", "0.0.0.0"),
        (["--port", "1234"], "port", 1234),
        (["--engine-threads", "3"], "engine_threads", 3),
        (["--max-queue-tokens=99999"], "max_queue_tokens", 99999),
        (["--no-auto-truncate"], "auto_truncate", False),
        (["--auto-truncate"], "auto_truncate", True),
        (["--access-log"], "access_log", True),
        (["--cache-dir", "x y"], "cache_dir", "x y"),
        (["--tune", "force"], "tune", "force"),
        (["--engine-streams", "0"], "engine_streams", 0),
        (["--graph-megabytes", "0"], "graph_megabytes", 0),
    ],
)
def test_a_flag_sets_its_field(served: Served, artifact: Path, arguments: list[str], name: str, value: object) -> None:
    main.main(["serve", str(artifact), *arguments])
    assert getattr(served[0][1], name) == value


def test_what_no_flag_says_is_taken_from_environment_file_and_defaults(
    served: Served, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"models: [{artifact}]\nhost: filed\nport: 1\npayload_limit: 1000\n")
    monkeypatch.setenv("BEI_PORT", "2")
    monkeypatch.setenv("BEI_PAYLOAD_LIMIT", "2000")
    main.main(["serve", "--config", str(file), "--payload-limit", "3000"])
    paths, config = served[0]
    assert paths == [artifact]
    assert (config.host, config.port, config.payload_limit) == ("filed", 2, 3000)
    assert config.auto_truncate


def test_models_of_the_environment_are_separated_by_commas(
    served: Served, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save_artifact(tmp_path / "other").path
    monkeypatch.setenv("BEI_MODELS", f"{artifact},{other}")
    main.main(["serve"])
    assert served[0][0] == [artifact, other]


def test_a_precision_is_held_against_every_artifact(
    served: Served, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several models, and of bei tune; before a checkpoint beside it is built."""
    built = _pretend_to_build(monkeypatch, {"org/model"})
    assert "tiny, which is an artifact" in fails_with(
        capsys, "serve", "org/model", str(artifact), "--precision", "bf16"
    )
    assert built == []
    other = save_artifact(tmp_path / "other", name="other", precision="bf16").path
    for command in ("serve", "tune"):
        error = fails_with(capsys, command, str(artifact), str(other), "--precision", "fp32")
        assert "other, which is an artifact, was built with bf16" in error
    monkeypatch.setenv("BEI_PRECISION", "int8")
    assert "tiny, which is an artifact, was built with fp32" in fails_with(capsys, "serve", str(artifact))
    assert served == []


def _pretend_to_build(monkeypatch: pytest.MonkeyPatch, available: set[str]) -> list[BuildConfig]:
    built: list[BuildConfig] = []

    def build_cached(config: BuildConfig, cache: ModelCache, *_: object) -> tuple[Artifact, EntryUse]:
        built.append(config)
        if config.model not in available:
            raise CheckpointNotFoundError(f"no {config.model}")
        return save_artifact(cache.folder / "built" / config.model), cache.use("built")

    monkeypatch.setattr("bei_build.cache.build_cached", build_cached)
    return built


def test_a_checkpoint_is_built_into_the_cache_with_the_precision_asked_for(
    served: Served, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = _pretend_to_build(monkeypatch, {"org/model"})
    main.main(["serve", "org/model", str(artifact), "--precision", "fp32", "--cache-dir", str(tmp_path)])
    made, given = served[0][0]
    assert isinstance(made, Artifact), "it is not verified again"
    assert (made.path, given) == (tmp_path / "built/org/model", artifact)
    assert [(config.model, config.name, config.precision) for config in built] == [("org/model", None, "fp32")]


def test_without_a_model_the_default_is_served(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_MODEL.name).mkdir()  # which nobody has named
    built = _pretend_to_build(monkeypatch, {DEFAULT_MODEL.name})
    main.main(["serve", "--cache-dir", str(tmp_path)])
    (made,) = served[0][0]
    assert isinstance(made, Artifact)
    assert [(config.model, config.name) for config in built] == [(DEFAULT_MODEL.name, None)]


@pytest.mark.parametrize("command", ["serve", "tune"])
def test_a_build_that_fails_names_what_the_command_has(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """--min-cosine is no flag of theirs; --precision is."""

    def build_cached(*_: object) -> None:
        raise VerificationError("Verification failed. To do: build with --precision fp32, or lower --min-cosine.")

    monkeypatch.setattr("bei_build.cache.build_cached", build_cached)
    error = fails_with(capsys, command, "org/model", "--cache-dir", str(tmp_path))
    assert error.endswith("or lower --min-cosine. Flags of 'bei build' are variables here: BEI_MIN_COSINE.")


def test_settings_of_a_build_that_contradict_each_other_name_what_the_command_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BEI_PLAN_OF", "another")
    monkeypatch.setenv("BEI_TARGET", "tensorrt")
    assert "BEI_STRIP_WEIGHTS=true" in fails_with(capsys, "serve", "org/model", "--cache-dir", str(tmp_path))


@pytest.mark.parametrize(("variable", "words"), [("BEI_MODEL", "BEI_MODELS"), ("BEI_OUT", "BEI_CACHE_DIR")])
def test_variables_of_bei_build_alone_are_not_passed_over(
    variable: str, words: str, served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """BEI_MODEL served the default model."""
    built = _pretend_to_build(monkeypatch, set())
    monkeypatch.setenv(variable, "org/model")
    error = fails_with(capsys, "serve")
    assert f"{variable} is for bei build" in error
    assert words in error
    assert (built, served) == ([], [])


def test_an_unknown_setting_is_one_line_and_names_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEI_PROT", "1")
    assert "Did you mean BEI_PORT?" in fails_with(capsys, "serve")


# tune


def test_tune_measures_with_the_settings_given_and_prints_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, artifact: Path, tmp_path: Path
) -> None:
    loaded: list[tuple[int, int]] = []

    def load_engine(folder: Path, manifest: Manifest, options: Mapping[str, int]) -> FakeEngine:
        loaded.append((options["num_threads"], options["num_streams"]))
        return FakeEngine(manifest.limits, options["num_streams"])

    monkeypatch.setattr("bei.engine.load.load_engine", load_engine)
    main.main(["tune", str(artifact), "--engine-threads", "2", "--engine-streams", "2", "--cache-dir", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "tiny, fp32" in shown
    assert "streams: 2" in shown
    assert re.search(r"steps: .+; bulk work beside interactive work: up to \d+ ms", shown)
    (kept,) = (tmp_path / "costs").iterdir()
    assert f"kept in {kept}" in shown
    assert loaded == [(2, 2)]


def test_tune_measures_the_engine_that_serve_loads_and_says_what_would_be_faster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, artifact: Path, tmp_path: Path
) -> None:
    loaded: list[int | None] = []

    def load_engine(folder: Path, manifest: Manifest, options: Mapping[str, int]) -> FakeEngine:
        loaded.append(options.get("num_streams"))
        engine = FakeEngine(manifest.limits, loaded[-1] or 1)
        engine.info = dataclasses.replace(engine.info, target="cpu")
        return engine

    monkeypatch.setattr("bei.engine.load.load_engine", load_engine)
    monkeypatch.setattr(
        "bei.scheduler.cost_measurement.choose_streams", lambda *_, **__: StreamChoice(2, {1: 100.0, 2: 150.0})
    )
    given = ["tune", str(artifact), "--engine-threads", "2", "--cache-dir", str(tmp_path)]
    main.main(given)
    assert "streams: 1 (1: 100 tokens/s, 2: 150 tokens/s); --engine-streams 0 or 2" in capsys.readouterr().out
    assert loaded[-1] is None
    main.main([*given, "--engine-streams", "0"])
    assert "streams: 2 (1: 100 tokens/s, 2: 150 tokens/s)\n" in capsys.readouterr().out
    assert loaded[-1] == 2


def test_tune_says_where_its_result_could_not_be_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, artifact: Path
) -> None:
    monkeypatch.setattr("bei.engine.load.load_engine", lambda folder, manifest, _: FakeEngine(manifest.limits))
    main.main(["tune", str(artifact), "--cache-dir", str(artifact / "manifest.json")])
    assert "not kept" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--port", "1"], ["--tune", "off"]])
def test_tune_has_no_settings_of_the_server_that_do_not_matter_to_it(
    arguments: list[str], artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is a flag of 'bei serve'" in fails_with(capsys, "tune", str(artifact), *arguments)


# build and inspect


def _pretend_to_build_here(monkeypatch: pytest.MonkeyPatch, built: list[BuildConfig], folder: Path) -> None:
    def build(config: BuildConfig, *_: object) -> Artifact:
        built.append(config)
        return save_artifact(folder / f"built {len(built)}")

    monkeypatch.setattr("bei_build.pipeline.build", build)


def test_a_build_ends_with_what_to_do_next(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a path that can be pasted: from the current folder, and quoted."""
    monkeypatch.chdir(tmp_path)
    _pretend_to_build_here(monkeypatch, [], tmp_path)
    main.main(["build", "given"])
    assert capsys.readouterr().err.splitlines() == [
        "Next:",
        "  bei serve 'built 1'     over HTTP",
        "  bei inspect 'built 1'   what it is, and how exact",
    ]


def test_an_artifact_is_not_built_again(capsys: pytest.CaptureFixture[str], artifact: Path) -> None:
    assert "is an artifact, built of" in fails_with(capsys, "build", str(artifact))


def test_build_hands_its_settings_to_the_pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[BuildConfig] = []
    _pretend_to_build_here(monkeypatch, built, tmp_path)
    file = tmp_path / "build.yaml"
    file.write_text("model: filed\nprecision: fp32\nmax_seq_len: 64\n")
    main.main(["build", "given", "--config", str(file), "--max-seq-len", "32", "--no-normalize", "--min-cosine", "0.5"])
    config = built[0]
    assert (config.model, config.precision, config.max_seq_len) == ("given", "fp32", 32)
    assert (config.normalize, config.min_cosine, config.max_batch_size) == (False, 0.5, None)


def test_build_without_a_model_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs a model" in fails_with(capsys, "build")


def test_a_build_is_asked_to_sign_with_a_key_and_its_passphrase(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[BuildConfig] = []
    _pretend_to_build_here(monkeypatch, built, tmp_path)
    monkeypatch.setenv("BEI_SIGN_PASSPHRASE", "s3cr3t")
    main.main(["build", "given", "--sign", "key.pem"])
    assert (built[0].sign, built[0].sign_passphrase) == ("key.pem", "s3cr3t")
    assert "s3cr3t" not in repr(built[0])
    main.main(["build", "given"])  # the variable may be there for bei sign
    capsys.readouterr()
    assert "set sign too" in fails_with(capsys, "build", "given", "--sign-passphrase-file", "x")


def test_inspect_prints_a_table_or_json(capsys: pytest.CaptureFixture[str], artifact: Path) -> None:
    main.main(["inspect", str(artifact)])
    assert "certificate" in capsys.readouterr().out
    main.main(["inspect", "--json", str(artifact)])
    assert capsys.readouterr().out.startswith("{")


def test_inspect_of_no_artifact_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "Make one with 'bei build'" in fails_with(capsys, "inspect", str(tmp_path))


def test_a_damaged_artifact_is_not_shown(capsys: pytest.CaptureFixture[str], artifact: Path) -> None:
    (artifact / "engine" / "fake.bin").write_bytes(b"something else")
    for flags in ((), ("--json",), ("--certificate",)):
        assert "is not the file that was built" in fails_with(capsys, "inspect", *flags, str(artifact))


# sign


def test_sign_says_whose_signature_an_artifact_has_now(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, artifact: Path, tmp_path: Path
) -> None:
    first, second = make_keys(tmp_path, "first"), make_keys(tmp_path, "second", passphrase="open")
    main.main(["sign", str(artifact), "--key", str(first.private)])
    assert capsys.readouterr().out == f"{artifact} is signed by {fingerprint(first.raw)}\n"
    monkeypatch.setenv("BEI_SIGN_PASSPHRASE", "open")
    second.private.chmod(0o644)
    main.main(["sign", str(artifact), "--key", str(second.private)])
    said = capsys.readouterr()
    instead = f", and no longer by {fingerprint(first.raw)}"
    assert said.out == f"{artifact} is signed by {fingerprint(second.raw)}{instead}\n"
    assert said.err.startswith("warning: the signing key")
    signed = load_artifact(artifact).signed
    assert signed is not None
    assert signed.public_key == second.raw


def test_what_is_damaged_is_not_signed(capsys: pytest.CaptureFixture[str], artifact: Path, tmp_path: Path) -> None:
    keys = make_keys(tmp_path)
    (artifact / "engine" / "fake.bin").write_bytes(b"something else")
    assert "is not the file that was built" in fails_with(capsys, "sign", str(artifact), "--key", str(keys.private))
    assert not (artifact / SIGNATURE).exists()


def test_only_signed_artifacts_are_served_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, served: Served, artifact: Path, tmp_path: Path
) -> None:
    """A checkpoint is refused before it is built; artifacts are looked at when they are opened."""
    built = _pretend_to_build(monkeypatch, {"org/model"})
    keys = make_keys(tmp_path)
    required = ("--require-signature", str(keys.public), "--cache-dir", str(tmp_path / "cache"))
    assert "signed by nobody" in fails_with(capsys, "serve", "org/model", *required)
    assert built == []
    monkeypatch.setenv("BEI_SIGN", str(keys.private))
    main.main(["serve", "org/model", *required])
    assert (built[0].sign, served[0][1].require_signature) == (str(keys.private), (str(keys.public),))
    assert "is not signed" in fails_with(capsys, "tune", str(artifact), *required)
