"""From an artifact on disk to a service that answers: engine, costs, engine port."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
from bei.swap_checks import check_in_place, check_room, check_swap
from bei.tokenization import TextEncoder
from bei.tuning import costs_for, costs_while_serving, engine_for
from bei.verifying import verified

log = logging.getLogger(__name__)

# Of a digest, in the log.
SHOWN_DIGITS = 12


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


class Loaded(NamedTuple):
    """What a service is made of: a verified artifact and its engine, warm. ``reload`` makes another engine; None: where
    it hangs there is no other.
    """

    artifact: Artifact
    encoder: TextEncoder
    engine: Engine
    costs: CostModel
    reload: Callable[[], Engine] | None

    def service(self, config: ServeConfig, metrics: Metrics, gate: DeviceGate) -> InferenceService:
        """Start it. ``gate`` is shared by all models of the device. Needs a running event loop."""
        port = local_port(self.engine, self.costs, config, gate, self.reload)
        return InferenceService(self.artifact, self.encoder, config, metrics, port, self.costs)


class Standing(NamedTuple):
    """What loading the next artifact of a served model goes by: where it lies, and what is known of the engine."""

    path: Path
    target: str
    num_streams: int
    costs: CostModel

    @classmethod
    def of(cls, source: Path | Artifact, loaded: Loaded) -> Standing:
        """After the artifact at ``source`` was loaded."""
        path = source if isinstance(source, Path) else source.path
        return cls(path, loaded.engine.info.target, loaded.engine.info.num_streams, loaded.costs)


def load_service(source: Path | Artifact, config: ServeConfig, metrics: Metrics, gate: DeviceGate) -> InferenceService:
    """``load_model`` and its service. Raises what it raises."""
    return load_model(source, config).service(config, metrics, gate)


def load_model(source: Path | Artifact, config: ServeConfig) -> Loaded:
    """Open the artifact at ``source``, load and warm its engine, and know what its steps cost.

    Raises ArtifactError and its subclasses, ConfigError, MissingDependencyError, EngineError, VerificationError.
    """
    # A link may lead elsewhere while it is read.
    artifact = opened(source.resolve() if isinstance(source, Path) else source, config)
    encoder = TextEncoder(
        artifact.path / artifacts.TOKENIZER,
        artifact.manifest.max_seq_len,
        auto_truncate=config.auto_truncate,
        frame=_frame_of(artifact),
    )
    engine = engine_for(artifact, config, _opener(artifact, config))
    return _warmed(artifact, encoder, engine, config, lambda artifact: costs_for(artifact, engine, config))


def load_next(standing: Standing, served: InferenceService, config: ServeConfig) -> Loaded | None:
    """Load what lies where the artifact of ``served`` lay, if it may take its place. None: it is the same artifact.

    Blocks: not for the event loop. Everything is checked as at start but the canary, which needs a service. Raises
    what ``load_model`` raises, and SwapRefusedError.
    """
    path = standing.path.resolve()
    if artifacts.load_manifest(path).digest == served.manifest.digest:
        return None
    artifact = opened(path, config)
    check_swap(served.manifest, artifact.manifest, vectors_may_change=config.swap_vectors)
    check_room(artifact)
    log.info("%s: loading the artifact %s", served.name, artifact.manifest.digest[:SHOWN_DIGITS])
    streams = config.engine_streams
    if streams == 0 and artifact.manifest.target == standing.target:
        streams = standing.num_streams  # chosen when the server started; measuring would disturb requests
    engine = _opener(artifact, config)(streams or None)
    # The tokenizer is the same file: reading a large one would hold the interpreter's lock for a second.
    encoder = served.encoder.fitted(artifact.manifest.max_seq_len, _frame_of(artifact))
    return _warmed(
        artifact,
        encoder,
        engine,
        config,
        lambda artifact: costs_while_serving(artifact, engine, config, standing.costs),
    )


def _warmed(
    artifact: Artifact,
    encoder: TextEncoder,
    engine: Engine,
    config: ServeConfig,
    costs_of: Callable[[Artifact], CostModel],
) -> Loaded:
    """Warm the engine and complete a pending certificate; where that fails the engine is closed."""
    try:
        engine.warmup()
        artifact = verified(artifact, engine)
        reload = None
        if engine.info.is_replaceable:
            reload = partial(_warm, _opener(artifact, config), engine.info.num_streams)
        return Loaded(artifact, encoder, engine, costs_of(artifact), reload)
    except BaseException:
        engine.close()
        raise


def _opener(artifact: Artifact, config: ServeConfig) -> Callable[[int | None], Engine]:
    """Makes engines of ``artifact`` with so many streams. Refers to none of them."""

    def make(num_streams: int | None) -> Engine:
        options = given_options(config.engine_threads, num_streams)
        engine = load_engine(artifact.engine_dir, artifact.manifest, options)
        try:
            check_in_place(artifact)
        except BaseException:
            engine.close()
            raise
        return engine

    return make


def _frame_of(artifact: Artifact) -> tuple[str, str]:
    template = artifact.manifest.rerank_template
    return (template.prefix, template.suffix) if template else ("", "")


def _warm(load: Callable[[int], Engine], num_streams: int) -> Engine:
    """Another engine. Refers to none that there is: that one's memory is freed as soon as it can be."""
    engine = load(num_streams)
    engine.warmup()
    return engine
