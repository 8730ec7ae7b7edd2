"""All targets, and how much of the inputs each gets: readers that take long, or that a library checks, get fewer."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.trial import MakeTrial, Trial


class Target(NamedTuple):
    """``function`` of ``module`` makes its trial. ``share``: thousandths of the inputs, about."""

    module: str
    function: str
    share: int

    def make(self, folder: Path) -> Trial:
        """The trial, which may write into ``folder``."""
        make: MakeTrial = getattr(import_module(f"tests.fuzz.{self.module}"), self.function)
        return make(folder)


TARGETS = {
    "bodies": Target("requests", "bodies", 390),
    "systemone questions": Target("questions", "systemone_questions", 15),
    "decisions questions": Target("questions", "decisions_questions", 15),
    "questions in Python": Target("questions", "python_questions", 10),
    "headers": Target("requests", "headers", 80),
    "manifest": Target("artifacts", "manifest", 70),
    "certificate": Target("artifacts", "certificate", 15),
    "artifact tokenizer": Target("artifacts", "tokenizer", 20),
    "token weights": Target("artifacts", "token_weights", 30),
    "int8": Target("artifacts", "int8", 20),
    "signature": Target("artifacts", "signature", 30),
    "reference answers": Target("artifacts", "reference_answers", 20),
    "artifact files": Target("artifacts", "files", 20),
    "cost cache": Target("artifacts", "cost_cache", 30),
    "settings": Target("settings", "settings", 30),
    "variables": Target("settings", "variables", 20),
    "API keys": Target("settings", "api_keys", 20),
    "trusted keys": Target("settings", "trusted", 20),
    "signing key": Target("settings", "signing_key", 10),
    "TLS": Target("settings", "tls", 10),
    "results and tables": Target("settings", "results", 20),
    "config.json": Target("checkpoints", "config", 30),
    "gliner_config.json": Target("checkpoints", "gliner", 20),
    "glirel_config.json": Target("checkpoints", "glirel", 10),
    "GLiNER2's config.json": Target("checkpoints", "gliner2", 20),
    "sentence-transformers": Target("checkpoints", "sentence_transformers", 40),
    "safetensors": Target("checkpoints", "safetensors", 60),
    "shards": Target("checkpoints", "shards", 20),
    "GGUF": Target("gguf_files", "gguf_file", 20),
    "GGUF metadata": Target("gguf_files", "metadata", 20),
    "GGUF checkpoint": Target("gguf_files", "checkpoint", 3),
    "packed matrices": Target("packed", "packed", 10),
    "pytorch_model.bin": Target("checkpoints", "pickles", 10),
    "tokenizer.json": Target("checkpoints", "tokenizer_json", 40),
    "tokenizer settings": Target("checkpoints", "tokenizer_settings", 10),
    "sentencepiece": Target("checkpoints", "sentencepiece_model", 5),
    "whole checkpoint": Target("checkpoints", "whole", 5),
}
