"""Preparers for modules.json: layouts of sentence-transformers and PyLate, and modules of repositories' own.

As in ``stored``, each takes the folder, then the arguments that ``repositories/*.yaml`` gives.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.hub_matrix import tokenizers
from tests.support.checkpoints import (
    Dense,
    bpe_tokenizer,
    change_config,
    change_json,
    read_tensors,
    save_dense,
    save_static,
    write_json,
    write_tensors,
)
from tests.support.onnx_files import save_onnx
from tests.support.stable_static import save_stable_static

# As zerank's: a query is what the system says, a document what the user says.
_CHATML = (
    "{% set roles = {'query': 'system', 'document': 'user'} %}"
    "{% for message in messages %}<|im_start|>{{ roles[message.role] }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def logit_score(folder: Path, yes: str = "Yes", no: str = "") -> None:
    """A CrossEncoder of a language model as sentence-transformers 5.4 and later save it; scored by one token or two."""
    modules = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.LogitScore"}
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(modules.items())
    ]
    write_json(folder / "modules.json", entries)
    scored = {
        f"{answer}_token_id": tokenizers.plain().token_to_id(token)
        for answer, token in (("true", yes), ("false", no))
        if token
    }
    write_json(folder / "1_LogitScore" / "config.json", {**scored, "module_input_name": "causal_logits"})
    message = {"method": "forward", "method_output_name": "logits", "format": "flat"}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}, "message": message},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    write_json(folder / "sentence_bert_config.json", transformer)
    settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    write_json(folder / "config_sentence_transformers.json", settings)
    (folder / "chat_template.jinja").write_text(_CHATML)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", tokenizer)


def ends_in_scores(folder: Path) -> None:
    """A CrossEncoder of layers behind a pooling, as sentence-transformers 5.5 saves it."""
    places = {
        "Transformer": "base.modules.transformer",
        "Pooling": "sentence_transformer.modules.pooling",
        "Dense": "base.modules.dense",
        "LayerNorm": "sentence_transformer.modules.layer_norm",
    }
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        kind = module["type"].rsplit(".", 1)[-1]
        module["type"] = f"sentence_transformers.{places[kind]}.{kind}"
    write_json(folder / "modules.json", modules)
    pooling = {"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    path = folder / modules[-1]["path"] / "config.json"
    write_json(path, {**json.loads(path.read_text()), "module_output_name": "scores"})
    settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    write_json(folder / "config_sentence_transformers.json", settings)


def splade(folder: Path) -> None:
    """SpladePooling behind a masked language model."""
    kinds = {"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}
    prefix = "sentence_transformers.sparse_encoder.models"
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"{prefix}.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", entries)
    write_json(folder / "1_SpladePooling" / "config.json", {"pooling_strategy": "max", "activation_function": "relu"})


def router(folder: Path, activation: str = "relu") -> None:
    """Queries by a table of weights, documents by a masked language model (sentence-transformers' Router)."""
    prefix = "sentence_transformers.sparse_encoder.models"
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}
    write_json(folder / "modules.json", [module])
    table, model, pooling = (
        f"{prefix}.SparseStaticEmbedding.SparseStaticEmbedding",
        f"{prefix}.MLMTransformer.MLMTransformer",
        f"{prefix}.SpladePooling.SpladePooling",
    )
    query, document, splade = "query_0_SparseStaticEmbedding", "document_0_MLMTransformer", "document_1_SpladePooling"
    router = {
        "types": {query: table, document: model, splade: pooling},
        "structure": {"query": [query], "document": [document, splade]},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    (folder / document).mkdir()
    for path in [path for path in folder.iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(folder / document / path.name)
    write_json(folder / "router_config.json", router)
    write_json(folder / splade / "config.json", {"pooling_strategy": "max", "activation_function": activation})
    rows = json.loads((folder / document / "config.json").read_text())["vocab_size"]
    (folder / query).mkdir()
    write_tensors(folder / query, {"weight": torch.linspace(0.1, 3.0, rows)})
    write_json(folder / query / "config.json", {"frozen": True})
    shutil.copy(folder / document / "tokenizer.json", folder / query)
    write_json(folder / query / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})


def pylate(folder: Path, query: str = "[Q] ", document: str = "[D] ", *, attended: bool = False) -> None:
    """PyLate's layout: the linear layer is on every token; a marker in front of each side. ``attended``: tokens see
    the expansion of queries."""
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())]
    write_json(folder / "modules.json", entries)
    save_dense(folder / "1_Dense", 32, Dense(16, "Identity", bias=False))
    lengths = {"query_length": 32, "document_length": 300, "attend_to_expansion_tokens": attended}
    markers = {"query_prefix": query, "document_prefix": document, "skiplist_words": [*string.punctuation]}
    write_json(folder / "config_sentence_transformers.json", {**markers, **lengths})


def residual(folder: Path) -> None:
    """PyLate's layout with a residual around the linear layer."""
    pylate(folder)
    change_json(folder / "1_Dense" / "config.json", use_residual=True)
    matrix = torch.randn(16, 32, generator=torch.Generator().manual_seed(16)) / 6
    write_tensors(folder / "1_Dense", {**read_tensors(folder / "1_Dense"), "residual.weight": matrix})


def residuals(folder: Path, widths: Sequence[int]) -> None:
    """PyLate's layout with several linear layers, of which all but the last have a residual."""
    pylate(folder)
    modules = json.loads((folder / "modules.json").read_text())[:1]
    for index, (before, width) in enumerate(zip([32, *widths], widths, strict=False), start=1):
        place = folder / f"{index}_Dense"
        modules.append({"idx": index, "name": str(index), "path": place.name, "type": "pylate.models.Dense.Dense"})
        tensors = save_dense(place, before, Dense(width, "Identity", bias=False))
        if index < len(widths):
            change_json(place / "config.json", use_residual=True)
            matrix = torch.randn(width, before, generator=torch.Generator().manual_seed(index)) / 6
            write_tensors(place, {**tensors, "residual.weight": matrix})
    write_json(folder / "modules.json", modules)


def static_router(folder: Path) -> None:
    """Queries by static embeddings, documents by an encoder (sentence-transformers' Router); both of unit length."""
    kinds = {name: f"sentence_transformers.models.{name}" for name in ("StaticEmbedding", "Transformer", "Pooling")}
    kinds["Normalize"] = "sentence_transformers.models.Normalize"
    structure = {
        "query": ["query_0_StaticEmbedding", "query_1_Normalize"],
        "document": ["document_0_Transformer", "document_1_Pooling", "document_2_Normalize"],
    }
    encoder, pooling, unit = (folder / name for name in structure["document"])
    encoder.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(encoder / path.name)
    (folder / "1_Pooling").rename(pooling)
    for place in (unit, folder / "query_1_Normalize"):
        place.mkdir()
    save_static(folder / "static", "sentence-transformers", bpe_tokenizer)
    (folder / "static" / "0_StaticEmbedding").rename(folder / "query_0_StaticEmbedding")
    shutil.rmtree(folder / "static")
    types = {name: kinds[name.rsplit("_", 1)[-1]] for names in structure.values() for name in names}
    parameters = {"default_route": "document", "allow_empty_key": True}
    write_json(folder / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}
    write_json(folder / "modules.json", [module])


def flexible_quantizer(folder: Path) -> None:
    """pplx-embed's own module behind the pooling."""
    modules = json.loads((folder / "modules.json").read_text())
    name = str(len(modules))
    own = {"idx": len(modules), "name": name, "path": "", "type": "st_quantize.FlexibleQuantizer"}
    write_json(folder / "modules.json", [*modules, {**own, "kwargs": ["quantization"]}])


def stable_static(folder: Path, *, quantized: bool = False) -> None:
    """RikkaBotan's files."""
    save_stable_static(folder, quantized=quantized)


def exported(folder: Path, name: str, *others: str) -> None:
    """An ONNX export in place of safetensors, and ``others`` that are not read."""
    scratch = folder.with_name(f"{folder.name}-exported")
    save_onnx(folder, scratch, name)
    (folder / name).parent.mkdir(exist_ok=True)
    (scratch / name).rename(folder / name)
    shutil.rmtree(scratch)
    (folder / "model.safetensors").unlink()
    for other in others:
        (folder / other).touch()


def original_colbert(folder: Path) -> None:
    """The original ColBERT's class, its linear layer among the base model's weights."""
    change_config(folder, architectures=["HF_ColBERT"])
    tensors = {f"bert.{name}": tensor for name, tensor in read_tensors(folder).items()}
    linear = save_dense(folder / "linear", 32, Dense(12, "Identity", bias=False))
    write_tensors(folder, {**tensors, **linear})
    markers = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "dim": 12, "mask_punctuation": True}
    lengths = {"query_maxlen": 32, "doc_maxlen": 300, "attend_to_mask_tokens": False}
    write_json(folder / "artifact.metadata", {**markers, **lengths})
