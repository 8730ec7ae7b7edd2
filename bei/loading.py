"""From an artifact on disk to a service that answers: engine, costs, engine port."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from bei import artifact as artifacts
from bei.artifact import Artifact
from bei.batching import BatchManager, SchedulingRules
from bei.batching.gate import DeviceGate
from bei.config import ServeConfig
from bei.core import Engine
from bei.costs import CostModel
from bei.engine import given_options, load_engine
from bei.metrics import Metrics, ModelMetrics
from bei.opening import opened
from bei.port import EnginePort, OnAnswers
from bei.service import InferenceService, OpenPort
from bei.tokenization import TextEncoder
from bei.tuning import costs_for, engine_for
from bei.verifying import verified


def local_port(
    engine: Engine,
    costs: CostModel,
    config: ServeConfig,
    gate: DeviceGate | None = None,
    reload: Callable[[], Engine] | None = None,
) -> OpenPort:
    """A port to ``engine`` in this process."""
    rules = SchedulingRules(
        step_cap_s=config.step_cap_ms / 1000,
        bulk_share=config.bulk_share,
        hang_timeout_s=config.hang_timeout,
        cache_bytes=config.cache_megabytes * 1_000_000,
    )

    def open_port(on_answers: OnAnswers, metrics: ModelMetrics) -> EnginePort:
        return BatchManager(engine, on_answers, costs, metrics, rules=rules, gate=gate, reload=reload)

    return open_port


def load_service(source: Path | Artifact, config: ServeConfig, metrics: Metrics, gate: DeviceGate) -> InferenceService:
    """Open the artifact at ``source``, load and warm its engine, start the service. Needs a running event loop.

    ``gate`` is shared by all models of the device. Raises ArtifactError and its subclasses, ConfigError,
    MissingDependencyError, EngineError, VerificationError.
    """
    artifact = opened(source, config)
    manifest = artifact.manifest
    template = manifest.rerank_template
    encoder = TextEncoder(
        artifact.path / artifacts.TOKENIZER,
        manifest.max_seq_len,
        auto_truncate=config.auto_truncate,
        frame=(template.prefix, template.suffix) if template else ("", ""),
    )

    def loaded(num_streams: int | None) -> Engine:
        return load_engine(artifact.engine_dir, manifest, given_options(config.engine_threads, num_streams))

    engine = engine_for(artifact, config, loaded)
    engine.warmup()
    artifact = verified(artifact, engine)
    costs = costs_for(artifact, engine, config)
    reload = partial(_warm, loaded, engine.info.num_streams) if engine.info.is_replaceable else None
    return InferenceService(artifact, encoder, config, metrics, local_port(engine, costs, config, gate, reload), costs)


def _warm(load: Callable[[int], Engine], num_streams: int) -> Engine:
    """Another engine. Refers to none that there is: that one's memory is freed as soon as it can be."""
    engine = load(num_streams)
    engine.warmup()
    return engine
