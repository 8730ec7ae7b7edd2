"""Memory and time of building and serving a model of a billion parameters or more, phase by phase.

    python -m benchmarks.large [--shape 1b 3b] [--before CHECKOUT] [-- FLAGS OF bei build]

Makes a random Llama-shaped checkpoint in BF16, builds it and serves it, each in a process of its own whose memory is
read 50 times a second. Anonymous memory stands apart from mapped files: the system can drop those and read them again.
``--before`` does the same with another checkout, as "NAME before". What was not measured stays in the results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import psutil

from benchmarks.common import RESULTS, mixed_lengths, random_texts, write
from benchmarks.models import minilm_folder
from benchmarks.server import ROOT, environment, revision, serving, tied, wait_ready

_SAMPLES_A_SECOND = 50
_FIELDS = {"VmRSS": "rss_mb", "RssAnon": "anonymous_mb", "RssFile": "files_mb"}
_LONGEST = 512
_SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes; the vocabulary is that of MiniLM's tokenizer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int = 30_522

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, in the order they are stored."""
        yield "embed_tokens.weight", (self.vocab, self.hidden)
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for index in range(self.layers):
            name = f"layers.{index}."
            yield f"{name}input_layernorm.weight", (self.hidden,)
            for part, rows in (("q", query), ("k", key), ("v", key)):
                yield f"{name}self_attn.{part}_proj.weight", (rows, self.hidden)
            yield f"{name}self_attn.o_proj.weight", (self.hidden, query)
            yield f"{name}post_attention_layernorm.weight", (self.hidden,)
            for part in ("gate", "up"):
                yield f"{name}mlp.{part}_proj.weight", (self.inner, self.hidden)
            yield f"{name}mlp.down_proj.weight", (self.hidden, self.inner)
        yield "norm.weight", (self.hidden,)

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaModel"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "torch_dtype": "bfloat16",
        }


# Those of Llama 3.2's models of 1 and 3 billion parameters, but for the vocabulary.
SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 16, 128),
    "1b": Shape(2048, 16, 32, 8, 64, 8192),
    "3b": Shape(3072, 28, 24, 8, 128, 8192),
}


def main() -> None:
    """Measure and write ``results/large.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1b"])
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--only-before", action="store_true", help="leave this checkout out, where it was measured")
    parser.add_argument("--scratch", type=Path, help="folder with room for three times the checkpoint")
    parser.add_argument("--texts", type=int, default=64, help="of mixed lengths, to ask the server one by one")
    parser.add_argument("--label", default="", help="what stands behind the shape's name in the results")
    parser.add_argument("flags", nargs="*", help="of bei build, behind --")
    options = parser.parse_args()
    checkouts = {} if options.only_before else {options.label: ROOT}
    if options.before is not None:
        checkouts["before"] = options.before.resolve()
    for shape in options.shape:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            checkpoint = save_checkpoint(SHAPES[shape], Path(scratch) / shape)
            for label, checkout in checkouts.items():
                found = measured(checkpoint, checkout, Path(scratch), options.flags, options.texts)
                _keep(f"{shape} {label}".strip(), found)


def save_checkpoint(shape: Shape, folder: Path) -> Path:
    """A random checkpoint in BF16, written tensor by tensor: shards of safetensors, always the same."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config))
    (folder / "tokenizer.json").write_bytes((minilm_folder() / "tokenizer.json").read_bytes())
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, dims in shape.tensors():
        size += 2 * int(np.prod(dims))
        if size > _SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 2 * int(np.prod(dims))
        shards[-1].append((name, dims))
    rng = np.random.default_rng(0)
    owners: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, tensors, rng)
        owners.update({name: file for name, _ in tensors})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": owners}))
    return folder


def _write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], rng: np.random.Generator) -> None:
    header, start = {}, 0
    for name, dims in tensors:
        end = start + 2 * int(np.prod(dims))
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, dims in tensors:
            values = rng.standard_normal(dims, np.float32)
            values = 1 + 0.02 * values if len(dims) == 1 else 0.02 * values
            file.write(values.astype(ml_dtypes.bfloat16).tobytes())


def measured(checkpoint: Path, checkout: Path, scratch: Path, flags: list[str], num_texts: int) -> dict[str, Any]:
    """Build and serve with the bei of ``checkout``: seconds and peak memory of each phase."""
    sizes: dict[str, Any] = {"revision": revision(checkout), "flags of build": flags, "checkpoint_mb": _mb(checkpoint)}
    artifact = scratch / "artifact"
    build = _build(checkpoint, artifact, checkout, flags)
    sizes["build"] = build
    if build["exit code"]:
        return sizes
    sizes["artifact_mb"] = _mb(artifact)
    certificate = json.loads((artifact / "certificate.json").read_bytes())
    sizes["certificate"] = {
        name: certificate.get(name) for name in ("kind", "reference", "num_texts", "num_held_out_texts", "passed")
    }
    sizes["cosines"] = {row["output"]: [row["cosine_mean"], row["cosine_min"]] for row in certificate["outputs"]}
    sizes["serve"] = _serve(artifact, checkout, num_texts)
    return sizes


def _build(checkpoint: Path, out: Path, checkout: Path, flags: list[str]) -> dict[str, Any]:
    """``bei build`` in a process; a phase ends where it prints that it has."""
    command = [sys.executable, "-m", "bei", "build", str(checkpoint), f"--out={out}", f"--max-seq-len={_LONGEST}"]
    command += ["--precision=bf16", "--allow-below-threshold", *flags]
    started = time.monotonic()
    process = subprocess.Popen(
        tied(command), stderr=subprocess.PIPE, text=True, cwd=checkout, env=environment(checkout, None, {})
    )
    lines = []
    with sampling_memory(process.pid) as memory:
        assert process.stderr is not None
        for line in process.stderr:
            print(line.rstrip(), flush=True)
            lines.append(line.strip())
            name = line.strip().split("  ")[0]
            if line.startswith("  ") and not name.startswith("note:"):
                memory.end_phase(name)
        code = process.wait()
    return {
        "exit code": code,
        "seconds": round(time.monotonic() - started, 1),
        "peak": memory.peak(),
        "phases": memory.phases,
        **({"output": lines[-5:]} if code else {}),
    }


def _serve(artifact: Path, checkout: Path, num_texts: int) -> dict[str, Any]:
    """``bei serve``: until it is ready, until its first answer, and over texts of mixed lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(artifact / "tokenizer.json"))
    texts = random_texts(tokenizer, mixed_lengths(num_texts, _LONGEST))
    with serving(artifact, "--tune", "off", checkout=checkout, wait=False) as (port, process):
        with sampling_memory(process.pid) as memory:
            wait_ready(port, process)
            memory.end_phase("start, canary")
            ask(port, texts[0])
            memory.end_phase("first answer")
            for text in texts:
                ask(port, text)
            memory.end_phase(f"{num_texts} texts of mixed lengths")
            time.sleep(3.0)
            memory.end_phase("idle")
        return {"peak": memory.peak(), "phases": memory.phases}


def ask(port: int, text: str) -> None:
    """One embedding."""
    body = json.dumps({"input": text}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/embeddings", body, timeout=120) as answer:
        answer.read()


class Memory:
    """What a process holds: the peaks of each phase, what it held at the phase's end, and its seconds."""

    def __init__(self, pid: int) -> None:
        self.phases: dict[str, dict[str, Any]] = {}
        self._pid = pid
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._peaks: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._overall: dict[str, float] = {}

    def sample(self) -> bool:
        """Read the process's memory once; False when it has ended."""
        try:
            text = Path(f"/proc/{self._pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if "VmRSS" not in rows:  # a zombie
            return False
        with self._lock:
            self._last = {ours: round(int(rows[name].split()[0]) * 1024 / 1e6, 1) for name, ours in _FIELDS.items()}
            for peaks in (self._peaks, self._overall):
                for name, value in self._last.items():
                    peaks[name] = max(value, peaks.get(name, 0.0))
        return True

    def end_phase(self, name: str) -> None:
        """What was sampled since the last phase was ``name``."""
        self.sample()
        with self._lock:
            now = time.monotonic()
            self.phases[name] = {"seconds": round(now - self._started, 1), "peak": self._peaks, "at end": self._last}
            self._started, self._peaks = now, {}

    def peak(self) -> dict[str, float]:
        """The peaks of all phases. They need not have been at one time."""
        return dict(self._overall)


@contextmanager
def sampling_memory(pid: int) -> Iterator[Memory]:
    """The memory of the process ``pid``, sampled in a thread until the end of the block."""
    memory, stop = Memory(pid), threading.Event()

    def sample() -> None:
        while memory.sample() and not stop.wait(1 / _SAMPLES_A_SECOND):
            pass

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        stop.set()
        thread.join()


def _mb(folder: Path) -> float:
    return round(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6, 1)


def _keep(name: str, found: dict[str, Any]) -> None:
    """Write ``found`` beside what other runs have left in the results."""
    file = RESULTS / "large.json"
    results = json.loads(file.read_bytes())["results"] if file.is_file() else {}
    found["memory available, MB"] = round(psutil.virtual_memory().available / 1e6)
    write("large", {**results, name: found})


if __name__ == "__main__":
    main()
