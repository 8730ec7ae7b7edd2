"""One NVIDIA GPU in minutes: its ceilings, then our packed module, its engine and transformers on real shapes.

    PYTHONPATH=.:build python -m benchmarks.gpu [--minutes 8] [--out FILE] [--only TEXT] [--dry-run [--compile]]

Needs torch >= 2.11, and of bei's other dependencies numpy; what else is missing is skipped by name. Measurements come
in the order of their worth and are kept one by one (results/gpu.json, ``--out``): finished ones are not measured again,
those that failed or did not fit into ``--minutes`` are tried in the next run. ``--only``: those with this text in their
name, or of this group (``plan.WAYS``; each fits into eight minutes): decide, eager, kernels, engines of BERT, engine of
mistral-7b FP8, engine of mistral-7b, engine of bge-m3, peers, compiled, tuned, build. ``--dry-run`` does all of it on
tiny models on the CPU, but for what is compiled into packages, which ``--compile`` adds: PyTorch takes a dozen seconds
each; nothing is kept of it.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bei.core import PackedBatch
from bei_build.spec.flops import flops
from bei_build.torch_graph.model import PackedModel, tensors_of
from benchmarks.gpu import ceilings, kernels
from benchmarks.gpu.attention import OTHERS, other_attention
from benchmarks.gpu.built import Built, random_artifact
from benchmarks.gpu.engines import CapturedEngine, Engine, Inputs, compiled
from benchmarks.gpu.http import over_http
from benchmarks.gpu.peers import padded_batches, transformers_model
from benchmarks.gpu.plan import BUILD, DECIDE, EAGER, KERNELS, LONG, MIXED, PAGES, QUERY, WAYS
from benchmarks.gpu.record import Found, Record, Skipped, agreement, latency, machine_of, rounded, throughput
from benchmarks.gpu.shapes import SHAPES, Shape, batch_of, fixed, lognormal, random_model, uniform
from tests.bei_build.torch_graph.gpu_cases import ATTENTION, FUSED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"

_PRODUCT_OF_7B = (16_384, 4096, 14_336)
_PARITY_LENGTHS = (17, 64, 5, 128, 33)  # of the texts that are compared with FP32


@dataclass(frozen=True)
class Measurement:
    """``estimate_s``: it is started only where so many seconds are left."""

    name: str
    estimate_s: float
    make: Callable[[], Found]
    group: str = ""


class Bench:
    """The device, one model and one engine at a time, and FP32 answers of each shape."""

    def __init__(self, device: torch.device, *, is_dry: bool, with_packages: bool = True) -> None:
        self.device = device
        self.is_dry = is_dry
        self._with_packages = with_packages
        self._budget_s = 0.01 if is_dry else 1.0
        self._model: tuple[str, PackedModel] | None = None
        self._built: tuple[str, Built] | None = None
        self._expected: dict[str, dict[str, Tensor]] = {}

    def shape(self, name: str) -> Shape:
        """One of ``SHAPES``, tiny in a dry run."""
        return SHAPES[name].shrunk() if self.is_dry else SHAPES[name]

    def lengths(self, shape: str, batch: str, way: str) -> list[int]:
        """Of the texts of a batch; in a dry run few short ones."""
        count = 32 if batch == QUERY else 16_384 if shape.startswith("mistral") else 32_768
        count = 1_000_000 if way == "over HTTP" else count
        kinds: dict[str, tuple[Callable[..., list[int]], list[int]]] = {
            QUERY: (fixed, [32]),
            LONG: (fixed, [512]),
            MIXED: (uniform, [16, 512]),
            PAGES: (lognormal, [250, 2048]),
        }
        make, bounds = kinds[batch]
        return make(100, *(min(32, bound) for bound in bounds)) if self.is_dry else make(count, *bounds)

    def ceilings(self) -> list[Measurement]:
        """The device's own limits; those that the first group is held to, of a product of 7B and of memory, first."""
        scale, num_bytes = (64, 2**20) if self.is_dry else (1, 2**32)
        on: dict[str, Any] = {"device": self.device, "budget_s": self._budget_s}
        works: dict[str, Callable[[], Found]] = {}
        for kind, fp8 in (("BF16", False), ("FP8", True)):
            for sides in (_PRODUCT_OF_7B, (8192, 8192, 8192), (32_768, 1024, 4096)):
                name = f"{kind} product {' x '.join(str(side // scale) for side in sides)}"
                works[name] = partial(ceilings.product, *(side // scale for side in sides), fp8=fp8, **on)
        works["memory"] = partial(ceilings.memory, num_bytes, **on)
        for name, to_device in (("to the device", True), ("to the host", False)):
            works[f"copy {name}"] = partial(ceilings.copies, num_bytes // 16, to_device=to_device, **on)
        decisive = f"product {' x '.join(str(side // scale) for side in _PRODUCT_OF_7B)}"
        found = [
            Measurement(f"ceiling: {name}", 3, work, DECIDE if name.endswith((decisive, "memory")) else EAGER)
            for name, work in works.items()
        ]
        return sorted(found, key=lambda one: one.group != DECIDE)

    def kernels(self) -> list[Measurement]:
        """Attention, the steps between the products, and products in FP8, each by itself."""
        kinds: Sequence[tuple[str, float, Mapping[str, Any], Callable[..., Found]]] = (
            ("product in FP8", 3, kernels.PRODUCTS, kernels.product),
            ("attention", 4, ATTENTION, kernels.attention),
            ("attention", 4, OTHERS, other_attention),
            ("fused", 6, FUSED, kernels.fused),
        )
        return [
            Measurement(
                f"{kind}: {name}",
                estimate_s,
                partial(make, case, self.device, budget_s=self._budget_s / 4),
                KERNELS,
            )
            for kind, estimate_s, cases, make in kinds
            for name, case in cases.items()
        ]

    def way(self, name: str, what: str, way: str) -> Found:
        """A batch of shape ``name``, run in this way: milliseconds, tokens and operations a second."""
        lengths, shape, is_latency = self.lengths(name, what, way), self.shape(name), what == QUERY
        if way.startswith("engine"):
            found = self._engine(name, lengths, is_latency=is_latency, spins=way.endswith("spinning"))
        elif way == "over HTTP":
            self._need_packages()
            self.close()
            found = over_http(shape, self.device, lengths)
        elif way.startswith("transformers"):
            _, attention_name, *options = way.split(", ")
            self.close()
            model = transformers_model(shape, self.device, attention_name, is_compiled=bool(options))
            batches = padded_batches(lengths, shape.sizes.vocab, self.device)
            with torch.inference_mode():
                found = throughput(lambda: [model(**one) for one in batches], self.device, budget_s=self._budget_s)
        else:
            found = self._module(name, lengths, way, is_latency=is_latency)
        seconds, num_tokens = found["ms"] / 1000, sum(lengths)
        rates = {"tokens_per_s": round(num_tokens / seconds), "tokens": num_tokens}
        return {**found, **rates, "tflops": rounded(flops(shape.spec, lengths) / seconds / 1e12)}

    def _module(self, name: str, lengths: list[int], way: str, *, is_latency: bool) -> Found:
        """The packed module in BF16 or FP8."""
        shape, model = self.shape(name), self._model_of(name)
        batch = batch_of(lengths, shape.sizes.vocab)
        inputs = tensors_of(model, batch)
        engine = self._runner(way, model, inputs)
        with torch.inference_mode():
            expected = _real(model, model(inputs), batch)
            started = time.monotonic()
            actual = _real(model, engine(inputs), batch)
            first_call_s = round(time.monotonic() - started, 2)
            work = partial(engine, inputs)
            timed = (latency if is_latency else throughput)(work, self.device, budget_s=self._budget_s)
        products = Counter(choice.product for choice in model.products.values())
        return {
            **timed,
            "first_call_s": first_call_s,
            "cosine to FP32": agreement(self._answers(model, shape), self._reference(shape)),
            "cosine to eager": agreement(actual, expected),
            "kernels": {choice.kernel: list(choice.reasons) for choice in model.choices.values()},
            **({"products": dict(products)} if shape.is_fp8 else {}),
        }

    def _engine(self, name: str, lengths: list[int], *, is_latency: bool, spins: bool) -> Found:
        """The engine of target cuda with the same weights: indices, copies and both streams included."""
        self._need_packages()
        shape = self.shape(name)
        if self._built is None or self._built[0] != name:  # else kept from the measurement before
            self.close()
            model = random_model(shape, self.device, torch.bfloat16, joined=False)
            self._built = name, Built(shape, model, self.device)
        built, batch = self._built[1], batch_of(lengths, shape.sizes.vocab)
        with built.spinning(self.device) if spins else nullcontext():
            timed = built.one_by_one(batch, self.device, self._budget_s) if is_latency else built.all_streams(batch)
        cosines = agreement(built.answers(_parity_batch(shape)), self._reference(shape))
        return {**timed, **built.facts, "cosine to FP32": cosines}

    def build(self, name: str) -> Found:
        """``bei build`` of a random checkpoint of transformers' class, to a certificate."""
        self._need_packages()
        self.close()
        with tempfile.TemporaryDirectory() as folder:
            made = random_artifact(self.shape(name), self.device, Path(folder))
        certificate = made.artifact.certificate
        cosines = {output.output: round(output.cosine_min, 6) for output in certificate.outputs}
        return {"ms": round(1000 * made.build_s, 1), "cosine to FP32": cosines, "reference": certificate.reference}

    def _need_packages(self) -> None:
        if not self._with_packages:
            raise Skipped("compiling a package for a CPU takes PyTorch a dozen seconds: --compile")

    def _model_of(self, name: str) -> PackedModel:
        if self._model is None or self._model[0] != name:
            self.close()
            shape = self.shape(name)
            self._model = name, random_model(shape, self.device, torch.bfloat16, is_fp8=shape.is_fp8)
        return self._model[1]

    def close(self) -> None:
        """Free what is not needed any more, also of measurements that failed."""
        self._model = None
        if self._built is not None:
            self._built[1].close()
            self._built = None
        if self.device.type == "cuda":
            torch.compiler.reset()  # compiled functions hold their modules
            gc.collect()
            torch.cuda.empty_cache()

    def _runner(self, way: str, model: PackedModel, inputs: Inputs) -> Engine:
        if way == "eager":
            return model
        if way.startswith("compiled"):
            return compiled(model, self.device, is_tuned=way.endswith("tuned"))
        assert way == "graph"
        with torch.inference_mode():
            return CapturedEngine(model, inputs, self.device)

    def _answers(self, model: PackedModel, shape: Shape) -> dict[str, Tensor]:
        batch = _parity_batch(shape)
        with torch.inference_mode():
            return _real(model, model(tensors_of(model, batch)), batch)

    def _reference(self, shape: Shape) -> dict[str, Tensor]:
        """The model in FP32, by the plain kernel; made once a shape and kept on the host."""
        if shape.name not in self._expected:
            model = random_model(shape, self.device, torch.float32, kernel="plain", joined=False)
            self._expected[shape.name] = {name: rows.cpu() for name, rows in self._answers(model, shape).items()}
        return self._expected[shape.name]


def _parity_batch(shape: Shape) -> PackedBatch:
    return batch_of([min(length, shape.max_seq_len) for length in _PARITY_LENGTHS], shape.sizes.vocab)


def _real(model: PackedModel, outputs: Mapping[str, Tensor], batch: PackedBatch) -> dict[str, Tensor]:
    """``outputs`` without the rows of filler, copied: an engine may write into them again."""
    counts = {head.output: batch.batch_size if head.pooling else batch.num_tokens for head in model.spec.heads}
    return {name: outputs[name][:count].clone() for name, count in counts.items()}


def measurements(bench: Bench) -> list[Measurement]:
    """All of them, group by group."""

    def way(group: str, shape: str, what: str, how: str, estimate_s: float) -> Measurement:
        return Measurement(f"{shape}, {what}: {how}", estimate_s, partial(bench.way, shape, what, how), group)

    build = Measurement("minilm: bei build --target cuda", 90, partial(bench.build, "minilm"), BUILD)
    found = [
        *bench.ceilings(),
        *bench.kernels(),
        *(way(group, *row) for group, rows in WAYS.items() for row in rows),
        build,
    ]
    order = list(WAYS)
    return sorted(found, key=lambda one: order.index(one.group))


def run(bench: Bench, record: Record, minutes: float, only: str) -> None:
    """Make the measurements that are not finished and fit into ``minutes``. One that fails costs the others nothing."""
    end, sources = time.monotonic() + 60 * minutes, _digest_of_sources()
    for measurement in measurements(bench):
        is_meant = only == measurement.group if only in WAYS else only in measurement.name
        if not is_meant or record.is_finished(measurement.name):
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
    """Identifies the measured code: a copy of the tree on a GPU machine has no history."""
    digest = hashlib.sha256()
    for folder in (ROOT / "build" / "bei_build" / "torch_graph", ROOT / "bei" / "engine" / "cuda"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _short(found: Mapping[str, object]) -> str:
    named = ("error", "skipped", "ms", "tokens_per_s", "tflops", "gb_per_s")
    return ", ".join(f"{name} {found[name]}" for name in named if name in found)


def table(record: Record) -> str:
    """Finished measurements, one line each; shares are of the best BF16 product."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("This measures an NVIDIA GPU, and torch sees none. --dry-run tries the script on the CPU.")
    device = torch.device("cpu" if options.dry_run else "cuda")
    if options.dry_run:
        torch.set_num_threads(1)  # tiny matrices are slower on several
    with tempfile.TemporaryDirectory() as scratch:
        record = Record(options.out or (Path(scratch) / "gpu.json" if options.dry_run else RESULTS), machine_of(device))
        with_packages = options.compile or not options.dry_run
        with closing(Bench(device, is_dry=options.dry_run, with_packages=with_packages)) as bench:
            run(bench, record, options.minutes, options.only)
        print(table(record))


if __name__ == "__main__":
    main()
