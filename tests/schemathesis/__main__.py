"""Schemathesis against a server's own /openapi.json: ``python -m tests.schemathesis --minutes 20``.

The server is a process of its own with a tiny random model of every kind. What schemathesis sends is made from the
page: bodies that the page allows, and bodies that it does not. Four fifths of the time go to *conformance*: on every
route, whatever the server answers to good and bad requests must be as the page says. The rest goes to *acceptance*:
what the page allows must be answered with 200. That holds for the fields of which a schema can say all; the page is
narrowed to those (``_narrowed``), since others depend on the model, on each other, or on the text's length.

Each path gets the same time in a run of its own, so that all are reached. Exit code 1 where something was found, or a
path was not asked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.e2e.kinds import MODELS, case, labels
from tests.e2e.process import DEADLINE_S, environment, serve
from tests.schemathesis.models import MODELS_VARIABLE
from tests.support.builds import build_artifact
from tests.support.gliner_models import save_gliner
from tests.support.zoo import save_case

_CONFORMANCE = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ensure_resource_availability",
)
# Left out everywhere: ignored_auth and object_level_authorization (the server has no keys), missing_required_header (no
# header is required). What is made and deleted: use_after_free and ensure_resource_availability, in the stateful phase.
_ACCEPTANCE = (*(check for check in _CONFORMANCE if "negative" not in check), "positive_data_acceptance")

# So many files and batches each. Schemathesis deletes them: then their routes are 404, as the page says.
_STORED = 10
# Of a batch: so many that some wait when they are cancelled.
_LINES = 3_000
_CONFIG = "schemathesis.toml"

_OF_STORED = ("/v1/files", "/v1/batches")

# An answer that takes longer is a hang: the slowest request of a tiny model takes a tenth of a second.
_HANG_S = 20

# A deadline ends most requests before the engine: one route of each form of errors has these headers, as all share the
# code that reads them.
_DEADLINES = ("Request-Timeout-Ms", "Request-Deadline-Ms", "X-Request-Timeout")
_WITH_DEADLINES = ("/v1/embeddings", "/tei/embed")
# With this header an input that the page refuses costs the others nothing: the answer is 200, and its report refuses
# it. So only good requests have it.
_REPORT = "X-Bei-Report"

# Fields that are refused for what a schema cannot say: they depend on the model, or contradict each other or a header.
_DEPENDENT = {
    *("model", "prompt_name", "input_type", "task", "instruction", "instruct", "late_chunking", "rank_fields"),
    *("dimensions", "output_dimension", "normalize", "normalized", "use_activation", "add_special_tokens"),
    *("encoding_format", "output_dtype", "embedding_type", "embedding_types", "encoding_type", "embed_dtype", "prompt"),
    *("truncate", "truncation", "truncation_direction", "truncation_side", "truncate_prompt_tokens"),
    *("max_tokens", "max_tokens_per_doc", "max_doc_length", "service_tier", "modality", "lora_path"),
    *("images", "image", "image_url", "image_base64", "url", "bytes"),  # no model here reads images
    *("threshold", "label", "score_mode", "score_weights"),  # they name labels and what the model can do
    "options",  # Ollama's: num_ctx must leave room for a token
}
# Routes whose inputs are such: ids of the model's vocabulary, lists of equal lengths, a body for each kind of model,
# labels for a model of natural language inference, tensors of a shape, files and routes that there are; or that need a
# model's name where several are served.
_DEPENDENT_ROUTES = (
    *("decode", "detokenize", "score", "invocations", "vertex", "v1/classify", "tokenize", "pooling"),
    *("infer", "v1/batches", "api/show", "api/pull", "models/{name}", "pipeline/{task}", "retrieval/{model}"),
    "contextualizedembeddings",  # all chunks together are limited
    *("v1/decisions", "v1/systemone"),  # a question's type says what it must have
)


# Labels of a request are for models of natural language inference.
SERVED = {**MODELS, "classifier": case("BertForSequenceClassification", **labels("contradiction", "entailment"))}
SPANS = "spans"  # GLiNER's
NAMES = [*SERVED, SPANS]


class Stored(NamedTuple):
    """The ids of files and batches that the server has when the run begins."""

    files: list[str]
    batches: list[str]


def main() -> int:
    """Build, serve, and run both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of sending requests, for both parts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a part of the paths to test")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        artifacts = list(_built(folder))
        flags = ["--max-client-batch-size", "16", "--payload-limit", "200000", "--batch-dir", folder / "batches"]
        with serve([*artifacts, *flags], environment(folder), folder) as server:
            (folder / _CONFIG).write_text(_config(_stored(server.url)))
            page = _closed(httpx.get(f"{server.url}/openapi.json", timeout=DEADLINE_S).raise_for_status().json())
            if arguments.only:
                page["paths"] = {path: item for path, item in page["paths"].items() if arguments.only in path}
            seconds = arguments.minutes * 60
            conformance, acceptance = _without_exceptions(page), _narrowed(page)
            found = [
                *_run(folder, conformance, server.url, _CONFORMANCE, "all", seconds * 0.8, arguments.seed),
                *_run(folder, acceptance, server.url, _ACCEPTANCE, "positive", seconds * 0.2, arguments.seed),
            ]
            assert server.get_status("/ready") == 200
            metrics = httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
            errors = [line for line in server.log if "unexpected error" in line or "Traceback" in line]
    print("\n".join([*errors, *_statuses(metrics)]))  # noqa: T201
    return int(any(found) or bool(errors))


def _statuses(metrics: str) -> Iterator[str]:
    """How often each status was answered, and which routes never answered 200."""
    pattern = r'^bei_requests_total{route="([^"]*)",status="(\d+)"} (\S+)'
    found = [(route, status, float(count)) for route, status, count in re.findall(pattern, metrics, re.M)]
    totals = {status: sum(count for _, one, count in found if one == status) for _, status, _ in found}
    yield "Answers by status: " + ", ".join(f"{status}: {totals[status]:.0f}" for status in sorted(totals))
    missing = {route for route, *_ in found} - {route for route, status, _ in found if status == "200"}
    yield "Never answered 200: " + (", ".join(sorted(missing)) or "none")


def _built(folder: Path) -> Iterator[Path]:
    for name in NAMES:
        checkpoint = folder / f"{name}-checkpoint"
        if name == SPANS:
            save_gliner(checkpoint)
        else:
            save_case(checkpoint, SERVED[name])
        tokens: dict[str, Any] = {"token_embeddings": True} if name == "embedder" else {}
        yield build_artifact(checkpoint, folder / name, name=name, reference="engine", **tokens).path


def _groups(page: Mapping[str, Any]) -> Iterator[list[str]]:
    """Paths that are tested together: those of files and batches, whose ids stand in others' answers, or one."""
    together = [path for path in page["paths"] if path.startswith(_OF_STORED)]
    yield from ([path] for path in page["paths"] if path not in together)
    yield from [together] if together else []


def _run(
    folder: Path, page: dict[str, Any], url: str, checks: Sequence[str], mode: str, seconds: float, seed: int
) -> Iterator[bool]:
    """A run of schemathesis for each group of paths, with its part of the ``seconds``: True where it found something or
    left an operation out, and its output is printed."""
    for group in _groups(page):
        file = folder / "page.json"
        file.write_text(json.dumps({**page, "paths": {path: page["paths"][path] for path in group}}))
        most_s = max(1, round(seconds * len(group) / len(page["paths"])))
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", folder / _CONFIG, "run", file, "--url", url),
            *("--checks", ",".join(checks), "--mode", mode, "--max-time", str(most_s)),
            *("--request-timeout", str(_HANG_S), "--seed", str(seed), "--generation-database", "none", "--no-color"),
            *("--phases", "coverage,fuzzing,stateful", "--suppress-health-check", "all", "--continue-on-failure"),
        ]
        env = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.schemathesis.hooks", MODELS_VARIABLE: json.dumps(NAMES)}
        done = subprocess.run([str(part) for part in command], env=env, check=False, capture_output=True, text=True)
        tested = re.search(r"Selected: (\d+)/.*\n +Tested: \1\n(?:.*\n)*? +(\d+) generated", done.stdout)
        is_bad = done.returncode != 0 or tested is None
        print(f"{', '.join(group)}: {mode}, {tested[2] if tested else 'not all'} tested", flush=True)  # noqa: T201
        if is_bad:
            print(done.stdout, done.stderr, flush=True)  # noqa: T201
        yield is_bad


def _config(stored: Stored) -> str:
    """A deadline that has passed is no failure; a path that names a model, a file or a batch names one that there is
    or was."""
    lines = ["[checks.not_a_server_error]", 'expected-statuses = ["2xx", "3xx", "4xx", "504"]']
    lines += ["[checks.negative_data_rejection]", 'expected-statuses = ["4xx", "5xx"]']  # 424: TEI's, of another model
    known = {"models": NAMES, "files": stored.files, "batches": stored.batches}
    for name, values in known.items():
        lines += [f"[dictionaries.{name}]", f"values = {json.dumps(values)}"]
    lines.append("[parameters]")
    for parameter, name in (("name", "models"), ("model", "models"), ("file_id", "files"), ("batch_id", "batches")):
        lines.append(f'"path.{parameter}" = {{ dictionary = "{name}", probability = 0.9 }}')
    return "\n".join(lines)


def _stored(url: str) -> Stored:
    """Files and batches, which requests read, cancel and delete in any order."""
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}} for n in range(_LINES)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        files = [
            client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).json()["id"]
            for _ in range(_STORED)
        ]
        asked = {"endpoint": "/v1/embeddings", "completion_window": "24h"}
        batches = [client.post("/v1/batches", json={**asked, "input_file_id": file}).json()["id"] for file in files]
    return Stored(files, batches)


def _closed(page: dict[str, Any]) -> dict[str, Any]:
    """``page``, in which answers have no other fields than those it names. To clients it does not promise that.

    But for answers with a report, which have the fields of the answer beside it.
    """
    asked = set(_references([one.get("requestBody") for item in page["paths"].values() for one in item.values()], page))
    for name, schema in page["components"]["schemas"].items():
        if name not in (*asked, "Reported") and "properties" in schema:
            schema["additionalProperties"] = False
    return page


def _references(node: Any, page: dict[str, Any]) -> Iterator[str]:
    """The names of all schemas that ``node`` refers to."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            name = node["$ref"].rpartition("/")[2]
            yield name
            yield from _references(page["components"]["schemas"].get(name), page)
        for value in node.values():
            yield from _references(value, page)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value, page)


def _without_exceptions(page: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``page`` without the header that forgives wrong inputs and, but for a few routes, without those that
    make most answers a 504."""
    found = _with_operations(
        page, lambda path, name: name != _REPORT and (path in _WITH_DEADLINES or name not in _DEADLINES)
    )
    for schema in found["components"]["schemas"].values():
        if "allOf" in schema:  # with this limit too there are more alternatives than schemathesis takes
            schema["allOf"] = [limit for limit in schema["allOf"] if "rank_fields" not in json.dumps(limit)]
    return found


def _narrowed(page: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``page`` that allows only what a server with these models answers with 200."""
    narrow = _with_operations(page, lambda _, name: name not in _DEADLINES)
    narrow["paths"] = {
        path: {"post": item["post"]}
        for path, item in narrow["paths"].items()
        if "post" in item and path.strip("/") not in ("", "tei") and not any(part in path for part in _DEPENDENT_ROUTES)
    }
    narrowed: dict[str, Any] = _independent(narrow)
    return narrowed


def _independent(node: Any) -> Any:
    """``node`` without dependent fields that may be left out, and without alternatives in which one must be there."""
    if isinstance(node, list):
        return [_independent(one) for one in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _independent(value) for key, value in node.items()}
    if isinstance(kept.get("properties"), dict):
        dropped = _DEPENDENT - set(kept.get("required", ()))
        kept["properties"] = {field: schema for field, schema in kept["properties"].items() if field not in dropped}
    for word in {"anyOf", "oneOf"} & kept.keys():
        alternatives = [one for one in kept[word] if not _DEPENDENT & set(one.get("required", ()))]
        kept[word] = alternatives or kept[word]
    return kept


def _with_operations(page: dict[str, Any], is_kept: Callable[[str, str], bool]) -> dict[str, Any]:
    """A copy of ``page`` with those parameters for which ``is_kept(path, name)``."""
    copy: dict[str, Any] = json.loads(json.dumps(page))
    for path, item in copy["paths"].items():
        for operation in item.values():
            operation["parameters"] = [
                one for one in operation.get("parameters", []) if is_kept(path, str(one.get("$ref")).rpartition("/")[2])
            ]
    return copy


if __name__ == "__main__":
    sys.exit(main())
