"""Attention by kernels of our own: when they are used, and that they compute what the graph computes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bei.artifact.manifest import ENGINE_DIR, OPENVINO_ATTENTION, OPENVINO_MODEL, OPENVINO_WEIGHTS, Artifact
from bei.core import Encoding, Engine, Float32Array, Int32Array, PackedBatch
from bei.engine.load import load_engine
from bei.engine.packed_attention import AttentionSite, Kernels, encoded, installed_kernels, use_kernels
from bei.engine.shared_prefixes import sharing
from bei.errors import EngineError, LibraryVersionError
from tests.support.builds import build_artifact, embed, random_encodings
from tests.support.cpus import BF16, instructions, needs_bf16
from tests.support.zoo import CASES, MAX_TOKENS, Case, encodings_of, save_case

OPENVINO = SimpleNamespace(__version__="2026.4.1-22982-e213a147257")
IS_INSTALLED = find_spec("bei_kernels_cpu") is not None
needs_kernels = pytest.mark.skipif(not IS_INSTALLED, reason="bei-kernels-cpu is not installed")

# A kind of attention each: plain, biases by distance (T5's table ends before its texts), windows, causal with shared
# keys, soft caps, and DeBERTa's scores, which stay in the graph.
KINDS = {
    "plain": "BertModel",
    "relative": "MPNetModel",
    "relative to a distance": "T5EncoderModel",
    "windows": "ModernBertModel",
    "causal": "LlamaModel",
    "softcap": "Gemma2Model",
    "disentangled": "DebertaV2Model",
}
BY_NAME = {case.name: case for case in CASES}

MakeArtifact = Callable[[str, str], Artifact]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeArtifact:
    """The artifact of a kind of attention in a precision, built once."""
    known: dict[tuple[str, str], Artifact] = {}

    def make(kind: str, precision: str) -> Artifact:
        if (kind, precision) not in known:
            folder = tmp_path_factory.mktemp(f"{kind}-{precision}")
            checkpoint = save_case(folder / "checkpoint", case_of(kind))
            known[kind, precision] = build_artifact(checkpoint, folder / "artifact", precision=precision, verify=False)
        return known[kind, precision]

    return make


def case_of(kind: str) -> Case:
    return BY_NAME[KINDS[kind]]


def engine_of(artifact: Artifact, *, kernels: bool) -> Engine:
    return load_engine(artifact.engine_dir, artifact.manifest, {"num_threads": 1, "use_kernels": int(kernels)})


def sites_of(artifact: Artifact) -> list[AttentionSite]:
    listed = artifact.path / ENGINE_DIR / OPENVINO_ATTENTION
    return msgspec.json.decode(listed.read_bytes(), type=list[AttentionSite]) if listed.exists() else []


def install(monkeypatch: pytest.MonkeyPatch, openvino: str, version: str = "0.1.0") -> None:
    package = SimpleNamespace(__version__=version, OPENVINO=openvino, LIBRARY=Path("libbei_kernels.so"))
    monkeypatch.setitem(sys.modules, "bei_kernels_cpu", package)


def test_nothing_changes_where_the_package_is_missing(monkeypatch: pytest.MonkeyPatch, made: MakeArtifact) -> None:
    monkeypatch.setitem(sys.modules, "bei_kernels_cpu", None)
    assert installed_kernels(OPENVINO, computes_bf16=False) is None
    with closing(engine_of(made("plain", "fp32"), kernels=True)) as engine:
        assert "bei-kernels-cpu" not in engine.info.device


def test_a_package_for_another_openvino_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "2026.3.0")
    with pytest.raises(LibraryVersionError, match=r"2026\.3\.0, and 2026\.4\.1 .*pip install openvino==2026\.3\.0"):
        installed_kernels(OPENVINO, computes_bf16=False)


@pytest.mark.parametrize(
    ("version", "tiles", "bf16", "attends"),
    [
        ("0.2.0", True, True, False),
        ("0.1.9", True, True, False),
        ("0.2.0", True, False, True),
        ("0.2.0", False, True, True),
        ("0.3.0", True, True, True),
        ("1.0.0rc1", True, True, True),
    ],
)
def test_a_package_that_does_not_know_the_cpu_s_tiles_does_not_attend_in_bf16(
    version: str,
    tiles: bool,
    bf16: bool,
    attends: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It took 1.1 times as long as OpenVINO's own operations, which use them."""
    install(monkeypatch, OPENVINO.__version__.partition("-")[0], version)
    library = SimpleNamespace(bei_kernel=lambda _: b"avx512_bf16")
    monkeypatch.setattr("bei.engine.packed_attention.ctypes.CDLL", lambda _: library)
    monkeypatch.setattr("bei.engine.packed_attention.has_tiles_of_bf16", lambda: tiles)
    found = installed_kernels(OPENVINO, computes_bf16=bf16)
    assert found is not None
    assert found.attends is attends
    assert ("pip install -U bei-kernels-cpu" in caplog.text) is not attends


@needs_kernels
@needs_bf16
def test_a_package_that_does_not_attend_leaves_attention_to_openvino(
    monkeypatch: pytest.MonkeyPatch, made: MakeArtifact
) -> None:
    import bei_kernels_cpu

    monkeypatch.setattr(bei_kernels_cpu, "__version__", "0.2.0")
    monkeypatch.delattr(bei_kernels_cpu, "OPERATIONS", raising=False)  # from 0.4.0 on; norms need no attention
    for tiles in (True, False):
        monkeypatch.setattr("bei.engine.packed_attention.has_tiles_of_bf16", lambda tiles=tiles: tiles)
        with closing(engine_of(made("plain", "bf16"), kernels=True)) as engine:
            assert ("bei-kernels-cpu 0.2.0" in engine.info.device) is not tiles


@needs_kernels
@pytest.mark.skipif("amx_bf16" not in instructions(), reason="this CPU has no tiles of BF16")
def test_the_package_attends_on_tiles_in_bf16_alone() -> None:
    import openvino

    names = [getattr(installed_kernels(openvino, computes_bf16=bf16), "name", "") for bf16 in (True, False)]
    assert [name.rpartition(" ")[2] for name in names] == ["(amx_bf16)", "(avx512)"]


@needs_kernels
def test_an_artifact_of_an_earlier_version_runs_without_kernels(made: MakeArtifact, tmp_path: Path) -> None:
    artifact = made("plain", "fp32")
    for name in (OPENVINO_MODEL, OPENVINO_WEIGHTS):
        shutil.copyfile(artifact.path / ENGINE_DIR / name, tmp_path / name)
    with closing(load_engine(tmp_path, artifact.manifest)) as engine:
        assert "bei-kernels-cpu" not in engine.info.device


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_lists_the_attentions_that_a_kernel_can_compute(kind: str, made: MakeArtifact) -> None:
    sites = sites_of(made(kind, "fp32"))
    assert bool(sites) == (kind != "disentangled")
    for site in sites:
        assert site.causal == (kind in ("causal", "softcap"))
        assert (site.biases is not None) == kind.startswith("relative")
        assert (site.softcap is not None) == (kind == "softcap")
    assert any(site.window is not None for site in sites) == (kind in ("windows", "softcap"))


@needs_kernels
def test_a_list_that_does_not_fit_its_model_is_an_error(made: MakeArtifact, tmp_path: Path) -> None:
    import bei_kernels_cpu
    import openvino

    artifact, listed = made("plain", "fp32"), tmp_path / OPENVINO_ATTENTION
    listed.write_bytes(encoded([msgspec.structs.replace(sites_of(artifact)[0], context="another")]))
    model = openvino.Core().read_model(artifact.path / ENGINE_DIR / OPENVINO_MODEL)
    with pytest.raises(EngineError, match=r"attention\.json.*build it again"):
        use_kernels(openvino, model, listed, Kernels(bei_kernels_cpu.LIBRARY, "kernels"), 8, computes_bf16=False)


@needs_kernels
@pytest.mark.parametrize("precision", ["fp32", BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_gives_what_the_graph_gives(kind: str, precision: str, made: MakeArtifact) -> None:
    artifact = made(kind, precision)
    encodings = encodings_of(case_of(kind), [1, MAX_TOKENS, 2, 17, 16, 5, 33], artifact.manifest.spec.vocab_size)
    rows = []
    for kernels in (False, True):
        with closing(engine_of(artifact, kernels=kernels)) as engine:
            is_used = kernels and (kind != "disentangled" or precision == "bf16")  # in BF16 of norms at least
            assert ("bei-kernels-cpu" in engine.info.device) == is_used
            assert engine.info.shares_prefixes == (kind in ("causal", "softcap"))
            rows.append(embed(engine, encodings))
    if precision == "fp32":
        np.testing.assert_allclose(rows[1], rows[0], atol=2e-4)
    else:
        assert cosines(*rows).min() > 0.999


@needs_kernels
@pytest.mark.parametrize("precision", ["fp32", BF16])
@pytest.mark.parametrize("kind", ["causal", "softcap"])
def test_the_kernel_gives_the_same_with_keys_that_texts_share(kind: str, precision: str, made: MakeArtifact) -> None:
    rng = np.random.default_rng(0)
    start, within, *ends = (rng.integers(0, 60, size, dtype=np.int32) for size in (20, 7, 9, 1, 5, 6, 17))
    texts = [*(np.concatenate([start, end]) for end in ends), *(np.concatenate([start, within, end]) for end in ends)]
    batch = PackedBatch.from_encodings([Encoding(text) for text in (*texts, start, ends[0], ends[1])])
    shared = sharing(batch)
    assert shared.num_computed < batch.num_tokens // 2
    with closing(engine_of(made(kind, precision), kernels=True)) as engine:
        rows, expected = (engine.run(one)["embedding"] for one in (shared, batch))
    if precision == "fp32":
        np.testing.assert_allclose(rows, expected, atol=1e-5)
    else:
        assert cosines(rows, expected).min() > 0.999


@needs_kernels
def test_a_package_that_reads_no_shared_keys_computes_each_text_whole(
    monkeypatch: pytest.MonkeyPatch, made: MakeArtifact
) -> None:
    import bei_kernels_cpu

    monkeypatch.setattr(bei_kernels_cpu, "__version__", "0.4.0")
    artifact = made("causal", "fp32")
    encodings = encodings_of(case_of("causal"), [1, MAX_TOKENS, 17], artifact.manifest.spec.vocab_size)
    rows = []
    for kernels in (False, True):
        with closing(engine_of(artifact, kernels=kernels)) as engine:
            assert ("bei-kernels-cpu before 0.5.0" in (engine.info.unshared or "")) is kernels
            rows.append(embed(engine, encodings))
    np.testing.assert_allclose(rows[1], rows[0], atol=2e-4)


def cosines(rows: Float32Array, others: Float32Array) -> Float32Array:
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(others, axis=1)
    return np.asarray((rows * others).sum(axis=1) / lengths)


@pytest.fixture(scope="module")
def long_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """A model of a plain attention with and one without kernels, for texts of more than a block of keys."""
    if not IS_INSTALLED:
        pytest.skip("bei-kernels-cpu is not installed")
    folder = tmp_path_factory.mktemp("long")
    case = BY_NAME["BertModel"]
    case = replace(case, settings={**case.settings, "max_position_embeddings": 600})
    artifact = build_artifact(save_case(folder / "checkpoint", case), folder / "artifact", verify=False)
    engines = [engine_of(artifact, kernels=kernels) for kernels in (False, True)]
    yield engines
    for engine in engines:
        engine.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths=st.lists(st.integers(1, 600), min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
@example(lengths=[255, 256, 257, 512], seed=0)
@example(lengths=[600, 1, 513], seed=1)
def test_any_lengths_give_what_the_graph_gives_and_what_each_gives_alone(
    long_engines: list[Engine], lengths: list[int], seed: int
) -> None:
    graph, kernel = long_engines
    lengths = fitting(lengths, kernel.info.limits.max_num_tokens)
    encodings: list[Encoding] = random_encodings(lengths, vocab_size=60, seed=seed)
    together = embed(kernel, encodings)
    np.testing.assert_allclose(together, embed(graph, encodings), atol=2e-4)
    alone = np.concatenate([embed(kernel, [encoding]) for encoding in encodings])
    np.testing.assert_allclose(together, alone, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("spoilt", ["key", "value"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("precision", ["fp32", BF16])
def test_infinite_keys_and_values_are_their_own_sequence_s_alone(precision: str, causal: bool, spoilt: str) -> None:
    """Within a sequence they may reach queries that do not see them, as in OpenVINO's own attention: 0 * inf is NaN."""
    starts = np.array([0, 40, 43, 83], np.int32)
    names, rng = ("query", "key", "value"), np.random.default_rng(0)
    rows = {name: rng.normal(size=(83, 32)).astype(np.float32) for name in names}
    expected = attended(rows, starts, precision, causal=causal)
    rows[spoilt][39] = np.inf
    found = attended(rows, starts, precision, causal=causal)
    np.testing.assert_array_equal(found[40:], expected[40:])
    assert np.isfinite(expected).all()
    assert not np.isfinite(found[39]).any()


def attended(rows: dict[str, Float32Array], starts: Int32Array, precision: str, *, causal: bool) -> Float32Array:
    """What the kernel makes of queries, keys and values [T, 32] of two heads."""
    import bei_kernels_cpu
    import openvino

    ops, narrow = openvino.opset13, precision == "bf16"
    inputs = [ops.parameter([-1, 32], openvino.Type.f32, name=name) for name in rows]
    at = ops.parameter([-1], openvino.Type.i32, name="starts")
    factory = openvino.utils.node_factory.NodeFactory()
    factory.add_extension(bei_kernels_cpu.LIBRARY)
    attributes = {
        **{"num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "causal": causal, "window": -1, "softcap": 0.0},
        **dict.fromkeys(("query_offset", "key_offset", "value_offset"), 0),
        **{"has_key_lens": False, "has_biases": False},
    }
    given = [(ops.convert(one, "bf16") if narrow else one).output(0) for one in inputs]
    context = factory.create("PackedAttention", [*given, at.output(0)], attributes).output(0)
    result = ops.convert(context, "f32") if narrow else context
    core = openvino.Core()
    core.add_extension(bei_kernels_cpu.LIBRARY)
    hint = {"INFERENCE_PRECISION_HINT": "bf16" if narrow else "f32"}
    compiled = core.compile_model(openvino.Model([result], [*inputs, at]), "CPU", hint)
    found: Float32Array = next(iter(compiled([*rows.values(), starts]).values()))
    return found


def fitting(lengths: list[int], most: int) -> list[int]:
    """As many of ``lengths``, from the first, as a batch of ``most`` tokens holds."""
    return [length for length, total in zip(lengths, np.cumsum(lengths), strict=True) if total <= most]
