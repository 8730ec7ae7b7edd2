"""Checkpoints with a Router: the modules that are built, and the texts that they do not read.

Layouts after ``Router.save`` of sentence-transformers 5 and 6, and ``Asym.save`` of 4.1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.artifact.sides import Routes
from bei.errors import BeiError, CheckpointError, ConfigError, InvalidRequestError
from bei.tokenizer.prompts import ChosenPrompt, choose_prompt
from bei_build.checkpoint.router import Routing
from bei_build.checkpoint.sentence_transformers import SentenceTransformersFiles, read_sentence_transformers
from tests.support.builds import build_artifact
from tests.support.checkpoints import (
    Dense,
    Normalize,
    add_modules,
    change_json,
    save_checkpoint,
    save_dense,
    write_json,
)
from tests.support.reading import read

MODELS = "sentence_transformers.models"
ROUTER = "sentence_transformers.base.modules.router.Router"
TRANSFORMER, POOLING, NORMALIZE = (f"{MODELS}.{kind}" for kind in ("Transformer", "Pooling", "Normalize"))


def save_router(
    folder: Path, routes: dict[str, dict[str, str]], *, file: str = "router_config.json", **parameters: Any
) -> Path:
    """A Router in the root; ``routes`` are types by the paths of existing modules."""
    write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": ROUTER}])
    types = {path: kind for modules in routes.values() for path, kind in modules.items()}
    structure = {name: list(modules) for name, modules in routes.items()}
    write_json(folder / file, {"types": types, "structure": structure, "parameters": parameters})
    return folder


def encoder(folder: Path, name: str) -> dict[str, str]:
    """A route ``name`` with a Transformer, its Pooling and Normalize; files of a pooling, and no weights."""
    for kind in ("Transformer", "Pooling", "Normalize"):
        (folder / f"{name}_{kind}").mkdir(parents=True)
    write_json(folder / f"{name}_Pooling" / "config.json", {"pooling_mode": "mean"})
    return {f"{name}_Transformer": TRANSFORMER, f"{name}_Pooling": POOLING, f"{name}_Normalize": NORMALIZE}


@pytest.fixture
def two(tmp_path: Path) -> dict[str, dict[str, str]]:
    """A route for queries and one for documents, as MongoDB/mdbr-leaf-ir-asym has them (from memory)."""
    return {name: encoder(tmp_path, name) for name in ("query", "document")}


def chosen(files: SentenceTransformersFiles) -> str:
    return files.transformer_folder.name.removesuffix("_Transformer")


# One route.


def test_a_router_with_one_route_is_built_as_its_modules(tmp_path: Path) -> None:
    plain = add_modules(save_checkpoint(tmp_path / "plain"), ("cls",), (Dense(16), Normalize()))
    folder = add_modules(save_checkpoint(tmp_path / "routed"), ("cls",), (Dense(16), Normalize()))
    modules = {module["path"]: module["type"] for module in json.loads((folder / "modules.json").read_text())}
    save_router(folder, {"document": modules}, default_route=None, allow_empty_key=True)
    expected, found = read(plain), read(folder)
    assert found.spec == expected.spec
    assert found.files.normalize
    assert found.files.routing is None
    with expected.weights() as ours, found.weights() as theirs:
        np.testing.assert_array_equal(ours.read("tail.0.weight"), theirs.read("tail.0.weight"))


def test_a_router_between_modules_gives_way_to_the_modules_of_its_route(tmp_path: Path) -> None:
    """A use of Asym: a Dense for each side, or one for both."""
    folder = add_modules(save_checkpoint(tmp_path), ("mean",), (Dense(8),))
    modules = json.loads((folder / "modules.json").read_text())
    asym = {"idx": 2, "name": "2", "path": "2_Asym", "type": f"{MODELS}.Asym"}
    write_json(folder / "modules.json", [*modules[:2], asym])
    save_dense(folder / "2_Asym" / "140_Dense", 32, Dense(8))
    content = {"types": {"140_Dense": f"{MODELS}.Dense"}, "structure": {"query": ["140_Dense"]}, "parameters": {}}
    write_json(folder / "2_Asym" / "config.json", content)
    files = read_sentence_transformers(folder)
    assert files.tail_folders == {"tail.0": folder / "2_Asym" / "140_Dense"}
    assert folder / "2_Asym" in files.folders  # hashed into the artifact's source
    assert files.routing is None


# Several.


@pytest.mark.parametrize(
    ("parameters", "asked", "route", "absent"),
    [
        ({"default_route": "document", "allow_empty_key": True}, None, "document", ("query",)),
        ({"default_route": "query", "allow_empty_key": True}, None, "query", ("document",)),
        ({"default_route": None, "allow_empty_key": True}, None, "query", ("document",)),  # the first one
        ({}, None, "query", ("document",)),
        ({"default_route": "document"}, "query", "query", ("document",)),
        ({"default_route": None, "allow_empty_key": False}, "document", "document", ("query",)),
    ],
)
def test_the_default_route_or_the_one_that_is_asked_for(
    parameters: dict[str, Any],
    asked: str | None,
    route: str,
    absent: tuple[str, ...],
    two: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    files = read_sentence_transformers(save_router(tmp_path, two, **parameters), asked)
    assert chosen(files) == route
    assert files.routing == Routing(route, absent)


@pytest.mark.parametrize(
    ("routes", "mappings", "route", "absent"),
    [
        # The library's order for a text: its task's mapping, its modality's, a route with its task's name, "text".
        (("text", "image"), {}, "text", ("image",)),
        (("a", "image"), {"(None, 'text')": "a", "(None, 'image')": "image"}, "a", ()),
        (("a", "b"), {"('query', None)": "b", "(None, None)": "a"}, "a", ("query",)),
        (("a", "b"), {"('query', 'text')": "b", "('query', None)": "a", "(None, ('image', 'text'))": "b"}, "a", "q d"),
    ],
)
def test_the_route_of_a_text_is_the_librarys(
    routes: tuple[str, ...], mappings: dict[str, str], route: str, absent: object, tmp_path: Path
) -> None:
    folder = save_router(tmp_path, {name: encoder(tmp_path, name) for name in routes}, route_mappings=mappings)
    files = read_sentence_transformers(folder)
    assert chosen(files) == route
    if absent == "q d":
        assert files.routing == Routing("a", ("query", "document", "b"))
    elif absent:
        assert files.routing is not None
        assert files.routing.absent[0] == absent[0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("own", "other", "prompts", "warning"),
    [
        ("document", "query", {"document": ""}, "routed took the texts for the side document: say by input_type what"),
        ("text", "image", {}, None),  # any text, of queries and of documents
    ],
)
def test_an_artifact_of_one_route_says_which_texts_it_does_not_read(
    own: str, other: str, prompts: dict[str, str], warning: str | None, tmp_path: Path
) -> None:
    folder = add_modules(save_checkpoint(tmp_path / "routed"), ("cls",))
    modules = {module["path"]: module["type"] for module in json.loads((folder / "modules.json").read_text())}
    save_router(folder, {other: encoder(folder, other), own: modules}, default_route=own)
    manifest = build_artifact(folder, tmp_path / "artifact").manifest
    assert manifest.routes == Routes(default=own, absent=[other])
    assert manifest.prompts == prompts
    assert (choose_prompt(manifest).warning or "").startswith(warning or "")
    assert (choose_prompt(manifest).warning is None) is (warning is None)
    assert choose_prompt(manifest, input_type="document") == ChosenPrompt("")
    with pytest.raises(InvalidRequestError, match=f"does not read '{other}'"):
        choose_prompt(manifest, input_type=other)


# Refused.


def _no_default(folder: Path) -> None:
    change_json(folder / "router_config.json", parameters={"default_route": None, "allow_empty_key": False})


def _two_routers(folder: Path) -> None:
    write_json(folder / "modules.json", [{"idx": i, "name": str(i), "path": "", "type": ROUTER} for i in range(2)])


def _outside(folder: Path) -> None:
    change_json(folder / "router_config.json", types={"../x": TRANSFORMER}, structure={"document": ["../x"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_no_default, r"routes query, document, and no default; an artifact holds one: choose it with --route"),
        (_two_routers, "asks for two Routers"),
        (_outside, "a module's folder that bei does not read"),
        ({"structure": {}}, "does not say which modules its routes are"),
        ({"structure": {"query": ["absent"]}}, "does not say which modules its routes are"),
        ({"structure": {"query": "query_Pooling"}}, "does not say which modules its routes are"),
        ({"types": []}, r"has types = \[\]: correct it"),
        ({"parameters": {"default_route": "other"}}, "names the route 'other', and has query, document"),
        ({"parameters": {"route_mappings": {"('query', None)": "other"}}}, "names the route 'other', and has"),
        ({"parameters": {"route_mappings": {"query": "query"}}}, "the route_mapping 'query', which is no task"),
        ({"parameters": {"route_mappings": {"(None, ['text'])": "query"}}}, "which is no task and modality"),
    ],
)
def test_a_router_that_cannot_be_read_is_refused_by_name(
    change: Any, message: str, two: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    folder = save_router(tmp_path, two, default_route="document")
    if callable(change):
        change(folder)
    else:
        change_json(folder / "router_config.json", **change)
    with pytest.raises(CheckpointError, match=message):
        read_sentence_transformers(folder)


@pytest.mark.parametrize("has_modules", [True, False])
def test_a_route_is_asked_for_where_there_is_one(has_modules: bool, two: Any, tmp_path: Path) -> None:
    def refused(folder: Path, asked: str, message: str) -> None:
        error: type[BeiError] = ConfigError
        with pytest.raises(error, match=message):
            read_sentence_transformers(folder, asked)

    refused(save_router(tmp_path / "router", two), "corpus", "--route corpus: .* Router has query, document")
    plain = save_checkpoint(tmp_path / "plain")
    refused(add_modules(plain) if has_modules else plain, "query", "--route is for checkpoints with a Router")
