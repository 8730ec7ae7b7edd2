"""Refusal of build settings without meaning for the model at hand: it would otherwise answer as if they were not
set."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bei.errors import ConfigError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.heads import tasks_of
from bei_build.config import BuildConfig
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.precision import PRECISIONS

# Tasks that can have a prompt.
_PROMPTED = frozenset(("embedding", "sparse", "token_weights", "token_embedding"))
# What a request brings beside its texts, by the output that scores it.
_OF_REQUESTS: Mapping[str, str] = {"label_logits": "labels", "option_logits": "options"}


def check_applicable(config: BuildConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError that names the first such setting."""
    spec = checkpoint.spec
    outputs = {head.output for head in spec.heads}
    what = f"{spec.architecture}, as it is built, has none"
    for name in ("normalize", "include_prompt"):
        if getattr(config, name) is not None and "embedding" not in outputs:
            raise ConfigError(f"{name} works with dense embeddings only, and {what}: leave it out.")
    if config.prompts and not outputs & _PROMPTED:
        raise ConfigError(f"prompts work with embeddings only, and {what}: leave them out.")
    tasks = {task for head in spec.heads for task in tasks_of(head, spec.hidden_size)}
    if "extract" in tasks:
        if config.target != "cpu":
            raise ConfigError(f"{spec.architecture} finds spans, which engines for cpu compute: use --target cpu.")
        layout = checkpoint.extraction
        if config.keep_reference and layout is not None and layout.label_width is not msgspec.UNSET:
            raise ConfigError(
                f"{spec.architecture} reads vectors of labels, which are not kept beside a reference's answers: leave "
                "keep_reference out."
            )
        if PRECISIONS.get(config.precision, PRECISIONS["fp32"]).quantized is not None:
            raise ConfigError(
                f"{spec.architecture} finds spans, and no calibration texts have labels: use --precision bf16 or fp32."
            )
    if spec.entry_types and "option_logits" not in outputs:
        raise ConfigError(f"{spec.architecture} decides, and does nothing else: leave task and pooling out.")
    if what_of := next((found for output, found in _OF_REQUESTS.items() if output in outputs), None):
        if config.target != "cpu":
            raise ConfigError(
                f"{spec.architecture} scores {what_of} of requests, as engines for cpu do: use --target cpu."
            )
        if PRECISIONS.get(config.precision, PRECISIONS["fp32"]).quantized is not None:
            raise ConfigError(
                f"{spec.architecture} scores {what_of}, and no calibration texts have any: use --precision bf16 or "
                "fp32."
            )
    if "token_likelihood" in outputs:
        _check_likelihoods(config, spec)
    if config.rerank_body and checkpoint.listwise is not None:
        raise ConfigError(f"{spec.architecture} reads lists of documents in a text of its own: leave rerank_body out.")
    if config.rerank_body and "rerank" not in tasks:
        raise ConfigError(
            f"rerank_body needs a model that scores pairs with one number, and {spec.architecture}, as it is built, "
            f"can only {', '.join(sorted(tasks))}. Leave it out."
        )


def _check_likelihoods(config: BuildConfig, spec: ModelSpec) -> None:
    what = f"{spec.architecture}, as it is built, gives likelihoods of texts"
    if config.target != "cpu":
        raise ConfigError(f"{what}, which engines for cpu compute: use --target cpu, or name score_tokens.")
    if PRECISIONS.get(config.precision, PRECISIONS["fp32"]).quantized is not None:
        raise ConfigError(f"{what}, which no quantization was measured for: use --precision bf16 or fp32.")
    if not all(attention.causal for attention in spec.attentions):
        raise ConfigError(f"{what}, and its tokens see those behind them: a likelihood needs a causal model.")
