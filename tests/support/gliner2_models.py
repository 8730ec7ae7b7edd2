"""Random GLiNER2 checkpoints, as the gliner2 library's save_pretrained writes them (2.1.0), without the library."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from torch import nn

from tests.support.checkpoints import change_json, save_tokenizer, write_json
from tests.support.gliner_models import ENCODERS, SHAPE

TOKENS = (
    *("[SEP_STRUCT]", "[SEP_TEXT]", "[P]", "[C]", "[E]", "[R]", "[L]"),
    *("[EXAMPLE]", "[OUTPUT]", "[DESCRIPTION]"),
)
MAX_WIDTH = 5
_COUNTS = 20
_INNER = 128


def gliner2_tokenizer(kind: str = "deberta-v2") -> Tokenizer:
    tokenizer: Tokenizer = ENCODERS[kind][1]()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in TOKENS])
    return tokenizer


def save_gliner2(
    folder: Path,
    kind: str = "deberta-v2",
    *,
    spread: float = 0.2,
    none: float = 0.0,
    counts: Mapping[int, float] | None = None,
    encoder: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A random model with an encoder of ``kind``; ``settings`` of config.json. ``spread``: standard deviation of its
    matrices. ``none``: what is added to its score of a count of 0. ``counts``: to those of others.
    ``encoder``: settings of its config."""
    settings = {"counting_layer": "count_lstm", "max_width": MAX_WIDTH, **settings}
    config = _encoder_config(kind, encoder)
    width = config.hidden_size
    with torch.random.fork_rng():
        torch.manual_seed(39)
        modules: dict[str, nn.Module] = {
            **_common_modules(kind, config),
            "count_pred": _mlp(width, 2 * width, _COUNTS),
            "count_embed.pos_embedding": nn.Embedding(_COUNTS, width),
            "count_embed.gru": nn.GRU(width, width),
        }
        for part, entering in (("project_start", width), ("project_end", width), ("out_project", 2 * width)):
            modules[f"span_rep.span_rep_layer.{part}"] = nn.Sequential(
                nn.Linear(entering, 4 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
            )
        if settings["counting_layer"] == "count_lstm":
            modules["count_embed.projector"] = _mlp(2 * width, 4 * width, width)
        else:
            layer = nn.TransformerEncoderLayer(_INNER, 4, 2 * _INNER, batch_first=True)
            modules["count_embed.transformer.in_projector"] = nn.Linear(width, _INNER)
            modules["count_embed.transformer.transformer"] = nn.TransformerEncoder(layer, 2)
            modules["count_embed.transformer.out_projector"] = _mlp(_INNER + width, width, width, width)
        tensors = _random(modules, spread)
        # So that scores are not near 0 and 1, where they would be equal.
        for name in ("weight", "bias"):
            tensors[f"span_rep.span_rep_layer.out_project.3.{name}"] *= 0.02
        tensors["count_pred.2.bias"][0] += none
        for count, added in (counts or {}).items():
            tensors["count_pred.2.bias"][count] += added
    return _save(folder, kind, config, tensors, settings)


# Of GLiNER2.5: few starts and ends, so that texts have more of them, and more pairs than their pool holds.
BOUNDARY_HEAD: Mapping[str, Any] = {
    "candidate_pool": "shared",
    "pool_boundary_top_k": 6,
    "pool_size": 12,
    "min_pool_per_query": 2,
    "candidate_attention_layers": 0,
    "query_attention_layers": 0,
    "boundary_dim": 16,
    "pair_dim": 24,
    "content_dim": 8,
    "enable_span_content": True,
    "boundary_attention_layers": 2,
    "boundary_attention_heads": 2,
    "boundary_attention_window": 4,
    "boundary_refinement_layers": 1,
    "multihead_pair_compat_heads": 1,
    "enable_records": False,
    "enable_relations": False,
}


# Of models that score relations: few heads, tails and pairs, so that texts have more of them.
RELATION_HEAD: Mapping[str, Any] = {
    "enable_relations": True,
    "relation_heads_per_type": 5,
    "relation_tails_per_type": 4,
    "relation_pair_cap": 7,
    "relation_argument_proposal_threshold": 0.2,
    "directional_relation_states": True,
    "relation_biaffine_content": True,
}


# Of models that form instances: few learned ones.
RECORD_HEAD: Mapping[str, Any] = {"enable_records": True, "record_dim": 12, "record_instance_queries": 5}


def save_gliner25(
    folder: Path, kind: str = "deberta-v2", *, spread: float = 0.2, offset: float = 0.0, **head: Any
) -> Path:
    """A random model of the architecture "boundary"; ``head``: settings of its ``boundary_head``. ``spread``: standard
    deviation of its matrices. ``offset``: what is added to all scores of pairs."""
    settings = {**BOUNDARY_HEAD, **head}
    config = _encoder_config(kind, None)
    hidden, width, pair, content = (
        config.hidden_size,
        *(settings[name] for name in ("boundary_dim", "pair_dim", "content_dim")),
    )
    sizes = {
        "boundary_encoder.left_projection": (hidden, width),
        "boundary_encoder.right_projection": (hidden, width),
        "boundary_encoder.output_projection": (2 * width, width),
        "null_projection": (hidden, 1),
        "count_head": (hidden, 1),
        "shared_pool_scorer.length_projection": (3, pair),
        "shared_pool_scorer.prior_projection": (1, pair),
        "shared_pool_scorer.query_projection": (hidden, pair),
        "shared_pool_scorer.film": (pair, 2 * pair),
        "shared_pool_scorer.film_output.0": (pair, 64),
        "shared_pool_scorer.film_output.3": (64, 1),
        "shared_pool_scorer.content_projection": (content, pair),
        "shared_pool_scorer.content_pooler.value_projection": (hidden, content),
        "boundary_query_head.inside_text_projection": (hidden, width),
        "boundary_query_head.inside_query_projection": (hidden, width),
        # Read by no model of a shared pool.
        "boundary_proposer.start_pair_projection": (width, width),
        "boundary_proposer.end_key_projection": (width, width),
        "boundary_proposer.start_query_projection": (hidden, width),
        "pair_scorer.start_endpoint_projection": (width, pair),
        "pair_scorer.end_endpoint_projection": (width, pair),
        "pair_scorer.query_gate": (hidden, pair),
        "pair_scorer.length_query_projection": (hidden, 3),
        "pair_scorer.content_pooler.value_projection": (hidden, content),
        "pair_scorer.content_query_projection": (hidden, content),
        "pair_scorer.content_bias": (content, 1),
        "pair_scorer.compat_mix": (1, 1),
    }
    for side in ("start", "end"):
        sizes |= {
            f"boundary_query_head.{side}_boundary_projection": (width, width),
            f"boundary_query_head.{side}_query_projection": (hidden, width),
            f"shared_pool_builder.{side}_projection": (width, width),
            f"shared_pool_scorer.{side}_projection": (width, pair),
        }
    norms = {
        "boundary_encoder.layer_norm": width,
        "shared_pool_scorer.candidate_norm": pair,
        "shared_pool_scorer.content_pooler.layer_norm": content,
        "pair_scorer.content_pooler.layer_norm": content,
    }
    for index in range(settings["boundary_attention_layers"]):
        block = f"boundary_encoder.attention_blocks.{index}"
        sizes |= {f"{block}.qkv_projection": (width, 3 * width), f"{block}.output_projection": (width, width)}
        norms[f"{block}.norm"] = width
    for index in range(settings["boundary_refinement_layers"]):
        block = f"boundary_encoder.refinement_blocks.{index}"
        sizes |= {f"{block}.input_projection": (width, 4 * width), f"{block}.output_projection": (2 * width, width)}
        norms[f"{block}.norm"] = width
    if not settings["enable_span_content"]:
        for every in (sizes, norms):
            for name in [name for name in every if ".content_" in name]:
                del every[name]
    with torch.random.fork_rng():
        torch.manual_seed(39)
        modules = {
            **_common_modules(kind, config),
            **{f"boundary_head.{name}": nn.Linear(*size) for name, size in sizes.items()},
            **{f"boundary_head.{name}": nn.LayerNorm(size) for name, size in norms.items()},
        }
        modules["classifier"] = nn.Sequential(
            nn.Linear(hidden, 2 * hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * hidden, 1)
        )
        tensors = _random(modules, spread)
        for name in norms:  # which the library has as ones and zeros before it learns
            tensors[f"boundary_head.{name}.weight"] = 1 + 0.3 * torch.randn(norms[name])
            tensors[f"boundary_head.{name}.bias"] = 0.3 * torch.randn(norms[name])
        for name in ("bos_state", "eos_state"):
            tensors[f"boundary_head.boundary_encoder.{name}"] = torch.randn(hidden)
        tensors["boundary_head.pair_scorer.inside_weight"] = torch.ones(())
        tensors["boundary_head.shared_pool_scorer.film_output.3.bias"] += offset
        if settings["enable_relations"]:
            tensors |= _random(_relation_modules(hidden, settings), spread)
        if settings["enable_records"]:
            tensors |= _random(_record_modules(hidden, width, settings), spread)
            tensors["record_decoder.null_embed"] = torch.randn(settings["record_dim"])
            tensors["record_decoder.instance_embed"] = torch.randn(settings["record_instance_queries"], hidden)
    return _save(folder, kind, config, tensors, {"architecture": "boundary", "boundary_head": settings})


def _relation_modules(hidden: int, settings: Mapping[str, Any]) -> dict[str, nn.Module]:
    of_label = hidden * (1 + settings.get("directional_relation_states", False))
    sizes = {"mlp.0": (4 * hidden + of_label + 2, hidden), "mlp.3": (hidden, 1)}
    if settings.get("relation_biaffine_content"):
        sizes |= dict.fromkeys(("head_content_projection", "tail_content_projection"), (hidden, hidden))
        sizes |= {"relation_content_gate": (of_label, hidden), "content_linear": (2 * hidden + of_label, 1)}
    return {f"relation_scorer.{name}": nn.Linear(*size) for name, size in sizes.items()}


def _record_modules(hidden: int, width: int, settings: Mapping[str, Any]) -> dict[str, nn.Module]:
    projections = dict.fromkeys(("inst_proj", "field_proj", "cand_proj", "q_proj", "k_proj"), settings["record_dim"])
    sizes = {**projections, "v_proj": hidden, "object_head": 1, "latent_seed_head": 1}
    return {
        "boundary_head.candidate_encoder": nn.Linear(2 * width, hidden),
        **{f"record_decoder.{name}": nn.Linear(hidden, size) for name, size in sizes.items()},
    }


def _encoder_config(kind: str, encoder: Mapping[str, Any] | None) -> Any:
    prefix, _, own = ENCODERS[kind]
    shape = {**SHAPE, **own, **(encoder or {}), "vocab_size": gliner2_tokenizer(kind).get_vocab_size()}
    return getattr(transformers, f"{prefix}Config")(**shape)


def _common_modules(kind: str, config: Any) -> dict[str, nn.Module]:
    width = config.hidden_size
    encoder = getattr(transformers, f"{ENCODERS[kind][0]}Model")(config)
    return {"encoder": encoder, "classifier": _mlp(width, 2 * width, 1)}


def _random(modules: Mapping[str, nn.Module], spread: float) -> dict[str, torch.Tensor]:
    return {
        f"{place}.{name}": torch.randn_like(value) * spread if value.ndim > 1 else value.detach().clone()
        for place, module in modules.items()
        for name, value in module.state_dict().items()
    }


def _save(
    folder: Path, kind: str, config: Any, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    common = {"model_type": "extractor", "model_name": f"random/{kind}", "token_pooling": "first", "max_len": 40}
    write_json(folder / "config.json", {**common, **settings})
    (folder / "encoder_config").mkdir(exist_ok=True)
    write_json(folder / "encoder_config" / "config.json", config.to_dict())
    tokenizer = gliner2_tokenizer(kind)
    save_tokenizer(folder, tokenizer)
    # The library pads, and looks tokens up by their spelling.
    unknown = {"unk_token": "<unk>"} if tokenizer.token_to_id("<unk>") is not None else {}
    change_json(folder / "tokenizer_config.json", pad_token="<pad>", **unknown)
    return folder


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for entering, leaving in pairwise(widths):
        layers += [nn.Linear(entering, leaving), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
