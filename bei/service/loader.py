"""From an artifact on disk to a service that answers: engine, costs, engine port."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from bei.artifact import store
from bei.artifact.compatibility import check_room, check_swap
from bei.artifact.manifest import IMAGE_ENGINE_DIR, LABEL_ENGINE_DIR, TOKEN_WEIGHTS, TOKENIZER, Artifact, Manifest
from bei.artifact.store import SHOWN_DIGITS
from bei.artifact.token_weights import read_token_weights
from bei.config.settings import ServeConfig
from bei.core import Engine, Float32Array
from bei.engine.load import given_options, load_engine
from bei.errors import ConfigError
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import EnginePort, OnAnswers
from bei.scheduler.batch_manager import BatchManager
from bei.scheduler.cost_measurement import costs_for, costs_while_serving, engine_for
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate
from bei.scheduler.scheduler import SchedulingRules
from bei.scheduler.tower_port import TowerPort
from bei.service.build_settings import build_settings, check_built
from bei.service.decoding_turns import DecodingTurns
from bei.service.image_side import ImageSide, check_reads_images, image_side_of
from bei.service.label_side import CACHE_MEGABYTES, LabelSide, label_encoder_of
from bei.service.service import InferenceService, OpenPort
from bei.service.trusted_artifact import opened
from bei.tokenizer.encoder import TextEncoder
from bei.tokenizer.label_encoder import LabelEncoder
from bei.tokenizer.special_tokens import TextFrame
from bei.verification.verify import verified

log = logging.getLogger(__name__)


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


def config_of_tower(config: ServeConfig, tower: Artifact) -> ServeConfig:
    """For a port to one engine of a model: where it has two towers, each has a cache of its own; that of labels always
    has one, so that a request's labels are computed for the first request alone. States that a decoder reads are not
    kept: its answers are."""
    if tower.manifest.second_tower is None:
        return config
    if (images := tower.manifest.image_tower) is not None and images.sequence:
        return replace(config, cache_megabytes=0) if tower.folder == IMAGE_ENGINE_DIR else config
    megabytes = config.cache_megabytes // 2
    return replace(
        config, cache_megabytes=max(megabytes, CACHE_MEGABYTES) if tower.folder == LABEL_ENGINE_DIR else megabytes
    )


def tower_port(open_texts: OpenPort, open_second: OpenPort, second: ImageSide | LabelSide) -> OpenPort:
    """A port to the engines of both towers of a model, of which ``second`` reads images or labels."""
    reading = second.reading if isinstance(second, ImageSide) else None

    def open_port(on_answers: OnAnswers, metrics: ModelMetrics) -> EnginePort:
        # The metrics' limits of a step are those of the port that is opened last: of texts.
        return TowerPort(
            lambda on_texts: open_texts(on_texts, metrics),
            lambda on_second: open_second(on_second, metrics),
            on_answers,
            reading,
            metrics,
        )

    return open_port


class WarmEngine(NamedTuple):
    """An engine that is ready to run, of a verified artifact, whose certificate it may have completed."""

    artifact: Artifact
    engine: Engine
    costs: CostModel


class LoadedTower(NamedTuple):
    """The second tower of a model, or its only one that reads no texts: how its inputs are read, and its engine, warm.
    ``reload`` as in ``Loaded``."""

    side: ImageSide | LabelSide
    engine: Engine
    reload: Callable[[], Engine] | None

    def side_at(self, gate: DeviceGate) -> ImageSide | LabelSide:
        """``side``; where the engine has the host's cores, threads that decode images take turns with its steps."""
        if isinstance(self.side, ImageSide) and self.engine.info.uses_cores:
            return replace(self.side, turns=DecodingTurns(gate, self.side.costs))
        return self.side


class Loaded(NamedTuple):
    """A verified artifact and its engine, warm: the parts of a service. ``reload`` makes another engine; None: an
    engine that hangs is not replaced. ``encoder``: None where the model reads images only, ``second``: where texts
    only.
    """

    artifact: Artifact
    encoder: TextEncoder | None
    engine: Engine
    costs: CostModel
    reload: Callable[[], Engine] | None
    second: LoadedTower | None = None

    @classmethod
    def of(
        cls, warm: WarmEngine, encoder: TextEncoder | None, config: ServeConfig, second: LoadedTower | None = None
    ) -> Loaded:
        """With ``encoder`` of the same artifact, whose files are held for another engine alone."""
        return cls(warm.artifact.without_files(), encoder, warm.engine, warm.costs, _reload(warm, config), second)

    def service(self, config: ServeConfig, metrics: Metrics, gate: DeviceGate) -> InferenceService:
        """Start it. ``gate`` is shared by all models of the device. Needs a running event loop."""
        port = local_port(self.engine, self.costs, config_of_tower(config, self.artifact), gate, self.reload)
        second, side = self.second, None if self.second is None else self.second.side_at(gate)
        if second is not None and second.engine is not self.engine:
            own = config_of_tower(config, self.artifact.of_second)
            of_second = local_port(second.engine, second.side.costs, own, gate, second.reload)
            port = tower_port(port, of_second, second.side)
        return InferenceService(self.artifact, self.encoder, config, metrics, port, self.costs, second=side)


class Standing(NamedTuple):
    """The facts of a served model that its successor takes over without measuring again: the folder that SIGHUP reads,
    the target, the numbers of streams chosen at start, the step costs. ``costs`` None: assumed."""

    path: Path
    target: str
    num_streams: int
    costs: CostModel | None
    second_streams: int = 0
    second_costs: CostModel | None = None

    @classmethod
    def of(cls, source: Path | Artifact, loaded: Loaded) -> Standing:
        """After the artifact at ``source`` was loaded."""
        path = source if isinstance(source, Path) else source.path
        info, second = loaded.engine.info, loaded.second
        found = cls(path, info.target, info.num_streams, loaded.costs)
        if second is None:
            return found
        return found._replace(second_streams=second.engine.info.num_streams, second_costs=second.side.costs)

    @property
    def of_second(self) -> Standing:
        """Of the second tower, by itself; without one, its engine gets as many streams as that of texts."""
        return self._replace(costs=self.second_costs, num_streams=self.second_streams or self.num_streams)


def load_service(source: Path | Artifact, config: ServeConfig, metrics: Metrics, gate: DeviceGate) -> InferenceService:
    """``load_model`` and its service. Raises what it raises."""
    return load_model(source, config).service(config, metrics, gate)


def load_model(source: Path | Artifact, config: ServeConfig) -> Loaded:
    """Open the artifact at ``source``, load and warm its engine, and know what its steps cost.

    Raises ArtifactError and its subclasses, ConfigError, MissingDependencyError, EngineError, VerificationError.
    """
    artifact = verified_at(source, config)
    check_reads_images(artifact.manifest)
    encoder = encoder_of(artifact, config)
    warm = warm_first(artifact, config)
    return _loaded(warm, encoder, config, partial(warm_first, config=config))


def load_next(standing: Standing, served: InferenceService, config: ServeConfig) -> Loaded | None:
    """Load what lies where the artifact of ``served`` lay, if it may take its place. None: it is the same artifact.

    Blocks: not for the event loop. Everything is checked as at start but the canary, which needs a service. Raises
    what ``load_model`` raises, and SwapRefusedError.
    """
    artifact = next_artifact(standing.path, served.manifest, config)
    if artifact is None:
        return None
    check_reads_images(artifact.manifest)
    warm = warm_next(artifact, standing, config)
    warm_second = partial(warm_next, standing=standing.of_second, config=config)
    return _loaded(warm, next_encoder(artifact, served.text_encoder), config, warm_second)


# The parts of it: of one process, or of several.


def manifest_of(source: Path | Artifact) -> Manifest:
    """The manifest of the model at ``source``; files are not hashed. Raises what ``load_manifest`` does."""
    return source.manifest if isinstance(source, Artifact) else store.load_manifest(source.resolve())


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError where two models have the same name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"Two models are called {name!r}: build one of them with another --name.")
        seen.add(name)


def verified_at(source: Path | Artifact, config: ServeConfig) -> Artifact:
    """The artifact at ``source``, verified as at start. Raises what ``bei.service.trusted_artifact.opened`` does."""
    # A link may lead elsewhere while it is read.
    return opened(source.resolve() if isinstance(source, Path) else source, config)


def next_artifact(path: Path, served: Manifest, config: ServeConfig, num_engines: int = 1) -> Artifact | None:
    """The artifact at ``path``, verified, if it may replace ``served``; None: it is the same.

    ``num_engines``: how many engines will be loaded. Raises what ``verified_at`` and ``check_built`` do,
    and SwapRefusedError.
    """
    path = path.resolve()
    if store.load_manifest(path).digest == served.digest:
        return None
    artifact = opened(path, config)
    check_built(artifact.manifest, build_settings(config))
    check_swap(served, artifact.manifest, vectors_may_change=config.swap_vectors)
    check_room(artifact, num_engines)
    log.info("%s: loading the artifact %s", served.name, artifact.manifest.digest[:SHOWN_DIGITS])
    return artifact


def encoder_of(artifact: Artifact, config: ServeConfig) -> TextEncoder | None:
    """The tokenizer of ``artifact``, and its table of weights; None where it reads images only. Raises
    ArtifactError."""
    tokenization = artifact.manifest.tokenization
    if tokenization is None:
        return None
    encoder = TextEncoder(
        artifact.file(TOKENIZER),
        artifact.manifest.max_seq_len,
        auto_truncate=config.auto_truncate,
        frame=_frame_of(artifact),
        truncation_side=tokenization.truncation_side,
        split_special_tokens=tokenization.splits_special_tokens,
        vocab_size=artifact.manifest.spec.vocab_size,
        filling_id=tokenization.filled_with,
    )
    refused = tokenization.refused_text or ()
    encoder.refused_texts = (refused,) if isinstance(refused, str) else (*refused,)
    encoder.chars_per_token = tokenization.chars_per_token or None
    artifact.check_files()
    return encoder.with_weights(_token_weights_of(artifact))


def next_encoder(artifact: Artifact, served: TextEncoder | None) -> TextEncoder | None:
    """The tokenizer of ``artifact``, which takes the place of the one of ``served``.

    It is the same file: reading a large one would hold the interpreter's lock for a second. Raises ArtifactError.
    """
    if served is None:
        return None
    encoder = served.fitted(artifact.manifest.max_seq_len, _frame_of(artifact))
    return encoder.with_weights(_token_weights_of(artifact))


def warm_first(artifact: Artifact, config: ServeConfig) -> WarmEngine:
    """The engine of a server that starts: as many streams and costs as ``config`` says. Raises what ``load_model``
    raises."""
    engine = engine_for(artifact, config, _opener(artifact, config))
    return _warmed(artifact, engine, lambda artifact: costs_for(artifact, engine, config))


def warm_next(artifact: Artifact, standing: Standing, config: ServeConfig) -> WarmEngine:
    """The engine that takes the place of the one of ``standing``. Raises what ``load_model`` raises."""
    streams = config.engine_streams
    if streams == 0 and artifact.manifest.target == standing.target:
        streams = standing.num_streams  # chosen when the server started; measuring would disturb requests
    engine = _opener(artifact, config)(streams or None)
    former = standing.costs or CostModel.assumed(engine.info.limits)  # the former one may have had no such tower
    return _warmed(artifact, engine, lambda artifact: costs_while_serving(artifact, engine, config, former))


def _loaded(
    warm: WarmEngine,
    encoder: TextEncoder | None,
    config: ServeConfig,
    warm_second: Callable[[Artifact], WarmEngine],
) -> Loaded:
    """The parts of a service, with the second tower if there is one. Where that one fails, both engines are closed."""
    manifest = warm.artifact.manifest
    if not manifest.reads_texts:
        side = image_side_of(warm.artifact, config, warm.costs)
        return Loaded.of(warm, encoder, config, LoadedTower(side, warm.engine, None))
    if manifest.second_tower is None:
        return Loaded.of(warm, encoder, config)
    try:
        labels = label_encoder_of(warm.artifact)
        found = warm_second(warm.artifact.of_second)
    except BaseException:
        warm.engine.close()
        raise
    own = side_of_second(warm.artifact, labels, config, found.costs, warm.costs, encoder)
    return Loaded.of(warm, encoder, config, LoadedTower(own, found.engine, _reload(found, config)))


def side_of_second(
    artifact: Artifact,
    labels: LabelEncoder | None,
    config: ServeConfig,
    costs: CostModel,
    text_costs: CostModel,
    texts: TextEncoder | None,
) -> ImageSide | LabelSide:
    """What reads the inputs of the second tower, whose steps cost ``costs``, and those of the engine of ``texts``
    ``text_costs``. ``labels``: its encoder, if it is one of labels."""
    return image_side_of(artifact, config, costs, text_costs, texts) if labels is None else LabelSide(labels, costs)


def _reload(warm: WarmEngine, config: ServeConfig) -> Callable[[], Engine] | None:
    """Makes another engine in the place of one that hangs; None: it is not replaced."""
    if not warm.engine.info.is_replaceable:
        return None
    return partial(warm_again, warm.artifact, config, warm.engine.info.num_streams)


def warm_again(artifact: Artifact, config: ServeConfig, num_streams: int | None) -> Engine:
    """Another engine of an artifact of which one was loaded before. Refers to none that there is: that one's memory is
    freed as soon as it can be. Raises ArtifactError, EngineError."""
    engine = _opener(artifact, config)(num_streams)
    try:
        engine.warmup()
    except BaseException:
        engine.close()
        raise
    return engine


def _warmed(artifact: Artifact, engine: Engine, costs_of: Callable[[Artifact], CostModel]) -> WarmEngine:
    """Warm the engine and complete a pending certificate; where that fails the engine is closed."""
    try:
        engine.warmup()
        artifact = verified(artifact, engine)
        _say_what_is_unshared(artifact.manifest, engine)
        return WarmEngine(artifact, engine, costs_of(artifact))
    except BaseException:
        engine.close()
        raise


def _say_what_is_unshared(manifest: Manifest, engine: Engine) -> None:
    """Of models that could compute common beginnings of texts once, where their engine does not."""
    if manifest.spec.attention == "causal" and (why := engine.info.unshared):
        log.info("%s: what texts begin with in common is computed for each of them: %s", manifest.name, why)


def _opener(artifact: Artifact, config: ServeConfig) -> Callable[[int | None], Engine]:
    """Makes engines of ``artifact`` with so many streams. Refers to none of them."""

    def make(num_streams: int | None) -> Engine:
        options = given_options(config.engine_options, num_streams)
        engine = load_engine(artifact.engine_files, artifact.manifest, options)
        try:
            artifact.check_files()
        except BaseException:
            engine.close()
            raise
        return engine

    return make


def _token_weights_of(artifact: Artifact) -> Float32Array | None:
    if not any(role.table for role in artifact.manifest.roles.values()):
        return None
    return read_token_weights(artifact.file(TOKEN_WEIGHTS), artifact.manifest.spec.vocab_size)


def _frame_of(artifact: Artifact) -> TextFrame:
    pairs = artifact.manifest.rerank_template
    template = pairs or artifact.manifest.classify_template
    last = () if pairs is None or isinstance(pairs.last_id, msgspec.UnsetType) else (pairs.last_id,)
    return TextFrame(template.prefix, template.suffix, last) if template else TextFrame()
