"""The order of the measurements: what decides first within two minutes, then groups that take eight minutes at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

QUERY, LONG, MIXED, PAGES = "one query of 32 tokens", "512 tokens", "16 to 512 tokens", "mixed lengths"
DECIDE, EAGER, KERNELS, BUILD = "decide", "eager", "kernels", "build"

# Shape, batch, way to run it, estimated seconds, by group (``--only``). Ceilings are in the first two, kernels in a
# group of their own. "engine ..." and "over HTTP" need packages; of a shape's engines the first compiles it.
WAYS: Mapping[str, Sequence[tuple[str, str, str, float]]] = {
    DECIDE: (
        ("mistral-7b", LONG, "eager", 30),
        ("mistral-7b FP8", LONG, "eager", 40),
        ("minilm", QUERY, "engine", 40),
    ),
    EAGER: (
        ("bert-large", LONG, "eager", 15),
        ("bert-base", LONG, "eager", 8),
        ("mistral-7b", QUERY, "graph", 8),
        ("mistral-7b FP8", QUERY, "graph", 8),
        ("bert-large", QUERY, "graph", 8),
        ("minilm", QUERY, "graph", 5),
        ("bge-m3", PAGES, "eager", 20),
        ("bert-base", MIXED, "eager", 8),
        ("bert-large", MIXED, "eager", 12),
        ("mistral-7b", MIXED, "eager", 30),
        ("bert-large FP8", LONG, "eager", 15),
    ),
    KERNELS: (),
    "engines of BERT": (
        ("bert-base", LONG, "engine", 120),
        ("bert-base", QUERY, "engine", 5),
        ("bert-base", MIXED, "engine", 5),
        ("bert-large", LONG, "engine", 150),
        ("bert-large", QUERY, "engine", 5),
        ("bert-large", MIXED, "engine", 5),
        ("bert-large", QUERY, "engine, spinning", 5),
        ("minilm", LONG, "engine", 60),
        ("minilm", MIXED, "engine", 5),
        ("minilm", QUERY, "engine, spinning", 5),
    ),
    "engine of mistral-7b FP8": (
        ("mistral-7b FP8", LONG, "engine", 300),
        ("mistral-7b FP8", QUERY, "engine", 5),
    ),
    "engine of mistral-7b": (
        ("mistral-7b", LONG, "engine", 300),
        ("mistral-7b", QUERY, "engine", 5),
        ("mistral-7b", MIXED, "engine", 5),
    ),
    "engine of bge-m3": (
        ("bge-m3", PAGES, "engine", 150),
        ("bge-m3", LONG, "engine", 5),
    ),
    "peers": (
        ("bert-base", LONG, "transformers, sdpa", 20),
        ("bert-large", LONG, "transformers, sdpa", 10),
        ("bert-large", LONG, "transformers, flash_attention_2", 10),
        ("bge-m3", PAGES, "transformers, sdpa", 15),
        ("bge-m3", PAGES, "transformers, flash_attention_2", 15),
        ("bge-m3", PAGES, "transformers, sdpa, compiled", 120),
        ("bge-m3", PAGES, "transformers, flash_attention_2, compiled", 120),
        ("bert-base", LONG, "transformers, sdpa, compiled", 60),
    ),
    "compiled": (
        ("bert-base", LONG, "compiled", 40),
        ("bert-large", LONG, "compiled", 70),
        ("mistral-7b", LONG, "compiled", 120),
        ("mistral-7b FP8", LONG, "compiled", 120),
        ("bert-large FP8", LONG, "compiled", 70),
    ),
    "tuned": (("bert-large", LONG, "compiled, tuned", 300),),
    BUILD: (("bert-base", MIXED, "over HTTP", 300),),
}
