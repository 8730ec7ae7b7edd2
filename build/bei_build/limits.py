"""The limits of an engine's steps: the target's, with the user's in their place."""

from __future__ import annotations

from dataclasses import replace

from bei.artifact.validation import limits_fault
from bei.core import Limits
from bei.errors import ConfigError
from bei_build.config import BuildConfig
from bei_build.targets.base import Compiler


def limits_of(config: BuildConfig, compiler: Compiler, max_seq_len: int) -> Limits:
    """For sequences of up to ``max_seq_len`` tokens. Raises ConfigError for contradictory ones."""
    limits = compiler.default_limits(max_seq_len)
    if config.max_num_tokens is not None and config.max_num_tokens < max_seq_len:
        raise ConfigError(
            f"max_num_tokens {config.max_num_tokens} cannot hold one sequence of max_seq_len {max_seq_len}: "
            "raise --max-num-tokens or lower --max-seq-len."
        )
    max_num_tokens = config.max_num_tokens or limits.max_num_tokens
    max_batch_size = config.max_batch_size or min(limits.max_batch_size, max_num_tokens)
    if fault := limits_fault(max_num_tokens, max_batch_size, max_seq_len):
        raise ConfigError(f"{fault}: change --max-num-tokens, --max-batch-size or --max-seq-len.")
    return replace(limits, max_num_tokens=max_num_tokens, max_batch_size=max_batch_size)
