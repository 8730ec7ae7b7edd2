"""A library that embeds or reranks, as a process of its own. It runs in the peer's environment: only the standard
library and the peer's packages are there.

It reads a JSON object a line from stdin and answers a line each. The first says what to load; then
``{"do": "embed", "calls": [[text, ...], ...]}`` and ``{"do": "rerank", "calls": [[query, [document, ...]], ...]}`` are
timed, each call by itself, and ``{"do": "vectors" | "scores", ...}`` gives what is computed, for the check of quality.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Embed = Callable[[Sequence[str]], Any]  # float [n, width]
Rerank = Callable[[str, Sequence[str]], Any]  # a score a document, in their order
Loaded = tuple[Embed, Rerank]


def main() -> None:
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    embed, rerank = LOADERS[(task := json.loads(sys.stdin.readline()))["library"]](task)
    print(json.dumps({"loaded": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        found: dict[str, Any]
        if asked["do"] == "vectors":
            found = {"vectors": [[float(value) for value in row] for row in embed(asked["texts"])]}
        elif asked["do"] == "scores":
            found = {"scores": [float(score) for score in rerank(asked["query"], asked["documents"])]}
        else:
            call: Callable[[Any], Any] = embed if asked["do"] == "embed" else lambda pair: rerank(*pair)
            found = timed(call, asked["calls"], asked.get("most_s"))
        print(json.dumps(found), file=answers, flush=True)


def timed(call: Callable[[Any], Any], calls: Sequence[Any], most_s: float | None) -> dict[str, Any]:
    """``most_s``: no call begins after so many seconds."""
    latencies, started = list[float](), time.perf_counter()
    for each in calls:
        before = time.perf_counter()
        if most_s is not None and before - started >= most_s:
            break
        call(each)
        latencies.append(time.perf_counter() - before)
    return {"latencies_s": latencies, "elapsed_s": time.perf_counter() - started}


def bei_model(task: dict[str, Any]) -> Loaded:
    from bei import Model

    model = Model(task["folder"])

    def rerank(query: str, documents: Sequence[str]) -> list[float]:
        scores = [0.0] * len(documents)
        for rank in model.rerank(query, documents):
            scores[rank.index] = rank.score
        return scores

    return model.embed, rerank


def sentence_transformers(task: dict[str, Any]) -> Loaded:
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer

    backend, prepared = task.get("backend", "torch"), Path(task["prepared"])
    settings: dict[str, Any] = {"device": "cpu", "backend": backend}
    folder, options = task["folder"], dict[str, Any]()
    if backend == "torch":
        options["torch_dtype"] = {"fp32": torch.float32, "bf16": torch.bfloat16}[task["precision"]]
    else:
        kind = CrossEncoder if task["task"] == "rerank" else SentenceTransformer
        folder, options = (
            _exported(kind, task, prepared),
            {"file_name": task["file"], "provider": "CPUExecutionProvider"},
        )
        if backend == "openvino":
            del options["provider"]
            if task["precision"] == "fp32":
                options["ov_config"] = {"INFERENCE_PRECISION_HINT": "f32"}
    if task["task"] == "rerank":
        encoder = CrossEncoder(str(folder), model_kwargs=options, **settings)
        return _refused, lambda query, documents: encoder.predict([(query, each) for each in documents])
    model = SentenceTransformer(str(folder), model_kwargs=options, **settings)
    model.max_seq_length = task["max_tokens"]
    return lambda texts: model.encode(texts, normalize_embeddings=True), _refused


def _exported(kind: Any, task: dict[str, Any], prepared: Path) -> Path:
    """The model's files for ONNX Runtime or OpenVINO, exported and quantized once, as the library's documents say."""
    done = prepared / "done"
    if done.is_file():
        return prepared
    backend = task["backend"]
    model = kind(task["folder"], device="cpu", backend=backend, model_kwargs={"export": True})
    model.save_pretrained(str(prepared))
    if task["precision"] == "int8" and backend == "onnx":
        from sentence_transformers.backend import export_dynamic_quantized_onnx_model

        export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(prepared))
    elif task["precision"] == "int8":
        _quantize_statically(model, prepared, task["calibration"])
    done.touch()
    return prepared


def _quantize_statically(model: Any, prepared: Path, texts: Sequence[str]) -> None:
    """What ``export_static_quantized_openvino_model`` does, by NNCF and with texts that are here: its own calibration
    set comes from the hub."""
    import nncf
    import openvino

    found = openvino.Core().read_model(prepared / "openvino" / "openvino_model.xml")
    names = {each.any_name for each in found.inputs}

    def tokens(text: str) -> dict[str, Any]:
        encoded = model.tokenizer(text, truncation=True, max_length=256, return_tensors="np")
        return {name: value for name, value in encoded.items() if name in names}

    dataset = nncf.Dataset([tokens(text) for text in texts])
    quantized = nncf.quantize(found, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(texts))
    openvino.save_model(quantized, prepared / "openvino" / "openvino_model_static_int8.xml", compress_to_fp16=False)


def ctranslate2(task: dict[str, Any]) -> Loaded:
    """Mean pooling and unit length by numpy: the library has no pooling."""
    import ctranslate2 as library
    import numpy as np
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer

    folder, prepared = Path(task["folder"]), Path(task["prepared"])
    if not (prepared / "model.bin").is_file():
        TransformersConverter(str(folder)).convert(str(prepared), force=True)
    kind = {"fp32": "float32", "int8": "int8_float32"}[task["precision"]]
    encoder = library.Encoder(str(prepared), device="cpu", compute_type=kind, intra_threads=task["threads"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(task["max_tokens"])
    tokenizer.no_padding()

    def some(texts: Sequence[str]) -> Any:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        states = np.asarray(encoder.forward_batch(ids).last_hidden_state)
        vectors = np.stack([rows[: len(each)].mean(axis=0) for rows, each in zip(states, ids, strict=True)])
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def embed(texts: Sequence[str]) -> Any:
        return np.concatenate([some(texts[start : start + 32]) for start in range(0, len(texts), 32)])

    return embed, _refused


def _refused(*_: Any) -> Any:
    raise SystemExit("the model does not do that")


LOADERS: dict[str, Callable[[dict[str, Any]], Loaded]] = {
    "bei": bei_model,
    "sentence-transformers": sentence_transformers,
    "ctranslate2": ctranslate2,
}

if __name__ == "__main__":
    main()
