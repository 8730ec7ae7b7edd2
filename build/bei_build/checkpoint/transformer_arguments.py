"""Arguments that sentence-transformers passes to transformers' classes, in the settings of its Transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bei.errors import CheckpointError
from bei_build.files.json_settings import setting

# Arguments that sentence-transformers passes to transformers' class; the first name is the one before version 5.4.
_TOKENIZER_ARGS = ("tokenizer_args", "processor_kwargs")
# Those of them that locate files.
_HUB_ARGS = frozenset(
    {"trust_remote_code", "revision", "local_files_only", "token", "cache_dir", "use_fast", "subfolder"}
)

# Arguments of transformers' config and model, and those of them by which no number changes.
_MODEL_ARGS = ("config_args", "config_kwargs", "model_args", "model_kwargs")
_IDLE_MODEL_ARGS = frozenset(
    {
        *("attn_implementation", "torch_dtype", "dtype", "device_map", "low_cpu_mem_usage", "use_safetensors"),
        *("add_pooling_layer", "use_cache", "unpad_inputs", "use_memory_efficient_attention"),
    }
)


def check_arguments(path: Path, config: dict[str, Any]) -> None:
    """Raise CheckpointError for arguments of the model's class or config that may change numbers, or another
    tokenizer."""
    for name in _MODEL_ARGS:
        given = (setting(path, config, name, dict) or {}).keys()
        if changing := sorted(given - _HUB_ARGS - _IDLE_MODEL_ARGS):
            raise CheckpointError(
                f"{path} gives transformers' classes {name} = {', '.join(changing)}, which bei does not read: set them "
                "in config.json, and take them out here."
            )
    if config.get("tokenizer_name_or_path") is not None:
        raise CheckpointError(
            f"{path} names another model's tokenizer (tokenizer_name_or_path): put its files into the folder, and take "
            "the name out."
        )


def tokenizer_args(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the tokenizer's class besides its files."""
    found = {key: value for name in _TOKENIZER_ARGS for key, value in (setting(path, config, name, dict) or {}).items()}
    return {key: value for key, value in found.items() if key not in _HUB_ARGS}


def check_lengths(path: Path, config: dict[str, Any]) -> None:
    """Raise CheckpointError where two settings limit a text's tokens differently: sentence-transformers 6 takes the
    tokenizer's, older versions took max_seq_length."""
    longest, of_tokenizer = config.get("max_seq_length"), tokenizer_args(path, config).get("model_max_length")
    if None not in (longest, of_tokenizer) and longest != of_tokenizer:
        raise CheckpointError(
            f"{path} has max_seq_length = {longest} and the tokenizer's model_max_length = {of_tokenizer}, of which "
            "versions of sentence-transformers take different ones: take one out."
        )
