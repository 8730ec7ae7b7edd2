"""The settings of ``bei serve``: names, defaults, help texts, and combinations that are refused."""

from __future__ import annotations

import dataclasses
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from bei.artifact.certificate.thresholds import PRECISIONS
from bei.config.checks import check_ranges
from bei.config.devices import check_devices
from bei.errors import ConfigError
from bei.utils.cpu_count import usable_cores
from bei.utils.ranges import TERABYTE, WEEK_S, Range
from bei.utils.units import parsed_size

ENV_PREFIX = "BEI_"


TOKEN_IDS = ("refuse", "accept")

UNTRAINED_DIMENSIONS = ("warn", "refuse")

# APIs whose routes and errors are mounted under ``/<name>`` (bei.server.dialects); "bei": the routes without a mount
# point.
DIALECTS = ("bei", "tei", "cohere", "jina", "voyage", "nim", "infinity", "vllm", "oip", "ollama")


LOG_FORMATS = ("text", "json")

UNLIMITED = "unlimited"


def _option(default: object, text: str, choices: tuple[str, ...] = (), within: Range | None = None) -> Any:
    """A setting. A number needs ``within``."""
    return field(default=default, metadata={"help": text, "choices": choices, "within": within})


def _default_tokenizer_threads() -> int:
    # One thread tokenizes 10,000 texts of 74 tokens a second (docs/decisions.md): few are enough for a CPU engine.
    return max(1, min(8, usable_cores() - 1))


# Upper limits: a larger value is a mistake.
_MEGABYTES = Range(0, 1_000_000, "megabytes")
_BYTES = Range(1, TERABYTE, "bytes")
_TOKENS = Range(1, 1_000_000_000)
_INPUTS = Range(1, 10_000_000)
_TIMEOUT = Range(0, WEEK_S, "seconds", above=True)
_WAIT = Range(0, WEEK_S, "seconds")


@dataclass(frozen=True)
class ServeConfig:
    """Configuration of ``bei serve``: each field is a flag, a variable ``BEI_<NAME>`` and a key of the YAML file."""

    models: tuple[str, ...] = field(
        default=(), metadata={"help": "artifacts or checkpoints (default: all-MiniLM-L6-v2)", "positional": True}
    )
    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = _option(8000, "TCP port; 0 lets the system choose", within=Range(0, 65535))
    grpc_port: int | None = _option(
        None, "TCP port for gRPC; 0 lets the system choose (default: none)", within=Range(0, 65535)
    )
    tcp: bool | None = _option(None, "listen on host and port (default: unless uds is set)")
    uds: str | None = _option(None, "path of a unix socket to listen on")
    uds_mode: str = _option("660", "permissions of the unix socket, in the octal digits of chmod")
    tls_cert: str | None = _option(None, "PEM file of the certificate chain: TLS on host and port; read anew on SIGHUP")
    tls_key: str | None = _option(None, "PEM file of the certificate's private key")
    tls_client_ca: str | None = _option(
        None, "PEM file of authorities; clients must have a certificate from one of them"
    )
    api_keys_file: str | None = _option(None, "YAML file of API keys (docs/reference.md); read anew on SIGHUP")
    api_keys: tuple[str, ...] | None = field(
        default=None,
        repr=False,
        metadata={"help": "API keys, NAME:KEY each", "file_only": True, "secret": True},  # ps shows flags to every user
    )
    metrics_need_key: bool = _option(False, "ask for an API key on /metrics too")
    cors_origins: tuple[str, ...] = _option(
        (), "origins of the pages that may send requests from a browser, with commas; * for all"
    )
    cors_credentials: bool = _option(False, "let browsers send cookies")
    health_path: str | None = _option(None, "another path of /health, for the one that asks (Vertex AI)")
    predict_path: str | None = _option(None, "another path of /vertex, for the one that asks (Vertex AI)")
    root_path: str = _option("", "prefix that a proxy has in front of every path, as /embeddings-api")
    engine_threads: int = _option(
        0, "threads of a CPU engine, over all its streams; 0: all cores", within=Range(0, 4096)
    )
    engine_streams: int | None = _option(
        None,
        "batches an engine runs side by side; 0: as many as are fastest on a CPU, measured "
        "(default: 1 on a CPU, whose threads they share; 2 on a GPU)",
        within=Range(0, 256),
    )
    graph_megabytes: int | None = _option(
        None,
        "megabytes of GPU memory for the CUDA graphs (recorded small steps) of an engine; 0: none (default: 256)",
        within=_MEGABYTES,
    )
    gpu_megabytes: int | None = _option(
        None,
        "megabytes of GPU memory for the engines of a process, target cuda (default: all that is free)",
        within=Range(1, 1_000_000, "megabytes"),
    )
    tune: str = _option(
        "auto",
        "what a step costs: auto measures at the first start and keeps it, force measures at every start, off assumes",
        choices=("auto", "off", "force"),
    )
    http_workers: int = _option(
        1, "front-end processes: HTTP, tokenizers and answers; more than 1 for fast engines", within=Range(1, 256)
    )
    devices: tuple[str, ...] = _option(
        (),
        "devices to serve on; each of several has its own engine process: GPUs as 0,1, or sets of cores for CPU "
        "engines as 0-15,16-31 (default: one device)",
    )
    tokenizer_threads: int = field(
        default_factory=_default_tokenizer_threads,
        metadata={
            "help": "threads that tokenize, over all front ends (default: cores - 1, at most 8)",
            "within": Range(1, 1024),
        },
    )
    image_megabytes: int = _option(20, "megabytes of an image's file", within=Range(1, 1000, "megabytes"))
    image_megapixels: int = _option(
        50,
        "millions of pixels of an image, or of an input's images together; decoding takes 3 to 12 bytes each",
        within=Range(1, 1000),
    )
    image_url_hosts: tuple[str, ...] = _option(
        (),
        "hosts whose images are fetched where a request names an URL: names, and *.name (default: no URL is fetched)",
    )
    image_url_seconds: float = _option(5.0, "seconds for a fetch of an image, redirects included", within=_TIMEOUT)
    max_queue_tokens: int = _option(
        4_000_000, "tokens accepted and not yet answered, per model; beyond it 429", within=_TOKENS
    )
    max_client_batch_size: int = _option(16384, "most inputs of one request", within=_INPUTS)
    interactive_inputs: int = _option(
        8, "a request of at most so many inputs is interactive unless it names its lane", within=_INPUTS
    )
    interactive_tokens: int = _option(
        1024, "... and of at most so many tokens, as estimated from its characters", within=_TOKENS
    )
    interactive_max_wait: float = _option(
        5.0, "seconds of predicted wait beyond which an interactive request is a 429", within=_WAIT
    )
    bulk_max_wait: float = _option(20.0, "the same for bulk requests", within=_WAIT)
    bulk_share: float = _option(
        0.2, "share of the engine's time that bulk work gets in any case", within=Range(0, 1, below=True)
    )
    step_cap_ms: float = _option(
        0.0,
        "longest step of bulk work beside interactive work; 0: chosen from the costs of steps",
        within=Range(0, 3_600_000, "milliseconds"),
    )
    hang_timeout: float = _option(30.0, "seconds after which a step may be taken to hang; 0: never", within=_WAIT)
    cache_megabytes: int = _option(0, "megabytes for a cache of answers, per model; 0: none", within=_MEGABYTES)
    answer_limit: int = _option(
        256_000_000, "largest answer in bytes, as estimated before it is computed", within=_BYTES
    )
    answer_memory: int = _option(
        1_000_000_000, "bytes of all answers under way together, as estimated; beyond it 429", within=_BYTES
    )
    compress_answers: bool = _option(False, "compress answers for clients whose Accept-Encoding has zstd or gzip")
    payload_limit: int = _option(8_000_000, "largest request body in bytes, also after decompression", within=_BYTES)
    body_memory: int = _option(
        256_000_000, "bytes of all request bodies until they are admitted; beyond it 429", within=_BYTES
    )
    max_connections: int = _option(
        16384, "most open connections; beyond it the one idle for longest is closed", within=Range(1, 1_000_000)
    )
    max_header_bytes: int = _option(
        32768,
        "most bytes of a request's headers, request line included; beyond it 431",
        within=Range(1, 100_000_000, "bytes"),
    )
    max_headers: int = _option(128, "most headers of a request; beyond it 431", within=Range(1, 100_000))
    keep_alive_timeout: float = _option(75.0, "seconds that a connection without a request stays open", within=_TIMEOUT)
    header_timeout: float = _option(
        20.0, "seconds a client may take to send a request's headers; beyond it 408", within=_TIMEOUT
    )
    body_timeout: float = _option(
        30.0,
        "seconds a client may take to send a body, and one more for every 10,000 bytes of it; beyond it 408",
        within=_TIMEOUT,
    )
    auto_truncate: bool = _option(True, "cut texts that are too long (reported in a header); otherwise they are a 400")
    untrained_dimensions: str = _option(
        "warn",
        "what to do with requests for dimensions that a model does not say it was trained for (Matryoshka)",
        choices=UNTRAINED_DIMENSIONS,
    )
    openai_token_ids: str = field(
        default="refuse",
        metadata={
            "help": "what to do with token ids on /v1/embeddings, which may come from another tokenizer",
            "choices": TOKEN_IDS,
        },
    )
    dialect: str = field(
        default="bei",
        metadata={"help": "dialect of the routes and errors for requests that do not name one", "choices": DIALECTS},
    )
    alias: tuple[str, ...] = _option((), "another name of the model, or ALIAS=MODEL of one of several; may be repeated")
    any_model_name: bool = _option(
        False, "answer requests for a model that is not served with the only one that has the task; a header says so"
    )
    ui: bool = _option(True, "serve the page /ui, to try the models in a browser and to watch the server")
    access_log: bool = _option(False, "log every request")
    log_inputs: bool = _option(False, "log the first inputs of a request in its line")
    log_format: str = _option("text", "form of the log: lines for people, or a JSON object a line", choices=LOG_FORMATS)
    server_timing: bool = _option(False, "add the header Server-Timing to answers, with the time of each stage")
    otlp_endpoint: str | None = _option(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP) that gets traces (default: OTEL_EXPORTER_OTLP_ENDPOINT)",
    )
    trace_sample_ratio: float | None = _option(
        None,
        "share of the requests that are traced, if their caller does not say (default: OTEL_TRACES_SAMPLER, or all)",
        within=Range(0, 1),
    )
    cache_dir: str = _option(
        "~/.cache/bei", "folder for artifacts that are built from checkpoints given to serve, and for measured costs"
    )
    cache_max_size: str = _option(
        "50GB", "most bytes of that folder, as 20GB; beyond it the least recently used is removed; unlimited: never"
    )
    precision: str = _option(
        "auto", "precision of checkpoints that are built first; artifacts must have it", choices=("auto", *PRECISIONS)
    )
    require_signature: tuple[str, ...] | None = _option(
        None, "files of public keys, with commas: only artifacts signed by one of them are served"
    )
    batch_dir: str | None = _option(
        None, "folder of /v1/files and /v1/batches, for this server alone (default: there are no such routes)"
    )
    batch_file_limit: int = _option(200_000_000, "largest file of /v1/files in bytes", within=_BYTES)
    batch_line_limit: int = _option(50_000, "most lines of a batch", within=_INPUTS)
    batch_open_limit: int = _option(20, "most batches of an API key that are not finished", within=Range(1, 10_000))
    batch_disk_limit: int = _option(
        20_000_000_000, "bytes of all files of an API key, answers of its batches included", within=_BYTES
    )
    swap_vectors: bool = _option(
        False, "let SIGHUP swap in an artifact whose vectors are not comparable with those that clients have stored"
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        for option in dataclasses.fields(self):  # argparse checks choices of flags only
            choices, value = option.metadata.get("choices"), getattr(self, option.name)
            if choices and value not in choices:
                raise ConfigError(f"{option.name} must be one of {', '.join(choices)}, not {value!r}.")
        _check_combinations(self)
        if (self.http_workers > 1 or self.devices) and not sys.platform.startswith("linux"):
            raise ConfigError("http_workers and devices need Linux: leave them out.")
        check_devices(self.devices)
        if self.cache_max_bytes == 0:
            raise ConfigError(f"cache_max_size 0 would keep nothing: give a size, or {UNLIMITED}.")
        if self.require_signature is not None and not self.require_signature:  # an empty variable
            raise ConfigError("require_signature is set and names no key: name files of public keys, or leave it out.")
        if self.body_memory < self.payload_limit:
            raise ConfigError(
                f"body_memory {self.body_memory} could never hold a body of payload_limit {self.payload_limit} bytes: "
                "raise the first or lower the second."
            )
        if self.batch_disk_limit < self.batch_file_limit:
            raise ConfigError(
                f"batch_disk_limit {self.batch_disk_limit} could never hold a file of batch_file_limit "
                f"{self.batch_file_limit} bytes: raise the first or lower the second."
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
        """The engine options that were set, except streams, which not every target has."""
        found = {
            "num_threads": self.engine_threads or None,
            "cuda_graphs": self.graph_megabytes,
            "memory": self.gpu_megabytes,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def has_processes(self) -> bool:
        """True if front ends, batch manager and engines run in separate processes."""
        return self.http_workers > 1 or len(self.devices) > 1

    @property
    def cache_max_bytes(self) -> int | None:
        """``cache_max_size`` in bytes; None: no limit."""
        return None if self.cache_max_size == UNLIMITED else parsed_size("cache_max_size", self.cache_max_size)

    @property
    def listens_on_tcp(self) -> bool:
        """True if the server listens on ``host`` and ``port``."""
        return self.uds is None if self.tcp is None else self.tcp

    @property
    def asks_for_keys(self) -> bool:
        """True if requests need an API key."""
        return self.api_keys_file is not None or self.api_keys is not None


ANY_ORIGIN = "*"


# First path segments of routes: a root_path that begins with one would be ambiguous. A test compares both.
FIRST_SEGMENTS = frozenset(
    (
        *("api-doc", "certificate", "classify", "decode", "detokenize", "docs", "embed", "embed_all"),
        *("embed_sparse", "embeddings", "health", "info", "invocations", "metrics", "models", "openapi.json"),
        *(
            "ping",
            "pooling",
            "predict",
            "predict_tokens",
            "ready",
            "rerank",
            "score",
            "similarity",
            "stats",
            "tokenize",
        ),
        *("tokenize", "ui", "v1", "v2", "vertex"),
        *("cohere", "infinity", "jina", "nim", "oip", "ollama", "tei", "vllm", "voyage"),
        *("api", "openai", "pipeline"),
    )
)


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*]+")


_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


_PATH = re.compile(r"(/[A-Za-z0-9._~:@-]+)+")


_MODE = re.compile(r"[0-7]{3}")


# Of at least two labels, so that * alone, and *.com, are none.
_HOST = re.compile(r"(?:\*\.[a-z0-9-]+\.|(?:[a-z0-9-]+\.)+)(?:[a-z0-9-]+\.)*[a-z][a-z0-9-]*[a-z0-9]")
_DEFAULT_MODE = "660"


def _check_combinations(config: ServeConfig) -> None:
    _check_sockets(config)
    _check_keys(config)
    _check_cors(config)
    _check_image_hosts(config)
    _check_root_path(config.root_path)
    _check_paths(config)
    if config.log_inputs and not config.access_log:
        raise ConfigError("log_inputs is for the lines of access_log: set both, or neither.")


def _check_sockets(config: ServeConfig) -> None:
    if config.uds is None:
        if config.tcp is False:
            raise ConfigError("tcp false leaves nothing to listen on: set uds, or leave tcp out.")
        if config.uds_mode != _DEFAULT_MODE:
            raise ConfigError("uds_mode needs uds: set uds too, or leave uds_mode out.")
    if config.grpc_port == 0 and config.http_workers > 1:
        raise ConfigError("grpc_port 0 would give each front end another port: name one, or leave http_workers out.")
    if config.grpc_port and config.grpc_port == config.port and config.listens_on_tcp:
        raise ConfigError(f"grpc_port and port are both {config.port}: give each its own.")
    if not _MODE.fullmatch(config.uds_mode):
        raise ConfigError(f"uds_mode must be three octal digits as chmod has them, not {config.uds_mode!r}.")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("tls_cert and tls_key belong together: set both, or neither.")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("tls_client_ca needs TLS: set tls_cert and tls_key too.")
    if config.tls_cert is not None and not config.listens_on_tcp:
        raise ConfigError("tls_cert is for TCP, a unix socket has no TLS: set tcp too, or leave tls_cert out.")


def _check_keys(config: ServeConfig) -> None:
    if config.api_keys is not None and not config.api_keys:  # an empty variable, as from a lost secret
        raise ConfigError("api_keys (BEI_API_KEYS) is set and has no key: everybody would be let in. Give it one.")
    if config.metrics_need_key and not config.asks_for_keys:
        raise ConfigError("metrics_need_key needs keys: set api_keys_file or BEI_API_KEYS too.")


def _check_cors(config: ServeConfig) -> None:
    origins = config.cors_origins
    if config.cors_credentials and not origins:
        raise ConfigError("cors_credentials is for pages of cors_origins: set both, or neither.")
    if ANY_ORIGIN in origins:
        if config.cors_credentials:
            raise ConfigError("cors_origins * and cors_credentials exclude each other in browsers: name the origins.")
        if len(origins) > 1:
            raise ConfigError("cors_origins * includes all others: name it alone, or leave it out.")
        return
    for origin in origins:
        if not _ORIGIN.fullmatch(origin.lower()):
            raise ConfigError(
                f"cors_origins has {origin!r}, which is no origin: give scheme, host and port, as https://a.example."
            )


def _check_image_hosts(config: ServeConfig) -> None:
    for host in config.image_url_hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"image_url_hosts has {host!r}, which is no name of a host: give images.example.com, or "
                "*.example.com for all names below one, in lower case."
            )


def _check_paths(config: ServeConfig) -> None:
    for name in ("health_path", "predict_path"):
        path = getattr(config, name)
        if path is not None and not _PATH.fullmatch(path):
            raise ConfigError(
                f"{name} must be a path as /v1/endpoints/1:predict, of letters, digits and ._~:@-, not {path!r}."
            )
    if config.health_path is not None and config.health_path == config.predict_path:
        raise ConfigError(f"health_path and predict_path are both {config.health_path}: give each its own.")


def _check_root_path(root_path: str) -> None:
    if not root_path:
        return
    if not _ROOT_PATH.fullmatch(root_path):
        raise ConfigError(
            f"root_path must begin with / and not end with it, of letters, digits and ._~-, not {root_path!r}."
        )
    if {".", ".."} & {*root_path.split("/")}:
        raise ConfigError(f"root_path {root_path} has . or .., which clients resolve: give the path that they ask for.")
    first = root_path.split("/")[1]
    if first in FIRST_SEGMENTS:
        raise ConfigError(f"root_path {root_path} begins as paths of routes do (/{first}): choose another one.")
