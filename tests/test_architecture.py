"""Who may import whom. Python has no crates; this file stands in for them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Rooms (packages, or modules beside them), the lowest first: each may import itself and those above it in this list.
# A room is the longest entry that a module's name begins with.
ROOMS = (
    *(
        "bei.version",
        "bei.printable",
        "bei.errors",
        "bei.core",
        "bei.port",
        "bei.utils",
        "bei.metrics",
        "bei.artifact",
        "bei.config",
    ),
    *("bei.engine", "bei.image", "bei.tokenizer", "bei.scheduler", "bei.verification"),
    *("bei_build.progress", "bei_build.memory", "bei_build.files", "bei_build.spec", "bei_build.families"),
    *("bei_build.weights", "bei_build.tokenizer", "bei_build.checkpoint", "bei_build.config"),
    *("bei_build.applicable_settings", "bei_build.onnx_graph", "bei_build.torch_graph", "bei_build.reference"),
    *("bei_build.targets", "bei_build.limits", "bei_build.job", "bei_build.quantization", "bei_build.verification"),
    *("bei_build.output_folder", "bei_build.image_model", "bei_build.pipeline", "bei_build.cache"),
    *("bei.service", "bei.tasks", "bei.offline", "bei"),
    *("bei.bulk.watchdog", "bei.bulk.file_systems", "bei.bulk.sources", "bei.bulk"),
    *(
        "bei.server.scope",
        "bei.server.process_tuning",
        "bei.server.telemetry",
        "bei.server.http",
        "bei.server.auth",
        "bei.server.endpoint",
    ),
    *("bei.server.status", "bei.server.lifecycle", "bei.server.routes", "bei.server.dialects", "bei.server.open_paths"),
    *(
        "bei.server.batches",
        "bei.server.server_parts",
        "bei.server.openapi",
        "bei.server.grpc",
        "bei.server.app",
        "bei.server.make_app",
        "bei.server.run_batch",
    ),
    *("bei.server.run", "bei.server"),
    *("bei.multiprocess.shared_memory", "bei.multiprocess.transport", "bei.multiprocess.remote"),
    *("bei.multiprocess.control", "bei.multiprocess.supervisor", "bei.multiprocess.roles", "bei.multiprocess"),
    "bei.ray",
    *(
        "bei.cli.console_text",
        "bei.cli.bench",
        "bei.cli.doctor",
        "bei.cli.embed",
        "bei.cli.simulate",
        "bei.cli",
        "bei.__main__",
    ),
    "bei_build",
)

HEAVY = {"torch", "transformers", "onnx", "modelopt", "bei_build"}
# An engine's library is imported by that engine alone, and there only when one is made.
ENGINE_LIBRARIES = {
    "openvino": "bei.engine.openvino",
    "tensorrt": "bei.engine.tensorrt.engine",
    "tensorrt_llm": "bei.engine.trtllm",
}
# Gives tensors to callers who ask for them.
TENSORS = {"torch": "bei.offline.encode"}
# Where the runtime starts a build, in functions.
BUILDING = {"bei.cli.main", "bei.service.resolve", "bei.service.build_process"}
# Whoever reads what these write may be made to execute it.
EXECUTING = {"pickle", "marshal", "shelve", "multiprocessing", "concurrent.futures.ProcessPoolExecutor"}
# Where a function makes a decoder, or converts: before threads do the same, or of types that are no classes.
DECODING = {
    "bei.multiprocess.transport.channel": "of prepared types",
    "bei.server.grpc.calls": "of types that the routes' parsers have prepared, on the event loop alone",
    "bei.utils.msgspec_types": "prepares them",
    "bei.server.endpoint.parse": "called while routes are made, by one thread",
    "bei.cli.bench.dialects": "called while the module is imported",
    "bei.offline.options": "plain types and literals",
    "bei.multiprocess.remote.recorded_engine": "plain types",
}
PLAIN = {"int", "str", "dict[str, object]", "dict[str, msgspec.Raw]"}
HTTP = {"fastapi", "starlette", "uvicorn", "uvloop", "httptools"}


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[parts[0] == "build" :]).removesuffix(".__init__")


MODULES = {
    _module(path): path for folder in ("bei", "build/bei_build") for path in sorted((ROOT / folder).rglob("*.py"))
}
RUNTIME = [module for module in MODULES if module.split(".")[0] == "bei"]
BUILDER = [module for module in MODULES if module.split(".")[0] == "bei_build"]


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def imports_of(module: str, *, everywhere: bool = True) -> tuple[str, ...]:
    """What ``module`` imports, in functions and for types too, or (not ``everywhere``) as it is loaded.

    ``from a import b`` is ``a.b``.
    """
    found: list[str] = []
    for node in ast.walk(_tree(module)) if everywhere else _loaded(_tree(module)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def _loaded(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements that run on import: not the bodies of functions, but those of classes, ifs and tries."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from _loaded(node)


def own_imports(module: str) -> Iterator[str]:
    """The project's modules that ``module`` imports."""
    for name in imports_of(module):
        if name.split(".")[0] in ("bei", "bei_build"):
            while name not in MODULES:
                name = name.rpartition(".")[0]
            yield name


def room_of(module: str) -> str:
    parts = module.split(".")
    return next(name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in ROOMS)


def _circle(imports: Mapping[str, Sequence[str]]) -> list[str]:
    """Modules that import each other in a loop; empty where there is none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for other in imports.get(module, ()):
                if found := walk(other, [*path, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in imports if (found := walk(module, []))), [])


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_the_rooms(module: str) -> None:
    own = ROOMS.index(room_of(module))
    for name in own_imports(module):
        assert ROOMS.index(room_of(name)) <= own, name


# The largest file that is still read in one go. A class is not cut in two for it: then the bound is the one to move.
MOST_LINES = 500
TABLES = {"bei/errors.py", "tests/support/recipes.py", "tests/support/zoo.py"}  # one entry after the other


@pytest.mark.parametrize("folder", ["bei", "build", "benchmarks", "tests"])
def test_no_file_is_longer_than_a_reader_s_patience(folder: str) -> None:
    lines = {path: path.read_text("utf-8").count("\n") for path in sorted((ROOT / folder).rglob("*.py"))}
    too_long = {str(path.relative_to(ROOT)) for path, count in lines.items() if count > MOST_LINES}
    assert too_long - TABLES == set()


def test_no_files_import_each_other_in_a_loop() -> None:
    assert _circle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]  # else nothing would be found
    assert _circle({module: list(own_imports(module)) for module in MODULES}) == []


# Wire types have the names of each API's documents. Results of ``bei.Model`` are public, and answered by the server.
WIRE_TYPES = ("bei.server.routes.", "bei.server.dialects.")
ON_THE_WIRE_TOO = {
    "ErrorBody": {"bei.server.http.errors"},
    "LabelScore": {"bei.tasks.schema_classes"},
    "ModelList": {"bei.server.endpoint.models"},
    "Rank": {"bei.offline.results"},
    "SparseVector": {"bei.offline.results", "bei.server.endpoint.vector_encoding"},
    "Stats": {"bei.server.status.stats"},
    "Token": {"bei.offline.results"},
}


def test_a_class_name_stands_for_one_idea() -> None:
    modules = defaultdict(set)
    for module in RUNTIME:
        for node in ast.walk(_tree(module)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].add(module)
    for name, found in modules.items():
        if len(found) > 1:
            outside = {module for module in found if not module.startswith(WIRE_TYPES)}
            assert outside == ON_THE_WIRE_TOO.get(name, set()), name


def test_every_room_of_the_list_is_there() -> None:
    assert [room for room in ROOMS if room not in {room_of(module) for module in MODULES}] == []


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_rooms_say_their_subject_and_hand_nothing_on(module: str) -> None:
    assert ast.get_docstring(_tree(module))
    if module not in ("bei", "bei.ray"):  # the library's faces
        assert len(_tree(module).body) == 1


@pytest.mark.parametrize("module", MODULES)
def test_msgspec_learns_what_classes_it_decodes_before_threads_decode_them(module: str) -> None:
    """See ``bei.utils.msgspec_types``: at the first decoding of a class by two threads the process may end."""
    at_import = {id(node) for node in _loaded(_tree(module))}
    late = [
        node.lineno
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Call) and id(node) not in at_import and _makes_msgspec_learn(node)
    ]
    assert late == [] or module in DECODING, f"{module} does at lines {late} what a decoder made at import does"


def _makes_msgspec_learn(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name.startswith("msgspec.") and name.endswith((".Decoder", ".convert")):
        return True
    kinds = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "type"]
    return name.startswith("msgspec.") and name.endswith(".decode") and any(kind not in PLAIN for kind in kinds)


@pytest.mark.parametrize("module", RUNTIME)
def test_the_runtime_imports_nothing_heavy_as_it_is_loaded(module: str) -> None:
    tops = {name.split(".")[0] for name in imports_of(module, everywhere=False)}
    assert not tops & HEAVY
    assert not tops & ENGINE_LIBRARIES.keys()


@pytest.mark.parametrize("module", RUNTIME)
def test_heavy_imports_inside_functions_are_where_they_belong(module: str) -> None:
    for name in imports_of(module):
        top = name.split(".")[0]
        assert not {top, name} & EXECUTING, name
        if top == "bei_build":
            assert module in BUILDING, name
        elif top in ENGINE_LIBRARIES:
            assert module == ENGINE_LIBRARIES[top], name
        else:
            assert top not in HEAVY or TENSORS.get(top) == module, name


@pytest.mark.parametrize("module", RUNTIME)
def test_http_stays_in_the_server(module: str) -> None:
    if not module.startswith("bei.server"):
        allowed = {"httptools"} if module == "bei.cli.bench.http1" else set()
        assert not {name.split(".")[0] for name in imports_of(module)} & (HTTP - allowed)


@pytest.mark.parametrize("module", [name for name in RUNTIME if name.startswith("bei.cli.bench")])
def test_the_load_generator_knows_nothing_of_the_server(module: str) -> None:
    rooms = {room_of(name) for name in own_imports(module)}
    assert rooms <= {"bei.cli.bench", "bei.cli.console_text", "bei.errors", "bei.printable", "bei.utils", "bei.version"}


@pytest.mark.parametrize("module", [name for name in RUNTIME if name.startswith("bei.cli.simulate")])
def test_the_simulation_knows_neither_engines_nor_services(module: str) -> None:
    rooms = {room_of(name) for name in own_imports(module)}
    known = {
        "bei.cli.simulate",
        "bei.cli.console_text",
        "bei.core",
        "bei.errors",
        "bei.port",
        "bei.scheduler",
        "bei.utils",
    }
    assert rooms <= known


@pytest.mark.parametrize("module", BUILDER)
def test_the_builder_imports_torch_in_functions_only(module: str) -> None:
    """But for the package that is made of its modules, which in turn is imported in functions only."""
    names = imports_of(module, everywhere=False)
    heavy = {"torch", "triton", "transformers", "openvino", "tensorrt", "modelopt", "huggingface_hub"}
    if module.startswith("bei_build.torch_graph"):
        is_kernel = module.startswith(("bei_build.torch_graph.ragged_attention", "bei_build.torch_graph.fused."))
        heavy -= {"torch", "triton"} if is_kernel else {"torch"}
    else:
        assert not [name for name in names if name.startswith("bei_build.torch_graph")]
    assert not {name.split(".")[0] for name in names} & heavy


def test_families_emit_no_graph_nodes() -> None:
    for module in BUILDER:
        if module.startswith("bei_build.families"):
            for name in imports_of(module):
                assert not name.startswith(("bei_build.onnx_graph", "bei_build.targets", "onnx")), (module, name)


@pytest.mark.parametrize("room", [room for room in ROOMS if (ROOT / "build" / room.replace(".", "/")).is_dir()])
def test_every_room_is_named_in_the_document(room: str) -> None:
    assert f"`{room.partition('.')[2] or room}" in (ROOT / "docs" / "architecture.md").read_text()


def _printed(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def test_commands_that_do_not_make_load_do_not_load_the_load_generator() -> None:
    loaded = "[m for m in sys.modules if m.startswith('bei.cli.bench')]"
    assert _printed(f"import sys, bei.cli.main; bei.cli.main._parser('serve'); print({loaded})") == "[]"


def test_the_module_for_pytorch_needs_neither_onnx_nor_the_artifact() -> None:
    """It runs on machines that have torch and little else (benchmarks.gpu)."""
    others = {"onnx", "msgspec", "transformers", "openvino", "tokenizers", "ml_dtypes", "triton"}
    modules = "bei_build.torch_graph.model, bei_build.spec.flops"
    assert _printed(f"import sys, {modules}; print(sorted({others} & sys.modules.keys()))") == "[]"


def test_importing_the_server_and_the_cli_loads_nothing_heavy() -> None:
    heavy = sorted((HEAVY - {"modelopt"}) | ENGINE_LIBRARIES.keys() | {"opentelemetry.sdk"})
    code = f"import sys, bei.cli.main, bei.server.run; print(sorted(set({heavy}) & sys.modules.keys()))"
    assert _printed(code) == "[]"
