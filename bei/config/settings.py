"""Settings: frozen dataclasses, filled from flags, environment, a YAML file and defaults, in this order.

``load`` serves every configuration class. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import sys
import types
import typing
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bei.artifact.certificate.thresholds import PRECISIONS
from bei.config import checks
from bei.config.devices import check_devices
from bei.config.kubernetes import injected
from bei.errors import ConfigError
from bei.utils.cpu_count import usable_cores
from bei.utils.units import parsed_size

ENV_PREFIX = "BEI_"

ConfigT = TypeVar("ConfigT")

TOKEN_IDS = ("refuse", "accept")

UNTRAINED_DIMENSIONS = ("warn", "refuse")

# Whose routes and errors there are under ``/<name>`` (bei.server.dialects); "bei": those without a mount point.
DIALECTS = ("bei", "tei", "cohere", "jina", "voyage", "nim", "infinity", "vllm")


LOG_FORMATS = ("text", "json")

UNLIMITED = "unlimited"


def _option(default: object, text: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


def _default_tokenizer_threads() -> int:
    # One thread tokenizes 10,000 texts of 74 tokens a second (docs/decisions.md): few are enough for a CPU engine.
    return max(1, min(8, usable_cores() - 1))


_MAY_BE_ZERO = {"port", "engine_threads", "engine_streams", "graph_megabytes", "cache_megabytes", "hang_timeout"}
# Beyond it somebody meant something else.
_MOST_HTTP_WORKERS = 256


@dataclass(frozen=True)
class ServeConfig:
    """How to serve. Every field is a flag of ``bei serve``, a variable ``BEI_<NAME>`` and a key of the YAML file."""

    models: tuple[str, ...] = field(
        default=(), metadata={"help": "artifacts or checkpoints (default: all-MiniLM-L6-v2)", "positional": True}
    )
    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = _option(8000, "TCP port; 0 lets the system choose")
    tcp: bool | None = _option(None, "listen on host and port (default: unless there is a uds)")
    uds: str | None = _option(None, "path of a unix socket to listen on")
    uds_mode: str = _option("660", "who may connect to it: its permissions, as chmod has them")
    tls_cert: str | None = _option(None, "PEM file of the certificate chain: TLS on host and port; read anew on SIGHUP")
    tls_key: str | None = _option(None, "PEM file of its private key")
    tls_client_ca: str | None = _option(None, "PEM file of authorities, of which a client must have a certificate")
    api_keys_file: str | None = _option(None, "YAML file of API keys (docs/reference.md); read anew on SIGHUP")
    api_keys: tuple[str, ...] | None = field(
        default=None,
        repr=False,
        metadata={"help": "API keys, NAME:KEY each", "file_only": True, "secret": True},  # ps shows flags to everybody
    )
    metrics_need_key: bool = _option(False, "an API key is asked for on /metrics too")
    cors_origins: tuple[str, ...] = _option((), "pages that may ask from a browser, by origin, with commas; * for all")
    cors_credentials: bool = _option(False, "browsers may send cookies along")
    root_path: str = _option("", "what a proxy has in front of every path, as /embeddings-api")
    engine_threads: int = _option(0, "threads of a CPU engine, over all its streams; 0: all cores")
    engine_streams: int | None = _option(
        None,
        "batches an engine runs side by side; 0: as many as are fastest on a CPU, measured "
        "(default: 1 on a CPU, whose threads they share; 2 on a GPU)",
    )
    graph_megabytes: int | None = _option(
        None, "a GPU's memory for the recorded small steps (CUDA graphs) of an engine; 0: none (default: 256)"
    )
    gpu_megabytes: int | None = _option(
        None, "a GPU's memory for the engines of a process, target cuda (default: all that is free)"
    )
    tune: str = _option(
        "auto",
        "what a step costs: auto measures at the first start and keeps it, force measures at every start, off assumes",
        choices=("auto", "off", "force"),
    )
    http_workers: int = _option(1, "front-end processes: HTTP, tokenizers and answers; more than 1 for fast engines")
    devices: tuple[str, ...] = _option(
        (),
        "devices to serve on, of several an engine process each: GPUs as 0,1, or sets of cores for CPU engines as "
        "0-15,16-31 (default: one device, as it is)",
    )
    tokenizer_threads: int = field(
        default_factory=_default_tokenizer_threads,
        metadata={"help": "threads that tokenize, over all front ends (default: cores - 1, at most 8)"},
    )
    max_queue_tokens: int = _option(4_000_000, "tokens accepted and not yet answered, per model; beyond it 429")
    max_client_batch_size: int = _option(16384, "most inputs of one request")
    interactive_inputs: int = _option(8, "a request of at most so many inputs is interactive if it does not say")
    interactive_tokens: int = _option(1024, "... and of at most so many tokens, as its characters promise")
    interactive_max_wait: float = _option(5.0, "seconds of predicted wait beyond which an interactive request is a 429")
    bulk_max_wait: float = _option(20.0, "the same for bulk requests")
    bulk_share: float = _option(0.2, "share of the engine's time that bulk work gets in any case")
    step_cap_ms: float = _option(0.0, "longest step of bulk work beside interactive work; 0: what the costs ask for")
    hang_timeout: float = _option(30.0, "seconds after which a step may be taken to hang; 0: never")
    cache_megabytes: int = _option(0, "memory for a cache of answers, per model; 0: none")
    answer_limit: int = _option(256_000_000, "largest answer in bytes, as estimated before it is computed")
    answer_memory: int = _option(1_000_000_000, "bytes of all answers under way together, as estimated; beyond it 429")
    compress_answers: bool = _option(False, "compress answers for clients whose Accept-Encoding has zstd or gzip")
    payload_limit: int = _option(8_000_000, "largest request body in bytes, also after decompression")
    body_memory: int = _option(256_000_000, "bytes of all request bodies until they are admitted; beyond it 429")
    max_connections: int = _option(16384, "most open connections; beyond it the one idle for longest is closed")
    max_header_bytes: int = _option(32768, "most bytes of a request's headers, request line included; beyond it 431")
    max_headers: int = _option(128, "most headers of a request; beyond it 431")
    keep_alive_timeout: float = _option(75.0, "seconds that a connection without a request stays open")
    header_timeout: float = _option(20.0, "seconds a client may take to send a request's headers; beyond it 408")
    body_timeout: float = _option(
        30.0, "seconds a client may take to send a body, and one more for every 10,000 bytes of it; beyond it 408"
    )
    auto_truncate: bool = _option(True, "cut texts that are too long (reported in a header); otherwise they are a 400")
    untrained_dimensions: str = _option(
        "warn",
        "dimensions of a model that does not say that it was trained for them (Matryoshka)",
        choices=UNTRAINED_DIMENSIONS,
    )
    openai_token_ids: str = field(
        default="refuse",
        metadata={"help": "token ids on /v1/embeddings, which may be another tokenizer's", "choices": TOKEN_IDS},
    )
    dialect: str = field(
        default="bei",
        metadata={"help": "whose routes and errors requests get that do not say", "choices": DIALECTS},
    )
    ui: bool = _option(True, "serve the page /ui, to try the models in a browser and to watch the server")
    access_log: bool = _option(False, "log every request")
    log_inputs: bool = _option(False, "the first inputs of a request are in its line of the log")
    log_format: str = _option("text", "form of the log: lines for people, or a JSON object a line", choices=LOG_FORMATS)
    server_timing: bool = _option(False, "answers say in the header Server-Timing where their time went")
    otlp_endpoint: str | None = _option(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP) that gets traces (default: OTEL_EXPORTER_OTLP_ENDPOINT)",
    )
    trace_sample_ratio: float | None = _option(
        None,
        "share of the requests that are traced, if their caller does not say (default: OTEL_TRACES_SAMPLER, or all)",
    )
    cache_dir: str = _option("~/.cache/bei", "where checkpoints given to serve are built, and measured costs kept")
    cache_max_size: str = _option(
        "50GB", "most bytes of it, as 20GB; beyond it what was not used for longest is removed; unlimited: never"
    )
    precision: str = _option(
        "auto", "precision of checkpoints that are built first; artifacts must have it", choices=("auto", *PRECISIONS)
    )
    require_signature: tuple[str, ...] | None = _option(
        None, "files of public keys, with commas: only artifacts signed by one of them are served"
    )
    swap_vectors: bool = _option(
        False, "SIGHUP may swap in an artifact whose vectors do not go with those that clients have stored"
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in _MAY_BE_ZERO or isinstance(value, (bool, float)) else 1
            if name.endswith("_timeout") and name not in _MAY_BE_ZERO and not value > 0:
                raise ConfigError(f"{name} must be a positive number of seconds, not {value}.")
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                raise ConfigError(f"{name} must be at least {least}, not {value}.")
        for option in dataclasses.fields(self):  # argparse holds the command line to its choices, nobody the others
            choices, value = option.metadata.get("choices"), getattr(self, option.name)
            if choices and value not in choices:
                raise ConfigError(f"{option.name} must be one of {', '.join(choices)}, not {value!r}.")
        checks.check(self)
        if self.http_workers > _MOST_HTTP_WORKERS:
            raise ConfigError(f"http_workers must be at most {_MOST_HTTP_WORKERS}, not {self.http_workers}.")
        if (self.http_workers > 1 or self.devices) and not sys.platform.startswith("linux"):
            raise ConfigError("http_workers and devices need Linux: leave them out.")
        check_devices(self.devices)
        if self.cache_max_bytes == 0:
            raise ConfigError(f"cache_max_size 0 would keep nothing: give a size, or {UNLIMITED}.")
        if self.require_signature is not None and not self.require_signature:  # a variable that was left empty
            raise ConfigError("require_signature is set and names no key: name files of public keys, or leave it out.")
        if not 0 <= self.bulk_share < 1:
            raise ConfigError(f"bulk_share must be at least 0 and below 1, not {self.bulk_share}.")
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, not {self.port}.")
        if self.body_memory < self.payload_limit:
            raise ConfigError(
                f"body_memory {self.body_memory} could never hold a body of payload_limit {self.payload_limit} bytes: "
                "raise the first or lower the second."
            )
        if self.answer_memory < self.answer_limit:
            raise ConfigError(
                f"answer_memory {self.answer_memory} could never hold an answer of answer_limit {self.answer_limit} "
                "bytes: raise the first or lower the second."
            )
        if self.engine_threads and self.engine_threads < (self.engine_streams or 1):
            raise ConfigError(
                f"engine_streams {self.engine_streams} need a thread each, engine_threads gives {self.engine_threads}: "
                "raise the second or lower the first."
            )

    @property
    def engine_options(self) -> dict[str, int]:
        """Those of the engines' options that somebody chose, but for streams: not every target has them."""
        found = {
            "num_threads": self.engine_threads or None,
            "cuda_graphs": self.graph_megabytes,
            "memory": self.gpu_megabytes,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def has_processes(self) -> bool:
        """Whether front ends, batch manager and engines are processes of their own."""
        return self.http_workers > 1 or len(self.devices) > 1

    @property
    def cache_max_bytes(self) -> int | None:
        """``cache_max_size`` in bytes; None: there is no bound."""
        return None if self.cache_max_size == UNLIMITED else parsed_size("cache_max_size", self.cache_max_size)

    @property
    def listens_on_tcp(self) -> bool:
        """Whether ``host`` and ``port`` are listened on."""
        return self.uds is None if self.tcp is None else self.tcp

    @property
    def asks_for_keys(self) -> bool:
        """Whether requests need an API key."""
        return self.api_keys_file is not None or self.api_keys is not None


# The builder's settings, by name only: the runtime does not import the builder. A test holds the two together.
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
        "relevant_label",
        "attention",
        "route",
        "token_embeddings",
        "tokenizer",
        "adapter",
        "rerank_prefix",
        "rerank_body",
        "rerank_suffix",
        "rerank_instruction",
        "prompts",
        "default_prompt_name",
        "max_seq_len",
        "document_length",
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


def load(
    cls: type[ConfigT], flags: Mapping[str, object], file: str | None = None, env: Mapping[str, str] | None = None
) -> ConfigT:
    """Fill ``cls``: ``flags`` (only those given) over ``env`` over the YAML ``file`` over the defaults.

    Raises ConfigError for unknown keys, values of the wrong type, and whatever ``cls`` itself refuses.
    """
    env = os.environ if env is None else env
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    secrets = {f.name for f in dataclasses.fields(cls) if f.metadata.get("secret")}  # type: ignore[arg-type]
    values: dict[str, object] = {}
    for source, settings in (("file", _from_file(file)), ("environment", _from_env(env, names)), ("flags", flags)):
        for key, value in settings.items():
            if key not in names:
                raise ConfigError(f"Unknown setting {key!r} in the {source}.{nearest(key, names)}")
            values[key] = converted(value, hints[key], key, source, is_secret=key in secrets)
    return cls(**values)


def _from_file(file: str | None) -> dict[str, object]:
    if file is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"Cannot read the configuration file {file}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold settings as 'key: value' lines.")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _from_env(env: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """``BEI_*`` variables, without those of the other command and those that Kubernetes injects for its Services."""
    return {key: value for key, value in _variables(env).items() if key in names or key not in _ALL_SETTINGS}


def build_variables() -> dict[str, str]:
    """The builder's settings that are in the environment."""
    return {key: value for key, value in _variables(os.environ).items() if key in BUILD_SETTINGS}


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    links = {name for of_service in injected(env).values() for name in of_service}
    return {
        key[len(ENV_PREFIX) :].lower(): value
        for key, value in env.items()
        if key.startswith(ENV_PREFIX) and key not in links
    }


def nearest(key: str, names: Seq[str], kind: str = "settings") -> str:
    """What a message about the unknown ``key`` ends with: the name that is meant, or all ``names``."""
    near = difflib.get_close_matches(key, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Known {kind}: {', '.join(names)}."


def converted(value: object, hint: Any, key: str, source: str, *, is_secret: bool = False) -> object:
    """``value`` of the setting ``key`` as ``hint`` asks; text (environment) is parsed, all else must fit as it is.
    Raises ConfigError."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    hint = next(option for option in options if option is not type(None))
    if typing.get_origin(hint) is tuple:
        items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
        if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
            return tuple(items)
    elif typing.get_origin(hint) is dict:
        if isinstance(value, dict) and all(isinstance(text, str) for item in value.items() for text in item):
            return value
    elif hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
    elif hint in (int, float):
        try:
            if isinstance(value, str) or (type(value) in (int, float) and type(value) in (int, hint)):
                return hint(value)
        except ValueError:
            pass
    elif isinstance(value, str):
        return value
    given = "" if is_secret else f", not {value!r}"
    raise ConfigError(f"Setting {key!r} ({source}) must be {_kind(hint)}{given}.")


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _kind(hint: Any) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
    return names.get(hint, "texts by name" if typing.get_origin(hint) is dict else "a list of texts")
