"""NomicBERT with biases and experts against an implementation in torch: transformers' class has neither.

Written from what the original code computes (nomic-ai/contrastors; text-embeddings-inference's nomic.rs and vLLM's
bert_with_rope.py follow it), token by token and expert by expert. The names of tensors and keys of config.json are
those of nomic-ai/nomic-embed-text-v2-moe.
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
from tests.checkpoints import add_modules, read_tensors, unigram_tokenizer, write_json, write_tensors

HIDDEN, HEADS, INNER, LAYERS, EXPERTS, LONGEST = 32, 4, 24, 4, 8, 64
VOCABULARY = unigram_tokenizer().get_vocab_size() + 5  # filled up to a round number, as the original is
LENGTHS = [5, 33, 1, 64, 17]
functional = torch.nn.functional


def config_of(**changes: Any) -> dict[str, Any]:
    return {
        "activation_function": "gelu",
        "add_pooling_layer": False,
        "architectures": ["NomicBertModel"],
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "causal": False,
        "expert_choice_router": False,
        "ffn_div": 1,
        "layer_norm_epsilon": 1e-05,
        "max_trained_positions": 2048,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "model_type": "nomic_bert",
        "moe_every_n_layers": 2,
        "moe_impl": "megablocks",
        "moe_normalize_expert_weights": False,
        "moe_top_k": 2,
        "n_embd": HIDDEN,
        "n_head": HEADS,
        "n_inner": INNER,
        "n_layer": LAYERS,
        "n_positions": LONGEST,
        "num_experts": EXPERTS,
        "num_shared_experts": 0,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": True,
        "rotary_emb_base": 100.0,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "type_vocab_size": 1,
        "use_rms_norm": False,
        "vocab_size": VOCABULARY,
        **changes,
    }


def has_experts(config: dict[str, Any], layer: int) -> bool:
    return bool(config["num_experts"]) and layer % int(config["moe_every_n_layers"]) == 1


def save(folder: Path, prefix: str = "", **changes: Any) -> Path:
    config, generator = config_of(**changes), torch.Generator().manual_seed(7)

    def normal(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return mean + 0.3 * torch.randn(*shape, generator=generator)

    def linear(name: str, out: int, width: int, bias: bool) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(out, width)} | ({f"{name}.bias": normal(out)} if bias else {})

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(HIDDEN, mean=1.0), f"{name}.bias": normal(HIDDEN)}

    tensors = {
        "embeddings.word_embeddings.weight": normal(VOCABULARY, HIDDEN),
        "embeddings.token_type_embeddings.weight": normal(1, HIDDEN),
        **norm("emb_ln"),
    }
    gated = config["activation_function"] != "gelu"
    for index in range(LAYERS):
        layer = f"encoder.layers.{index}"
        tensors |= linear(f"{layer}.attn.Wqkv", 3 * HIDDEN, HIDDEN, config["qkv_proj_bias"])
        tensors |= linear(f"{layer}.attn.out_proj", HIDDEN, HIDDEN, config["qkv_proj_bias"])
        tensors |= norm(f"{layer}.norm1") | norm(f"{layer}.norm2")
        if has_experts(config, index):
            tensors[f"{layer}.mlp.router.layer.weight"] = 3 * normal(EXPERTS, HIDDEN)
            tensors[f"{layer}.mlp.experts.mlp.w1"] = normal(EXPERTS * INNER, HIDDEN)
            tensors[f"{layer}.mlp.experts.mlp.w2"] = normal(EXPERTS * INNER, HIDDEN)
            tensors[f"{layer}.mlp.experts.bias"] = normal(HIDDEN)
            continue
        for name in ("fc11", "fc12") if gated else ("fc1",):
            tensors |= linear(f"{layer}.mlp.{name}", INNER, HIDDEN, config["mlp_fc1_bias"])
        tensors |= linear(f"{layer}.mlp.fc2", HIDDEN, INNER, config["mlp_fc2_bias"])
    write_json(folder / "config.json", config)
    unigram_tokenizer().save(str(folder / "tokenizer.json"))
    tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    if "id2label" in changes:
        tensors |= linear(f"{prefix}pooler.dense", HIDDEN, HIDDEN, True)
        tensors |= linear("classifier", len(changes["id2label"]), HIDDEN, True)
    return write_tensors(folder, tensors)


def rotated(heads: torch.Tensor, base: float) -> torch.Tensor:
    """``heads`` [tokens, heads, width]: the halves turn by position / base ** (2 i / width)."""
    width = heads.shape[-1]
    angles = torch.arange(len(heads))[:, None] / base ** (torch.arange(0, width, 2) / width)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Oracle:
    """The original code's transformer on one text."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {name.removeprefix(prefix): tensor for name, tensor in read_tensors(folder).items()}

    def states(self, encoding: Encoding) -> torch.Tensor:
        ids = torch.from_numpy(encoding.input_ids.astype(np.int64))
        value = self.tensors["embeddings.word_embeddings.weight"][ids]
        value = self.norm("emb_ln", value + self.tensors["embeddings.token_type_embeddings.weight"][0])
        for index in range(LAYERS):
            layer = f"encoder.layers.{index}"
            value = self.norm(f"{layer}.norm1", self.attention(f"{layer}.attn", value) + value)
            mlp = self.experts if has_experts(self.config, index) else self.mlp
            value = self.norm(f"{layer}.norm2", mlp(f"{layer}.mlp", value) + value)
        return value

    def linear(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return functional.linear(value, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, value: torch.Tensor) -> torch.Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return functional.layer_norm(value, (HIDDEN,), weight, bias, self.config["layer_norm_epsilon"])

    def attention(self, name: str, value: torch.Tensor) -> torch.Tensor:
        parts = self.linear(f"{name}.Wqkv", value).view(len(value), 3, HEADS, -1).unbind(1)
        base = self.config["rotary_emb_base"]
        query, key, rows = rotated(parts[0], base), rotated(parts[1], base), parts[2]
        weights = torch.einsum("qhd,khd->hqk", query, key) / (HIDDEN // HEADS) ** 0.5
        mixed = torch.einsum("hqk,khd->qhd", weights.softmax(-1), rows)
        return self.linear(f"{name}.out_proj", mixed.reshape(len(value), HIDDEN))

    def mlp(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if self.config["activation_function"] == "gelu":
            return self.linear(f"{name}.fc2", functional.gelu(self.linear(f"{name}.fc1", value)))
        activation = functional.silu if self.config["activation_function"] == "swiglu" else functional.gelu
        gate = activation(self.linear(f"{name}.fc12", value))
        return self.linear(f"{name}.fc2", self.linear(f"{name}.fc11", value) * gate)

    def experts(self, name: str, value: torch.Tensor) -> torch.Tensor:
        up, down = (self.tensors[f"{name}.experts.mlp.{w}"].view(EXPERTS, INNER, HIDDEN) for w in ("w1", "w2"))
        rows = []
        for token in value:
            shares = self.linear(f"{name}.router.layer", token).softmax(-1)
            best = shares.argsort(descending=True)[: self.config["moe_top_k"]]
            total = shares[best].sum() if self.config["moe_normalize_expert_weights"] else 1.0
            outputs = [shares[e] / total * (functional.gelu(up[e] @ token) @ down[e]) for e in best.tolist()]
            rows.append(torch.stack(outputs).sum(0) + self.tensors[f"{name}.experts.bias"])
        return torch.stack(rows)


def vectors(folder: Path, out: Path, texts: list[Encoding], **settings: Any) -> np.ndarray[Any, Any]:
    with running(build_artifact(folder, out, **settings)) as engine:
        return embed(engine, texts)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_normalize_expert_weights": True},
        {"moe_top_k": 1},
        {"moe_top_k": 3, "moe_normalize_expert_weights": True, "moe_every_n_layers": 3},
        {"moe_top_k": EXPERTS},
        {"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False},
        {"num_experts": 0},
        {"num_experts": 0, "activation_function": "swiglu"},
        {"num_experts": 0, "activation_function": "geglu", "mlp_fc1_bias": False},
    ],
    ids=str,
)
def test_vectors_are_those_of_the_original_code(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = save(tmp_path / "nomic", **changes)
    add_modules(folder, ("mean",), hidden=HIDDEN)
    oracle, texts = Oracle(folder), random_encodings(LENGTHS, VOCABULARY)
    expected = torch.stack([oracle.states(text).mean(0) for text in texts])
    np.testing.assert_allclose(vectors(folder, tmp_path / "artifact", texts), expected.numpy(), atol=2e-4)


@pytest.mark.parametrize(
    ("changed", "least"), [({"moe_normalize_expert_weights": True}, 1e-2), ({"moe_top_k": 1}, 1e-2)], ids=str
)
def test_the_tolerance_tells_the_routers_settings_apart(changed: dict[str, Any], least: float, tmp_path: Path) -> None:
    """The control of the test above: the same weights read with another setting."""
    texts = random_encodings(LENGTHS, VOCABULARY)
    right = Oracle(save(tmp_path / "right"))
    wrong = Oracle(save(tmp_path / "wrong", **changed))
    for text in texts:
        assert (right.states(text).mean(0) - wrong.states(text).mean(0)).abs().max() > least


def test_a_classifier_reads_the_pooled_first_token(tmp_path: Path) -> None:
    labels = {"0": "low", "1": "high"}
    folder = save(tmp_path / "n", "bert.", architectures=["NomicBertForSequenceClassification"], id2label=labels)
    oracle, texts = Oracle(folder, "bert."), random_encodings(LENGTHS, VOCABULARY)
    with running(build_artifact(folder, tmp_path / "artifact")) as engine:
        actual = engine.run(PackedBatch.from_encodings(texts))["logits"]
    for row, text in zip(actual, texts, strict=True):
        pooled = torch.tanh(oracle.linear("pooler.dense", oracle.states(text)[0]))
        np.testing.assert_allclose(row, oracle.linear("classifier", pooled).numpy(), atol=2e-4)


def test_who_else_is_in_the_batch_changes_nothing(tmp_path: Path) -> None:
    """Sums of experts' outputs are in one order, whichever tokens each of them has."""
    texts = random_encodings([*LENGTHS, 2, 9], VOCABULARY)
    with running(build_artifact(save(tmp_path / "nomic"), tmp_path / "artifact")) as engine:
        together = embed(engine, texts)
        assert (embed(engine, texts) == together).all()
        for row, text in zip(together, texts, strict=True):
            np.testing.assert_allclose(embed(engine, [text])[0], row, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_it_is_close_in_fewer_bits(precision: str, tmp_path: Path) -> None:
    artifact = build_artifact(save(tmp_path / "nomic"), tmp_path / "artifact", precision=precision)
    certificate = json.loads((artifact.path / "certificate.json").read_text())
    assert certificate["threshold"] <= certificate["cosine_mean"] < 1.0


def test_it_is_verified_with_its_own_fp32_engine(tmp_path: Path) -> None:
    """transformers' class takes the config and leaves out experts and biases."""
    folder = save(tmp_path / "nomic")
    certificate = json.loads((build_artifact(folder, tmp_path / "artifact").path / "certificate.json").read_text())
    assert "engine, FP32" in certificate["reference"]
    with pytest.raises(ConfigError, match=r"transformers has no NomicBertModel\. Use --reference engine"):
        build_artifact(folder, tmp_path / "other", reference="hf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_choice_router": True}, "expert_choice_router = True.*only False"),
        ({"num_shared_experts": 1}, "num_shared_experts = 1.*only 0"),
        ({"ffn_div": 2}, "ffn_div = 2.*only 1"),
        ({"moe_normalize_expert_weights": 2}, "moe_normalize_expert_weights = 2.*only False or None or 1"),
        ({"moe_top_k": 9}, "8 experts, moe_top_k 9"),
        ({"moe_top_k": 0}, "8 experts, moe_top_k 0"),
        ({"moe_every_n_layers": 1}, "moe_every_n_layers 1"),
        ({"activation_function": "swiglu"}, "activation_function = 'swiglu'.*only 'gelu'"),
        ({"use_rms_norm": True}, "use_rms_norm = True"),
    ],
    ids=str,
)
def test_other_settings_of_its_experts_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(locate(str(save(tmp_path, **changes))))


def test_experts_of_another_width_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    tensors = read_tensors(folder)
    name = "encoder.layers.1.mlp.experts.mlp.w1"
    write_tensors(folder, {**tensors, name: tensors[name][:-1]})
    with pytest.raises(WeightsError, match=rf"{name} has shape \[191, 32\], but config.json implies \[192, 32\]"):
        read_checkpoint(locate(str(folder))).weights()
