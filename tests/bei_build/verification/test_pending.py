"""A build whose engine cannot run here leaves its verification to the machine where it runs: the whole way.

The engine is OpenVINO's, and its compiler reports that it cannot run.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from bei.artifact import store
from bei.artifact.certificate import record
from bei.artifact.manifest import CERTIFICATE_PAGE, Artifact
from bei.cli.main import main
from bei.config.settings import ServeConfig
from bei.errors import ArtifactHashMismatchError, ConfigError, MissingDependencyError, VerificationError
from bei.metrics.registry import Metrics
from bei.scheduler.device_gate import DeviceGate
from bei.service.loader import load_service
from bei_build import pipeline
from bei_build.reference import hf_model as hf
from bei_build.targets.openvino import OpenVINOCompiler
from tests.support.builds import build_artifact
from tests.support.checkpoints import save_checkpoint
from tests.support.keys import make_keys


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine lacks the engine's device."""
    monkeypatch.setattr(OpenVINOCompiler, "cannot_run", lambda self: "this machine has no such device")


@pytest.fixture
def pending(tmp_path: Path, elsewhere: None) -> Artifact:
    return build_artifact(save_checkpoint(tmp_path / "checkpoint"), tmp_path / "artifact")


def served(artifact: Artifact) -> record.Certificate:
    """The certificate of a server of ``artifact``, once it is ready."""

    async def start() -> record.Certificate:
        config = ServeConfig(tokenizer_threads=1, engine_threads=1, tune="off")
        service = load_service(artifact.path, config, Metrics(), DeviceGate())
        try:
            await service.check_ready()
            return service.certificate
        finally:
            service.close()

    return asyncio.run(start())


def test_the_artifact_says_pending_and_keeps_what_to_compare_with(pending: Artifact) -> None:
    certificate = pending.certificate
    assert (certificate.kind, pending.manifest.verification, certificate.passed) == ("pending", "pending", False)
    assert (certificate.num_texts, certificate.device, certificate.outputs) == (0, "", [])
    assert certificate.thresholds is not None
    assert certificate.num_held_out_texts > 10
    assert "transformers" in certificate.reference
    assert pending.manifest.embedding is not None
    assert pending.manifest.embedding.int8_largest is not None
    assert {info.path for info in pending.manifest.files} >= {"reference/answers.npz", "reference/reference.json"}


def test_a_build_says_that_nothing_was_verified(
    tmp_path: Path, elsewhere: None, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    main(["build", str(checkpoint), "--out", str(tmp_path / "artifact"), "--precision", "fp32"])
    said = " ".join(capsys.readouterr().err.split())
    assert "not verified, because this machine has no such device: 'bei verify artifact'" in said
    main(["inspect", str(tmp_path / "artifact")])
    assert "PENDING" in capsys.readouterr().out


def test_verify_completes_the_certificate(pending: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify", str(pending.path)])
    shown = capsys.readouterr().out
    assert "passed on" in shown
    assert "verified on" in shown
    completed = store.load(pending.path)
    assert completed.certificate.passed
    assert completed.certificate.kind == "reference"
    assert completed.certificate.device
    assert completed.certificate.canary_row == pytest.approx(pending.certificate.canary_row, abs=1e-4)


def test_verify_asks_the_engine_again_wherever_the_answers_are_kept(
    pending: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    """On this machine: a certificate of another device is replaced."""
    main(["verify", str(pending.path)])
    completed = store.load(pending.path)
    moved = msgspec.structs.replace(completed.certificate, device="a CPU of last year")
    store.recertify(completed, moved)
    main(["verify", str(pending.path)])
    assert store.load(pending.path) == completed
    assert "passed on" in capsys.readouterr().out


def test_the_retrieval_of_a_quantized_engine_is_measured_where_it_runs(tmp_path: Path, elsewhere: None) -> None:
    artifact = build_artifact(
        save_checkpoint(tmp_path / "checkpoint"), tmp_path / "artifact", precision="int8", verify_retrieval=None
    )
    certificate = artifact.certificate
    assert (certificate.retrieval, certificate.retrieval_is_missing) == (None, True)
    assert "Not measured yet." in (artifact.path / CERTIFICATE_PAGE).read_text()
    main(["verify", str(artifact.path)])
    completed = store.load(artifact.path).certificate
    assert completed.retrieval is not None
    assert completed.retrieval.num_queries == 150
    assert "Not measured" not in (artifact.path / CERTIFICATE_PAGE).read_text()


def test_serving_completes_it_once_and_says_so(pending: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert served(pending).passed
    assert "verifying its engine on" in caplog.text
    assert store.load(pending.path).certificate.passed
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert served(pending).passed
    assert "verifying its engine" not in caplog.text


def test_a_certificate_from_another_device_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = build_artifact(save_checkpoint(tmp_path / "checkpoint"), tmp_path / "artifact")
    moved = msgspec.structs.replace(artifact.certificate, device="a CPU of last year")
    with caplog.at_level(logging.INFO):
        served(store.recertify(artifact, moved))
    assert "its certificate was made on a CPU of last year, this machine has" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        served(store.recertify(artifact, artifact.certificate))
    assert "its certificate was made on" not in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_artifact_that_cannot_be_written_is_verified_and_served(
    pending: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    pending.path.chmod(0o555)
    assert served(pending).passed
    assert "verified at every start" in caplog.text


def test_an_artifact_on_a_full_disk_is_verified_and_served(
    pending: Artifact, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "recertify", full)
    assert served(pending).passed
    assert "No space left on device" in caplog.text
    assert "verified at every start" in caplog.text


def test_a_signed_one_is_verified_at_every_start_and_left_as_it_was_signed(
    pending: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its certificate is signed too."""
    signed = store.sign(pending, make_keys(tmp_path).key)
    with caplog.at_level(logging.INFO):
        assert served(signed).passed
    assert "is not written, since it is signed" in caplog.text
    assert store.load(pending.path) == signed
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(pending.path)])
    assert stop.value.code == 2
    assert "delete signature.json, verify, and sign again" in capsys.readouterr().err
    assert store.load(pending.path) == signed


def test_an_emulation_that_fails_is_no_artifact(tmp_path: Path, elsewhere: None) -> None:
    """The precision is int8, the threshold that of exact arithmetic."""
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(VerificationError, match="cosine"):
        build_artifact(checkpoint, tmp_path / "artifact", precision="int8", min_cosine=1.0)
    assert not (tmp_path / "artifact").exists()


def test_an_engine_that_fails_is_not_served_and_verify_says_why(
    tmp_path: Path, elsewhere: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The precision is int8, the threshold that of exact arithmetic, and nothing was emulated."""
    monkeypatch.setattr(pipeline, "meet_thresholds", lambda job, found, questions, progress: found)
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    artifact = build_artifact(checkpoint, tmp_path / "artifact", precision="int8", min_cosine=1.0)
    with pytest.raises(VerificationError, match="differs from its reference"):
        served(artifact)
    assert store.load(artifact.path).certificate.kind == "pending"
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(artifact.path)])
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert "BELOW THRESHOLD" in shown.out
    assert "cosine" in shown.err
    assert shown.err.count("\n") == 1
    with pytest.raises(VerificationError, match="differs from its reference"):
        served(artifact)  # that it was compared does not make it good


def test_an_engine_that_fails_is_served_where_the_build_allowed_it(tmp_path: Path, elsewhere: None) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    artifact = build_artifact(
        checkpoint, tmp_path / "artifact", precision="int8", min_cosine=1.0, allow_below_threshold=True
    )
    for _ in range(2):
        assert not served(artifact).passed


def test_without_torch_the_cpu_engine_is_what_is_kept(
    tmp_path: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "is_available", lambda: False)
    artifact = build_artifact(save_checkpoint(tmp_path / "checkpoint"), tmp_path / "artifact")
    assert artifact.certificate.reference == "openvino engine, FP32, one text at a time"
    assert served(artifact).kind == "self-consistency"


def test_no_verify_is_refused_where_nothing_would_know_the_canary(tmp_path: Path, elsewhere: None) -> None:
    with pytest.raises(ConfigError, match="cannot run here"):
        build_artifact(save_checkpoint(tmp_path / "checkpoint"), tmp_path / "artifact", verify=False)
    assert not (tmp_path / "artifact").exists()


def test_what_could_not_be_verified_is_not_compiled(
    tmp_path: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither torch nor OpenVINO: reported before minutes of compiling."""

    def missing(self: OpenVINOCompiler) -> None:
        raise MissingDependencyError("openvino", "cpu", "Building for the target cpu")

    elsewhere_compiler = type("Elsewhere", (OpenVINOCompiler,), {"check_able": lambda self: None})
    monkeypatch.setattr(hf, "is_available", lambda: False)
    monkeypatch.setattr("bei_build.pipeline.compiler_for", lambda config: elsewhere_compiler())
    monkeypatch.setattr(OpenVINOCompiler, "check_able", missing)
    monkeypatch.setattr(elsewhere_compiler, "compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(MissingDependencyError, match="openvino"):
        build_artifact(save_checkpoint(tmp_path / "checkpoint"), tmp_path / "artifact")


def test_two_servers_may_complete_one_artifact_at_once(pending: Artifact) -> None:
    """Each reads the artifact, and writes its certificate, at any time; a reader finds a whole one."""
    certificates = [
        msgspec.structs.replace(pending.certificate, device=f"GPU {index}" * (index + 1)) for index in range(4)
    ]

    (pending.path / ".certificate.killed_1").mkdir()  # a process was, between its renames

    def write(certificate: record.Certificate) -> None:
        for _ in range(20):
            store.recertify(pending, certificate)

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, certificate) for certificate in certificates]
        while not all(writer.done() for writer in writers):
            with suppress(ArtifactHashMismatchError):  # more writers than there ever are
                store.load(pending.path)
        for writer in writers:
            writer.result()
    assert store.load(pending.path).certificate in certificates
    assert not list(pending.path.glob(".certificate.*"))


def test_verifying_what_was_verified_at_build_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = build_artifact(save_checkpoint(tmp_path / "checkpoint"), tmp_path / "artifact")
    with pytest.raises(SystemExit):
        main(["verify", str(artifact.path)])
    assert "keeps no answers of a reference to compare with: its engine was verified" in capsys.readouterr().err


def test_what_was_verified_at_build_time_is_verified_anew_where_the_answers_were_kept(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint")
    built = build_artifact(folder, tmp_path / "artifact", precision="int8", verify_retrieval=True, keep_reference=True)
    assert built.certificate.kind == "reference"
    store.recertify(built, msgspec.structs.replace(built.certificate, device="another machine"))
    main(["verify", str(built.path)])
    again = store.load(built.path).certificate
    assert (again.kind, again.passed, again.num_texts) == ("reference", True, built.certificate.num_texts)
    assert again.device == built.certificate.device
    assert again.outputs[0].cosine_mean == pytest.approx(built.certificate.outputs[0].cosine_mean, abs=1e-4)
    assert again.retrieval is not None
    assert again.quantization == built.certificate.quantization


def test_verifying_what_was_built_without_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = build_artifact(save_checkpoint(tmp_path / "checkpoint"), tmp_path / "artifact", verify=False)
    with pytest.raises(SystemExit):
        main(["verify", str(artifact.path)])
    assert "it was built with --no-verify" in capsys.readouterr().err
