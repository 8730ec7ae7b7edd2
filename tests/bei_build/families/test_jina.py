"""JinaBERT v2 against an implementation in torch, written from the papers: transformers has none.

Two models of the same names: the one of the papers, and that of jina-embeddings-v2-base-code, "code" here, of which
there is the authors' modeling_bert.py (jinaai/jina-bert-v2-qk-post-norm) and text-embeddings-inference's jina_code.rs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bei.core import Encoding, PackedBatch
from bei.errors import CheckpointError, ConfigError, WeightsError
from bei_build.checkpoint import locate, read_checkpoint
from tests.bei_build.builds import build_artifact, embed, random_encodings, running
from tests.checkpoints import add_modules, read_tensors, wordpiece_tokenizer, write_json, write_tensors

HIDDEN, HEADS, INNER, LAYERS, LONGEST = 36, 6, 20, 3, 64  # six heads: slopes of a number that is no power of two
VOCABULARY = wordpiece_tokenizer().get_vocab_size()
CODE = "jinaai/jina-bert-v2-qk-post-norm"
functional = torch.nn.functional


def save(folder: Path, prefix: str = "", code: str = "jinaai/jina-bert-implementation", **changes: Any) -> Path:
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return mean + 0.3 * torch.randn(*shape, generator=generator)

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(HIDDEN, mean=1.0), f"{name}.bias": normal(HIDDEN)}

    def linear(name: str, out: int, width: int = HIDDEN) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(out, width), f"{name}.bias": normal(out)}

    tensors = {
        "embeddings.word_embeddings.weight": normal(VOCABULARY, HIDDEN),
        "embeddings.token_type_embeddings.weight": normal(2, HIDDEN),
        **norm("embeddings.LayerNorm"),
        **linear("pooler.dense", HIDDEN),
        **(linear("classifier", 3) if "id2label" in changes else {}),
    }
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            tensors |= linear(f"{layer}.attention.{name}", HIDDEN)
        tensors |= norm(f"{layer}.attention.output.LayerNorm")
        if code == CODE:
            for name in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2"):
                tensors |= norm(f"{layer}.{name}")
        else:
            tensors |= norm(f"{layer}.mlp.layernorm")
        up, down = ("up_gated_layer", "down_layer") if code == CODE else ("gated_layers", "wo")
        tensors[f"{layer}.mlp.{up}.weight"] = normal(2 * INNER, HIDDEN)
        tensors |= linear(f"{layer}.mlp.{down}", HIDDEN, INNER)
    config = {
        "architectures": ["JinaBertForMaskedLM"],
        "auto_map": {"AutoModel": f"{code}--modeling_bert.JinaBertModel"},
        "emb_pooler": "mean",
        "feed_forward_type": "geglu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": LONGEST,
        "model_type": "bert",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "position_embedding_type": "alibi",
        "type_vocab_size": 2,
        "vocab_size": VOCABULARY,
        **changes,
    }
    write_json(folder / "config.json", config)
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    heads = {name for name in tensors if name.startswith("classifier.")}
    return write_tensors(
        folder, {name if name in heads else f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    )


def slopes(count: int) -> list[float]:
    """2 ** (-8 i / n) for n a power of two; else those of the one below, then every other one of twice as many."""
    below = 1 << (count.bit_length() - 1)
    first = [2 ** (-8 * (index + 1) / below) for index in range(below)]
    return first if below == count else first + slopes(2 * below)[0::2][: count - below]


def states(
    tensors: dict[str, torch.Tensor], encoding: Encoding, activation: Any = functional.gelu, code: str = ""
) -> torch.Tensor:
    def norm(name: str, value: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(value, (HIDDEN,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        return functional.linear(value, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    ids = torch.from_numpy(encoding.input_ids.astype(np.int64))
    types = (
        torch.from_numpy(encoding.token_type_ids.astype(np.int64)) if encoding.token_type_ids is not None else ids * 0
    )
    value = (
        tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][types]
    )
    value = norm("embeddings.LayerNorm", value)
    positions = torch.arange(len(ids))
    bias = -torch.tensor(slopes(HEADS))[:, None, None] * (positions[:, None] - positions[None]).abs()
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        query, key, rows = (linear(f"{layer}.attention.self.{name}", value) for name in ("query", "key", "value"))
        if code == CODE:
            query = norm(f"{layer}.attention.self.layer_norm_q", query)
            key = norm(f"{layer}.attention.self.layer_norm_k", key)
        query, key, rows = (part.view(len(ids), HEADS, -1).transpose(0, 1) for part in (query, key, rows))
        weights = torch.softmax(query @ key.transpose(1, 2) / (HIDDEN // HEADS) ** 0.5 + bias, -1)
        mixed = (weights @ rows).transpose(0, 1).reshape(len(ids), HIDDEN)
        attended = norm(f"{layer}.attention.output.LayerNorm", linear(f"{layer}.attention.output.dense", mixed) + value)
        if code == CODE:
            value = norm(f"{layer}.layer_norm_1", value + attended)
            up, gate = torch.chunk(linear(f"{layer}.mlp.up_gated_layer", value), 2, -1)
            value = norm(f"{layer}.layer_norm_2", value + linear(f"{layer}.mlp.down_layer", up * activation(gate)))
        else:
            gate, up = torch.chunk(linear(f"{layer}.mlp.gated_layers", attended), 2, -1)
            value = norm(f"{layer}.mlp.layernorm", linear(f"{layer}.mlp.wo", activation(gate) * up) + attended)
    return value


@pytest.mark.parametrize(("kind", "activation"), [("geglu", functional.gelu), ("reglu", functional.relu)])
@pytest.mark.parametrize("code", ["jinaai/jina-bert-implementation", CODE])
@pytest.mark.parametrize("prefix", ["", "bert."])
def test_vectors_are_those_of_the_papers(prefix: str, code: str, kind: str, activation: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "jina", prefix, code, feed_forward_type=kind)
    add_modules(folder, ("mean",), hidden=HIDDEN)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in read_tensors(folder).items()}
    texts = random_encodings([5, 33, 2, 64, 17], VOCABULARY, pairs=True)
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.manifest.max_seq_len == LONGEST
    with running(artifact) as engine:
        actual = embed(engine, texts)
    expected = torch.stack([states(tensors, text, activation, code).mean(0) for text in texts])
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("code", ["jinaai/jina-bert-implementation", CODE])
def test_a_classifier_reads_the_pooled_first_token(code: str, tmp_path: Path) -> None:
    labels = {"0": "low", "1": "middle", "2": "high"}
    architectures = ["JinaBertForSequenceClassification"]
    folder = save(tmp_path / "jina", "bert.", code, architectures=architectures, id2label=labels)
    tensors = {name.removeprefix("bert."): tensor for name, tensor in read_tensors(folder).items()}
    texts = random_encodings([5, 33, 2], VOCABULARY, pairs=True)
    with running(build_artifact(folder, tmp_path / "artifact")) as engine:
        actual = engine.run(PackedBatch.from_encodings(texts))["logits"]
    for row, text in zip(actual, texts, strict=True):
        first = states(tensors, text, code=code)[0]
        pooled = torch.tanh(functional.linear(first, tensors["pooler.dense.weight"], tensors["pooler.dense.bias"]))
        expected = functional.linear(pooled, tensors["classifier.weight"], tensors["classifier.bias"])
        np.testing.assert_allclose(row, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_model_for_code_is_close_in_fewer_bits(precision: str, tmp_path: Path) -> None:
    artifact = build_artifact(save(tmp_path / "jina", code=CODE), tmp_path / "artifact", precision=precision)
    certificate = json.loads((artifact.path / "certificate.json").read_text())
    assert certificate["passed"]
    assert certificate["cosine_mean"] < 1.0, "computed in FP32 after all"


def test_a_copy_of_the_model_for_code_is_known_by_its_origin(tmp_path: Path) -> None:
    """transformers writes ``_name_or_path``; whoever copies the code beside the weights gets another auto_map."""
    auto_map = {"AutoModel": "modeling_bert.JinaBertModel"}
    folder = save(tmp_path / "jina", code=CODE, auto_map=auto_map, _name_or_path=CODE)
    assert read_checkpoint(locate(str(folder))).spec.layers[0].second_attention_norm


def test_it_is_verified_with_its_own_fp32_engine(tmp_path: Path) -> None:
    folder = save(tmp_path / "jina")
    artifact = build_artifact(folder, tmp_path / "artifact")
    certificate = json.loads((artifact.path / "certificate.json").read_text())
    assert "engine, FP32" in certificate["reference"]
    with pytest.raises(ConfigError, match=r"transformers has no JinaBertForMaskedLM\. Use --reference engine"):
        build_artifact(folder, tmp_path / "other", reference="hf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_type": "original"}, "feed_forward_type 'original'; .* only geglu or reglu"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'.*only 'alibi'"),
    ],
)
def test_other_settings_of_its_code_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(locate(str(save(tmp_path, **changes))))


def test_the_model_for_code_without_its_origin_is_refused_by_its_tensors(tmp_path: Path) -> None:
    folder = save(tmp_path, code=CODE, auto_map={})
    with pytest.raises(WeightsError, match=r"layer\.0\.mlp\.gated_layers\.weight is missing"):
        read_checkpoint(locate(str(folder))).weights()
