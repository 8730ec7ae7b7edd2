"""What an artifact is made of. Hashes and digest fit more often than not: whoever changes a file can write them too."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from bei.artifact.compatibility import check_swap
from bei.artifact.cost_cache import CostCache
from bei.artifact.int8 import int8_of, scaled
from bei.artifact.manifest import CERTIFICATE, MANIFEST, TOKENIZER, Artifact
from bei.artifact.signature import SIGNATURE, read_signature
from bei.artifact.store import certificate_html, load, sign
from bei.artifact.token_weights import read_token_weights, write_token_weights
from bei.cli.certificate import as_tables
from bei.cli.inspect_artifact import as_json, as_table
from bei.engine.fake import FakeEngine
from bei.scheduler.cost_measurement import _cached_model
from bei.scheduler.cost_model import CostModel
from bei.tokenizer.encoder import TextEncoder
from bei.verification.stored_answers import complete_certificate
from tests.bei.server.kinds import KINDS, save_kind
from tests.fuzz.mutation import ROUGH, changed, changed_body, changed_bytes, spoilt
from tests.fuzz.trial import Trial
from tests.support.artifacts import LIMITS, save_artifact
from tests.support.keys import make_keys
from tests.support.spoilt_artifacts import ENGINE_FILE, manifest_of, put, seal

# Parts that the tiny artifacts lack.
_PROFILE = {"name": "latency", "tokens": [1, 8, 64], "sequences": [1, 1, 8], "longest": [1, 8, 16]}
_PLAN = {"lowerings": ["padded", "packed"], "fallbacks": ["no FP8: none"], "profiles": [_PROFILE], "refit": False}
_PACKAGE = {
    **{"cuda": "12.8", "inputs": ["input_ids", "cu_seqlens"], "kernels": ["flash"], "fallbacks": []},
    "weight_bytes": 1000,
}
_TEMPLATE = {"prefix": "<s>", "body": "{instruction} {query} {document}", "suffix": "</s>", "instruction": "judge"}
_MORE: list[dict[str, Any]] = [
    {},
    {
        "engine": {
            "compiler": "TensorRT",
            "compiler_version": "11",
            "device": "SM89",
            "capabilities": ["SM89"],
            "plan": _PLAN,
        }
    },
    {"engine": {"compiler": "AOT", "compiler_version": "2", "device": "cpu", "capabilities": [], "package": _PACKAGE}},
    {"rerank_template": _TEMPLATE},
    {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query"},
    {"routes": {"default": "query", "absent": ["document"]}},
    {
        "roles": {
            "query": {
                **{"max_tokens": 8, "skip_ids": [1, 2], "table": False},
                "expansion": {"token_id": 4, "num_tokens": 8, "attended": True, "padding_id": 0},
            }
        }
    },
]


def _used(random: Random, artifact: Artifact) -> None:
    """What is done with every artifact that is loaded, before an engine is opened; to some, as it takes 20 times as
    long."""
    if random.random() > 0.1:
        return
    manifest = artifact.manifest
    TextEncoder(artifact.file(TOKENIZER), manifest.max_seq_len, vocab_size=manifest.spec.vocab_size)
    certificate_html(manifest, artifact.certificate)
    as_json(artifact)
    as_table(artifact)
    as_tables(artifact)


def _restored(path: Path) -> Callable[[], None]:
    """Writes the files of ``path`` as they are now."""
    kept = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def restore() -> None:
        for file, content in kept.items():
            file.write_bytes(content)

    return restore


def manifest(folder: Path) -> Trial:
    """manifest.json, of every kind of model."""
    served = []
    for kind, (_, widths, _) in KINDS.items():
        ((output, width),) = widths.items()
        served.append(save_kind(folder / kind, kind, output=output, canary=[0.5] * width)[0])
    contents = [manifest_of(artifact.path) for artifact in served]

    def trial(random: Random) -> None:
        at = random.randrange(len(served))
        path = served[at].path
        content: Any = contents[at] if random.random() < 0.5 else {**contents[at], **random.choice(_MORE)}
        for _ in range(random.randrange(4)):
            content = changed(random, content)
        try:
            seal(path, content)
        except (msgspec.MsgspecError, UnicodeError, OverflowError):
            (path / MANIFEST).write_bytes(spoilt(random, content))
        else:
            if random.random() < 0.1:
                whole = (path / MANIFEST).read_bytes()
                (path / MANIFEST).write_bytes(changed_bytes(random, whole))
        loaded = load(path)
        _used(random, loaded)
        check_swap(served[at].manifest, loaded.manifest, vectors_may_change=random.random() < 0.5)

    return trial


def certificate(folder: Path) -> Trial:
    """certificate.json, which the manifest lists."""
    path = save_artifact(folder / "tiny").path
    restore = _restored(path)
    content = json.loads((path / CERTIFICATE).read_text())
    figures = {"output": "embedding", "num_queries": 5, "num_documents": 9, "ndcg_chance": 0.1, "ndcg_reference": 0.9}
    content["retrieval"] = {
        **figures,
        "ndcg_engine": 0.9,
        "loss": 0.0,
        "loss_error": 0.01,
        "is_judged": True,
        "failures": [],
    }
    layers = [{"layer": "layers.0.mlp", "error": 0.1, "is_high": True, "effect": 0.5}]
    calibration = {"format": "int8", "method": "max", "calibration": "texts", "num_texts": 1, "num_tokens": 9}
    quantization = {**calibration, "texts_sha256": "0" * 64, "layers": layers}

    def trial(random: Random) -> None:
        restore()
        put(path, CERTIFICATE, changed_body(random, [content, {**content, "quantization": quantization}], ROUGH))
        _used(random, load(path))

    return trial


def tokenizer(folder: Path) -> Trial:
    """tokenizer.json, which the manifest lists."""
    path = save_artifact(folder / "tiny").path
    restore = _restored(path)
    content = json.loads((path / TOKENIZER).read_text())

    def trial(random: Random) -> None:
        restore()
        put(path, TOKENIZER, changed_body(random, [content], ROUGH))
        artifact = load(path)
        manifest = artifact.manifest
        encoder = TextEncoder(artifact.file(TOKENIZER), manifest.max_seq_len, vocab_size=manifest.spec.vocab_size)
        encoder.encode(["the cats", "", "a b " * 40])

    return trial


def token_weights(folder: Path) -> Trial:
    """token_weights.npy."""
    file = folder / "token_weights.npy"
    write_token_weights(file, np.arange(8, dtype=np.float32))
    plain = file.read_bytes()
    archive = io.BytesIO()
    np.savez_compressed(archive, a=np.zeros(8, np.float32))
    words = (
        b"'descr': '<f4'",
        b"'descr': '|O'",
        b"'descr': [('a', '<f4')]",
        b"(8,)",
        b"(10000000000,)",
        b"(-1,)",
        b"((",
        b"0x",
        b"9" * 99,
    )

    def trial(random: Random) -> None:
        seed = plain if random.random() < 0.9 else archive.getvalue()
        file.write_bytes(changed_bytes(random, seed, words))
        read_token_weights(file, 8)

    return trial


def int8(folder: Path) -> Trial:
    """The bound of int8 vectors in a manifest that is accepted: vectors stay bytes in the range."""
    path = save_artifact(folder / "tiny").path
    content = manifest_of(path)
    vectors = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    numbers = (0, 0.0, -0.0, 1e-320, 1e-45, 1e-39, 1e-30, 1e30, 1e308, -1, 0.1, 1, 2**63, None)

    def trial(random: Random) -> None:
        number = random.choice(numbers)
        largest = number if number is None or random.random() < 0.5 else number * random.random()
        embedding = {**content["embedding"], "int8_largest": largest}
        seal(path, {**content, "embedding": embedding})
        found = load(path).manifest.embedding
        assert found is not None
        if found.int8_largest is not None:
            with np.errstate(all="raise"):
                for bound in (found.int8_largest, scaled(found.int8_largest, 8, random.randrange(1, 9))):
                    assert np.abs(int8_of(vectors, bound).astype(int)).max() <= 127

    return trial


def signature(folder: Path) -> Trial:
    """signature.json."""
    artifact = save_artifact(folder / "tiny")
    sign(artifact, make_keys(folder).key)
    file = artifact.path / SIGNATURE
    content = json.loads(file.read_text())

    def trial(random: Random) -> None:
        file.write_bytes(changed_body(random, [content], ROUGH))
        read_signature(artifact.path, artifact.manifest.digest)

    return trial


def reference_answers(folder: Path) -> Trial:
    """reference/, which a pending certificate is completed from."""
    record = {
        **{"name": "transformers", "is_own": False, "outputs": ["embedding"], "texts": ["a", "b"], "canary_text": "c"},
        **{"thresholds": {"mean": 0.99, "p1": 0.9, "min": 0.5}, "allow_below_threshold": False, "retrieval": None},
    }
    arrays: dict[str, Any] = {
        **{"input_ids": np.arange(9, dtype=np.int32), "num_tokens": np.array([3, 3, 3], np.int32)},
        **{"num_keys": np.full(3, -1, np.int32), "num_unpooled": np.zeros(3, np.int32)},
        "rows.embedding": np.ones((2, 8), np.float32),
    }
    source = save_artifact(folder / "tiny").path
    (source / "reference").mkdir()
    restore = _restored(source)
    names = ("reference/reference.json", "reference/answers.npz")

    def trial(random: Random) -> None:
        restore()
        written = io.BytesIO()
        changes = {random.choice([*arrays]): _array(random)} if random.random() < 0.5 else {}
        (np.savez_compressed if random.random() < 0.5 else np.savez)(written, **{**arrays, **changes})
        answers = written.getvalue()
        contents = (
            json.dumps(record).encode() if random.random() < 0.5 else changed_body(random, [record], ROUGH),
            answers if random.random() < 0.5 else changed_bytes(random, answers, (b"<i4", b"|O", b"(9,)", b"PK\1\2")),
        )
        for name, content in zip(names, contents, strict=True):
            put(source, name, content)
        complete_certificate(load(source), FakeEngine(LIMITS))

    return trial


def _array(random: Random) -> Any:
    """An array of some shape, type and numbers."""
    shape = random.choice(((), (0,), (1,), (3,), (9,), (2, 8), (2, 0), (1, 2, 3)))
    kind = random.choice((np.int32, np.int64, np.float32, np.uint8, np.bool_, "<U3", np.complex64))
    made: Any = np.full(shape, random.choice((0, 1, -1 if kind is not np.uint8 else 1, 3, 100)), kind)
    return made


_LARGE = 1 << 33


def files(folder: Path) -> Trial:
    """Anything may lie in an artifact in the place of its files, or beside them."""
    good = save_artifact(folder / "good").path
    path = folder / "artifact"
    names = (MANIFEST, TOKENIZER, CERTIFICATE, "certificate.html", ENGINE_FILE, "engine", "engine/more", "x", ".x")

    def trial(random: Random) -> None:
        if path.is_symlink() or path.exists():
            shutil.rmtree(path)
        shutil.copytree(good, path)
        for _ in range(random.choice((1, 1, 2))):
            _spoil(random, path, path / random.choice(names), names)
        with_copies = load(path, sealed=random.random() < 0.3)
        assert with_copies.files is not None
        with_copies.files.close()

    return trial


def _spoil(random: Random, root: Path, file: Path, names: tuple[str, ...]) -> None:
    """Put something else where ``file`` is."""
    if not file.parent.is_dir():
        return
    content = file.read_bytes() if file.is_file() and file.stat().st_size < _LARGE else b"x"
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    kind = random.randrange(8)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        os.mkfifo(file)
    elif kind == 2:
        file.symlink_to(random.choice((root / random.choice(names), Path("/dev/zero"), Path("nothing"), file, root)))
    elif kind == 3:
        file.write_bytes(changed_bytes(random, content))
    elif kind == 4:
        with file.open("wb") as opened:
            opened.truncate(random.choice((0, 1, len(content), _LARGE)))
    elif kind == 5:
        file.write_bytes(content)
        list_as = {"path": os.path.relpath(file, root), "size": random.choice((0, len(content), 1 << 40))}
        listed = {**list_as, "sha256": hashlib.sha256(content).hexdigest()}
        if (root / MANIFEST).is_file() and (root / MANIFEST).stat().st_size < _LARGE:
            try:
                stored = manifest_of(root)
                seal(root, {**stored, "files": [*stored["files"], listed]})
            except (ValueError, KeyError, msgspec.MsgspecError):
                return
    elif kind == 6:
        file.write_bytes(content)
        file.chmod(random.choice((0o000, 0o400, 0o666)))


def cost_cache(folder: Path) -> Trial:
    """A file of costs: it is used, or it counts as missing."""
    cache, key = CostCache(folder), {"device": "cpu", "streams": 1}
    stored = CostModel(LIMITS, CostModel.assumed(LIMITS).coefficients, speed=2.0).to_json()
    file = cache.write("tiny", key, stored)
    assert file is not None

    def trial(random: Random) -> None:
        data: Any = stored
        for _ in range(random.randrange(4)):
            data = changed(random, data)
        whole = {"key": key, "data": data}
        file.write_bytes(spoilt(random, whole) if random.random() < 0.7 else changed_body(random, [whole], ROUGH))
        found = _cached_model(cache, "tiny", key, LIMITS, "measured anew")
        if found is not None:
            assert 0 < found.seconds(8, 1, 8) < math.inf
            assert 0 < found.sequence_seconds(8) < math.inf
            assert found.efficient_tokens(8) > 0

    return trial
