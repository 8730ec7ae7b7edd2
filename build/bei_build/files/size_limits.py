"""Bounds for the sizes in config.json, checked before anything of that size is allocated.

A config class may make a list with an entry per layer, or a name per label, before it checks anything: 1,000,000,000
layers took 8 GB until they were refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bei.errors import CheckpointError

# Matched by parts of key names in all families; the first match counts. The deepest model of the hub has some 130
# layers, the widest some 20,000 components, and the largest vocabulary a million words.
_MOST = (
    (re.compile(r"(num|n|encoder|decoder)_(\w+_)?layers?|num_hidden_groups"), 2_000),
    (re.compile(r"num_labels"), 1_000_000),
    (re.compile(r"\w*_positions|\w*max_position\w*|\w*seq_length"), 1 << 31),
    (re.compile(r"\w*vocab_size"), 1 << 24),
    (re.compile(r"\w*(hidden|intermediate|embedding|inner|kernel)_size|\w*_dim|dim|\w*_rank|d_(model|kv|ff)"), 1 << 20),
    (re.compile(r"\w*_heads|n_(inner|embd|head|ctx)|num_experts\w*|\w*num_buckets|position_buckets"), 1 << 20),
)
# Names of sizes that are none: switches (LFM2's block_auto_adjust_ff_dim), and a factor of YaRN's.
_NO_SIZE = re.compile(r"\w*auto_\w*|mscale_all_dim")


def check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a size in ``config``, the content of ``path``, beyond that of any model."""
    for key, value in _entries(config):
        most = largest(key)
        if most is None or not isinstance(value, (int, float, str)):
            continue
        if type(value) is not int:
            raise CheckpointError(f"{path} has {key} = {json.dumps(value)[:80]}: correct it to a whole number.")
        if not -1 <= value <= most:  # some configs write -1 for "none"
            shown = str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
            raise CheckpointError(f"{path} has {key} = {shown}, and no model has more than {most:,}: correct it.")


def largest(key: str) -> int | None:
    """The largest number that a config may have under ``key``; None where ``key`` is no size."""
    if _NO_SIZE.fullmatch(key):
        return None
    return next((most for pattern, most in _MOST if pattern.fullmatch(key)), None)


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values, including those of nested objects at any depth."""
    waiting = [config]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, Mapping):
                waiting.append(value)
            yield str(key), value
