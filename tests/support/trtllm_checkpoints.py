"""A tiny checkpoint of each kind that target trtllm takes, in the type it is written in, so that nothing is rounded."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from tests.support.checkpoints import change_config, read_tensors, save_checkpoint, write_tensors
from tests.support.zoo import CASES, Case, qwen_tokenizer, save_case


def qwen3_embedder(folder: Path, *, causal_lm: bool = False) -> Path:
    """As Qwen3-Embedding: no prefix and no matrix of a language model, unless with ``causal_lm``."""
    name = "Qwen3ForCausalLM" if causal_lm else "Qwen3Model"
    case = next(case for case in CASES if case.name == name)
    return save_case(folder, replace(case, stored=torch.bfloat16))


def bert_classifier(folder: Path) -> Path:
    """Three labels, two types of tokens."""
    return save_checkpoint(folder, task="ForSequenceClassification", dtype=torch.float16, num_labels=3)


def reward_model(folder: Path) -> Path:
    """As Qwen2.5-Math-RM: a head that lies beside the model's tensors, one of a language model that nobody reads."""
    case = next(case for case in CASES if case.name == "Qwen2Model")
    settings = {key: value for key, value in case.settings.items() if "window" not in key and key != "layer_types"}
    save_case(folder, Case("Qwen2", "Qwen2Model", settings, qwen_tokenizer, stored=torch.bfloat16))
    generator = torch.Generator().manual_seed(5)
    tensors = {f"model.{name}": tensor for name, tensor in read_tensors(folder).items()}
    for name, shape in {"0.weight": (32, 32), "0.bias": (32,), "2.weight": (1, 32), "2.bias": (1,)}.items():
        tensors[f"score.{name}"] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    tensors["lm_head.weight"] = torch.ones(tensors["model.embed_tokens.weight"].shape)
    write_tensors(folder, tensors)
    auto_map = {"AutoModel": "modeling_qwen2_rm.Qwen2ForRewardModel"}
    return change_config(folder, architectures=["Qwen2ForRewardModel"], auto_map=auto_map)


JOINED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def in_fp8(folder: Path, copy: Path) -> Path:
    """``folder`` with the matrices of its layers rounded by torch's own FP8, joined ones with one scale."""
    shutil.copytree(folder, copy)
    tensors = {name: tensor.float() for name, tensor in read_tensors(folder).items()}
    rounded = dict(tensors)
    for name, group in itertools.product(tensors, JOINED):
        part = next((part for part in group if name.endswith(f"{part}.weight")), None)
        if part:
            scale = torch.stack([tensors[name.replace(part, other)].abs().max() for other in group]).max() / 448
            rounded[name] = (tensors[name] / scale).to(torch.float8_e4m3fn).float() * scale
    return write_tensors(copy, rounded)
