"""Preparers: they change a saved checkpoint to what a repository has, where ``save_pretrained`` writes something else.

Each takes the folder, then the arguments that ``repositories/*.yaml`` gives. ``..._of`` compute what such layers do.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tests.bei_build.families.nv_embed import around as around
from tests.bei_build.families.nv_embed import latent_attention as latent_attention
from tests.support import recipes
from tests.support.checkpoints import (
    add_static_modules,
    change_config,
    read_tensors,
    save_static,
    write_json,
    write_tensors,
)
from tests.support.gguf_files import save_gguf, vocabulary_metadata


def pickled(folder: Path) -> None:
    """pytorch_model.bin alone, as repositories before safetensors have it."""
    torch.save(read_tensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def gamma_and_beta(folder: Path) -> None:
    """TensorFlow's names of a norm's weight and bias."""
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = read_tensors(folder)
    for name in list(tensors):
        for new, old in names.items():
            if name.endswith(new):
                tensors[name.replace(new, old)] = tensors.pop(name)
    write_tensors(folder, tensors)


def position_ids(folder: Path) -> None:
    """The numbers of positions among the weights, as transformers up to 4.30 saved them."""
    ids = torch.arange(8)[None]
    write_tensors(folder, {**read_tensors(folder), "embeddings.position_ids": ids})


def vocabulary_file(folder: Path) -> None:
    """vocab.txt in place of tokenizer.json."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n")
    write_json(folder / "tokenizer_config.json", {"do_lower_case": True, "tokenizer_class": "BertTokenizer"})


def tokenizer_class(folder: Path, name: str) -> None:
    """tokenizer_config.json that names the tokenizer's class."""
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": name})


def asks_for_end(folder: Path, eos: str, bos: str | None = None) -> None:
    """A tokenizer_config.json that asks for what tokenizer.json does not add."""
    settings = {"add_bos_token": bos is not None, "add_eos_token": True, "bos_token": bos, "eos_token": eos}
    write_json(folder / "tokenizer_config.json", settings)


def python_tokenizer(folder: Path, name: str, *files: str) -> None:
    """A tokenizer that exists in Python alone."""
    (folder / "tokenizer.json").unlink()
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": name})
    for file in files:
        (folder / file).write_text("a 1\nb 1\n")


def beside_towers(folder: Path) -> None:
    """EmbeddingGemma 2's text model as a part of the whole, with a tensor of each tower."""
    text = json.loads((folder / "config.json").read_text())
    write_json(
        folder / "config.json",
        {
            "architectures": ["EmbeddingGemma2Model"],
            "model_type": "embedding_gemma2",
            "text_config": {key: value for key, value in text.items() if key != "architectures"},
            "vision_config": {"model_type": "gemma4_vision"},
            "audio_config": {"model_type": "gemma4_audio"},
        },
    )
    tensors = {f"language_model.{name}": tensor for name, tensor in read_tensors(folder).items()}
    towers = ("vision_tower.encoder", "audio_tower.encoder", "embed_vision.projection", "embed_audio.projection")
    write_tensors(folder, {**tensors, **{f"{tower}.weight": torch.ones(2, 2) for tower in towers}})


def without_prefix(folder: Path, name: str) -> None:
    """Tensors of a base model under the class with a head, ``name``, in config.json."""
    change_config(folder, architectures=[name])


def only(folder: Path, *names: str) -> None:
    """Files that no part of transformers reads."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\0" * 64)


def instead_of_weights(folder: Path, *names: str) -> None:
    """Another form of the weights in place of safetensors."""
    (folder / "model.safetensors").unlink()
    only(folder, *names)


def gguf(folder: Path, arch: str, model: str, pre: str, pooling: int) -> None:
    """llama.cpp's form of the checkpoint in place of all its files."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    metadata: dict[str, object] = {**vocabulary_metadata(tokenizer, model, pre), f"{arch}.pooling_type": pooling}
    if pre == "qwen2":
        metadata["tokenizer.ggml.add_eos_token"] = True
    save_gguf(folder, folder / "model-f32.gguf", arch, metadata)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".gguf":
            path.unlink()


def adapter_of_an_adapter(folder: Path) -> None:
    """An adapter's files, whose base is a repository with code of its own and an adapter too."""
    base = folder.with_name(f"{folder.name}-base")
    base.mkdir()
    settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}
    write_json(base / "adapter_config.json", {**settings, "base_model_name_or_path": "x/y"})
    write_tensors(base, {"base_model.model.none.lora_A.weight": torch.zeros(1)})
    write_json(folder / "adapter_config.json", {**settings, "base_model_name_or_path": str(base)})
    only(folder, "adapter_model.safetensors")


def adapter(folder: Path) -> None:
    """An adapter of all linear layers and, elsewhere, its base; with it merged the base is the saved model."""
    base = folder.with_name(f"{folder.name}-base")
    shutil.copytree(folder, base)
    generator, tensors, factors = torch.Generator().manual_seed(9), read_tensors(folder), dict[str, torch.Tensor]()
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        a, b = (0.3 * torch.randn(shape, generator=generator) for shape in ((_RANK, columns), (rows, _RANK)))
        tensors[name] = tensors[name] - b @ a
        module = f"base_model.model.{name.removesuffix('.weight')}"
        factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    write_tensors(base, tensors)
    for path in folder.glob("model*.safetensors"):
        path.unlink()
    (folder / "config.json").unlink()
    write_tensors(folder, factors, "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "base_model_name_or_path": str(base)}
    write_json(folder / "adapter_config.json", settings)


def mlx(folder: Path) -> None:
    """MLX's packed weights, with scales and biases beside them."""
    change_config(folder, quantization={"group_size": 32, "bits": 4})
    tensors = {}
    for name, tensor in read_tensors(folder).items():
        if tensor.ndim == 2 and "embed" not in name:
            stem, extra = name.removesuffix("weight"), torch.zeros(tensor.shape[0], 1, dtype=torch.float16)
            tensors[name] = torch.zeros(tensor.shape[0], tensor.shape[1] // 8, dtype=torch.uint32)
            tensors |= {f"{stem}scales": extra, f"{stem}biases": extra.clone()}
        else:
            tensors[name] = tensor
    write_tensors(folder, tensors)


def modelopt_fp8(folder: Path) -> None:
    """ModelOpt's FP8, of weights that were saved in FP8: matrices of layers have the scale one, all else is BF16."""
    tensors = dict[str, torch.Tensor]()
    for name, tensor in read_tensors(folder).items():
        if "_proj." in name:
            scales = {f"{name}_scale": torch.ones(()), f"{name.removesuffix('weight')}input_scale": torch.ones(())}
            tensors |= {name: tensor, **scales}
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    write_tensors(folder, tensors)
    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    write_json(folder / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": settings})
    change_config(folder, dtype="bfloat16")


_FLASH_NAMES = {
    "encoder.layer.": "encoder.layers.",
    ".attention.output.dense": ".mixer.out_proj",
    ".attention.output.LayerNorm": ".norm1",
    ".intermediate.dense": ".mlp.fc1",
    ".output.dense": ".mlp.fc2",
    ".output.LayerNorm": ".norm2",
    "embeddings.LayerNorm": "emb_ln",
    ".attention.self.query": ".mixer.Wqkv",
}
_NEW_NAMES = {
    "layers.": "encoder.layer.",
    ".self_attn.q_proj": ".attention.qkv_proj",
    ".self_attn.o_proj": ".attention.o_proj",
    ".post_attention_layernorm": ".attn_ln",
    ".mlp.up_proj": ".mlp.up_gate_proj",
    ".post_mlp_layernorm": ".mlp_ln",
}


def flash_names(folder: Path) -> None:
    """Names of jinaai/xlm-roberta-flash-implementation: query, key and value are one matrix."""
    _renamed(folder, _FLASH_NAMES, {".self.query": (".self.query", ".self.key", ".self.value")})


def new_names(folder: Path) -> None:
    """Names of Alibaba-NLP/new-impl: query, key and value are one matrix, and so are the MLP's two."""
    joined = {
        ".self_attn.q_proj": (".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"),
        ".mlp.up_proj": (".mlp.up_proj", ".mlp.gate_proj"),
    }
    _renamed(folder, _NEW_NAMES, joined)


def _renamed(folder: Path, names: dict[str, str], joined: dict[str, tuple[str, ...]]) -> None:
    """Tensors with parts of their names replaced; those that are ``joined`` lie under the name of the first."""
    tensors, renamed = read_tensors(folder), {}
    left_out = [part for parts in joined.values() for part in parts[1:]]
    for name, tensor in tensors.items():
        if any(part in name for part in left_out):
            continue
        for first, parts in joined.items():
            if first in name:
                tensor = torch.cat([tensors[name.replace(first, part)] for part in parts])
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    write_tensors(folder, renamed)


def write_keys_of_transformers_4(folder: Path, *, layer_types: bool) -> None:
    """Rotations as config.json had them before ``rope_parameters``; ``layer_types``: the list of kinds stays."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters")
    if not rope:
        return
    if "full_attention" in rope:
        local, full = rope["sliding_attention"]["rope_theta"], rope["full_attention"]["rope_theta"]
        names = ("local_rope_theta", "global_rope_theta")
        if config["model_type"].startswith("gemma"):
            names = ("rope_local_base_freq", "rope_theta")
        config.update(zip(names, (local, full), strict=True))
        if rope["full_attention"]["rope_type"] != "default":
            config["rope_scaling"] = {**rope["full_attention"], "rope_theta": full}
    else:
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        config["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    for key in ("rope_parameters", *(() if layer_types else ("layer_types",))):
        config.pop(key, None)
    write_json(folder / "config.json", config)


def two_layers(folder: Path) -> None:
    """Qwen2.5-Math-RM's layers behind the last token's state."""
    generator = torch.Generator().manual_seed(5)
    tensors = {f"model.{name}": tensor for name, tensor in read_tensors(folder).items()}
    width = tensors["model.norm.weight"].shape[0]
    for index, rows in ((0, width), (2, 1)):
        tensors[f"score.{index}.weight"] = torch.randn(rows, width, generator=generator) / width**0.5
        tensors[f"score.{index}.bias"] = torch.randn(rows, generator=generator)
    write_tensors(folder, tensors)


def two_layers_of(folder: Path, states: torch.Tensor) -> torch.Tensor:
    """The score that ``two_layers`` compute of ``states``."""
    tensors, functional = read_tensors(folder), torch.nn.functional
    first, second = ((tensors[f"score.{i}.weight"], tensors[f"score.{i}.bias"]) for i in (0, 2))
    return functional.linear(functional.relu(functional.linear(states[-1], *first)), *second)


def one_layer(folder: Path) -> None:
    """voyage-4-nano's layer on every token's state."""
    tensors = {f"model.{name}": tensor for name, tensor in read_tensors(folder).items()}
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(6)) / 6
    write_tensors(folder, {**tensors, "linear.weight": weight})


def one_layer_of(folder: Path, states: torch.Tensor) -> torch.Tensor:
    """The states that ``one_layer`` computes of ``states``."""
    return torch.nn.functional.linear(states, read_tensors(folder)["linear.weight"])


JINA_TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
_RANK, _ALPHA = 4, 1


def jina_adapters(folder: Path) -> None:
    """jina-embeddings-v3's factors of every matrix and table; with those of the first task it is the saved model."""
    generator, tensors = torch.Generator().manual_seed(9), {}
    saved = {f"roberta.{name.removeprefix('roberta.')}": tensor for name, tensor in read_tensors(folder).items()}
    for name, tensor in saved.items():
        if tensor.ndim != 2:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        is_table = "embeddings" in name
        shapes = ((rows, _RANK), (_RANK, columns)) if is_table else ((_RANK, columns), (rows, _RANK))
        a, b = (0.3 * torch.randn(len(JINA_TASKS), *shape, generator=generator) for shape in shapes)
        product = a[0] @ b[0] if is_table else b[0] @ a[0]
        parts = {"original": tensor - product * (_ALPHA / _RANK), "0.lora_A": a, "0.lora_B": b}
        stem = f"{name.removesuffix('.weight')}.parametrizations.weight"
        tensors |= {f"{stem}.{part}": value for part, value in parts.items()}
    write_tensors(folder, tensors)
    change_config(folder, lora_adaptations=JINA_TASKS, lora_rank=_RANK, lora_alpha=_ALPHA)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    write_json(folder / "modules.json", modules)


JINA_V5_TASKS = ["retrieval", "text-matching", "clustering", "classification"]


def jina_v5_adapters(folder: Path) -> None:
    """jina-embeddings-v5's factors of every linear layer, as PEFT saves them; with those of the first task it is the
    saved model."""
    generator, tensors = torch.Generator().manual_seed(9), read_tensors(folder)
    matrices = [name for name in tensors if name.endswith("_proj.weight")]
    settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "bias": "none", "use_dora": False}
    for task in JINA_V5_TASKS:
        factors: dict[str, torch.Tensor] = {}
        for name in matrices:
            rows, columns = tensors[name].shape
            a, b = (0.3 * torch.randn(shape, generator=generator) for shape in ((_RANK, columns), (rows, _RANK)))
            if task == JINA_V5_TASKS[0]:
                tensors[name] = tensors[name] - b @ a
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        write_json(folder / "adapters" / task / "adapter_config.json", settings)
        write_tensors(folder / "adapters" / task, factors, "adapter_model.safetensors")
    write_tensors(folder, tensors)
    change_config(folder, task_names=JINA_V5_TASKS)


def one_label(folder: Path) -> None:
    """Keep the first of the three labels that ``jina.save`` writes."""
    tensors = read_tensors(folder)
    write_tensors(folder, {n: t[:1] if n.startswith("classifier.") else t for n, t in tensors.items()})


def potion(folder: Path) -> None:
    """model2vec's files."""
    save_static(folder, normalize=True)
    add_static_modules(folder, ".", "Normalize")


def remote_gte(folder: Path, theta: float, factor: float, prefix: str = "") -> None:
    """GTE as its remote code has it (``tests.support.recipes.remote_gte``)."""
    recipes.remote_gte(theta, factor, prefix)(folder)


def remote_gte_with_classifier(folder: Path) -> None:
    """With a classifier, and the names of two classes in config.json."""
    classifier = {"classifier__weight": torch.ones(1, 32), "classifier__bias": torch.ones(1)}
    recipes.remote_gte(20000.0, 8.0, "new.", **classifier)(folder)
    change_config(folder, architectures=["NewModel", "NewForTokenClassification"])
