"""Loads settings of a configuration class from flags, environment, YAML file and defaults, in this order.

Unknown keys are errors that name the nearest known key.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from bei.config.clouds import cloud_settings
from bei.config.kubernetes import injected
from bei.config.settings import ENV_PREFIX, ServeConfig
from bei.errors import ConfigError
from bei.utils.named_files import MOST_SETTINGS_BYTES, named_text
from bei.utils.ranges import shown

ConfigT = TypeVar("ConfigT")


# The builder's settings by name: the runtime does not import the builder. A test compares both.
BUILD_SETTINGS = frozenset(
    (
        "model",
        "out",
        "target",
        "precision",
        "name",
        "revision",
        "task",
        "pooling",
        "normalize",
        "include_prompt",
        "score_tokens",
        "score_labels",
        "relevant_label",
        "attention",
        "route",
        "token_embeddings",
        "tokenizer",
        "adapter",
        "lora",
        "images",
        "texts",
        "rerank_prefix",
        "rerank_body",
        "rerank_suffix",
        "rerank_instruction",
        "classify_prefix",
        "classify_body",
        "classify_suffix",
        "decide_body",
        "decide_option",
        "prompts",
        "default_prompt_name",
        "max_seq_len",
        "document_length",
        "max_image_pixels",
        "max_num_tokens",
        "max_batch_size",
        "compute_capability",
        "attention_lowering",
        "latency_tokens",
        "latency_sequences",
        "hardware_compatible",
        "strip_weights",
        "plan_of",
        "timing_cache",
        "calibration_data",
        "calibration_column",
        "calibration_size",
        "calibration_length",
        "calibration_seed",
        "calibration_method",
        "calibrate_with",
        "calibration_percentile",
        "fp8_outputs",
        "max_highprec_layers",
        "min_cosine",
        "allow_below_threshold",
        "reference",
        "verify",
        "verify_budget",
        "verify_retrieval",
        "keep_reference",
        "sign",
        "sign_passphrase",
        "sign_passphrase_file",
    )
)


_ALL_SETTINGS = BUILD_SETTINGS | {f.name for f in dataclasses.fields(ServeConfig)}


_MOST_LISTED = 40


def load(
    cls: type[ConfigT], flags: Mapping[str, object], file: str | None = None, env: Mapping[str, str] | None = None
) -> ConfigT:
    """An instance of ``cls``: ``flags`` (only those given) over ``env`` over the YAML ``file`` over the defaults.

    A cloud's variables come before our own: images set the latter, and the cloud asks nowhere else.

    Raises ConfigError for unknown keys and values of wrong types, and the errors of ``cls`` itself.
    """
    env = os.environ if env is None else env
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    secrets = {f.name for f in dataclasses.fields(cls) if f.metadata.get("secret")}  # type: ignore[arg-type]
    values: dict[str, object] = {}
    of_cloud = {key: value for key, value in cloud_settings(env).items() if key in names}
    sources = (("file", _from_file(file)), ("environment", _from_env(env, names)), ("environment", of_cloud))
    for source, settings in (*sources, ("flags", flags)):
        for key, value in settings.items():
            if key not in names:
                raise ConfigError(_unknown(key, source, names, settings))
            values[key] = converted(value, hints[key], key, source, is_secret=key in secrets)
    return cls(**values)


def _unknown(key: str, source: str, names: list[str], given: Mapping[str, object]) -> str:
    """What to say of a ``key`` that the command does not have, of all that are ``given``."""
    if source == "environment":  # which the other command reads too
        near = difflib.get_close_matches(key, sorted(_ALL_SETTINGS.union(names)), n=1)
        meant = f"Did you mean {ENV_PREFIX}{near[0].upper()}?" if near else "Unset it, or see docs/reference.md."
        return f"Unknown setting {ENV_PREFIX}{key.upper()} in the environment. {meant}"
    if key not in _ALL_SETTINGS:
        return f"Unknown setting {key!r} in the {source}.{nearest(key, names)}"
    if key not in BUILD_SETTINGS:
        return f"{key!r} in the {source} is a setting of 'bei serve': leave it out."
    if "model" in given:
        return f"The {source} is a recipe of 'bei build': give it to that as --config, and serve what it builds."
    variable = ENV_PREFIX + key.upper()
    return (
        f"{key!r} in the {source} is a setting of 'bei build': for what is built here set {variable}, or leave it out."
    )


def _from_file(file: str | None) -> dict[str, object]:
    if file is None:
        return {}
    from bei.utils.strict_yaml import YamlError, parsed  # most servers have no use for YAML

    text = named_text("The configuration file", file, MOST_SETTINGS_BYTES, may_be_pipe=True)
    try:
        content = parsed(text)
    except YamlError as error:
        fault = "a setting twice in one table" if error.is_twice else "lines that are no YAML"
        raise ConfigError(
            f"The configuration file {file} has {fault}{error.place}: write 'key: value' lines, each key once."
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold settings as 'key: value' lines.")
    settings = {str(key).replace("-", "_"): value for key, value in content.items()}
    if len(settings) < len(content):
        raise ConfigError(f"The configuration file {file} has a setting with - and with _: keep one of them.")
    return settings


def _from_env(env: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """The ``BEI_*`` variables, except the other command's and those that Kubernetes injects."""
    return {key: value for key, value in _variables(env).items() if key in names or key not in _ALL_SETTINGS}


def build_variables() -> dict[str, str]:
    """The builder's settings in the environment."""
    return {key: value for key, value in _variables(os.environ).items() if key in BUILD_SETTINGS}


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    links = {name for of_service in injected(env).values() for name in of_service}
    return {
        key[len(ENV_PREFIX) :].lower(): value
        for key, value in env.items()
        if key.startswith(ENV_PREFIX) and key not in links
    }


def nearest(key: str, names: Seq[str], kind: str = "settings") -> str:
    """The end of a message about an unknown ``key``: the nearest name, or all ``names`` unless they are too many."""
    if near := difflib.get_close_matches(key, names, n=1):
        return f" Did you mean {near[0]!r}?"
    return f" Known {kind}: {', '.join(names)}." if len(names) <= _MOST_LISTED else " See docs/reference.md."


def listed(text: str) -> list[str]:
    """The items of ``text``, which are separated by commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def converted(value: object, hint: Any, key: str, source: str, *, is_secret: bool = False) -> object:
    """``value`` of the setting ``key`` converted to the type ``hint``: text from the environment is parsed, other
    values must have the type. Raises ConfigError."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    hint = next(option for option in options if option is not type(None))
    if typing.get_origin(hint) is tuple:
        items = listed(value) if isinstance(value, str) else value
        if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
            return tuple(items)
    elif typing.get_origin(hint) is dict:
        if isinstance(value, dict) and all(isinstance(text, str) for item in value.items() for text in item):
            return value
    elif hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in BOOLEANS:
            return BOOLEANS[value.lower()]
    elif hint in (int, float):
        try:
            if isinstance(value, str) or (type(value) in (int, float) and type(value) in (int, hint)):
                return hint(value)
        except (ValueError, OverflowError):
            pass
    elif isinstance(value, str):
        return value
    if value == "" and source == "environment":
        raise ConfigError(f"{ENV_PREFIX}{key.upper()} is empty: unset it, or set it to {_kind(hint)}.")
    given = "" if is_secret else f", not {shown(value)}"
    raise ConfigError(f"Setting {key!r} ({source}) must be {_kind(hint)}{given}.")


BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _kind(hint: Any) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
    return names.get(hint, "texts by name" if typing.get_origin(hint) is dict else "a list of texts")
