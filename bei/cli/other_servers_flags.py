"""Flags of text-embeddings-inference, vLLM and Infinity, and what stands for them here; their variables are not read.

``docs/clients.md`` has the same table, which a test compares.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from bei.errors import ConfigError

# Flags that are called so here too.
SAME = (
    *("--host", "--port", "--uds", "--root-path", "--max-client-batch-size", "--auto-truncate"),
    *("--otlp-endpoint", "--payload-limit"),
)

# Variables that name the model there.
_MODEL_VARIABLES = ("MODEL_ID", "INFINITY_MODEL_ID")

_LIMITS = "`bei build --max-num-tokens`, `bei build --max-batch-size`: upper bounds of a step; measured costs decide it"

# In Markdown. What begins with code names a flag, a variable or a field.
INSTEAD: Mapping[tuple[str, ...], str] = {
    (
        "--model-id",
        "--model",
    ): "the first argument: a hub id, a folder or an installed package; to serve, also an artifact",
    ("--served-model-name",): "`--alias`; `bei build --name` names what it builds",
    ("--dtype", "--quantization"): "`--precision`",
    ("--runner", "--convert"): "`bei build --task` (otherwise as the checkpoint's files say)",
    (
        "--hf-overrides",
    ): "flags of `bei build` (such as `bei build --pooling`), or a copy of the checkpoint with another config.json",
    ("--embedding-dtype",): "the field `output_dtype` of a request",
    ("--pooling-method", "--override-pooler-config"): "`bei build --pooling` (otherwise as the checkpoint's files say)",
    ("--dense-path",): "nothing: `bei build` reads the Dense modules of the checkpoint",
    ("--max-model-len",): "`bei build --max-seq-len`",
    (
        "--max-batch-tokens",
        "--max-batch-prefill-tokens",
        "--max-batch-requests",
        "--batch-size",
        "--max-num-batched-tokens",
        "--max-num-seqs",
    ): _LIMITS,
    ("--max-concurrent-requests",): "`--max-queue-tokens`, `--interactive-max-wait` and `--bulk-max-wait`, which bound "
    "what waits",
    ("--tokenization-workers", "--tokenizer-pool-size"): "`--tokenizer-threads`",
    ("--device", "--engine"): "`bei build --target`; which devices: `--devices`",
    ("--tensor-parallel-size", "--pipeline-parallel-size"): "nothing: an engine has one device; `--devices` has one "
    "engine on each",
    ("--gpu-memory-utilization",): "`--gpu-megabytes`",
    ("--trust-remote-code",): "nothing: no code of a checkpoint is run",
    ("--compile", "--bettertransformer", "--enforce-eager"): "nothing: `bei build` has compiled the engine",
    ("--model-warmup",): "nothing: a server is warm before it listens",
    ("--preload-only",): "`bei build`",
    ("--vector-disk-cache",): "`--cache-megabytes`, in memory",
    ("--lengths-via-tokenize",): "nothing: usage counts tokens",
    ("--default-prompt",): "`bei build --config` with `prompts` and `default_prompt_name`",
    ("--hf-token", "--hf-api-token"): "the variable `HF_TOKEN`",
    ("--huggingface-hub-cache", "--download-dir"): "the variable `HF_HUB_CACHE`",
    ("--hostname",): "`--host`",
    ("--uds-path",): "`--uds`, on which the server listens too",
    ("--api-key",): "the variable `BEI_API_KEYS`, or `--api-keys-file`",
    ("--ssl-certfile",): "`--tls-cert`",
    ("--ssl-keyfile",): "`--tls-key`",
    ("--ssl-ca-certs",): "`--tls-client-ca`",
    ("--cors-allow-origin", "--allowed-origins", "--permissive-cors"): "`--cors-origins`",
    ("--allow-credentials",): "`--cors-credentials`",
    ("--url-prefix", "--proxy-root-path"): "`--root-path`",
    ("--json-output",): "`--log-format json`",
    ("--log-level",): "nothing: the log has one level; `--access-log` adds a line for each request",
    ("--disable-uvicorn-access-log",): "nothing: requests are logged with `--access-log` only",
    ("--otlp-traces-endpoint",): "`--otlp-endpoint`",
    ("--otlp-service-name",): "the variable `OTEL_SERVICE_NAME`",
    ("--prometheus-port",): "nothing: `/metrics` is on the server's port",
}


def table() -> list[str]:
    """The rows of the table in ``docs/clients.md``."""
    rows = {SAME: "the same", **INSTEAD}
    return [f"| {', '.join(f'`{flag}`' for flag in flags)} | {text} |" for flags, text in rows.items()]


_BY_FLAG = {flag: text for flags, text in INSTEAD.items() for flag in flags}
# Values of --dtype.
_PRECISIONS = {
    **{"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"},
    **{word: word for word in ("auto", "fp16", "bf16", "fp32")},
}


def instead_of(flag: str, value: str = "") -> str | None:
    """What to use instead of ``flag`` of another server, which is given with ``value``, as a message; None: no server
    has it that is known here."""
    if flag == "--dtype" and value in _PRECISIONS:
        return f"{flag} {value}: use --precision {_PRECISIONS[value]}"
    text = _BY_FLAG.get(flag) or _BY_FLAG.get("--" + flag.removeprefix("--").removeprefix("no-"))
    return None if text is None else f"{flag}: use {text}".replace("`", "").replace("use nothing: ", "not needed: ")


def check_no_variable_names_a_model() -> None:
    """Raise ConfigError where a variable of another server names the model, which nothing here does: the default would
    be served in its place."""
    for variable in _MODEL_VARIABLES:
        if model := os.environ.get(variable):
            raise ConfigError(
                f"No model is given, and {variable}, a variable of another server, names {model[:100]!r}: set "
                f"BEI_MODELS={model[:100]}, or unset {variable}."
            )
