"""Calibration of a build: texts, an FP32 engine that outputs its layers' inputs, scales, and ``quantization.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from bei.artifact.certificate.record import LayerSensitivity, QuantizationRecord
from bei.core import Encoding
from bei.errors import ConfigError
from bei.utils.share_done import Tell
from bei_build.checkpoint.heads import tasks_of
from bei_build.config import BuildConfig
from bei_build.job import Job, open_fp32
from bei_build.onnx_graph.writer import ObservedTensor
from bei_build.progress import Progress
from bei_build.quantization.activation_stats import OUTPUT, PRODUCT, collect_stats, input_groups, largest_products
from bei_build.quantization.calibration_texts import CalibrationTexts, calibration_texts
from bei_build.quantization.checkpoint_scales import stored_ranges, stored_row_scales
from bei_build.quantization.layer_sensitivity import measure_effects
from bei_build.quantization.scales import ChosenScales, KnownScales, choose_scales, worst
from bei_build.reference.held_out import encode
from bei_build.spec.dtypes import FloatArray
from bei_build.spec.linear_layers import LinearLayer, is_projection, linear_layers
from bei_build.spec.quantization import Format, LayerQuantization, Method, Quantization

QUANTIZATION = "quantization.json"  # in the artifact

_METHODS: dict[Format, Method] = {"fp8": "max", "int8": "mse"}


class _LayerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer in ``quantization.json``. Figures as in ``LayerQuantization``; ``error`` as in ``ChosenScales``.

    ``effect``: the change of the outputs from rounding this layer alone (``layer_sensitivity``); None where it was not
    measured.
    """

    input_amax: float
    smoothing: tuple[float, ...] | None
    output_amax: float | None
    per_token: bool
    matrix_bits: int = 8
    least: float | None = None
    error: float
    is_high: bool
    effect: float | None = None


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``quantization.json``."""

    format: Format
    method: str
    texts: str
    texts_sha256: str
    num_texts: int
    num_tokens: int
    seed: int
    layers: dict[str, _LayerRecord]


_record_decoder = msgspec.json.Decoder(_Record)


@dataclass(frozen=True)
class Calibration:
    """A quantization, the way it was found, and its layers that are kept in ``high`` precision all the same.

    ``effects``: the order in which layers are kept high (``with_more_high``); None: not measured yet. Empty: they
    cannot be measured, and the layers' own errors decide.
    """

    chosen: ChosenScales
    method: str
    texts: CalibrationTexts
    num_tokens: int
    seed: int
    most_high: int
    high: frozenset[str] = frozenset()
    effects: Mapping[str, float] | None = None

    @property
    def quantization(self) -> Quantization:
        """The quantization without the layers kept in high precision."""
        return self.chosen.quantization.without(self.high)

    def with_more_high(self, share: float) -> Calibration | None:
        """A copy with more layers kept in high precision, those with the largest effect; None where no more are
        allowed. ``share`` as in ``needed``."""
        count = min(self.needed(share), self.most_high)
        if count <= len(self.high):
            return None
        layers = self.chosen.quantization.layers
        return replace(self, high=frozenset(worst(self.effects or self.chosen.errors, layers, count)))

    def needed(self, share: float) -> int:
        """Number of layers to keep in high precision, so that ``share`` of the present change from rounding remains.

        Effects of layers nearly add up, so they give that number, at least an eighth more than now; without effects it
        is twice the present number.
        """
        layers, count = self.chosen.quantization.layers, len(self.high)
        if not self.effects:
            return min(max(1, 2 * count), len(layers))
        changes = sorted(self.effects.values(), reverse=True)
        allowed, least = share * sum(changes[count:]), count + 1 + count // 8
        return next((more for more in range(least, len(layers)) if sum(changes[more:]) <= allowed), len(layers))

    @property
    def record(self) -> QuantizationRecord:
        """The certificate's record."""
        return QuantizationRecord(
            format=self.chosen.quantization.format,
            method=self.method,
            calibration=f"{len(self.texts.texts)} texts of {self.texts.source}",
            num_texts=len(self.texts.texts),
            num_tokens=self.num_tokens,
            texts_sha256=self.texts.sha256,
            layers=[
                LayerSensitivity(
                    layer=name,
                    error=self.chosen.errors[name],
                    is_high=name in self.high,
                    effect=self.effects[name] if self.effects else None,
                )
                for name in self.chosen.quantization.layers
            ],
        )

    def write(self, root: Path) -> None:
        """Write ``quantization.json`` into the artifact at ``root``."""
        layers = {
            name: _LayerRecord(
                input_amax=layer.input_amax,
                smoothing=layer.smoothing,
                output_amax=layer.output_amax,
                per_token=layer.per_token,
                matrix_bits=layer.matrix_bits,
                least=layer.least,
                error=self.chosen.errors[name],
                is_high=name in self.high,
                effect=self.effects[name] if self.effects else None,
            )
            for name, layer in self.chosen.quantization.layers.items()
        }
        record = _Record(
            format=self.chosen.quantization.format,
            method=self.method,
            texts=self.texts.source,
            texts_sha256=self.texts.sha256,
            num_texts=len(self.texts.texts),
            num_tokens=self.num_tokens,
            seed=self.seed,
            layers=layers,
        )
        (root / QUANTIZATION).write_bytes(msgspec.json.encode(record) + b"\n")


def with_more_high(job: Job, calibration: Calibration, share: float, progress: Progress) -> Calibration | None:
    """``calibration`` with more layers kept in high precision by their effects; None where no more are allowed, with a
    note on the number that would be needed. ``share`` as in ``Calibration.needed``. Raises EngineError."""
    measured = _with_effects(job, calibration, progress)
    more = measured.with_more_high(share)
    needed, most = measured.needed(share), measured.most_high
    if more is None and measured.effects and needed > most:
        progress.note(
            f"by their effects about {needed} of {len(measured.effects)} linear layers would have to stay "
            f"unquantized; {most} may (--max-highprec-layers)"
        )
    return more


def reaching(job: Job, calibration: Calibration, share: float, progress: Progress) -> Calibration | None:
    """As ``with_more_high``, but None where those that may be kept high would not suffice, or effects were not
    measured. Raises EngineError."""
    measured = _with_effects(job, calibration, progress)
    is_enough = bool(measured.effects) and measured.needed(share) <= measured.most_high
    return measured.with_more_high(share) if is_enough else None


def _with_effects(job: Job, calibration: Calibration, progress: Progress) -> Calibration:
    """``calibration`` with the change of the outputs from rounding each layer, if layers may be kept in high precision.
    Measured once.

    Where that cannot be measured, layers are chosen by their own errors, and a note says so. Raises EngineError.
    """
    if calibration.effects is not None or not calibration.most_high:
        return calibration
    with progress.step("Measure layers") as step:
        quantization, encodings = calibration.chosen.quantization, _encodings(job, calibration.texts)
        spec, read, longest = job.checkpoint.spec, job.weights.read, job.limits.max_seq_len
        found = measure_effects(spec, read, quantization, encodings, longest, job.root, step.tell)
        step.details.append(f"what rounding each of {len(quantization.layers)} changes of the outputs")
    if found is None:
        progress.note(
            "the effects of layers on the outputs were not measured: their own errors choose which stay unquantized"
        )
    return replace(calibration, effects=found or {})


def read_quantization(root: Path) -> Quantization:
    """The quantized layers in ``quantization.json`` of the artifact at ``root``.

    Matrices have scales by their largest values; row scales of an FP8 checkpoint are not stored in it. Raises OSError
    and msgspec.DecodeError.
    """
    record = _record_decoder.decode((root / QUANTIZATION).read_bytes())
    layers = {
        name: LayerQuantization(
            layer.input_amax,
            layer.smoothing,
            layer.output_amax,
            layer.per_token,
            layer.matrix_bits,
            least=layer.least,
        )
        for name, layer in record.layers.items()
        if not layer.is_high
    }
    return Quantization(record.format, layers)


@dataclass(frozen=True)
class _Task:
    """The ``layers`` to quantize. ``row_scales`` of matrices and ``ranges`` of inputs come from the checkpoint."""

    layers: Sequence[LinearLayer]
    number_format: Format
    method: Method
    row_scales: Mapping[str, Mapping[str, FloatArray]]
    ranges: Mapping[str, float] | None


def calibrate(job: Job, number_format: Format, progress: Progress) -> Calibration:
    """Scales for the model's linear layers. Raises ConfigError, VerificationError (memory), and the errors of
    engines."""
    config, task = job.config, _task(job, number_format, progress)
    texts = calibration_texts(
        config.calibration_data, config.calibration_column, config.calibration_size, config.calibration_seed
    )
    with progress.step(f"Calibrate ({number_format}, {task.method})") as step:
        encodings = _encodings(job, texts)
        num_tokens = sum(encoding.num_tokens for encoding in encodings)
        chosen, how = _chosen(job, task, encodings, step.tell)
        step.details.append(
            f"{len(task.layers)} linear layers, {len(texts.texts)} texts of {texts.source}, {num_tokens:,} tokens"
        )
    most = config.max_highprec_layers
    most_high = max(1, len(task.layers) // 4) if most is None else min(most, len(task.layers))
    return Calibration(chosen, how, texts, num_tokens, config.calibration_seed, most_high)


def _task(job: Job, number_format: Format, progress: Progress) -> _Task:
    spec, asked = job.checkpoint.spec, job.config.calibration_method
    method: Method = _METHODS[number_format] if asked == "auto" else asked  # type: ignore[assignment]
    layers = linear_layers(spec)
    row_scales = stored_row_scales(job.weights, spec) if number_format == "fp8" else {}
    ranges = stored_ranges(job.weights, spec) if row_scales else None
    if ranges is not None:
        _check_nothing_asked(job.config)
    if row_scales:
        there = row_scales.keys() if ranges is None else row_scales.keys() & ranges.keys()
        layers = tuple(layer for layer in layers if layer.name in there)
        what = "matrices in FP8" if ranges is None else "matrices in FP8 and scales of inputs"
        progress.note(f"the checkpoint brings {what}, which are taken as they are")
    if not layers:
        raise ConfigError(f"{spec.architecture} has no linear layers to quantize: build with --precision bf16 or fp32.")
    return _Task(layers, number_format, method, row_scales, ranges)


def _check_nothing_asked(config: BuildConfig) -> None:
    """Raise ConfigError for settings that choose ranges of inputs, where the checkpoint brings its own."""
    for name, usual in (("calibration_method", "auto"), ("calibrate_with", "engine")):
        if getattr(config, name) != usual:
            raise ConfigError(
                f"{name} chooses ranges of inputs, and the checkpoint brings scales of its own, which are taken: leave "
                "it out."
            )


def _encodings(job: Job, texts: CalibrationTexts) -> list[Encoding]:
    checkpoint = job.checkpoint
    pairs = "rerank" in tasks_of(checkpoint.spec.heads[0], checkpoint.spec.hidden_size)
    length = min(job.config.calibration_length, checkpoint.max_seq_len)
    encodings = encode(checkpoint.tokenizer, texts.texts, checkpoint.spec, length, pairs=pairs and length > 8)
    found = [encoding for encoding in encodings if encoding.num_tokens]
    if checkpoint.adapters is None:
        return found
    count = len(checkpoint.adapters.names) + 1  # each adapter's inputs are seen, and those of the base model
    return [encoding._replace(adapter=index % count) for index, encoding in enumerate(found)]


def _chosen(job: Job, task: _Task, encodings: Sequence[Encoding], tell: Tell) -> tuple[ChosenScales, str]:
    """Scales, and the name of the method."""
    config, read = job.config, job.weights.read
    groups = input_groups(task.layers)
    widths = {group: layer.matrix(read).shape[1] for group, layer in groups.items()}
    rounded_too = [layer for layer in task.layers if config.fp8_outputs and is_projection(layer)]
    by_modelopt = None if task.ranges else _by_modelopt(job, encodings, task.method)
    outputs = {OUTPUT + group: ObservedTensor(layer.name, widths[group]) for group, layer in groups.items()}
    for layer in rounded_too:
        outputs[PRODUCT + layer.name] = ObservedTensor(layer.name, len(layer.matrix(read)), is_product=True)
    with open_fp32(job, "The FP32 engine to calibrate with", outputs) as (engine, _):
        seen = collect_stats(engine, encodings, widths, config.calibration_seed, tell)
        products = largest_products(engine, encodings, [layer.name for layer in rounded_too])
    percentile, given = (
        config.calibration_percentile,
        KnownScales(task.ranges or by_modelopt, task.row_scales, products),
    )
    bits = job.compiler.matrix_bits
    chosen = choose_scales(task.layers, seen, read, task.number_format, task.method, percentile, given, bits)
    if task.ranges:
        return chosen, "the checkpoint's own"
    how = f"percentile {percentile:g}" if task.method == "percentile" else task.method
    return chosen, f"{how}, by ModelOpt on transformers' model" if by_modelopt else how


def _by_modelopt(job: Job, encodings: Sequence[Encoding], method: Method) -> Mapping[str, float] | None:
    """Ranges of inputs measured by ModelOpt; None where another method is used."""
    if job.config.calibrate_with != "modelopt":
        return None
    if method == "mse":
        raise ConfigError("calibrate_with modelopt measures max or percentile: choose one with --calibration-method.")
    from bei_build.quantization.modelopt import calibrate_with_modelopt

    if job.checkpoint.adapters is not None:
        raise ConfigError("calibrate_with: nvidia-modelopt would measure without the adapters. Leave it out.")
    return calibrate_with_modelopt(job.checkpoint, job.weights, encodings, method, job.config.calibration_percentile)
