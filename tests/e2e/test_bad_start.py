"""What cannot be served ends with exit code 2 and one line that says what to do. Never a traceback."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from bei.artifact import store
from bei.artifact.manifest import CERTIFICATE, MANIFEST, TOKENIZER, Artifact
from tests.e2e import process
from tests.support.artifacts import save_artifact, tiny_tokenizer

Damage = Callable[[Path], object]


def fails(arguments: list[object], env: Mapping[str, str], cwd: Path, num_lines: int | None = 1) -> str:
    """The error line of ``bei`` with ``arguments``; ``num_lines`` None where a build may report its steps before."""
    ended = process.run(arguments, env, cwd)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], ended.stderr
    assert num_lines in (None, len(lines)), ended.stderr
    return lines[-1]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def corrupt(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2))


ENGINE = "engine/model.bin"
ANEW = "Copy the artifact anew from its source"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: corrupt(folder / ENGINE), ANEW),
        (lambda folder: truncate(folder / ENGINE), ANEW),
        (lambda folder: (folder / ENGINE).unlink(), "lacks engine/model.bin"),
        (lambda folder: truncate(folder / CERTIFICATE), ANEW),
        (lambda folder: truncate(folder / MANIFEST), "Build the artifact again"),
        (lambda folder: edit(folder / MANIFEST, max_seq_len=7), "was changed after the build"),
        (lambda folder: edit(folder / MANIFEST, schema_version=99), "upgrade bei"),
        (lambda folder: (folder / MANIFEST).unlink(), "it has no manifest.json"),
        (lambda folder: tiny_tokenizer().save(str(folder / TOKENIZER)), ANEW),
    ],
    ids=["corrupt", "truncated", "missing", "certificate", "manifest", "edited", "newer", "no manifest", "tokenizer"],
)
def test_a_damaged_artifact(
    tiny: Artifact, env: Mapping[str, str], tmp_path: Path, damage: Damage, message: str
) -> None:
    shutil.copytree(tiny.path, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    is_artifact = store.is_artifact(tmp_path / "damaged")
    assert message in fails(["serve", tmp_path / "damaged"], env, tmp_path, 1 if is_artifact else None)


def reseal(artifact: Artifact) -> None:
    """Make the hashes fit what is in the files now."""
    store.save(artifact.path, artifact.manifest, artifact.certificate)


def test_an_engine_that_does_not_compile_although_its_hash_is_right(
    tiny: Artifact, env: Mapping[str, str], tmp_path: Path
) -> None:
    shutil.copytree(tiny.path, tmp_path / "artifact")
    truncate(tmp_path / "artifact" / "engine" / "model.xml")
    reseal(Artifact(tmp_path / "artifact", tiny.manifest, tiny.certificate))
    assert "OpenVINO could not compile" in fails(["serve", tmp_path / "artifact"], env, tmp_path)


def test_a_tokenizer_that_cannot_be_read_although_its_hash_is_right(env: Mapping[str, str], tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "artifact")
    (artifact.path / TOKENIZER).write_text("{}")
    reseal(artifact)
    assert "is not a readable tokenizer" in fails(["serve", artifact.path], env, tmp_path)


def test_an_artifact_of_a_target_without_an_engine_here(env: Mapping[str, str], tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "artifact")
    assert "Build it again with --target cpu" in fails(["serve", artifact.path], env, tmp_path)


def test_two_models_of_one_name(tiny: Artifact, env: Mapping[str, str], tmp_path: Path) -> None:
    assert "another --name" in fails(["serve", tiny.path, tiny.path, "--port", "0"], env, tmp_path)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "org/nowhere", "nowhere"])
def test_a_model_that_is_nowhere(env: Mapping[str, str], tmp_path: Path, model: str) -> None:
    assert model in fails(["serve", model], env, tmp_path)


def test_an_architecture_without_a_family(env: Mapping[str, str], tmp_path: Path) -> None:
    config = {"model_type": "mamba", "architectures": ["MambaModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for command in ("serve", "build"):
        assert "mamba" in fails([command, tmp_path], env, tmp_path, None).lower()


def test_a_checkpoint_with_the_tokenizer_of_another_one(
    checkpoint: Path, env: Mapping[str, str], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"word{index}" for index in range(500)])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert "belongs to another checkpoint" in fails(["build", folder, "--precision", "fp32"], env, tmp_path, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]  # a failed build leaves nothing behind


def test_a_port_in_use(tiny: Artifact, env: Mapping[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in fails(["serve", tiny.path, "--port", port], env, tmp_path)


def test_an_address_that_is_not_ours(tiny: Artifact, env: Mapping[str, str], tmp_path: Path) -> None:
    documentation = "203.0.113.1"  # RFC 5737: nobody has it
    assert "choose another --host" in fails(["serve", tiny.path, "--host", documentation, "--port", "0"], env, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 8000\n", "Unknown setting 'prot' in the file. Did you mean 'port'?"),
        ("port: many\n", "must be an integer"),
        ("port: [1\nhost: }\n", "The configuration file serve.yaml has lines that are no YAML"),
        ("port: 70000\n", "from 0 to 65,535"),
    ],
)
def test_a_wrong_settings_file(env: Mapping[str, str], tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "serve.yaml").write_text(content)
    assert message in fails(["serve", "--config", "serve.yaml"], env, tmp_path)


def test_an_unknown_variable(env: Mapping[str, str], tmp_path: Path) -> None:
    assert "Did you mean BEI_PORT?" in fails(["serve"], {**env, "BEI_PROT": "1"}, tmp_path)


def test_a_port_in_use_is_found_before_anything_is_built(
    checkpoint: Path, env: Mapping[str, str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = fails(["serve", checkpoint, "--port", port, "--cache-dir", tmp_path / "cache"], env, tmp_path)
    assert f"Cannot listen on 127.0.0.1 port {port}" in line
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-keys-file", "spoilt"], "The API keys in spoilt must be a table of names"),
        (["--tls-cert", "spoilt", "--tls-key", "spoilt"], "tls_cert spoilt has no certificate"),
        (["--require-signature", "spoilt"], "The trusted key spoilt has a line 1 that is not a key"),
    ],
    ids=["API keys", "TLS", "trusted keys"],
)
def test_a_file_that_cannot_be_used_is_found_before_anything_is_built(
    flags: list[str], message: str, checkpoint: Path, env: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "spoilt").write_text("nothing of use")
    command = ["serve", checkpoint, "--port", 0, "--cache-dir", tmp_path / "cache"]
    assert message in fails([*command, *flags], env, tmp_path)
    assert not (tmp_path / "cache").exists()


def test_a_prompt_whose_name_cannot_be_printed_is_refused_before_anything_is_compiled(
    checkpoint: Path, env: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "build.yaml").write_text('prompts: {"a\\u0007b": "x"}')
    line = fails(["build", checkpoint, "--config", "build.yaml", "--out", "out"], env, tmp_path, num_lines=None)
    assert "A prompt's name in the setting prompts cannot be kept" in line
    assert not (tmp_path / "out").exists()
