"""How ``--help`` shows the settings of servers and builds: groups, forms of values, examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SERVE_GROUPS: Mapping[str, Sequence[str]] = {
    "where it listens": (
        *(
            "host",
            "port",
            "grpc_port",
            "tcp",
            "uds",
            "uds_mode",
            "health_path",
            "predict_path",
            "root_path",
            "http_workers",
        ),
    ),
    "who may ask (TLS, keys, browsers)": (
        *("tls_cert", "tls_key", "tls_client_ca", "api_keys_file", "metrics_need_key"),
        *("cors_origins", "cors_credentials", "require_signature"),
    ),
    "models and engines": (
        *(
            "alias",
            "any_model_name",
            "precision",
            "devices",
            "engine_threads",
            "engine_streams",
            "graph_megabytes",
            "gpu_megabytes",
        ),
        *("tokenizer_threads", "tune", "cache_dir", "cache_max_size", "hang_timeout", "swap_vectors"),
    ),
    "answers": (
        *("dialect", "auto_truncate", "untrained_dimensions", "openai_token_ids", "compress_answers"),
        *("cache_megabytes", "ui"),
    ),
    "lanes: single queries beside bulk work": (
        *("interactive_inputs", "interactive_tokens", "interactive_max_wait", "bulk_max_wait", "bulk_share"),
        "step_cap_ms",
    ),
    "limits": (
        *("max_queue_tokens", "max_client_batch_size", "payload_limit", "body_memory", "answer_limit"),
        *("answer_memory", "max_connections", "max_header_bytes", "max_headers", "keep_alive_timeout"),
        *("header_timeout", "body_timeout", "image_megabytes", "image_megapixels"),
        *("image_url_hosts", "image_url_seconds"),
    ),
    "files and batches": (
        *("batch_dir", "batch_file_limit", "batch_line_limit", "batch_open_limit", "batch_disk_limit"),
    ),
    "logs and traces": (
        *("access_log", "log_inputs", "log_format", "server_timing", "otlp_endpoint", "trace_sample_ratio"),
    ),
}

BUILD_GROUPS: Mapping[str, Sequence[str]] = {
    "what is built": ("out", "target", "precision", "name", "revision", "task"),
    "in place of what the checkpoint says": (
        *("pooling", "normalize", "include_prompt", "default_prompt_name", "tokenizer", "attention", "adapter"),
        *("lora", "images", "max_image_pixels", "texts", "route", "token_embeddings", "document_length"),
    ),
    "rerankers": (
        *("score_tokens", "relevant_label", "rerank_prefix", "rerank_body", "rerank_suffix"),
        "rerank_instruction",
    ),
    "classifiers by tokens": ("score_labels", "classify_prefix", "classify_body", "classify_suffix"),
    "language models that decide": ("decide_body", "decide_option"),
    "limits": ("max_seq_len", "max_num_tokens", "max_batch_size"),
    "NVIDIA GPUs": (
        *("compute_capability", "attention_lowering", "latency_tokens", "latency_sequences"),
        *("hardware_compatible", "strip_weights", "plan_of", "timing_cache"),
    ),
    "quantization (int8, fp8)": (
        *("calibration_data", "calibration_column", "calibration_size", "calibration_length", "calibration_seed"),
        *("calibration_method", "calibrate_with", "calibration_percentile", "fp8_outputs", "max_highprec_layers"),
    ),
    "verification": (
        *("min_cosine", "allow_below_threshold", "reference", "verify", "verify_budget", "verify_retrieval"),
        "keep_reference",
    ),
    "signature (extra: sign)": ("sign", "sign_passphrase_file"),
}

# What a flag takes, where that is no plain text: files by their usual endings, units, and lists.
METAVARS: Mapping[str, str] = {
    "alias": "NAME|NAME=MODEL",
    "api_keys_file": "FILE.yaml",
    "batch_dir": "FOLDER",
    "cache_dir": "FOLDER",
    "cache_max_size": "SIZE",
    "calibration_data": "FILE.txt|jsonl|csv|tsv",
    "compute_capability": "N,N",
    "cors_origins": "URL,URL",
    "devices": "DEVICE,DEVICE",
    "host": "ADDRESS",
    "image_url_hosts": "NAME,NAME",
    "otlp_endpoint": "URL",
    "out": "FOLDER",
    "plan_of": "FOLDER",
    "require_signature": "FILE.pem,...",
    "root_path": "/PREFIX",
    "health_path": "/PATH",
    "predict_path": "/PATH",
    "sign": "FILE.pem",
    "sign_passphrase_file": "FILE",
    "timing_cache": "FILE",
    "tls_cert": "FILE.pem",
    "tls_client_ca": "FILE.pem",
    "tls_key": "FILE.pem",
    "uds": "SOCKET",
    "uds_mode": "MODE",
}

# In place of all flags, which follow below.
USAGES: Mapping[str, str] = {
    "build": "bei build [flags] MODEL",
    "serve": "bei serve [flags] [MODEL ...]",
    "embed": "bei embed [flags] MODEL --input FILES --output FOLDER",
    "tune": "bei tune [flags] [MODEL ...]",
    "run-batch": "bei run-batch [flags] -i FILE.jsonl -o FILE.jsonl [MODEL ...]",
    "doctor": "bei doctor [flags]",
    "simulate": "bei simulate [flags]",
    "bench": "bei bench [flags] URL [URL ...]\n       bei bench compare [flags] A.json B.json",
}

EXAMPLES: Mapping[str, str] = {
    "bei": """examples:
  bei build sentence-transformers/all-MiniLM-L6-v2 --out minilm
  bei serve minilm --port 8000
  bei doctor
'bei COMMAND --help' has the flags and examples of a command.""",
    "build": """examples:
  bei build all-MiniLM-L6-v2              of the installed package, or the hub
  bei build ./checkpoint --precision int8 --out small
  bei build org/reranker --task rerank --score-tokens no,yes
  bei build --config configs/all-minilm-l6-v2.yaml

docs/reference.md says more of each setting.""",
    "serve": """examples:
  bei serve                               all-MiniLM-L6-v2
  bei serve minilm reranker --host 0.0.0.0 --port 8000
  bei serve org/model --precision fp32    built first, kept in --cache-dir
  bei serve minilm --http-workers 4 --log-format json
  bei serve minilm --tls-cert cert.pem --tls-key key.pem
  bei serve minilm --api-keys-file keys.yaml
  bei serve minilm --batch-dir batches    OpenAI's files and batches

Every flag is also a variable (--max-headers: BEI_MAX_HEADERS) and a key of the
file of --config (max_headers: 128). Flags of other servers: docs/clients.md.""",
    "embed": """examples:
  bei embed minilm --input corpus.parquet --output vectors
  bei embed minilm --input s3://bucket/texts --output s3://bucket/vectors
  bei embed minilm --input docs --chunk-tokens 200 --output vectors
  bei embed minilm --input corpus --output vectors --shard 0/4
  bei embed ranker --task rerank --query-column q --input a.csv --output b

The same command again does what is not done yet: docs/bulk.md.""",
    "tune": """examples:
  bei tune minilm
  bei tune minilm --engine-threads 4 --engine-streams 2""",
    "run-batch": """examples:
  bei run-batch -i in.jsonl -o out.jsonl minilm
  bei run-batch -i in.jsonl -o out.jsonl --errors bad.jsonl minilm reranker

A line: {"custom_id": "1", "method": "POST", "url": "/v1/embeddings",
"body": {"input": "a text"}}, in one line. The url is any route of bei serve
that asks a model. The same command goes on where a former run has ended. Exit
code 0: every line has an answer; 1: some have errors; 2: it could not run.""",
    "calibrate": """examples:
  bei calibrate classifier --data labelled.jsonl
  bei calibrate nli --data labelled.jsonl --question question.json

A line: {"text": "a text", "label": "one of the model's, or of the options"}.
Half of the texts are left out of the fit, and are what the figures are of.""",
    "inspect": """examples:
  bei inspect minilm
  bei inspect all-MiniLM-L6-v2            what bei serve has built
  bei inspect minilm --certificate --json""",
    "sign": """examples:
  openssl genpkey -algorithm ed25519 -out release.pem
  openssl pkey -in release.pem -pubout -out release.pub
  bei sign minilm --key release.pem
  bei serve minilm --require-signature release.pub""",
    "doctor": """examples:
  bei doctor
  bei doctor --target cpu --no-attention  exit code 1 if it does not work""",
    "cache": """examples:
  bei cache list
  bei cache prune --older-than 30d --dry-run""",
    "completion": """examples:
  bei completion bash > ~/.local/share/bash-completion/completions/bei
  bei completion zsh > _bei               in a folder of $fpath
  bei completion fish > ~/.config/fish/completions/bei.fish""",
}
