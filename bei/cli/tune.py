"""``bei tune``: measures step costs of an artifact, and prints them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bei.artifact.manifest import Artifact
from bei.cli.console_text import console_text
from bei.config.settings import ServeConfig
from bei.core import Engine, Limits
from bei.scheduler.cost_measurement import StreamChoice, cache_path, costs_for, measure_streams
from bei.scheduler.cost_model import CostModel
from bei.scheduler.lane_shares import capped_step_s
from bei.service.trusted_artifact import opened
from bei.verification.verify import verified

_LENGTHS = (16, 32, 64, 128, 256, 512, 2048, 8192)


def tune(source: Path | Artifact, config: ServeConfig) -> str:
    """Measure the artifact at ``source`` anew, store the costs for ``bei serve``, and return a table of them.

    Raises ArtifactError and its subclasses, ConfigError, MissingDependencyError, EngineError.
    """
    from rich.console import Console
    from rich.progress import Progress

    config = dataclasses.replace(config, tune="force")
    artifact = opened(source, config)

    def make_engine(num_streams: int | None) -> Engine:
        return _loaded(artifact, config, num_streams)

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"streams of {artifact.manifest.name}", total=None)
        engine = make_engine(config.engine_streams or None)
        choice = None
        if engine.info.target == "cpu":
            engine.close()
            choice = measure_streams(artifact, engine.info, config, make_engine)
            # The engine that ``bei serve`` will load, since costs depend on the number of streams. The table tells of
            # faster ones.
            engine = make_engine(choice.num_streams if config.engine_streams == 0 else config.engine_streams)
        try:
            engine.warmup()
            artifact = verified(artifact, engine)  # as a server does: costs are stored by the artifact's digest
            progress.update(task, description=f"steps of {artifact.manifest.name}")
            costs = costs_for(
                artifact, engine, config, lambda done, total: progress.update(task, completed=done, total=total)
            )
        finally:
            engine.close()
    return table(artifact, engine, config, costs, choice)


def _loaded(artifact: Artifact, config: ServeConfig, num_streams: int | None) -> Engine:
    from bei.engine.load import given_options, load_engine

    return load_engine(artifact.engine_files, artifact.manifest, given_options(config.engine_options, num_streams))


def table(
    artifact: Artifact, engine: Engine, config: ServeConfig, costs: CostModel, choice: StreamChoice | None
) -> str:
    """The measured costs as text."""
    from rich import box
    from rich.table import Table

    info = engine.info
    shapes = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("tokens of a text", "alone, ms", "best step, texts", "tokens", "ms", "tokens/s"):
        shapes.add_column(title, justify="right")
    for length in (length for length in _LENGTHS if length <= info.limits.max_seq_len):
        tokens = costs.efficient_tokens(length)
        count = min(info.limits.max_batch_size, -(-tokens // length))
        seconds = costs.seconds(tokens, count, length)
        row = (length, costs.seconds(length, 1, length) * 1e3, count, tokens, seconds * 1e3)
        rate = tokens * info.num_streams / seconds
        shapes.add_row(
            *(f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" for value in row), f"{rate:,.0f}"
        )
    path = cache_path(artifact, engine, config)
    return console_text(
        f"{artifact.manifest.name}, {info.precision}, {info.device}",
        _streams_line(info.num_streams, choice),
        _sizes_line(costs, info.limits),
        shapes,
        f"kept in {path}" if path.is_file() else "not kept: the cache cannot be written",
    )


def _sizes_line(costs: CostModel, limits: Limits) -> str:
    tiles = f"filled up to whole tiles of {costs.tile} tokens" if costs.has_tiles else "of any number of tokens"
    return f"steps: {tiles}; bulk work beside interactive work: up to {1000 * capped_step_s(costs, limits):.0f} ms"


def _streams_line(used: int, choice: StreamChoice | None) -> str:
    if choice is None:
        return f"streams: {used}"
    rates = ", ".join(f"{count}: {rate:,.0f} tokens/s" for count, rate in choice.tokens_per_s.items())
    advice = (
        "" if used == choice.num_streams else f"; --engine-streams 0 or {choice.num_streams} would be faster in bulk"
    )
    return f"streams: {used} ({rates}){advice}"
