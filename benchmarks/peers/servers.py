"""How each server is started with a model, and where it answers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bei.utils.cpu_count import usable_cores
from benchmarks.peers.data import Model, Peer, cache_folder, environment_folder

_NAME = "measured"


@dataclass(frozen=True)
class Served:
    """``model``: its name in requests. ``embed`` and ``rerank``: paths. ``fields``: of every request, beside those that
    all peers get."""

    command: Sequence[object]
    model: str = _NAME
    embed: str = "/v1/embeddings"
    rerank: str = "/rerank"
    ready: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, object] = field(default_factory=dict)


Start = Callable[[Peer, Model, Path, int, Mapping[str, Path]], Served]


def bei(peer: Peer, model: Model, folder: Path, port: int, binaries: Mapping[str, Path]) -> Served:
    command = [_program(peer, "bei"), "serve", folder, "--port", port]
    return Served(command, model.name, ready="/ready")


def infinity(peer: Peer, model: Model, folder: Path, port: int, binaries: Mapping[str, Path]) -> Served:
    """Without its torch.compile, which would compile for minutes at each new length."""
    flags = ["--model-id", folder, "--served-model-name", _NAME, "--port", port, "--host", "127.0.0.1"]
    more = ["--device", "cpu", "--no-compile", *peer.settings["flags"]]
    command = [_program(peer, "infinity_emb"), "v2", *flags, *more]
    return Served(command, embed="/embeddings", environment={"INFINITY_ANONYMOUS_USAGE_STATS": "0"})


def vllm(peer: Peer, model: Model, folder: Path, port: int, binaries: Mapping[str, Path]) -> Served:
    """By its module: its program looks for a package of another name than the build for CPUs has. On all cores, of
    which it would leave one to others. Longer texts are cut only where a request asks for it."""
    flags = ["--served-model-name", _NAME, "--port", port, "--host", "127.0.0.1", "--runner", "pooling"]
    module = [_program(peer, "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [*module, *flags, "--max-model-len", model.max_tokens, *peer.settings["flags"]]
    return Served(command, environment=environment, fields={"truncate_prompt_tokens": -1})


def llama(peer: Peer, model: Model, folder: Path, port: int, binaries: Mapping[str, Path]) -> Served:
    """Four slots of a model's longest texts; a step has as many tokens as the longest requests of the cells. A thread
    of HTTP for each connection: by default there are fewer, and the others' requests wait for a connection to end."""
    flags = ["--embeddings", "--pooling", model.pooling, "--host", "127.0.0.1", "--port", port, "--alias", _NAME]
    sizes = ["--ctx-size", 4 * 2048, "--batch-size", 2048, "--ubatch-size", 2048, "--parallel", 4]
    more = ["--offline", "--threads", usable_cores(), "--threads-batch", usable_cores(), "--threads-http", 300]
    return Served([_program(peer, "llama-server"), "-m", _gguf(peer, model, folder), *flags, *sizes, *more])


def _gguf(peer: Peer, model: Model, folder: Path) -> Path:
    """The model's GGUF file of the peer's outtype, made once by llama.cpp's own converter."""
    outtype = peer.settings["outtype"]
    path = cache_folder() / "prepared" / f"{model.name}-{outtype}.gguf"
    if not path.is_file():
        python = environment_folder("sentence-transformers") / "bin" / "python"
        converter = environment_folder(peer.environment) / "llama.cpp" / "convert_hf_to_gguf.py"
        part = path.with_suffix(".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        command = [python, converter, folder, "--outtype", outtype, "--outfile", part]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"convert_hf_to_gguf.py: {(done.stderr.strip() or 'no word').splitlines()[-1]}")
        part.replace(path)
    return path


def tei(peer: Peer, model: Model, folder: Path, port: int, binaries: Mapping[str, Path]) -> Served:
    flags = ["--dtype", "float32", "--port", port, "--hostname", "127.0.0.1", "--auto-truncate"]
    return Served([binaries["tei"], "--model-id", folder, *flags, "--max-client-batch-size", 256])


def _program(peer: Peer, name: str) -> Path:
    return environment_folder(peer.environment) / "bin" / name


COMMANDS: dict[str, Start] = {"bei": bei, "infinity": infinity, "vllm": vllm, "llama-server": llama, "tei": tei}
