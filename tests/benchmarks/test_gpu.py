"""The GPU benchmark without a GPU: all of it on tiny models, and what it does with a run that ends or fails early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import list_flash_attention_impls
from torchgen.aoti.fallback_ops import inductor_fallback_ops  # type: ignore[import-untyped]

from bei.engine.cuda.device import TorchDevice
from bei.engine.cuda.engine import CudaEngine, CudaOptions
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import records
from benchmarks.gpu.__main__ import Bench, Measurement, measurements, run, table
from benchmarks.gpu.attention import by_cudnn, flash_attention_3
from benchmarks.gpu.built import waiting_awake
from benchmarks.gpu.plan import DECIDE, WAYS
from benchmarks.gpu.record import Record, Skipped, agreement
from benchmarks.gpu.shapes import SHAPES, fixed, lognormal, uniform
from tests.bei.engine.cuda import simulated
from tests.bei.engine.cuda.torch_standin import StandIn
from tests.bei_build.torch_graph.gpu_cases import ATTENTION, attention_inputs

MACHINE = {"device": "a test"}
# What a CPU cannot show; nothing else may be left out.
NOT_ON_CPUS = (*("FP8 product", "ceiling: copy", "attention: ", "graph", "compiled", "flash_attention_2", "spinning"),)
PACKAGES = (": engine", ": bei build", "over HTTP")  # of the second tier


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A dry run computes on one."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_a_dry_run_makes_every_measurement_that_needs_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--dry-run", "--out", str(out)])
    found = json.loads(out.read_bytes())["measurements"]
    assert found.keys() == {each.name for each in measurements(Bench(torch.device("cpu"), is_dry=True))}
    assert {name: each["error"] for name, each in found.items() if "error" in each} == {}
    for name in (name for name, each in found.items() if "skipped" in each):
        assert any(part in name for part in (*NOT_ON_CPUS, *PACKAGES)), (name, found[name])
    ours = [each for each in found.values() if "cosine to FP32" in each]
    assert len(ours) > 5
    for name, each in found.items():
        least = 0.99 if "FP8" in name else 0.999
        assert all(cosine >= least for cosine in each.get("cosine to FP32", {}).values()), name
    products = found["mistral-7b FP8, 512 tokens: eager"]["products"]
    assert products == {"plain": 8}  # of two layers: joined projections, output, joined gate and up, down
    beside = [each for name, each in found.items() if name.startswith(("fused: ", "product in FP8: "))]
    assert len(beside) > 10
    assert all("relative_error" in each for each in beside)
    printed = capsys.readouterr().out
    assert "| bert-large, 512 tokens: eager |" in printed


def _only_measured(out: Path) -> Any:
    """The one measurement that was not skipped."""
    (found,) = (each for each in json.loads(out.read_bytes())["measurements"].values() if "skipped" not in each)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "least"),
    [
        ("minilm, one query of 32 tokens: engine", 0.999),
        ("bge-m3, mixed lengths: engine", 0.999),
        ("mistral-7b FP8, one query of 32 tokens: engine", 0.99),
        (": bei build", 0.999),
    ],
)
def test_a_dry_run_compiles_packages_where_it_is_asked_to(only: str, least: float, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--dry-run", "--compile", "--out", str(out), "--only", only])
    found = _only_measured(out)
    assert found["ms"] > 0, found
    assert all(cosine >= least for cosine in found["cosine to FP32"].values())


@pytest.mark.slow
def test_a_dry_run_serves_a_package_over_http(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--dry-run", "--compile", "--out", str(out), "--only", "over HTTP"])
    found = _only_measured(out)
    assert found["engine alone, texts_per_s"] > 0, found
    kinds = {
        f"{kind}, {count}"
        for kind in ("requests of 16 texts", "single texts")
        for count in ("1 front end", "4 front ends")
    }
    assert found["texts_per_s"].keys() == found["share of the engine alone"].keys() == kinds
    assert min(found["texts_per_s"].values()) > 0


def test_what_decides_comes_first_and_groups_fit_into_a_run() -> None:
    seconds: Counter[str] = Counter()
    for each in measurements(Bench(torch.device("cpu"), is_dry=False)):
        seconds[each.group] += round(each.estimate_s)
    assert next(iter(seconds)) == DECIDE
    assert seconds[DECIDE] <= 120
    assert max(seconds.values()) <= 8 * 60
    assert set(seconds) == set(WAYS)


def test_a_group_is_asked_for_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = {"peers": Counted(), "compiled": Counted()}
    planned = [Measurement(f"one of {group}, compiled", 1, work, group) for group, work in works.items()]
    monkeypatch.setattr(gpu, "measurements", lambda bench: planned)
    run(Bench(torch.device("cpu"), is_dry=True), Record(tmp_path / "gpu.json", MACHINE), minutes=1, only="compiled")
    assert {group: work.calls for group, work in works.items()} == {"peers": 0, "compiled": 1}


class Counted:
    """A measurement that counts its calls, and fails as long as it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls = 0
        self.error = error

    def __call__(self) -> dict[str, float]:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return {"ms": 1.0, "tflops": 2.0}


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = {
        "good": Counted(),
        "bad": Counted(RuntimeError("out of memory")),
        "missing": Counted(Skipped("no package")),
    }
    late = Counted()
    planned = [*(Measurement(name, 1, work) for name, work in works.items()), Measurement("late", 1000, late)]
    monkeypatch.setattr(gpu, "measurements", lambda bench: planned)
    bench, path = Bench(torch.device("cpu"), is_dry=True), tmp_path / "gpu.json"
    run(bench, Record(path, MACHINE), minutes=1, only="")
    works["bad"].error = None
    record = Record(path, MACHINE)
    assert record.measurements["bad"]["error"] == "RuntimeError: out of memory"
    assert record.measurements["missing"]["skipped"] == "no package"
    assert not record.is_finished("late")
    run(bench, record, minutes=100, only="")
    assert [works[name].calls for name in ("good", "bad", "missing")] == [1, 2, 2]
    assert late.calls == 1
    assert table(Record(path, MACHINE)).count("\n") == 1 + 3  # a line for each that is finished


# Kernels that packages cannot call.


def test_attention_by_cudnn_is_called_as_pytorch_declares_it_and_packages_cannot_call_it() -> None:
    """On a CPU it fails for the device alone. With a C function it would be a choice of the target."""
    case = ATTENTION["BERT-large"]
    step, parts, terms = attention_inputs(case, [5, 3], torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=r"_cudnn_attention_forward' with arguments from the 'CPU' backend"):
        by_cudnn(case, parts, terms, step)()
    names = [name.removeprefix("aten.") for name in inductor_fallback_ops]
    assert "_flash_attention_forward.default" in names
    assert "_cudnn_attention_forward.default" not in names


def test_flash_attention_3_is_known_to_pytorch_and_skipped_where_it_is_not_installed() -> None:
    assert "FA3" in list_flash_attention_impls()
    with pytest.raises(Skipped, match="flash_attn_interface is not installed"), flash_attention_3():
        pass


def test_an_engine_that_waits_awake_does_so_for_the_measurement_alone(tmp_path: Path) -> None:
    gpu = StandIn()
    device: Any = TorchDevice(gpu.torch, "A test")
    folder = tmp_path / "artifact" / "engine"
    batch = simulated.batch_of([3, 4])
    with closing(CudaEngine(folder, simulated.manifest_in(tmp_path), CudaOptions(), device=device)) as engine:
        with waiting_awake(engine, gpu.torch):
            simulated.check(engine, batch)
        simulated.check(engine, batch)
    assert [call[-1] for call in gpu.log if call[0] == "wait"] == ["spinning", "asleep"]


WITHOUT_MSGSPEC = """
import sys
from importlib import util
real = util.find_spec
util.find_spec = lambda name, package=None: None if name == "msgspec" else real(name, package)
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "msgspec":
            raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")
sys.meta_path.insert(0, Missing())
from benchmarks.gpu import __main__ as gpu
gpu.main(["--dry-run", "--compile", "--only", "minilm, one query of 32 tokens: engine", "--out", sys.argv[1]])
"""


@pytest.mark.slow
def test_an_engine_is_measured_where_msgspec_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "build")])}
    subprocess.run([sys.executable, "-c", WITHOUT_MSGSPEC, str(out)], env=env, cwd=root, check=True)
    found = _only_measured(out)
    assert found["ms"] > 0, found


def test_records_without_msgspec_are_those_of_the_manifest() -> None:
    module: Any = records._module()

    class Record(module.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[misc,call-arg]
        name: str
        weights: object = module.UNSET
        ranks: dict[str, int] = {}  # noqa: RUF012

    one = Record(name="a")
    assert one.weights is module.UNSET
    one.ranks["a"] = 1
    assert Record(name="a").ranks == {}
    one.ranks.clear()
    assert module.structs.replace(one, weights="beside") == Record(name="a", weights="beside")
    with pytest.raises(TypeError, match="unknown"):
        Record(name="a", unknown=1)
    with pytest.raises(Skipped, match="msgspec is not installed"):
        module.json.Decoder(Record).decode(b"{}")


def test_figures_of_another_machine_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    Record(path, MACHINE).keep("one", {"ms": 1.0})
    with pytest.raises(SystemExit, match="another GPU"):
        Record(path, {"device": "another GPU"})


def test_numbers_that_are_not_finite_or_another_models_are_told() -> None:
    expected = {"embedding": torch.eye(3)}
    assert agreement({"embedding": torch.eye(3).bfloat16()}, expected) == {"embedding": 1.0}
    assert agreement({"embedding": torch.eye(3).roll(1, 0)}, expected) == {"embedding": 0.0}
    with pytest.raises(ValueError, match="NaN"):
        agreement({"embedding": torch.full((3, 3), torch.nan)}, expected)


def test_without_a_gpu_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--dry-run"):
        gpu.main([])


def test_shapes_have_the_sizes_of_the_models_they_are_called_after() -> None:
    """Millions of parameters as published, without poolers; bge-m3 with its heads."""
    published = {"minilm": 22.6, "bert-base": 108.9, "bert-large": 334.1, "bge-m3": 567.8}
    published |= {"qwen3-0.6b": 595.8, "mistral-7b": 7110.7}
    for name, millions in published.items():
        assert SHAPES[name].spec.num_parameters / 1e6 == pytest.approx(millions, rel=0.002), name


def test_lengths_are_what_they_are_called() -> None:
    assert fixed(2048, 512) == [512] * 4
    spread = uniform(32_768, 16, 512)
    assert (min(spread) >= 16, max(spread) <= 512) == (True, True)
    pages = lognormal(400_000, 250, 2048)
    assert sum(pages) / len(pages) == pytest.approx(250, rel=0.1)
