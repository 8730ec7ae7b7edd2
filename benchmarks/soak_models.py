"""What the soak serves: random tiny models, one a task, or real ones that were fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.models import minilm_folder
from tests.real.models import cache_dir
from tests.support.builds import build_artifact
from tests.support.zoo import CASES, Case, save_case

# Tasks of bei, as the traffic asks for them.
EMBED, EMBED_TOKENS, EMBED_SPARSE = "embed", "embed_tokens", "embed_sparse"
RERANK, CLASSIFY, CLASSIFY_TOKENS = "rerank", "classify", "classify_tokens"

# Architecture and settings of BERT's case in the zoo; settings of the build.
_TINY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    EMBED: ("BertModel", {}, {"token_embeddings": True}),
    EMBED_SPARSE: ("BertForMaskedLM", {}, {}),
    RERANK: ("BertForSequenceClassification", {"num_labels": 1}, {}),
    CLASSIFY: ("BertForSequenceClassification", {"num_labels": 3}, {}),
    CLASSIFY_TOKENS: ("BertForTokenClassification", {"num_labels": 5}, {}),
}
_REAL = {RERANK: "ms-marco-reranker", CLASSIFY: "toxicity"}  # beside MiniLM

TINY_LIMIT = 48  # tokens of a sequence, of tiny models


def tiny_models(scratch: Path) -> tuple[list[Path], dict[str, str]]:
    """Artifacts of five random models, and by task which of them does it."""
    plain = next(case for case in CASES if case.architecture == "BertModel")
    artifacts, names = [], {}
    for task, (architecture, config, settings) in _TINY.items():
        folder = save_case(scratch / f"checkpoint-{task}", Case("BERT", architecture, {**plain.settings, **config}))
        settings = {"name": f"tiny-{task}", "reference": "engine", **settings}
        artifacts.append(build_artifact(folder, scratch / f"tiny-{task}", **settings).path)
        names[task] = f"tiny-{task}"
    return artifacts, {**names, EMBED_TOKENS: names[EMBED]}


def real_models(scratch: Path) -> tuple[list[Path], dict[str, str]]:
    """Artifacts of MiniLM, a reranker and a classifier; ends the program if one is not fetched."""
    folders = {EMBED: minilm_folder(), **{task: cache_dir() / name for task, name in _REAL.items()}}
    for task, name in _REAL.items():
        if not folders[task].is_dir():
            raise SystemExit(f"{folders[task]} is not there: python -m tests.real.fetch {name}")
    artifacts, names = list[Path](), dict[str, str]()
    settings: dict[str, Any]
    for task, folder in folders.items():
        settings = {"name": f"real-{task}", "precision": "auto", "token_embeddings": task == EMBED}
        artifacts.append(build_artifact(folder, scratch / f"real-{task}", reference="engine", **settings).path)
        names[task] = f"real-{task}"
    return artifacts, {**names, EMBED_TOKENS: names[EMBED]}
