"""Builds by TensorRT-RTX on a machine without a GPU, from checkpoint to artifact, and its builder's settings."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from rich.console import Console

from bei.artifact.manifest import CERTIFICATE, ENGINE_DIR, MANIFEST, REFERENCE_DIR, Artifact
from bei.artifact.store import load, save
from bei.cli.main import main
from bei.engine.nvidia import Gpu
from bei.errors import CompileError, ConfigError
from bei_build.config import BuildConfig
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.progress import Progress
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import ModelSpec
from bei_build.targets.base import Numerics
from bei_build.targets.choose import compiler_for
from bei_build.targets.tensorrt import compiler as module
from bei_build.targets.tensorrt import plan, timing_cache
from bei_build.targets.tensorrt.plan import PlanSettings, write_plan
from bei_build.targets.tensorrt.progress import monitor_of
from bei_build.weights.model_weights import ModelWeights
from tests.bei.scheduler.front import wait_until
from tests.bei_build.targets.rtx import (
    VERSION,
    AheadOfTimeBuilder,
    compiled,
    limits_of,
    module_like,
    needs_rtx,
    profiles,
)
from tests.bei_build.targets.tiny import MAX_SEQ_LEN, case_named, graph_of, random_weights, tiny_spec
from tests.support.artifacts import save_artifact
from tests.support.builds import build_artifact
from tests.support.engines import DEADLINE_S
from tests.support.zoo import save_case

FOR_TWO: dict[str, Any] = {"target": "tensorrt-rtx", "compute_capability": ("89", "120"), "precision": "auto"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """ModernBERT, with windows in some layers, and packed attention requested."""
    folder = tmp_path_factory.mktemp("rtx")
    checkpoint = save_case(folder / "checkpoint", case_named("ModernBertModel"))
    return build_artifact(checkpoint, folder / "artifact", attention_lowering="packed", **FOR_TWO)


# The artifact.


@needs_rtx
def test_the_artifact_says_which_gpus_it_is_for_and_how_it_was_compiled(artifact: Artifact) -> None:
    engine = artifact.manifest.engine
    assert (artifact.manifest.target, artifact.manifest.precision) == ("tensorrt-rtx", "bf16")
    assert (engine.compiler, engine.compiler_version.split(".")[0]) == ("tensorrt-rtx", "1")
    assert engine.device == "any GPU of compute capability 8.9 or 12.0"
    assert engine.capabilities == ["SM89", "SM120"]
    assert engine.plan is not None
    assert engine.plan.lowerings == ["padded", "masked", "padded"]
    assert [profile.name for profile in engine.plan.profiles] == ["latency", "throughput"]
    assert (engine.plan.hardware_compatible, engine.plan.refit) == (False, False)
    assert sorted(file.name for file in artifact.engine_dir.iterdir()) == ["model.plan"]


@needs_rtx
def test_packed_attention_falls_back_and_the_manifest_says_why(artifact: Artifact) -> None:
    assert artifact.manifest.engine.plan is not None
    (fallback,) = artifact.manifest.engine.plan.fallbacks
    assert fallback.startswith("attention is padded, since there is no kernel for packed attention: ")
    assert "no fused kernel is available" in fallback
    assert "\n" not in fallback
    assert len(fallback) < 400


@needs_rtx
def test_its_certificate_is_pending_and_the_reference_is_in_the_artifact(artifact: Artifact) -> None:
    assert (artifact.certificate.kind, artifact.manifest.verification) == ("pending", "pending")
    assert artifact.certificate.reference.startswith("transformers, FP32")
    assert not artifact.certificate.passed
    names = {info.path for info in load(artifact.path).manifest.files}
    assert {CERTIFICATE, f"{REFERENCE_DIR}/reference.json", f"{REFERENCE_DIR}/answers.npz"} <= names


@needs_rtx
def test_a_model_that_has_no_layer_to_pack_says_so(tmp_path: Path) -> None:
    checkpoint = save_case(tmp_path / "checkpoint", case_named("DebertaV2Model"))
    artifact = build_artifact(checkpoint, tmp_path / "artifact", attention_lowering="packed", **FOR_TWO)
    assert artifact.manifest.engine.plan is not None
    assert artifact.manifest.engine.plan.lowerings == ["primitive"] * 3
    assert artifact.manifest.engine.plan.fallbacks == ["no layer of this model can have packed attention"]


@needs_rtx
def test_the_command_line_builds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save_case(tmp_path / "checkpoint", case_named("BertModel"))
    flags = ["--target", "tensorrt-rtx", "--compute-capability", "75,89", "--verify-budget", "1", "--max-seq-len", "16"]
    main(["build", str(checkpoint), "--out", str(tmp_path / "artifact"), *flags])
    assert "not verified, because " in " ".join(capsys.readouterr().err.split())  # CUDA's word for it is the machine's
    manifest = load(tmp_path / "artifact").manifest
    assert (manifest.precision, manifest.engine.capabilities) == ("fp16", ["SM75", "SM89"])


# Progress and interruption.


@needs_rtx
def test_progress_names_phases_and_steps(trt: ModuleType, tmp_path: Path) -> None:
    said: list[str] = []
    compiled(trt, graph_of(tiny_spec(), tmp_path), say=said.append)
    assert said
    assert all(" of " in text for text in said)
    assert said[0].startswith("Building engine 0 of ")
    assert len(said) < 100, "hundreds of steps a second are not told one by one"


@needs_rtx
def test_an_interrupt_ends_the_build_and_reaches_the_caller(
    trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    ends: list[threading.Event] = []

    def noting(trt: Any, say: Callable[[str], None], cancelled: threading.Event) -> Any:
        ends.append(cancelled)
        return monitor_of(trt, say, cancelled)

    def interrupt(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert ends[0].wait(DEADLINE_S), "the main thread says that the build is to end"

    monkeypatch.setattr(plan, "monitor_of", noting)
    path = graph_of(tiny_spec(), tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            compiled(trt, path, say=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "model.plan").exists()
    assert compiled(trt, path), "the next build is not held up"


@needs_rtx
def test_an_error_while_telling_ends_the_build_and_is_raised(trt: ModuleType, tmp_path: Path) -> None:
    def fail(_: str) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError, match="nobody reads"):
        compiled(trt, graph_of(tiny_spec(), tmp_path), say=fail)
    assert not (tmp_path / "model.plan").exists()


def test_a_terminal_shows_what_the_builder_is_at() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, width=100))
    with progress.step("Compile") as step:
        step.say("Building engine 2 of 6, Cloning network graph 3 of 159")
        wait_until(lambda: "Cloning network graph 3 of 159" in out.getvalue(), "rich draws ten times a second")


# Settings of the builder.


@needs_rtx
def test_several_gpus_are_one_plan(trt: ModuleType, tmp_path: Path) -> None:
    path = graph_of(tiny_spec(), tmp_path)
    one, two = (compiled(trt, path, capabilities=capabilities) for capabilities in ((89,), (89, 120)))
    assert one != two
    path = graph_of(tiny_spec(), tmp_path, DType.BF16)
    with pytest.raises(CompileError, match="sm75, because the model contains HW-specific datatypes: b16"):
        compiled(trt, path, capabilities=(75,))


@needs_rtx
def test_a_setting_that_is_refused_without_a_word_fails(trt: ModuleType, tmp_path: Path) -> None:
    """TensorRT-RTX has the setting, and does not change it."""
    with pytest.raises(CompileError, match="did not take the setting hardware_compatible"):
        compiled(trt, graph_of(tiny_spec(), tmp_path), hardware_compatible=True)


class Compile:
    """``tensorrt`` for an L4, with RTX in place of TensorRT: it gets all settings, and applies those that it has."""

    def __init__(self, trt: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flags: set[str] = set()
        outer = self

        class Builder(AheadOfTimeBuilder):
            def build_serialized_network_to_stream(self, network: object, config: Any, writer: object) -> bool:
                flags = (trt.BuilderFlag.STRIP_PLAN, trt.BuilderFlag.REFIT)
                outer.flags = {flag.name for flag in flags if config.get_flag(flag)}
                for flag in flags:  # RTX needs a GPU for these
                    config.clear_flag(flag)
                return super().build_serialized_network_to_stream(network, config, writer)

        stand_in = module_like(trt, Builder=lambda logger: Builder(trt, logger))
        monkeypatch.setattr(module, "load_library", lambda target, purpose: stand_in)
        monkeypatch.setattr(module, "load_cuda", lambda purpose, extra: None)
        monkeypatch.setattr(module, "current_gpu", lambda cuda: Gpu("NVIDIA L4", 89, 24 << 30, 13000))
        monkeypatch.setattr(timing_cache, "default_file", lambda version, gpu: None)  # RTX does not take one
        self._folder = folder

    def __call__(
        self,
        folder: Path | None = None,
        spec: ModelSpec | None = None,
        *,
        precision: str = "bf16",
        scale: float = 1.0,
        **settings: Any,
    ) -> Any:
        spec = spec or tiny_spec()
        read = random_weights(spec)
        weights = cast(ModelWeights, SimpleNamespace(read=lambda name: read(name) * np.float32(scale)))
        compiler = compiler_for(BuildConfig(model="tiny", target="tensorrt", **settings))
        limits = limits_of(MAX_SEQ_LEN)
        return compiler.compile(spec, weights, Numerics(precision), limits, folder or self._folder, lambda _: None)


@pytest.fixture
def compile_tiny(trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    return Compile(trt, tmp_path, monkeypatch)


@needs_rtx
def test_tensorrt_writes_the_plan_alone(compile_tiny: Compile, tmp_path: Path) -> None:
    requirements = compile_tiny()
    assert [file.name for file in tmp_path.iterdir()] == ["model.plan"]
    assert (requirements.compiler, requirements.compiler_version) == ("tensorrt", VERSION)
    assert (requirements.device, requirements.capabilities) == ("NVIDIA L4", ["SM89"])
    assert (requirements.plan.lowerings, requirements.plan.fallbacks) == (["padded", "padded"], [])
    assert compile_tiny.flags == set()


@needs_rtx
def test_a_stripped_plan_keeps_the_graph_and_its_weights_beside_it(compile_tiny: Compile, tmp_path: Path) -> None:
    requirements = compile_tiny(strip_weights=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.plan", "model.weights"]
    assert compile_tiny.flags == {"STRIP_PLAN", "REFIT"}
    assert requirements.plan.refit


@needs_rtx
def test_a_fine_tune_takes_the_plan_of_another_and_brings_its_own_weights(
    compile_tiny: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if compiling would give the same plan."""
    lent = save_artifact(tmp_path / "lent")
    folder, weights = lent.path / ENGINE_DIR, (tmp_path / "own" / "model.weights")
    (folder / "fake.bin").unlink()
    engine = compile_tiny(folder, strip_weights=True)
    limits = limits_of(MAX_SEQ_LEN)
    manifest = msgspec.structs.replace(lent.manifest, engine=engine, precision="bf16", **asdict(limits))
    (lent.path / MANIFEST).unlink()
    save(lent.path, manifest, lent.certificate)
    asked: dict[str, Any] = {"strip_weights": True, "plan_of": str(lent.path)}
    weights.parent.mkdir()
    monkeypatch.setattr(module, "write_plan", lambda *_: pytest.fail("compiled"))
    assert compile_tiny(weights.parent, scale=2.0, **asked) == engine
    assert (weights.parent / "model.plan").read_bytes() == (folder / "model.plan").read_bytes()
    assert weights.read_bytes() != (folder / "model.weights").read_bytes()
    with pytest.raises(CompileError, match="its precision is bf16, not fp16"):
        compile_tiny(weights.parent, precision="fp16", **asked)
    with pytest.raises(CompileError, match="its plan is"):
        compile_tiny(weights.parent, latency_tokens=64, **asked)
    with pytest.raises(CompileError, match="from another graph"):
        compile_tiny(weights.parent, tiny_spec(pooling=("cls",)), **asked)
    with pytest.raises(ConfigError, match="add --strip-weights"):
        compile_tiny(weights.parent, plan_of=str(lent.path))
    holds = msgspec.structs.replace(engine.plan, refit=False)
    manifest = msgspec.structs.replace(manifest, engine=msgspec.structs.replace(engine, plan=holds))
    save(lent.path, manifest, lent.certificate)
    with pytest.raises(CompileError, match="holds its own weights"):
        compile_tiny(weights.parent, **asked)


@needs_rtx
def test_packed_attention_is_not_tried_unless_it_is_asked_for(
    compile_tiny: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[AttentionCore] = []

    def write(spec: Any, read: Any, folder: Any, types: Any, core: AttentionCore, *others: Any) -> Path:
        tried.append(core)
        return write_graph(spec, read, folder, types, core, *others)

    monkeypatch.setattr(module, "write_graph", write)
    for lowering in ("auto", "padded", "packed"):
        compile_tiny(attention_lowering=lowering)
    monkeypatch.setattr(module, "PACKED_ON", frozenset((89,)))
    compile_tiny(attention_lowering="auto")
    padded, packed = AttentionCore.TRT_ATTENTION, AttentionCore.TRT_PACKED
    assert tried == [padded, padded, packed, padded, packed, padded]


@needs_rtx
def test_a_plan_that_cannot_be_written_fails_with_the_disks_word(trt: ModuleType, tmp_path: Path) -> None:
    path = graph_of(tiny_spec(), tmp_path)
    (tmp_path / "model.plan").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        compiled(trt, path)
    assert not (tmp_path / "model.plan").is_symlink()
    assert Path("/dev/full").exists()


@needs_rtx
def test_a_library_without_streams_gives_the_same_plan(trt: ModuleType, tmp_path: Path) -> None:
    path = graph_of(tiny_spec(), tmp_path)
    older = module_like(trt)
    del older.IStreamWriter
    assert abs(len(compiled(older, path)) - len(compiled(trt, path))) < 1000  # names of kernels differ


# The timing cache, which TensorRT-RTX does not have.


class CacheConfig:
    """A builder's config with TensorRT's answers about caches; it takes those that begin with ``good``."""

    def __init__(self, log: list[tuple[str, str]]) -> None:
        self._log = log
        self._cache = b""

    def create_timing_cache(self, data: bytes) -> bytes | None:
        return data

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache and not cache.startswith(b"good"):
            self._log.append(("ERROR", "Timing cache header mismatch"))
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> SimpleNamespace:
        return SimpleNamespace(serialize=lambda: self._cache + b" more")


@pytest.mark.parametrize(
    ("stored", "note", "kept"),
    [(None, None, b" more"), (b"good", None, b"good more"), (b"bad", "was replaced", b" more")],
    ids=["none", "good", "refused"],
)
def test_a_timing_cache_is_used_and_kept(tmp_path: Path, stored: bytes | None, note: str | None, kept: bytes) -> None:
    path = tmp_path / "cache"
    if stored is not None:
        path.write_bytes(stored)
    log = [("INFO", "before")]
    config = CacheConfig(log)
    said = timing_cache.load(config, path, log)
    assert note == said or (note is not None and said is not None and note in said)
    assert log == [("INFO", "before")], "a cache that is refused is no failure of the build"
    assert timing_cache.stored(config, path) is None
    assert path.read_bytes() == kept
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


def test_a_timing_cache_that_cannot_be_replaced_leaves_no_scratch_and_the_build_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    said = timing_cache.stored(CacheConfig([]), tmp_path / "cache")
    assert said is not None
    assert "cache could not be written (No space left on device): the next build measures anew" in said
    assert not list(tmp_path.iterdir())


def test_a_version_and_a_model_of_gpu_have_a_timing_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = timing_cache.default_file("11.4.0.106", "NVIDIA L40S/x")
    assert path == tmp_path / ".cache/bei/timing/tensorrt-11.4.0.106-NVIDIA-L40S-x"
    timing_cache.check_writable(path)
    assert timing_cache.default_file("11.4.0.106", "NVIDIA L4") != path
    path.mkdir()
    assert timing_cache.default_file("11.4.0.106", "NVIDIA L40S/x") is None
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    assert timing_cache.default_file("11.4.0.106", "NVIDIA L4") is None


@needs_rtx
def test_a_build_uses_and_keeps_the_timing_cache(
    trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def record(name: str, answer: str | None) -> Callable[..., str | None]:
        def call(*_: object) -> str | None:
            asked.append(name)
            return answer

        return call

    monkeypatch.setattr(timing_cache, "load", record("load", "measured anew"))
    monkeypatch.setattr(timing_cache, "stored", record("stored", "not written"))
    settings = PlanSettings(profiles=profiles(), timing_cache=tmp_path / "cache")
    path = graph_of(tiny_spec(), tmp_path)
    notes = write_plan(trt, path, ["padded", "padded"], settings, tmp_path / "model.plan", lambda _: None)
    assert (notes, asked) == (["measured anew", "not written"], ["load", "stored"])
