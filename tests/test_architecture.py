"""Who may import whom. Python has no crates; this file stands in for them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUNTIME = sorted((ROOT / "bei").rglob("*.py"))
BUILDER = sorted((ROOT / "build" / "bei_build").rglob("*.py"))

HEAVY = {"torch", "transformers", "onnx", "modelopt", "bei_build"}
# An engine's library is imported by that engine alone, and there only when one is made.
ENGINE_LIBRARIES = {
    "openvino": "bei/engine/openvino.py",
    "tensorrt": "bei/engine/tensorrt/engine.py",
    "tensorrt_llm": "bei/engine/trtllm.py",
}
# Each layer may import those to its right, and whatever is not a layer (errors, config, metrics, ...).
LAYERS = [
    *(
        "cli",
        "processes",
        "server",
        "model",
        "tasks",
        "fates",
        "loading",
        "service",
        "feeding",
        "simulation",
        "tuning_report",
        "batching",
        "engine",
        "core",
    )
]
# Pure functions over arrays and texts, and the words' cache: the lowest stones, which anybody may use.
LEAVES = {
    "elsewhere": set(),
    "histograms": set(),
    "metric_sums": {"bei.metrics.tei"},
    "peers": set(),
    "te_metrics": set(),
    "port_gauges": {"bei.core", "bei.port"},
    "stages": set(),
    "admission": {"bei.core", "bei.errors", "bei.port", "bei.metrics.request_timing"},
    "byte_vectors": {"bei.core"},
    "calls": {"bei.service.admission", "bei.core", "bei.errors", "bei.metrics.request_timing"},
    "canary": {"bei.core"},
    "port": {"bei.core", "bei.errors"},
    "costs": {"bei.core"},
    "entities": {"bei.core"},
    "packing": {"bei.core"},
    "postprocess": {"bei.core"},
    "tokenization": {
        *(
            "bei.core",
            "bei.errors",
            "bei.utils.untrusted_files",
            "bei.tokenizer.special_tokens",
            "bei.tokenizer.long_text",
            "bei.tokenizer.file",
        ),
        "bei.tokenizer.word_cache",
    },
    "recent": {"bei.port"},
    "tokenizer_file": {"bei.utils.untrusted_files"},
    "tokenizer_pool": {"bei.core", "bei.errors", "bei.tokenizer.encoder"},
    "files": {"bei.errors"},
    "free_memory": set(),
    "service_links": set(),
    "sides": {"bei.core"},
    "sparse": {"bei.core"},
    "token_weights": {"bei.core", "bei.errors"},
    "long_texts": {"bei.core"},
    "layout": {"bei.core"},
    "libraries": {"bei.errors"},
    "file_locks": set(),
    "mapped": set(),
    "pytorch": {"bei", "bei.errors"},
    "quantities": {"bei.errors"},
    "signing_keys": {"bei.errors", "bei.utils.untrusted_files", "bei.utils.libraries"},
    "timing": {"bei.core", "bei.port", "bei.metrics.request_stages"},
    "word_cache": set(),
}
CONTRACT = {
    "bei",
    "bei.artifact.manifest",
    "bei.artifact.int8",
    "bei.artifact.certificate.canary",
    "bei.verification.answers",
    "bei.verification.comparison",
    "bei.verification.retrieval",
    "bei.verification.stored_answers",
    "bei.artifact.certificate.thresholds",
    "bei.core",
    "bei.errors",
    "bei.utils.untrusted_files",
    "bei.utils.free_memory",
    "bei.engine.cpu_features",
    "bei.utils.libraries",
    "bei.artifact.validation",
    "bei.artifact.cache",
    "bei.engine.nvidia",
    "bei.engine.packing",
    "bei.engine.pytorch",
    "bei.utils.units",
    "bei.artifact.sides",
    "bei.artifact.signing_keys",
    "bei.engine.sparse",
    "bei.engine.tensorrt_logger",
    "bei.artifact.token_weights",
    "bei.tokenizer.encoder",
    "bei.tokenizer.file",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path, *, everywhere: bool = False) -> Iterator[str]:
    """Modules imported by ``path`` at module level, or in its functions too; ``from a import b`` is ``a.b``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if everywhere else module_level(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements that run on import: not the bodies of functions, but those of classes, ifs and tries."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from module_level(node)


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "bei" and parts[1] in LAYERS else None


@pytest.mark.parametrize("path", RUNTIME, ids=name_of)
def test_the_runtime_imports_nothing_heavy_at_module_level(path: Path) -> None:
    tops = {module.split(".")[0] for module in imports_of(path)}
    assert not tops & HEAVY
    assert not tops & ENGINE_LIBRARIES.keys()


# Whoever reads what these write may be made to execute it.
EXECUTING = {"pickle", "marshal", "shelve", "multiprocessing", "concurrent.futures.ProcessPoolExecutor"}


@pytest.mark.parametrize("path", RUNTIME, ids=name_of)
def test_heavy_imports_inside_functions_are_where_they_belong(path: Path) -> None:
    for module in imports_of(path, everywhere=True):
        top = module.split(".")[0]
        assert not {top, module} & EXECUTING, module
        if top == "bei_build":
            assert name_of(path) in {"bei/cli/main.py", "bei/service/resolve.py"}, module
        elif top in ENGINE_LIBRARIES:
            assert name_of(path) == ENGINE_LIBRARIES[top], module
        else:
            assert top not in HEAVY, module


@pytest.mark.parametrize("path", RUNTIME, ids=name_of)
def test_imports_go_down_the_layers(path: Path) -> None:
    if name_of(path) in {"bei/__init__.py", "bei/__main__.py"}:
        return  # the entries, above all layers
    own = layer_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    # A module that is no layer serves them all, so it may know the lowest ones only.
    allowed = LAYERS[LAYERS.index(own or "engine") :]
    for module in imports_of(path, everywhere=True):
        assert layer_of(module) is None or layer_of(module) in allowed, module


@pytest.mark.parametrize(("name", "known"), sorted(LEAVES.items()))
def test_leaves_know_the_nouns_at_most(name: str, known: set[str]) -> None:
    modules = {module for module in imports_of(ROOT / "bei" / f"{name}.py", everywhere=True)}
    own = {module.rsplit(".", 1)[0] for module in modules if module.split(".")[0] == "bei"}
    assert own <= known


@pytest.mark.parametrize("path", RUNTIME, ids=name_of)
def test_http_stays_in_the_server(path: Path) -> None:
    if not path.is_relative_to(ROOT / "bei" / "server"):
        tops = {module.split(".")[0] for module in imports_of(path, everywhere=True)}
        is_client = path == ROOT / "bei" / "bench" / "http1.py"
        assert not tops & (
            {"fastapi", "starlette", "uvicorn", "uvloop", "httptools"} - ({"httptools"} if is_client else set())
        )


BENCH = (
    "bei.cli.bench",
    "bei.utils.cpu_count",
    "bei.errors",
    "bei.utils.untrusted_files",
    "bei.utils.html",
    "bei.__version__",
)


@pytest.mark.parametrize("path", sorted((ROOT / "bei" / "bench").rglob("*.py")), ids=name_of)
def test_the_load_generator_knows_nothing_of_the_server(path: Path) -> None:
    for module in imports_of(path, everywhere=True):
        if module.split(".")[0] == "bei":
            assert any(module == known or module.startswith(f"{known}.") for known in BENCH), module


def test_commands_that_do_not_make_load_do_not_load_the_load_generator() -> None:
    code = "import sys, bei.cli.main; bei.cli._parser('serve'); print([m for m in sys.modules if m.startswith('bei.cli.bench')])"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted((ROOT / "bei" / "simulation").glob("*.py")), ids=name_of)
def test_the_simulation_knows_neither_engines_nor_services(path: Path) -> None:
    known = {"batching", "core", None}
    for module in imports_of(path, everywhere=True):
        assert module.startswith("bei.cli.simulate") or layer_of(module) in known, module


@pytest.mark.parametrize("path", BUILDER, ids=name_of)
def test_the_builder_knows_the_contract_and_nothing_else_of_the_runtime(path: Path) -> None:
    for module in imports_of(path, everywhere=True):
        if module.split(".")[0] == "bei":
            parent = module.rsplit(".", 1)[0]
            assert module in CONTRACT or (parent in CONTRACT - {"bei"}) or module == "bei.__version__", module


@pytest.mark.parametrize("path", BUILDER, ids=name_of)
def test_the_builder_imports_torch_in_functions_only(path: Path) -> None:
    """But for the package that is made of its modules, which in turn is imported in functions only."""
    modules = list(imports_of(path))
    heavy = {"torch", "triton", "transformers", "openvino", "tensorrt", "modelopt", "huggingface_hub"}
    if "torch_graph" in path.parts:
        is_kernel = path.name == "ragged.py" or path.parent.name == "fused"
        heavy -= {"torch", "triton"} if is_kernel else {"torch"}
    else:
        assert not [module for module in modules if module.startswith("bei_build.torch_graph")]
    assert not {module.split(".")[0] for module in modules} & heavy


def test_the_module_for_pytorch_needs_neither_onnx_nor_the_artifact() -> None:
    """It runs on machines that have torch and little else (benchmarks/gpu.py)."""
    others = {"onnx", "msgspec", "transformers", "openvino", "tokenizers", "ml_dtypes", "triton"}
    code = (
        f"import sys, bei_build.torch_graph.model, bei_build.spec.flops; print(sorted({others} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


def test_families_emit_no_graph_nodes() -> None:
    for path in sorted((ROOT / "build" / "bei_build" / "families").rglob("*.py")):
        for module in imports_of(path, everywhere=True):
            assert not module.startswith(("bei_build.onnx_graph", "bei_build.targets.base", "onnx")), (path, module)


def test_every_module_is_named_in_the_document() -> None:
    """A newcomer finds the room of each file there. Families have a table of their own, and names that say all."""
    named = set(re.findall(r"`(?:\w+/)*(\w+?)(?:\.py)?`", (ROOT / "docs" / "architecture.md").read_text()))
    everything = (path for path in (*RUNTIME, *BUILDER) if path.parent.name != "families")
    modules = [path for path in everything if not path.stem.startswith("__")]
    assert len(modules) > 300  # else nothing is looked at
    assert [name_of(path) for path in modules if path.stem not in named] == []


def test_importing_the_server_and_the_cli_loads_nothing_heavy() -> None:
    heavy = sorted((HEAVY - {"modelopt"}) | ENGINE_LIBRARIES.keys() | {"opentelemetry.sdk"})
    code = f"import sys, bei.cli.main, bei.server.run; print(sorted(set({heavy}) & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"
