"""Ways in which an artifact is spoilt: each changes the good one in a folder, with hashes and a digest that fit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bei.artifact import store
from bei.artifact.manifest import CERTIFICATE, MANIFEST, TOKEN_WEIGHTS, TOKENIZER, Manifest

Spoil = Callable[[Path], object]

ENGINE_FILE = "engine/fake.bin"
HUGE = 2 << 30


# Writing what a build would not.


def seal(folder: Path, content: dict[str, Any]) -> None:
    """Write ``content`` as the manifest, in the form and with the digest that it must have."""
    manifest = store._sealed(msgspec.convert(content, Manifest))
    (folder / MANIFEST).write_bytes(store._encode(manifest))


def manifest_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return content


def says(*path: str | int, value: object) -> Spoil:
    """The manifest says ``value`` at ``path``."""

    def spoil(folder: Path) -> None:
        content: Any = manifest_of(folder)
        place = content
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        seal(folder, content)

    return spoil


def says_all(**fields: object) -> Spoil:
    """The manifest has these ``fields``."""
    return lambda folder: seal(folder, {**manifest_of(folder), **fields})


def raw(change: Callable[[bytes], bytes], name: str = MANIFEST) -> Spoil:
    """The bytes of a file are others. Of one that the manifest lists, it lists the others."""

    def spoil(folder: Path) -> None:
        put(folder, name, change((folder / name).read_bytes()))

    return spoil


def put(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    if name != MANIFEST:
        list_again(folder, name, len(content), hashlib.sha256(content).hexdigest())


def list_again(folder: Path, name: str, size: int, sha256: str = "0" * 64) -> None:
    """The manifest lists the file ``name`` so, in place of how it did."""
    content = manifest_of(folder)
    others = [info for info in content["files"] if info["path"] != name]
    seal(folder, {**content, "files": [*others, {"path": name, "size": size, "sha256": sha256}]})


def lists(name: str) -> Spoil:
    """The manifest lists a file by a ``name`` that it must not have."""
    return lambda folder: list_again(folder, name, 5)


def certificate(*path: str | int, value: object) -> Spoil:
    """The certificate says ``value`` at ``path``."""

    def change(content: bytes) -> bytes:
        record = json.loads(content)
        place = record
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        return json.dumps(record).encode()

    return raw(change, CERTIFICATE)


def text(*, old: str, new: str) -> Spoil:
    """The manifest's text has ``new`` for ``old``."""

    def change(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode("utf-8", "surrogatepass"), 1)

    return raw(change)


def pipe(name: str) -> Spoil:
    """A file is a named pipe, which nobody writes to."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def linked(name: str, target: str) -> Spoil:
    """A file or folder lies elsewhere, and a link in its place leads there. ``target`` is seen from its folder."""

    def spoil(folder: Path) -> None:
        place = folder / name
        moved = Path(os.path.normpath(place.parent / target))
        if moved == place:  # a link to itself
            place.unlink()
        else:
            shutil.move(place, moved)
        place.symlink_to(target)

    return spoil


def extra(name: str) -> Spoil:
    """A file lies there that the manifest does not list."""

    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"weights of somebody else")

    return spoil


def extra_link(folder: Path) -> None:
    """A folder of somebody else's files, linked into the engine's."""
    (folder.parent / "others").mkdir()
    (folder / "engine" / "more").symlink_to(folder.parent / "others")


def beside_linked(folder: Path) -> None:
    """The engine's folder is a link inside the artifact, and has one file more."""
    (folder / "..data").mkdir()
    (folder / "engine").rename(folder / "..data" / "engine")
    (folder / "engine").symlink_to("..data/engine")
    (folder / "engine" / "more.bin").write_bytes(b"weights of somebody else")


def many(folder: Path) -> None:
    """More files than a server can pass on to another process."""
    listed = manifest_of(folder)["files"]
    more = [{"path": f"engine/{index}", "size": 5, "sha256": "0" * 64} for index in range(251 - len(listed))]
    seal(folder, {**manifest_of(folder), "files": [*listed, *more]})


def dangling(folder: Path) -> None:
    (folder / ENGINE_FILE).unlink()
    (folder / ENGINE_FILE).symlink_to("nothing")


def device(folder: Path) -> None:
    """Endless zeros in the place of the tokenizer."""
    (folder / TOKENIZER).unlink()
    (folder / TOKENIZER).symlink_to("/dev/zero")


def large(name: str) -> Spoil:
    """A file of two gigabytes, which take no room on the disk, and are listed."""

    def spoil(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(HUGE)
        if name != MANIFEST:
            list_again(folder, name, HUGE)

    return spoil


def without_template(content: bytes, form: str) -> bytes:
    """The tokenizer's template for one text, or for pairs, is empty."""
    stored = json.loads(content)
    stored["post_processor"][form] = []
    return json.dumps(stored).encode()


def with_id(tokenizer: bytes, token: str, index: int) -> bytes:
    """``tokenizer``, which gives ``token`` the id ``index``."""
    content = json.loads(tokenizer)
    content["model"]["vocab"][token] = index
    return json.dumps(content).encode()


def large_table(folder: Path) -> None:
    """A table of weights for more tokens than there are."""
    put(folder, TOKEN_WEIGHTS, b"")
    large(TOKEN_WEIGHTS)(folder)


def without_engine(folder: Path) -> None:
    (folder / ENGINE_FILE).unlink()
    content = manifest_of(folder)
    seal(folder, {**content, "files": [info for info in content["files"] if info["path"] != ENGINE_FILE]})


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"0" + b"}" * depth


def output(name: str, dimension: int = 8, *, per_token: bool = False) -> dict[str, object]:
    return {"name": name, "dimension": dimension, "per_token": per_token, "unit_length": False}


def kind(task: str, name: str, dimension: int = 8, *, per_token: bool = False, **fields: object) -> Spoil:
    """A model of one output, and its ``task``."""
    outputs = [output(name, dimension, per_token=per_token)]
    return says_all(**{"tasks": [task], "outputs": outputs, "embedding": None, **fields})


def labelled(count: int) -> dict[str, object]:
    return {"labels": [f"LABEL_{index}" for index in range(count)], "function": "softmax"}


TEMPLATE = {"prefix": "", "body": "{query} {document}", "suffix": "", "instruction": ""}
ROLE: dict[str, Any] = {"max_tokens": 8, "expansion": None, "skip_ids": []}
EXPANSION = {"token_id": 5, "num_tokens": 8, "attended": False, "padding_id": None}
PROFILE = {"name": "latency", "tokens": [1, 8, 64], "sequences": [1, 2, 8], "longest": [1, 8, 16]}


def plan(*profiles: Mapping[str, object]) -> Spoil:
    fields = {"lowerings": ["packed"], "fallbacks": [], "profiles": list(profiles)}
    return says("engine", "plan", value={**fields, "hardware_compatible": False, "refit": False})


def package(**changes: object) -> Spoil:
    fields = {"cuda": "13.0", "inputs": ["input_ids"], "kernels": ["flash"], "fallbacks": [], "weight_bytes": 1}
    return says("engine", "package", value={**fields, **changes})
