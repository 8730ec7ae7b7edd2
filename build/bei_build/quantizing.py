"""How a build finds its quantization: texts, an FP32 engine that shows its layers' inputs, scales, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from bei.artifact import LayerSensitivity, QuantizationRecord
from bei.core import Encoding
from bei.errors import ConfigError
from bei_build.heads import tasks_of
from bei_build.job import Job, Observed, opened_fp32
from bei_build.progress import Progress
from bei_build.quantization.choice import Chosen, Method, choose, worst
from bei_build.quantization.layers import linear_layers
from bei_build.quantization.observation import OUTPUT, observe, observed_layers
from bei_build.quantization.scheme import Format, Quantization
from bei_build.quantization.stored import stored_quantization
from bei_build.quantization.texts import CalibrationTexts, calibration_texts
from bei_build.verification import encode

QUANTIZATION = "quantization.json"  # in the artifact

_METHODS: dict[Format, Method] = {"fp8": "max", "int8": "mse"}


class _LayerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer in ``quantization.json``. Figures as in ``LayerQuantization``; ``error`` as in ``Chosen``."""

    input_amax: float
    smoothing: tuple[float, ...] | None
    output_amax: float | None
    error: float
    is_high: bool


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """``quantization.json``."""

    format: Format
    method: str
    texts: str
    texts_sha256: str
    num_texts: int
    num_tokens: int
    seed: int
    layers: dict[str, _LayerRecord]


@dataclass(frozen=True)
class Calibrated:
    """A quantization, how it was found, and which of its layers are left ``high`` all the same."""

    chosen: Chosen
    method: str
    texts: CalibrationTexts
    num_tokens: int
    seed: int
    most_high: int
    high: frozenset[str] = frozenset()

    @property
    def quantization(self) -> Quantization:
        """Of the layers that are quantized."""
        return self.chosen.quantization.without(self.high)

    def with_more_high(self) -> Calibrated | None:
        """The same with twice as many layers left high, those with the largest errors; None where no more may be."""
        count = min(max(1, 2 * len(self.high)), self.most_high)
        if count <= len(self.high):
            return None
        return replace(self, high=frozenset(worst(self.chosen.errors, self.chosen.quantization.layers, count)))

    @property
    def record(self) -> QuantizationRecord:
        """For the certificate."""
        return QuantizationRecord(
            format=self.chosen.quantization.format,
            method=self.method,
            calibration=f"{len(self.texts.texts)} texts of {self.texts.source}",
            num_texts=len(self.texts.texts),
            num_tokens=self.num_tokens,
            texts_sha256=self.texts.sha256,
            layers=[
                LayerSensitivity(layer=name, error=self.chosen.errors[name], is_high=name in self.high)
                for name in self.chosen.quantization.layers
            ],
        )

    def keep(self, root: Path) -> None:
        """Write ``quantization.json`` into the artifact at ``root``."""
        layers = {
            name: _LayerRecord(
                input_amax=layer.input_amax,
                smoothing=layer.smoothing,
                output_amax=layer.output_amax,
                error=self.chosen.errors[name],
                is_high=name in self.high,
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


def calibrated(job: Job, number_format: Format, progress: Progress) -> Calibrated:
    """Scales for the model's linear layers. Raises ConfigError, VerificationError (memory), and what engines raise."""
    config, checkpoint = job.config, job.checkpoint
    layers = linear_layers(checkpoint.spec)
    if not layers:
        raise ConfigError(
            f"{checkpoint.spec.architecture} has no linear layers to quantize: build with --precision bf16 or fp32."
        )
    texts = calibration_texts(
        config.calibration_data, config.calibration_column, config.calibration_size, config.calibration_seed
    )
    stored = stored_quantization(job.weights, checkpoint.spec) if number_format == "fp8" else None
    if stored is not None:
        layers = tuple(layer for layer in layers if layer.name in stored.layers)
        progress.note(
            "the checkpoint brings scales of inputs, which are taken, and its matrices in FP8, which are rounded once "
            "more, with a scale a row"
        )
    method = config.calibration_method
    chosen_method: Method = _METHODS[number_format] if method == "auto" else method  # type: ignore[assignment]
    groups = observed_layers(layers)
    with progress.step(f"Calibrate ({number_format}, {chosen_method})") as step:
        widths = {group: layer.matrix(job.weights.read).shape[1] for group, layer in groups.items()}
        pairs = "rerank" in tasks_of(checkpoint.spec.heads[0], checkpoint.spec.hidden_size)
        length = min(config.calibration_length, checkpoint.max_seq_len)
        encodings = encode(checkpoint.tokenizer, texts.texts, checkpoint.spec, length, pairs=pairs and length > 8)
        encodings = [encoding for encoding in encodings if encoding.num_tokens]
        given = _given(job, stored, encodings, chosen_method)
        observed = {OUTPUT + group: Observed(layer.name, widths[group]) for group, layer in groups.items()}
        with opened_fp32(job, "The FP32 engine to calibrate with", observed) as (engine, _):
            seen = observe(engine, encodings, widths, config.calibration_seed)
        percentile = config.calibration_percentile
        chosen = choose(layers, seen, job.weights.read, number_format, chosen_method, percentile, given)
        num_tokens = sum(encoding.num_tokens for encoding in encodings)
        step.details.append(
            f"{len(layers)} linear layers, {len(texts.texts)} texts of {texts.source}, {num_tokens:,} tokens"
        )
    how = f"percentile {percentile:g}" if chosen_method == "percentile" else chosen_method
    if stored is not None:
        how = "the checkpoint's own"
    elif given is not None:
        how = f"{how}, by ModelOpt on transformers' model"
    most = config.max_highprec_layers
    return Calibrated(
        chosen,
        how,
        texts,
        num_tokens,
        config.calibration_seed,
        max(1, len(layers) // 4) if most is None else min(most, len(layers)),
    )


def _given(
    job: Job, stored: Quantization | None, encodings: Sequence[Encoding], method: Method
) -> Mapping[str, float] | None:
    """Ranges of inputs that the checkpoint brings, or that ModelOpt measures; None: our own engine's count."""
    if stored is not None:
        return {name: layer.input_amax for name, layer in stored.layers.items()}
    if job.config.calibrate_with != "modelopt":
        return None
    if method == "mse":
        raise ConfigError("calibrate_with modelopt measures max or percentile: choose one with --calibration-method.")
    from bei_build.quantization.modelopt import calibrate_with_modelopt

    return calibrate_with_modelopt(job.checkpoint, job.weights, encodings, method, job.config.calibration_percentile)
