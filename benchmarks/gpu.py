"""One NVIDIA GPU in minutes: its ceilings, then our packed module and its peers on models of real shapes.

    PYTHONPATH=.:build python -m benchmarks.gpu [--minutes 8] [--out FILE] [--wheels FOLDER] [--only TEXT]
                                                [--dry-run [--compile]]

Needs torch >= 2.11, and of bei's other dependencies numpy; what else is missing is skipped by name. Measurements come
in the order of their worth and are kept one by one (results/gpu.json): what is finished is not measured again, what
failed or did not fit into the minutes is tried in the next run. ``--dry-run`` does all of it on tiny models on the CPU,
but for what is compiled into packages, which ``--compile`` adds: PyTorch takes a dozen seconds each.

Weights are random and BF16's; the module's outputs are compared with the same model in FP32 (the plain kernel), on the
same device in the same run, and every other way to run it with the module's. Operations are counted from the spec
(``bei_build.spec.flops``), real tokens only.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bei.core import PackedBatch
from bei.engine.packing import graph_inputs
from bei_build.spec.flops import flops
from bei_build.torch_graph.model import PackedModel, tensors_of
from benchmarks import gpu_ceilings, gpu_fused, gpu_kernels
from benchmarks.gpu_built import Built, built_from_a_checkpoint
from benchmarks.gpu_engines import CapturedEngine, Engine, Inputs, compiled
from benchmarks.gpu_http import over_http
from benchmarks.gpu_peers import SentenceTransformers, Transformers
from benchmarks.gpu_record import Found, Record, Skipped, agreement, latency, machine_of, rounded, throughput
from benchmarks.gpu_rtx import plan_on_this_gpu
from benchmarks.gpu_shapes import SHAPES, Shape, batch_of, fixed, lognormal, random_model, uniform

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "gpu.json"

_PARITY_LENGTHS = (17, 64, 5, 128, 33)  # of the texts that are compared with FP32


@dataclass(frozen=True)
class Measurement:
    """``estimate_s``: it is started only where so many seconds are left."""

    name: str
    estimate_s: float
    make: Callable[[], Found]


class Bench:
    """What the measurements share: the device, one model at a time, FP32 answers of each."""

    def __init__(self, device: torch.device, wheels: Path | None, *, is_dry: bool, with_packages: bool = True) -> None:
        self.device = device
        self.is_dry = is_dry
        self._with_packages = with_packages
        self._built: tuple[str, Built] | None = None
        self._wheels = wheels
        self._budget_s = 0.01 if is_dry else 1.0
        self._held: tuple[str, PackedModel] | None = None
        self._expected: dict[str, dict[str, Tensor]] = {}

    def shape(self, name: str) -> Shape:
        """One of ``SHAPES``, tiny in a dry run."""
        return SHAPES[name].shrunk() if self.is_dry else SHAPES[name]

    def lengths(self, make: Callable[..., list[int]], num_tokens: int, *rest: int) -> list[int]:
        """The lengths that ``make`` gives; in a dry run few short ones."""
        return make(num_tokens, *rest) if not self.is_dry else make(100, *(min(32, bound) for bound in rest))

    def ceilings(self) -> list[Measurement]:
        """The device's own limits."""
        scale, device, budget_s = (64 if self.is_dry else 1), self.device, self._budget_s
        sides = [(8192, 8192, 8192), (32_768, 1024, 4096), (16_384, 4096, 14_336)]
        found = []
        for kind, is_fp8 in (("BF16", False), ("FP8", True)):
            for rows, inner, columns in sides:
                sizes = rows // scale, inner // scale, columns // scale
                work = partial(gpu_ceilings.product, device, *sizes, fp8=is_fp8, budget_s=budget_s)
                found.append(Measurement(f"ceiling: {kind} product {rows} x {inner} x {columns}", 3, work))
        num_bytes = 2**20 if self.is_dry else 2**32
        found.append(
            Measurement("ceiling: memory", 3, partial(gpu_ceilings.memory, device, num_bytes, budget_s=budget_s))
        )
        for name, to_device in (("to the device", True), ("to the host", False)):
            work = partial(gpu_ceilings.copies, device, num_bytes // 16, to_device=to_device, budget_s=budget_s)
            found.append(Measurement(f"ceiling: copy {name}", 3, work))
        return found

    def kernels(self) -> list[Measurement]:
        """Attention, the steps between the products, and products in FP8, each by itself."""
        of = {"budget_s": self._budget_s / 4}
        return [
            *(
                Measurement(f"product in FP8: {name}", 3, partial(gpu_fused.product, case, self.device, **of))
                for name, case in gpu_fused.PRODUCTS.items()
            ),
            *(
                Measurement(f"attention: {name}", 4, partial(gpu_kernels.measured, case, self.device, **of))
                for name, case in gpu_kernels.CASES.items()
            ),
            *(
                Measurement(f"fused: {name}", 6, partial(gpu_fused.fused, case, self.device, **of))
                for name, case in gpu_fused.FUSED.items()
            ),
        ]

    def ours(self, name: str, lengths: list[int], kind: str, *, is_latency: bool = False) -> Found:
        """The packed module of shape ``name`` in BF16 on one batch, run as ``kind`` says."""
        shape, model = self.shape(name), self._model(name)
        batch = batch_of(lengths, shape.sizes.vocab)
        inputs = tensors_of(model, batch)
        facts: Found = {}
        engine = self._engine(kind, model, inputs)
        with torch.inference_mode():
            expected = self._real(model, model(inputs), batch)
            started = time.monotonic()
            actual = self._real(model, engine(inputs), batch)
            facts["first_call_s"] = round(time.monotonic() - started, 2)
            work = partial(engine, inputs)
            timed = (latency if is_latency else throughput)(work, self.device, budget_s=self._budget_s)
        facts["cosine to FP32"] = agreement(self._answers(model, shape), self._reference(shape))
        facts["cosine to eager"] = agreement(actual, expected)
        facts["kernels"] = _kernels(model)
        if shape.is_fp8:
            facts["products"] = dict(Counter(choice.product for choice in model.products.values()))
        return {**_rates(timed, flops(shape.spec, lengths), sum(lengths)), **facts}

    def engine(self, name: str, lengths: list[int], *, is_latency: bool = False) -> Found:
        """The engine of target cuda with the same weights: indices, copies and both streams included."""
        shape, built = self.shape(name), self._engine_of(name)
        batch = batch_of(lengths, shape.sizes.vocab)
        timed = built.one_by_one(batch, self.device, self._budget_s) if is_latency else built.all_streams(batch)
        same = {"cosine to FP32": agreement(built.answers(self._parity_batch(shape)), self._reference(shape))}
        return {**_rates(timed, flops(shape.spec, lengths), sum(lengths)), **built.facts, **same}

    def build(self, name: str) -> Found:
        """``bei build`` from a checkpoint to a certificate."""
        self._need_packages()
        self.close()
        return built_from_a_checkpoint(self.shape(name), self.device)

    def http(self, name: str, lengths: list[int]) -> Found:
        """``bei serve`` in front of the engine."""
        self._need_packages()
        self.close()
        shape = self.shape(name)
        timed = over_http(shape, self.device, lengths)
        return _rates(timed, flops(shape.spec, lengths), sum(lengths))

    def _need_packages(self) -> None:
        if not self._with_packages:
            raise Skipped("compiling a package for a CPU takes PyTorch a dozen seconds: --compile")

    def _engine_of(self, name: str) -> Built:
        """Kept for the next measurement of the same shape."""
        self._need_packages()
        if self._built is None or self._built[0] != name:
            self.close()
            model = random_model(self.shape(name), self.device, torch.bfloat16, joined=False)
            self._built = name, Built(self.shape(name), model, self.device)
        return self._built[1]

    def rtx(self, name: str, lengths: list[int]) -> Found:
        """TensorRT-RTX on the same weights and batch."""
        shape = self.shape(name)
        self.close()
        model = random_model(shape, self.device, torch.bfloat16, joined=False)
        batch = batch_of(lengths, shape.sizes.vocab)

        def inputs_of(names: list[str]) -> Inputs:
            arrays = graph_inputs(batch, names)
            return {key: torch.from_numpy(array).to(self.device) for key, array in arrays.items()}

        with torch.inference_mode():
            outputs, timed = plan_on_this_gpu(model, inputs_of, self._wheels, self.device, budget_s=self._budget_s)
            expected = self._real(model, model(tensors_of(model, batch)), batch)
        same = {"cosine to eager": agreement(self._real(model, outputs, batch), expected)}
        return {**_rates(timed, flops(shape.spec, lengths), sum(lengths)), **same}

    def peer(self, name: str, lengths: list[int], attention: str, *, is_compiled: bool) -> Found:
        """transformers' class of the same shape on texts of the same lengths, sorted and padded."""
        self.close()
        shape = self.shape(name)
        model = Transformers(shape, self.device, attention, is_compiled=is_compiled)
        batches = model.batches(lengths, shape.sizes.vocab)
        with torch.inference_mode():
            timed = throughput(lambda: model.run(batches), self.device, budget_s=self._budget_s)
        return _rates(timed, flops(shape.spec, lengths), sum(lengths))

    def sentence_transformers(self, name: str, lengths: list[int]) -> Found:
        """sentence-transformers on texts of the same lengths, tokenizer and copies included."""
        self.close()
        shape = self.shape(name)
        model = SentenceTransformers(shape, self.device)
        texts = model.texts(lengths)
        timed = latency(lambda: model.run(texts), self.device, budget_s=self._budget_s)
        return _rates(timed, flops(shape.spec, lengths), sum(lengths))

    def _model(self, name: str) -> PackedModel:
        if self._held is None or self._held[0] != name:
            self.close()
            shape = self.shape(name)
            self._held = name, random_model(shape, self.device, torch.bfloat16, is_fp8=shape.is_fp8)
        return self._held[1]

    def close(self) -> None:
        """Free what is not needed any more, also of measurements that failed."""
        self._held = None
        if self._built is not None:
            self._built[1].close()
            self._built = None
        if self.device.type == "cuda":
            torch.compiler.reset()  # compiled functions hold their modules
            gc.collect()
            torch.cuda.empty_cache()

    def _engine(self, kind: str, model: PackedModel, inputs: Inputs) -> Engine:
        if kind == "eager":
            return model
        if kind == "compiled":
            return compiled(model, self.device, dynamic=False)
        if kind == "compiled for any shape":
            return compiled(model, self.device, dynamic=True)
        assert kind in ("graph", "compiled graph")
        recorded = model if kind == "graph" else compiled(model, self.device, dynamic=False)
        with torch.inference_mode():
            return CapturedEngine(recorded, inputs, self.device)

    def _parity_batch(self, shape: Shape) -> PackedBatch:
        return batch_of([min(length, shape.max_seq_len) for length in _PARITY_LENGTHS], shape.sizes.vocab)

    def _answers(self, model: PackedModel, shape: Shape) -> dict[str, Tensor]:
        batch = self._parity_batch(shape)
        with torch.inference_mode():
            return self._real(model, model(tensors_of(model, batch)), batch)

    def _reference(self, shape: Shape) -> dict[str, Tensor]:
        """The model in FP32, by the plain kernel; made once a shape and kept on the host."""
        if shape.name not in self._expected:
            model = random_model(shape, self.device, torch.float32, kernel="plain", joined=False)
            self._expected[shape.name] = {name: rows.cpu() for name, rows in self._answers(model, shape).items()}
        return self._expected[shape.name]

    @staticmethod
    def _real(model: PackedModel, outputs: Mapping[str, Tensor], batch: PackedBatch) -> dict[str, Tensor]:
        """``outputs`` without the rows of filler, copied: an engine may write into them again."""
        counts = {head.output: batch.batch_size if head.pooling else batch.num_tokens for head in model.spec.heads}
        return {name: outputs[name][:count].clone() for name, count in counts.items()}


def _rates(timed: Found, num_flops: int, num_tokens: int) -> Found:
    seconds = timed["ms"] / 1000
    rates = {"tokens_per_s": round(num_tokens / seconds), "tflops": rounded(num_flops / seconds / 1e12)}
    return {**timed, "tokens": num_tokens, **rates}


def _kernels(model: PackedModel) -> dict[str, list[str]]:
    """Attention kernels of the model, and why not a faster one."""
    return {choice.kernel: list(choice.reasons) for choice in model.choices.values()}


def measurements(bench: Bench) -> list[Measurement]:
    """All of them, the most telling first."""
    one = "one query of 32 tokens"
    long = bench.lengths(fixed, 32_768, 512)
    query = bench.lengths(fixed, 32, 32)
    mixed = bench.lengths(uniform, 32_768, 16, 512)
    pages = bench.lengths(lognormal, 32_768, 250, 2048)

    def ours(shape: str, what: str, lengths: list[int], kind: str, estimate_s: float) -> Measurement:
        work = partial(bench.ours, shape, lengths, kind, is_latency=what == one)
        return Measurement(f"{shape}, {what}: {kind}", estimate_s, work)

    def engine(shape: str, what: str, lengths: list[int], estimate_s: float) -> Measurement:
        work = partial(bench.engine, shape, lengths, is_latency=what == one)
        return Measurement(f"{shape}, {what}: engine", estimate_s, work)

    def peer(
        shape: str, what: str, lengths: list[int], attention: str, estimate_s: float, *, is_compiled: bool = False
    ) -> Measurement:
        work = partial(bench.peer, shape, lengths, attention, is_compiled=is_compiled)
        return Measurement(f"{shape}, {what}: transformers, {attention}{', compiled' * is_compiled}", estimate_s, work)

    return [
        *bench.ceilings(),
        ours("bert-large", "512 tokens", long, "eager", 15),
        ours("bert-base", "512 tokens", long, "eager", 8),
        *bench.kernels(),
        Measurement("bert-base, 512 tokens: TensorRT-RTX", 40, partial(bench.rtx, "bert-base", long)),
        ours("bert-base", "512 tokens", long, "compiled", 40),
        ours("bert-large", "512 tokens", long, "compiled", 70),
        engine("bert-base", "512 tokens", long, 120),
        engine("bert-base", one, query, 5),
        engine("bert-base", "16 to 512 tokens", mixed, 5),
        ours("bert-large", one, query, "graph", 8),
        ours("minilm", one, query, "graph", 5),
        ours("mistral-7b", "512 tokens", bench.lengths(fixed, 16_384, 512), "eager", 30),
        ours("mistral-7b", one, query, "graph", 8),
        ours("mistral-7b FP8", "512 tokens", bench.lengths(fixed, 16_384, 512), "eager", 40),
        ours("mistral-7b FP8", one, query, "graph", 8),
        peer("bert-base", "512 tokens", long, "sdpa", 20),
        peer("bert-large", "512 tokens", long, "sdpa", 10),
        peer("bert-large", "512 tokens", long, "flash_attention_2", 10),
        ours("bge-m3", "mixed lengths", pages, "eager", 20),
        peer("bge-m3", "mixed lengths", pages, "sdpa", 15),
        peer("bge-m3", "mixed lengths", pages, "flash_attention_2", 15),
        ours("bert-base", "16 to 512 tokens", mixed, "eager", 8),
        ours("bert-large", "16 to 512 tokens", mixed, "eager", 12),
        ours("mistral-7b", "16 to 512 tokens", bench.lengths(uniform, 16_384, 16, 512), "eager", 30),
        engine("bert-large", "512 tokens", long, 150),
        engine("bert-large", one, query, 5),
        engine("bert-large", "16 to 512 tokens", mixed, 5),
        engine("minilm", one, query, 60),
        engine("minilm", "512 tokens", long, 5),
        engine("minilm", "16 to 512 tokens", mixed, 5),
        engine("bge-m3", "mixed lengths", pages, 150),
        engine("bge-m3", "512 tokens", long, 5),
        engine("mistral-7b", "512 tokens", bench.lengths(fixed, 16_384, 512), 300),
        engine("mistral-7b", one, query, 5),
        engine("mistral-7b", "16 to 512 tokens", bench.lengths(uniform, 16_384, 16, 512), 5),
        engine("mistral-7b FP8", "512 tokens", bench.lengths(fixed, 16_384, 512), 300),
        engine("mistral-7b FP8", one, query, 5),
        Measurement(
            "bert-base, 16 to 512 tokens: over HTTP",
            *(300, partial(bench.http, "bert-base", bench.lengths(uniform, 1_000_000, 16, 512))),
        ),
        Measurement("minilm: bei build --target cuda", 90, partial(bench.build, "minilm")),
        ours("bert-large", one, query, "compiled graph", 60),
        ours("minilm", one, query, "compiled graph", 30),
        ours("bert-base", "16 to 512 tokens", mixed, "compiled for any shape", 60),
        peer("bge-m3", "mixed lengths", pages, "sdpa", 120, is_compiled=True),
        peer("bge-m3", "mixed lengths", pages, "flash_attention_2", 120, is_compiled=True),
        peer("bert-base", "512 tokens", long, "sdpa", 60, is_compiled=True),
        ours("mistral-7b", "512 tokens", bench.lengths(fixed, 16_384, 512), "compiled", 120),
        ours("mistral-7b FP8", "512 tokens", bench.lengths(fixed, 16_384, 512), "compiled", 120),
        ours("bert-large FP8", "512 tokens", long, "eager", 15),
        ours("bert-large FP8", "512 tokens", long, "compiled", 70),
        Measurement(
            "bert-base, 512 tokens: sentence-transformers", 30, partial(bench.sentence_transformers, "bert-base", long)
        ),
    ]


def run(bench: Bench, record: Record, minutes: float, only: str) -> None:
    """Make what is not finished and fits into ``minutes``. A measurement that fails costs the others nothing."""
    end, sources = time.monotonic() + 60 * minutes, _digest_of_sources()
    for measurement in measurements(bench):
        if only not in measurement.name or record.is_finished(measurement.name):
            continue
        if time.monotonic() + measurement.estimate_s > end:
            print(f"left for the next run: {measurement.name}", flush=True)
            continue
        started = time.monotonic()
        try:
            found = measurement.make()
        except Skipped as reason:
            found = {"skipped": str(reason)}
        except Exception as error:  # of any library: the others are to be measured, and this one says what it was
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
        seconds = round(time.monotonic() - started, 1)
        record.keep(measurement.name, {**found, "took_s": seconds, "sources": sources})
        print(f"{seconds:6.1f} s  {measurement.name}: {_short(found)}", flush=True)


def _digest_of_sources() -> str:
    """Of the code that a figure is of: a copy of the tree on a GPU machine has no history."""
    digest = hashlib.sha256()
    for folder in (ROOT / "build" / "bei_build" / "torch_graph", ROOT / "bei" / "engine" / "cuda"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _short(found: Mapping[str, object]) -> str:
    named = ("error", "skipped", "ms", "tokens_per_s", "tflops", "gb_per_s")
    return ", ".join(f"{name} {found[name]}" for name in named if name in found)


def table(record: Record) -> str:
    """What is finished, one line each; shares are of the best BF16 product."""
    finished = {name: found for name, found in record.measurements.items() if record.is_finished(name)}
    products = [found["tflops"] for name, found in finished.items() if name.startswith("ceiling: BF16")]
    lines = ["| measurement | ms | tokens/s | TFLOP/s or GB/s | of the best BF16 product | lowest cosine to FP32 |"]
    lines.append("|---|---|---|---|---|---|")
    for name, found in finished.items():
        rate = found.get("tflops", found.get("gb_per_s", ""))
        share = f"{found['tflops'] / max(products):.0%}" if products and "tflops" in found else ""
        cosines = found.get("cosine to FP32", found.get("cosine to eager", {}))
        cosine = min(cosines.values()) if cosines else ""
        lines.append(f"| {name} | {found['ms']} | {found.get('tokens_per_s', '')} | {rate} | {share} | {cosine} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, keep, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="no measurement is started that may end later")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}; of a dry run: nothing is kept")
    parser.add_argument("--wheels", type=Path, help="folder with TensorRT-RTX's wheels, where it is not installed")
    parser.add_argument("--only", default="", help="measurements whose name has this text in it")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny models on the CPU: do all parts of this script run?"
    )
    parser.add_argument("--compile", action="store_true", help="with --dry-run: packages too, for this CPU")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("This measures an NVIDIA GPU, and torch sees none. --dry-run tries the script on the CPU.")
    device = torch.device("cpu" if options.dry_run else "cuda")
    if options.dry_run:
        torch.set_num_threads(1)  # tiny matrices are slower on several
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / "gpu.json" if options.dry_run else RESULTS
        record = Record(options.out or kept, machine_of(device))
        with_packages = options.compile or not options.dry_run
        with closing(Bench(device, options.wheels, is_dry=options.dry_run, with_packages=with_packages)) as bench:
            run(bench, record, options.minutes, options.only)
        print(table(record))


if __name__ == "__main__":
    main()
