"""The engine of target trtllm against a stand-in for TensorRT-LLM that enforces what its documents say.

Nothing here has met TensorRT-LLM or a GPU: what holds is that the adapter and the documents agree, and that what the
builder writes is the checkpoint's model when transformers computes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from bei.artifact.manifest import Artifact
from bei.artifact.store import load
from bei.core import Encoding, Engine, Float32Array, PackedBatch, finite_sequences
from bei.engine.load import load_engine
from bei.engine.trtllm import TRTLLMEngine
from bei.errors import (
    ArtifactManifestError,
    ArtifactWrongDeviceError,
    BeiError,
    BrokenDependencyError,
    ConfigError,
    DeviceNotFoundError,
    EngineDeadError,
    EngineError,
    LibraryVersionError,
    MissingDependencyError,
)
from bei.verification.verify import verify
from tests.support import trtllm
from tests.support.builds import build_artifact, random_encodings
from tests.support.checkpoints import read_tensors
from tests.support.trtllm_checkpoints import bert_classifier, in_fp8, qwen3_embedder, reward_model

LENGTHS = (3, 17, 1, 29, 8)
MAKERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "embedder": (qwen3_embedder, "bf16"),
    "embedder in fp8": (qwen3_embedder, "fp8"),
    "classifier": (bert_classifier, "fp16"),
    "reward model": (reward_model, "bf16"),
    "reward model in fp8": (reward_model, "fp8"),
}


@pytest.fixture
def api() -> Iterator[Any]:
    with trtllm.installed() as module:
        yield module


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make(root / name) for name, (make, _) in MAKERS.items()}


@pytest.fixture(scope="module")
def artifacts(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """Built, and verified by the engine over the stand-in."""
    root = tmp_path_factory.mktemp("artifacts")
    with trtllm.installed():
        return {
            name: build_artifact(
                checkpoints[name],
                root / name,
                load_engine,
                target="trtllm",
                precision=precision,
                max_batch_size=16,
                max_num_tokens=256,
                min_cosine=0.99 if precision == "fp8" else None,  # random weights
            )
            for name, (_, precision) in MAKERS.items()
        }


@pytest.fixture
def engine(api: Any, artifacts: dict[str, Artifact]) -> Iterator[Engine]:
    with closing(opened(artifacts["embedder"])) as made:
        yield made


def opened(artifact: Artifact, **options: int) -> Engine:
    return load_engine(artifact.engine_dir, artifact.manifest, options)


def texts_for(artifact: Artifact, **options: Any) -> list[Encoding]:
    return random_encodings(LENGTHS, artifact.manifest.spec.vocab_size, **options)


def answer(engine: Engine, encodings: list[Encoding]) -> Float32Array:
    (rows,) = engine.run(PackedBatch.from_encodings(encodings)).values()
    return rows


def hf_rows(folder: Path, encodings: list[Encoding]) -> Float32Array:
    """Rows of transformers' classes, one text at a time, in FP32; a reward model's head is computed here."""
    inputs = [torch.from_numpy(encoding.input_ids).long()[None] for encoding in encodings]
    with torch.no_grad():
        if folder.name == "classifier":
            model: Any = transformers.BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
            types = [encoding.token_type_ids for encoding in encodings]
            kinds = [None if each is None else torch.from_numpy(each).long()[None] for each in types]
            rows = [model(ids, token_type_ids=kind).logits[0] for ids, kind in zip(inputs, kinds, strict=True)]
            return np.stack([row.numpy() for row in rows])
        if folder.name.startswith("embedder"):
            model = transformers.Qwen3Model.from_pretrained(folder, dtype=torch.float32)
            states = [model(ids).last_hidden_state[0, -1] for ids in inputs]
            return np.stack([torch.nn.functional.normalize(state, dim=0).numpy() for state in states])
        config = transformers.Qwen2Config.from_pretrained(folder)
        model = transformers.Qwen2Model(config)
        tensors = {name: tensor.float() for name, tensor in read_tensors(folder).items()}
        backbone = {name.removeprefix("model."): tensors[name] for name in tensors if name.startswith("model.")}
        model.load_state_dict(backbone)
        first, bias, second, offset = (
            tensors[f"score.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        )
        states = [model(ids).last_hidden_state[0, -1] for ids in inputs]
        return np.stack([(torch.relu(s @ first.T + bias) @ second.T + offset).numpy() for s in states])


@pytest.mark.parametrize("name", MAKERS)
def test_an_artifact_is_verified_against_transformers_by_its_own_engine(
    name: str, artifacts: dict[str, Artifact]
) -> None:
    certificate = artifacts[name].certificate
    assert (certificate.kind, certificate.passed, certificate.device) == ("reference", True, "NVIDIA Stand-in")
    (agreement,) = certificate.outputs
    assert agreement.cosine_mean > (0.99 if "fp8" in name else 0.99995)


@pytest.mark.parametrize("name", MAKERS)
def test_rows_are_those_of_transformers(
    name: str, api: Any, checkpoints: dict[str, Path], artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    artifact = artifacts[name]
    encodings = texts_for(artifact)
    expected = hf_rows(checkpoints[name], encodings)
    with closing(opened(artifact)) as engine:
        rows = answer(engine, encodings)
    assert rows.dtype == np.float32
    assert rows.shape == expected.shape
    # The answer is in the model's type: BF16 has 8 bits.
    if "fp8" in name:
        assert not np.allclose(rows, expected, rtol=2**-8, atol=1e-3)
        expected = hf_rows(in_fp8(checkpoints[name], tmp_path / name), encodings)
    np.testing.assert_allclose(rows, expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("has_graphs", [True, False])
def test_pairs_get_their_token_types(
    has_graphs: bool, api: Any, checkpoints: dict[str, Path], artifacts: dict[str, Artifact]
) -> None:
    if not has_graphs:
        del api.llmapi.EncodeExtraInputSpec  # before 1.4.0rc1
    pairs = texts_for(artifacts["classifier"], pairs=True)
    with closing(opened(artifacts["classifier"])) as engine:
        assert (api.LLM.made[-1].graphs is not None) == has_graphs
        rows = answer(engine, pairs)
        without = answer(engine, [Encoding(pair.input_ids) for pair in pairs])
    np.testing.assert_allclose(rows, hf_rows(checkpoints["classifier"], pairs), atol=1e-4)
    assert np.abs(rows - without).max() > 0.01


def test_a_pending_artifact_is_completed_where_tensorrt_llm_is(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    build_artifact(checkpoints["embedder"], tmp_path / "artifact", target="trtllm", precision="bf16")
    assert load(tmp_path / "artifact").certificate.kind == "pending"
    with pytest.raises(MissingDependencyError, match=r"'tensorrt-llm': pip install 'bei\[trtllm\]'"):
        verify(tmp_path / "artifact")
    with trtllm.installed() as api:
        artifact, is_good = verify(tmp_path / "artifact")
        assert all(llm.is_shut_down for llm in api.LLM.made)
    assert is_good
    assert load(tmp_path / "artifact").certificate == artifact.certificate
    assert (artifact.certificate.kind, artifact.certificate.passed) == ("reference", True)


def test_it_says_that_it_is_experimental(
    api: Any, artifacts: dict[str, Artifact], caplog: pytest.LogCaptureFixture
) -> None:
    opened(artifacts["embedder"]).close()
    assert "target trtllm is experimental" in caplog.text
    assert "experimental" in artifacts["embedder"].manifest.engine.compiler


def test_the_facts_are_stated(engine: Engine, artifacts: dict[str, Artifact]) -> None:
    info = engine.info
    assert (info.target, info.precision, info.device) == ("trtllm", "bf16", "NVIDIA Stand-in")
    assert info.limits == artifacts["embedder"].manifest.limits
    assert (info.outputs, info.per_token, info.num_streams) == ({"embedding": 32}, frozenset(), 1)


def test_only_what_is_asked_for_is_computed(api: Any, engine: Engine, artifacts: dict[str, Artifact]) -> None:
    batch = PackedBatch.from_encodings(texts_for(artifacts["embedder"]))
    assert engine.run(batch, {"logits"}) == {}
    assert api.LLM.made[-1].batches == []
    assert engine.run(batch, {"embedding"})["embedding"].shape == (len(LENGTHS), 32)


@pytest.mark.parametrize("name", ["embedder", "classifier"])  # bfloat16 is widened, float32 could be shared
def test_rows_are_the_callers_to_keep(name: str, api: Any, artifacts: dict[str, Artifact]) -> None:
    with closing(opened(artifacts[name])) as engine:
        first, second = (texts_for(artifacts[name], seed=seed) for seed in (1, 2))
        kept = answer(engine, first)
        before = kept.copy()
        assert np.abs(answer(engine, second) - before).max() > 0.01
        np.testing.assert_array_equal(kept, before)


def _from_four_threads(engine: Engine, texts: list[list[Encoding]]) -> list[Float32Array]:
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda encodings: answer(engine, encodings), texts))


def test_one_caller_at_a_time_is_inside(engine: Engine, artifacts: dict[str, Artifact]) -> None:
    texts = [texts_for(artifacts["embedder"], seed=seed) for seed in range(12)]
    expected = [answer(engine, encodings) for encodings in texts]
    for rows, alone in zip(_from_four_threads(engine, texts), expected, strict=True):
        np.testing.assert_array_equal(rows, alone)


def test_without_its_lock_the_stand_in_notices(engine: Engine, artifacts: dict[str, Artifact]) -> None:
    engine._lock = nullcontext()  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=r"failed on a batch of 5 sequences and 58 tokens: two calls of encode\(\)"):
        _from_four_threads(engine, [texts_for(artifacts["embedder"], seed=seed) for seed in range(12)])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([2] * 17, r"a batch of 17 sequences and 34 tokens: Batch size \(17\) exceeds max_batch_size \(16\)"),
        ([40] * 7, r"Total tokens \(280\) across the batch exceeds max_num_tokens \(256\)"),
        ([49], r"Max sequence length \(49\) exceeds max_seq_len \(48\)"),
    ],
)
def test_a_batch_beyond_the_limits_is_an_error_of_that_batch(
    lengths: list[int], message: str, engine: Engine, artifacts: dict[str, Artifact]
) -> None:
    with pytest.raises(EngineError, match=message):
        answer(engine, random_encodings(lengths, 64))
    assert answer(engine, texts_for(artifacts["embedder"])).shape == (len(LENGTHS), 32)


def answers_of(*statuses: str) -> Callable[[], tuple[SimpleNamespace]]:
    """A function of CUDA's that returns these, and then the last of them."""
    left = list(statuses)

    def function() -> tuple[SimpleNamespace]:
        name = left.pop(0) if len(left) > 1 else left[0]
        return (SimpleNamespace(value=0 if name == "cudaSuccess" else 700, name=name),)

    return function


@pytest.mark.parametrize("status", ["cudaSuccess", "cudaErrorMemoryAllocation"])
def test_a_cuda_error_that_passes_is_an_error_of_that_batch_in_one_line(
    status: str, engine: Engine, artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: out of\nmemory")

    runtime = sys.modules["cuda.bindings.runtime"]
    monkeypatch.setattr(runtime, "cudaDeviceSynchronize", answers_of(status, "cudaSuccess"))
    monkeypatch.setattr(trtllm.LLM, "_encoded", fail)
    with pytest.raises(EngineError, match="58 tokens: CUDA error: out of memory") as raised:
        answer(engine, texts_for(artifacts["embedder"]))
    assert type(raised.value) is EngineError


def test_a_gpu_that_is_lost_ends_the_engine_in_one_line(
    engine: Engine, artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")

    runtime = sys.modules["cuda.bindings.runtime"]
    monkeypatch.setattr(runtime, "cudaDeviceSynchronize", answers_of("cudaErrorIllegalAddress"))
    monkeypatch.setattr(trtllm.LLM, "_encoded", fail)
    with pytest.raises(EngineDeadError) as raised:
        answer(engine, texts_for(artifacts["embedder"]))
    assert str(raised.value) == (
        "The GPU does not answer this process any more (cudaErrorIllegalAddress, simulated cudaErrorIllegalAddress): "
        "restart the server. It began with: CUDA error: an illegal memory access was encountered"
    )


def test_an_answer_of_another_shape_is_refused(
    engine: Engine, artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen3's class for language models would give: scores of the vocabulary."""
    monkeypatch.setattr(trtllm.LLM, "_encoded", lambda *_: torch.zeros(5, 64))
    with pytest.raises(EngineError, match=r"answered \[5, 64\] for embedding, not \[5, 32\]"):
        answer(engine, texts_for(artifacts["embedder"]))


def test_rows_that_are_not_finite_are_found_and_the_others_kept(
    engine: Engine, artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.ones(5, 32)
    rows[3, 7] = float("nan")
    monkeypatch.setattr(trtllm.LLM, "_encoded", lambda *_: rows)
    batch = PackedBatch.from_encodings(texts_for(artifacts["embedder"]))
    assert finite_sequences(engine.run(batch), batch, set()).tolist() == [True, True, True, False, True]


def test_warming_up_runs_the_largest_batch(api: Any, engine: Engine) -> None:
    engine.warmup()
    assert api.LLM.made[-1].batches == [[48] * 5]  # of 256 tokens


def test_closing_shuts_it_down(api: Any, engine: Engine, artifacts: dict[str, Artifact]) -> None:
    engine.close()
    engine.close()
    assert api.LLM.made[-1].is_shut_down
    with pytest.raises(EngineError, match="The engine is closed"):
        answer(engine, texts_for(artifacts["embedder"]))


def test_cuda_graphs_are_for_small_batches_and_not_many(api: Any, engine: Engine) -> None:
    graphs = api.LLM.made[-1].graphs
    assert graphs.enable_padding
    assert (graphs.batch_sizes, graphs.num_tokens, graphs.seq_lens) == ([1, 2, 4, 8], [16, 32, 64, 128, 256], [16, 32])


def test_no_more_than_sixty_graphs_are_captured(api: Any, artifacts: dict[str, Artifact], tmp_path: Path) -> None:
    """Counted as TensorRT-LLM does: every batch size, number of tokens and longest length that can come together."""
    manifest = msgspec.structs.replace(
        artifacts["embedder"].manifest, max_num_tokens=65536, max_batch_size=256, max_seq_len=32768
    )
    load_engine(artifacts["embedder"].engine_dir, manifest).close()
    graphs, count = api.LLM.made[-1].graphs, 0
    for batch_size in graphs.batch_sizes:
        for previous, length in zip([0, *graphs.seq_lens], graphs.seq_lens, strict=False):
            for fewer, tokens in zip([0, *graphs.num_tokens], graphs.num_tokens, strict=False):
                count += previous + batch_size <= tokens <= batch_size * length > fewer and length <= tokens
    assert 40 < count <= 60


def test_cuda_graphs_can_be_left_out(api: Any, artifacts: dict[str, Artifact]) -> None:
    opened(artifacts["embedder"], graph_tokens=0).close()
    assert api.LLM.made[-1].graphs is None


def test_token_types_are_an_input_of_cuda_graphs(api: Any, artifacts: dict[str, Artifact]) -> None:
    opened(artifacts["classifier"]).close()
    (declared,) = api.LLM.made[-1].graphs.extra_model_inputs
    assert (declared.name, declared.shape, declared.dtype) == ("token_type_ids", ("num_tokens",), "int32")
    opened(artifacts["embedder"]).close()
    assert api.LLM.made[-1].graphs.extra_model_inputs == []


def test_an_option_of_another_target_is_refused(api: Any, artifacts: dict[str, Artifact]) -> None:
    with pytest.raises(ConfigError, match="engine_threads is for target cpu; this artifact is for trtllm: leave it"):
        opened(artifacts["embedder"], num_threads=2)


def _encode_without(*names: str) -> Callable[..., None]:
    def encode(
        self: Any, inputs: Any, add_special_tokens: bool = True, copy_logits_to_host: bool = True, **model_kwargs: Any
    ) -> None:
        raise AssertionError

    return encode


def _no_encode(api: Any) -> None:
    api.LLM = type("LLM", (), {})


def _older_encode(api: Any) -> None:
    api.LLM.encode = _encode_without("return_raw_logits")


def _no_graphs(api: Any) -> None:
    del api.llmapi.EncodeCudaGraphConfig


def _no_encode_only(api: Any) -> None:
    fields = {name: None for name in trtllm.TorchLlmArgs.model_fields if name != "encode_only"}
    api.llmapi.TorchLlmArgs = type("TorchLlmArgs", (), {"model_fields": fields})


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (_no_encode, "LLM.encode"),
        (_older_encode, "argument return_raw_logits of LLM.encode"),
        (_no_graphs, "llmapi.EncodeCudaGraphConfig"),
        (_no_encode_only, "argument encode_only of LLM"),
    ],
)
def test_a_version_without_what_is_used_is_refused_with_the_remedy(
    change: Callable[[Any], None], missing: str, api: Any, artifacts: dict[str, Artifact]
) -> None:
    change(api)
    with pytest.raises(LibraryVersionError) as info:
        opened(artifacts["embedder"])
    assert str(info.value) == (
        f"TensorRT-LLM 1.4.0rc1 has no {missing}: install 1.3.0rc27 or newer, with pip install 'bei[trtllm]'."
    )


def test_a_version_whose_constructor_takes_other_arguments_is_refused(api: Any, artifacts: dict[str, Artifact]) -> None:
    del api.llmapi.TorchLlmArgs  # the constructor is all there is to ask
    original = api.LLM.__init__
    api.LLM.__init__ = lambda self, **kwargs: original(self, beam_width=1, **kwargs)
    with pytest.raises(EngineError, match=r"1.4.0rc1 could not load .*Extra inputs are not permitted. bei needs"):
        opened(artifacts["embedder"])


def test_without_the_package_the_extra_is_named(artifacts: dict[str, Artifact]) -> None:
    with pytest.raises(MissingDependencyError, match=r"'tensorrt-llm': pip install 'bei\[trtllm\]'"):
        opened(artifacts["embedder"])


def test_a_package_that_does_not_load_is_named(
    artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tensorrt_llm.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BrokenDependencyError, match=r"installed and cannot be loaded \(libcuda.so.1: cannot open"):
        opened(artifacts["embedder"])


def test_without_a_gpu_nothing_is_loaded(artifacts: dict[str, Artifact]) -> None:
    with trtllm.installed() as api:
        runtime: Any = sys.modules["cuda.bindings.runtime"]
        (success, _) = runtime.cudaGetDeviceCount()
        runtime.cudaGetDeviceCount = lambda: (success, 0)
        with pytest.raises(DeviceNotFoundError, match="CUDA finds no NVIDIA GPU"):
            opened(artifacts["embedder"])
        assert api.LLM.made == []


@pytest.mark.parametrize(("name", "capability", "least"), [("embedder in fp8", 80, 89), ("embedder", 75, 80)])
def test_a_gpu_that_does_not_compute_in_the_precision_is_refused(
    name: str, capability: int, least: int, artifacts: dict[str, Artifact]
) -> None:
    with trtllm.installed(capability) as api:
        with pytest.raises(ArtifactWrongDeviceError, match=rf"NVIDIA Stand-in \(SM{capability}\) does not: build it"):
            opened(artifacts[name])
        assert api.LLM.made == []
    with trtllm.installed(least):
        opened(artifacts[name]).close()


def test_outputs_that_it_does_not_give_are_refused(api: Any, artifacts: dict[str, Artifact]) -> None:
    manifest = artifacts["embedder"].manifest
    per_token = msgspec.structs.replace(manifest.outputs[0], name="token_embedding", per_token=True)
    manifest = msgspec.structs.replace(manifest, outputs=[*manifest.outputs, per_token])
    with pytest.raises(ArtifactManifestError, match="has outputs that TensorRT-LLM does not give"):
        load_engine(artifacts["embedder"].engine_dir, manifest)


def test_a_checkpoint_that_is_not_there_is_an_error(api: Any, artifacts: dict[str, Artifact], tmp_path: Path) -> None:
    with pytest.raises(ArtifactManifestError, match=r"config.json of .* cannot be read"):
        load_engine(tmp_path, artifacts["embedder"].manifest)


def test_keys_that_only_some_tokens_are_have_no_place(engine: Engine) -> None:
    batch = PackedBatch(np.ones(3, np.int32), np.array([0, 3], np.int32), key_lens=np.array([2], np.int32))
    with pytest.raises(EngineError, match="no keys or means of some tokens"):
        engine.run(batch)


def test_the_stand_in_refuses_what_the_documents_say(api: Any, artifacts: dict[str, Artifact]) -> None:
    folder = str(artifacts["embedder"].engine_dir)
    limits = {"max_batch_size": 2, "max_num_tokens": 64, "max_seq_len": 32}
    llm = api.LLM(folder, skip_tokenizer_init=True, encode_only=True, **limits)
    for name in ("generate", "generate_async"):
        with pytest.raises(RuntimeError, match="encode_only=True"):
            getattr(llm, name)([[1]])
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.encode(["a text"])
    with pytest.raises(TypeError, match="no forward takes"):
        llm.encode([[1]], token_type_id=[0])
    with pytest.raises(RuntimeError, match="requires encode_only=True"):
        api.LLM(folder, skip_tokenizer_init=True, **limits).encode([[1]])
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        api.LLM(folder, skip_tokenizer_init=True, pooling="mean", **limits)
    first = llm.encode([[1, 2]], return_raw_logits=True)
    before = first.clone()
    llm.encode([[3, 4, 5]], return_raw_logits=True)
    assert not torch.equal(first, before)


def test_the_engine_is_the_one_of_its_target(engine: Engine) -> None:
    assert isinstance(engine, TRTLLMEngine)
    assert issubclass(EngineError, BeiError)
