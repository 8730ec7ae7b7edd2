"""Folders whose only weights are an ONNX export: the same model as that of safetensors, or refused by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bei.core import PackedBatch
from bei.errors import WeightsError
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import source_of
from tests.support.builds import build_artifact, random_encodings, running
from tests.support.checkpoints import change_config, read_tensors, write_tensors
from tests.support.onnx_files import save_onnx
from tests.support.reading import read, refused, saved

_NAMES = [
    *("BertModel", "BertForSequenceClassification", "BertForMaskedLM", "RobertaModel", "MPNetModel", "ElectraModel"),
    *("XLMRobertaForSequenceClassification", "DistilBertModel", "DistilBertForSequenceClassification"),
    *(
        "NomicBertModel",
        "ModernBertModel",
        "ModernBertForSequenceClassification",
        "Qwen3Model",
        "Qwen2Model",
        "LlamaModel",
    ),
    *("MistralModel", "T5EncoderModel", "DebertaV2Model", "AlbertModel"),
]
_NEWER = ["BertModel", "ModernBertModel", "Qwen3Model"]


def _same_weights(one: Path, other: Path) -> None:
    wanted, found = read(one), read(other)
    assert wanted.spec == found.spec
    with wanted.weights() as stored, found.weights() as weights:
        for weight, _ in wanted.spec.weights():
            np.testing.assert_array_equal(weights.read(weight), stored.read(weight), weight)


@pytest.mark.parametrize("name", _NAMES)
def test_an_export_has_the_weights_of_the_model(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "source", name)
    save_onnx(source, tmp_path / "alone")
    _same_weights(source, tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("name", _NEWER)
def test_an_export_of_the_newer_exporter_too(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "source", name)
    save_onnx(source, tmp_path / "alone", dynamo=True)
    _same_weights(source, tmp_path / "alone")


@pytest.mark.parametrize("how", ["external", "unfolded", "another name"])
def test_every_form_of_a_file_is_the_same_model(tmp_path: Path, how: str) -> None:
    source = saved(tmp_path / "source", "BertModel")
    name = "model_exported.onnx" if how == "another name" else "model.onnx"
    save_onnx(source, tmp_path / "alone", name, external=how == "external", folded=how != "unfolded")
    _same_weights(source, tmp_path / "alone")


def test_numbers_of_fp16_are_read_as_they_are(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "BertModel")
    save_onnx(source, tmp_path / "alone", half=True)
    one, other = read(source), read(tmp_path / "alone")
    with one.weights() as stored, other.weights() as weights:
        assert weights.stored_types == {"F16"}
        for weight, _ in one.spec.weights():
            np.testing.assert_array_equal(weights.read(weight), stored.read(weight).astype(np.float16), weight)


def test_equal_tensors_that_are_stored_once_are_each_found(tmp_path: Path) -> None:
    """As in untrained models: biases of zeros."""
    source = saved(tmp_path / "source", "BertModel")
    tensors = read_tensors(source)
    equal = {name: tensor.zero_() if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}
    write_tensors(source, equal)
    file = save_onnx(source, tmp_path / "alone")
    assert len(onnx.load(file).graph.initializer) < len(equal) - 10
    _same_weights(source, tmp_path / "alone")


@pytest.mark.parametrize("name", ["BertModel", "Qwen3Model"])
def test_the_artifact_answers_as_onnx_runtime_does(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "source", name)
    file = save_onnx(source, tmp_path / "alone", external=True)
    artifact = build_artifact(tmp_path / "alone", tmp_path / "artifact", pooling="mean", task="embed")
    assert artifact.certificate.reference.startswith("transformers")
    encodings = random_encodings([7, 1, 20, 9], 40)
    with running(artifact) as engine:
        vectors = engine.run(PackedBatch.from_encodings(encodings))["embedding"]
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for vector, encoding in zip(vectors, encodings, strict=True):
        ids = encoding.input_ids.astype(np.int64)[None]
        (states,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        np.testing.assert_allclose(vector, states[0].mean(0), rtol=0, atol=2e-5)


def test_all_files_of_an_export_are_recorded(tmp_path: Path) -> None:
    file = save_onnx(saved(tmp_path / "source", "BertModel"), tmp_path / "alone", external=True)
    before = source_of(read(tmp_path / "alone")).sha256
    beside = file.with_name(f"{file.name}_data")
    content = bytearray(beside.read_bytes())
    content[-1] ^= 1
    beside.write_bytes(content)
    assert source_of(read(tmp_path / "alone")).sha256 != before


def _changed(folder: Path, change: Callable[[ModelProto], object], name: str = "BertModel") -> Path:
    """An export whose content is changed."""
    file = save_onnx(saved(folder / "source", name), folder / "alone", "model.onnx")
    model = onnx.load(file)
    change(model)
    file.write_bytes(model.SerializeToString())
    return file


def _node(model: ModelProto, end: str) -> NodeProto:
    found: NodeProto = next(node for node in model.graph.node if node.name.endswith(end))
    return found


def _drop(model: ModelProto, end: str) -> None:
    model.graph.initializer.remove(next(each for each in model.graph.initializer if each.name.endswith(end)))


def _quantized(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("DequantizeLinear", ["a", "b", "c"], ["d"]))


def _fused(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Attention", ["a"], ["d"], domain="com.microsoft"))


def _conditional(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("If", ["a"], ["d"]))


def _nameless(model: ModelProto) -> None:
    _node(model, "layer.1/attention/self/query/MatMul").name = "MatMul_17"


def _other_matrix(model: ModelProto) -> None:
    one, other = (_node(model, f"layer.{layer}/attention/self/query/MatMul") for layer in (0, 1))
    one.name = other.name


def _another_layer(model: ModelProto) -> None:
    matrix = numpy_helper.from_array(np.ones((32, 8), np.float32), "onnx::MatMul_999")
    model.graph.initializer.append(matrix)
    node = helper.make_node(
        "MatMul", [model.graph.output[0].name, matrix.name], ["y"], name="/encoder/layer.0/extra/MatMul"
    )
    model.graph.node.append(node)


def _scaled(model: ModelProto) -> None:
    _another_layer(model)
    node = model.graph.node[-1]
    node.op_type = "Gemm"
    node.attribute.append(helper.make_attribute("alpha", 2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_quantized, r"graph is quantized \(operator 'DequantizeLinear'\)\. Build from the original"),
        (_fused, r"graph is fused, or made of functions \(operator 'com\.microsoft\.Attention'\)"),
        (_conditional, r"graph has conditions \(operator 'If'\)"),
        (_nameless, r"has no name of a parameter, and neither has the operator that reads it \('MatMul_17'\)"),
        (_other_matrix, r"has two tensors for .*layer\.1\.attention\.self\.query\.weight"),
        (_another_layer, r"Tensor encoder\.layer\.0\.extra\.weight.* is not part of this architecture"),
        (_scaled, r"operator '/encoder/layer\.0/extra/MatMul' scales a matrix"),
        (lambda model: _drop(model, "word_embeddings.weight"), r"is missing"),
        (lambda model: _drop(model, "layer.2.output.dense.bias"), r"layer\.2\.output\.dense\.bias is missing"),
    ],
)  # fmt: skip
def test_what_a_graph_does_not_say_is_refused_by_name(
    tmp_path: Path, change: Callable[[ModelProto], object], message: str
) -> None:
    refused(_changed(tmp_path, change).parent, WeightsError, message)


def test_an_export_beside_another_model_s_settings_is_refused(tmp_path: Path) -> None:
    save_onnx(saved(tmp_path / "source", "BertModel"), tmp_path / "alone")
    change_config(tmp_path / "alone", num_hidden_layers=2)
    refused(tmp_path / "alone", WeightsError, "is not part of this architecture")


def _named_norms(model: ModelProto) -> list[str]:
    return [each.name for each in model.graph.initializer if each.name.endswith("norm.weight")]


@pytest.mark.parametrize(
    ("name", "dynamo"),
    [
        ("Gemma3TextModel", False),
        ("NemotronModel", False),
        pytest.param("Gemma3TextModel", True, marks=pytest.mark.slow),
    ],
)
def test_norms_to_which_the_exporter_adds_one_multiply_by_the_same_numbers(
    tmp_path: Path, name: str, dynamo: bool
) -> None:
    """They multiply by one more than their weights, and the file has the sum alone."""
    source = saved(tmp_path / "source", name)
    assert not _named_norms(onnx.load(save_onnx(source, tmp_path / "alone", dynamo=dynamo)))
    one, other = read(source), read(tmp_path / "alone")
    assert one.spec == other.spec
    with one.weights() as stored, other.weights() as weights:
        for weight, _ in one.spec.weights():
            added = np.float32("norm" in weight and weight.endswith(".weight"))
            np.testing.assert_array_equal(weights.read(weight) + added, stored.read(weight) + added, weight)


def test_one_is_not_taken_off_a_norm_s_bias_that_lost_its_name(tmp_path: Path) -> None:
    path = save_onnx(saved(tmp_path / "source", "NemotronModel"), tmp_path / "alone")
    model = onnx.load(path)
    names = {each.name: f"onnx::{place}" for place, each in enumerate(model.graph.initializer) if "norm" in each.name}
    assert any(name.endswith("norm.bias") for name in names)
    for each in model.graph.initializer:
        each.name = names.get(each.name, each.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    onnx.save(model, path)
    refused(tmp_path / "alone", WeightsError, r"norm\.bias is missing")


def test_of_several_files_none_is_chosen(tmp_path: Path) -> None:
    file = save_onnx(saved(tmp_path / "source", "BertModel"), tmp_path / "alone", "onnx/model_fp16.onnx")
    file.with_name("model_quantized.onnx").touch()
    refused(
        tmp_path / "alone", WeightsError, r"has 2 ONNX files, .*\(model_fp16\.onnx, model_quantized\.onnx\): rename"
    )


# Hostile files.


def _tensor(model: ModelProto) -> TensorProto:
    found: TensorProto = next(each for each in model.graph.initializer if each.name.endswith("word_embeddings.weight"))
    return found


def _huge(model: ModelProto) -> None:
    _tensor(model).dims[:] = [1 << 40, 1 << 40]


def _negative(model: ModelProto) -> None:
    _tensor(model).dims[:] = [-1, -1024]


def _many_dimensions(model: ModelProto) -> None:
    _tensor(model).dims[:] = [1] * 100_000


def _unknown_type(model: ModelProto) -> None:
    _tensor(model).data_type = 9999


def _integers(model: ModelProto) -> None:
    tensor = _tensor(model)
    tensor.CopyFrom(numpy_helper.from_array(np.zeros(list(tensor.dims), np.int8), tensor.name))


def _twice(model: ModelProto) -> None:
    model.graph.initializer.append(model.graph.initializer[0])


def _cyclic(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Identity", ["a"], ["b"]))
    model.graph.node.append(helper.make_node("Identity", ["b"], ["a"]))
    model.graph.node.append(helper.make_node("MatMul", ["x", "a"], ["c"], name="/pooler/dense/MatMul"))
    _drop(model, "word_embeddings.weight")


def _outside(location: str, offset: str = "0") -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        tensor = _tensor(model)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", offset)):
            tensor.external_data.add(key=key, value=value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_huge, r"has shape \[1099511627776, 1099511627776\]"),
        (_negative, r"has shape \[-1, -1024\]"),
        (_many_dimensions, r"has 100000 dimensions"),
        (_unknown_type, r"is missing"),
        (_integers, r"is missing"),
        (_twice, r"has the tensor .* twice"),
        (_cyclic, r"is missing"),
        (_outside("../secret"), r"is not read \('\.\./secret' leads out of its folder\)"),
        (_outside("/etc/passwd"), r"'/etc/passwd' leads out of its folder"),
        (_outside("nowhere"), r"'nowhere' is not there"),
        (_outside("config.json"), r"ends outside of config\.json"),
        (_outside("config.json", "-5"), r"offset '-5'"),
        (_outside("config.json", "9" * 30), r"offset '999"),
        (_outside(""), r"location ''"),
        (_outside("x\0y"), r"has a NUL byte in it"),
        (_outside("*/_ORT_MEM_ADDR_/*", "140000000000"), r"is not there"),
    ],
)  # fmt: skip
def test_a_hostile_graph_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[ModelProto], object], message: str
) -> None:
    folder = _changed(tmp_path, change).parent
    (tmp_path / "secret").write_bytes(bytes(1 << 20))
    with pytest.raises(WeightsError, match=message) as info, read(folder).weights() as weights:
        weights.read("embeddings.word.weight")
    assert "\n" not in str(info.value)
    assert len(str(info.value)) < 1000


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(1 << 20))
    folder = _changed(tmp_path, _outside("data")).parent
    (folder / "data").symlink_to(tmp_path / "secret")
    with pytest.raises(WeightsError, match="a link that leads out of its folder"), read(folder).weights() as weights:
        weights.read("embeddings.word.weight")


@pytest.mark.parametrize("length", [0, 1, 100, 5000, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    file = save_onnx(saved(tmp_path / "source", "BertModel"), tmp_path / "alone", "model.onnx")
    file.write_bytes(file.read_bytes()[:length])
    refused(tmp_path / "alone", WeightsError, r"model\.onnx is not a readable ONNX file \(.*\)\. Download it again")


def _bytes_of(number: int) -> bytes:
    """A varint."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _message(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _bytes_of(len(content)) + content


# In 20 MB: ten million empty nodes, tensors, or attributes of one node; and messages in each other.
_BOMBS = {
    "nodes": _message(7, bytes([1 << 3 | 2, 0]) * 10_000_000),
    "tensors": _message(7, bytes([5 << 3 | 2, 0]) * 10_000_000),
    "attributes": _message(7, _message(1, bytes([5 << 3 | 2, 0]) * 10_000_000)),
    "functions": bytes([25 << 3 & 127 | 2 | 128, 1, 0]) * 7_000_000,
}


@pytest.mark.parametrize("name", [*_BOMBS, "depth"])
def test_what_grows_when_it_is_parsed_is_refused_in_bounded_memory(tmp_path: Path, name: str) -> None:
    content = _BOMBS.get(name, b"")
    if name == "depth":
        for _ in range(5000):
            content = _message(1, _message(5, _message(6, content)))  # a graph in an attribute of a node of a graph
        content = _message(7, content)
    file = tmp_path / "model.onnx"
    file.write_bytes(content)
    code = f"""
import resource, sys
import onnx
from pathlib import Path
from bei.core import PackedBatch
from bei.errors import WeightsError
from bei_build.weights.onnx_file import read_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_model(Path({str(file)!r}))
except WeightsError as error:
    print(str(error).count(chr(10)), error)
print("grew", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    refusal, grew = found.stdout.splitlines()
    assert refusal.startswith(f"0 {file} is not a readable ONNX file"), found.stdout
    assert int(grew.split()[1]) < 400, found.stdout  # MB, in this process: the copy that parsed has ended


def test_of_a_repository_s_exports_one_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["onnx/model.onnx", "onnx/model.onnx_data", "onnx/model_quantized.onnx", "config.json"]
    asked: list[str] = []

    def download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.extend(pattern for pattern in allow_patterns if "onnx" in pattern)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: files)
    assert locate("a/b").folder == tmp_path
    assert asked == ["onnx/model.onnx*"]
    files += ["training_args.bin", "2_Dense/model.safetensors"]  # neither is the weights of the model
    locate("a/b")
    assert asked == ["onnx/model.onnx*"] * 2
    files.append("0_Transformer/model.safetensors")
    locate("a/b")
    assert asked == ["onnx/model.onnx*"] * 2
