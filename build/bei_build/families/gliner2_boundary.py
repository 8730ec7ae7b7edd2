"""GLiNER2.5: the architecture "boundary" of gliner2's models, which pairs boundaries between words. Of it bei builds
entities, structures, relations, and classifications.

Its settings are those of ``boundary_head`` in config.json, with the library's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from bei.artifact.label_layouts import Candidates, Records, RelationPairs
from bei.errors import CheckpointError
from bei_build.spec.head_layers import BoundaryScoresSpec, RecordStatesSpec, SpanPairScoresSpec
from bei_build.spec.model_spec import HeadSpec
from bei_build.spec.parts import DenseSpec

_NAME, _RELATIONS, _RECORDS = "boundaries", "relations", "records"
_MOST_WIDTH, _MOST_LAYERS, _MOST_CANDIDATES = 1 << 14, 8, 1 << 14
_MOST_ENDS, _MOST_PAIRS = 1 << 10, 1 << 12  # of a relation

# Settings whose other values are other models, of which none is published.
_SUPPORTED: Mapping[str, object] = {
    "candidate_pool": "shared",
    "candidate_attention_layers": 0,
    "query_attention_layers": 0,
    "content_soft_max_pool": False,
    "use_inside_evidence": True,
    "enable_abstention": True,
    "adaptive_threshold": False,
    "overlap_policy": "flat",
    "pair_temperature": 1.0,
    "relation_temperature": 1.0,
    "record_temperature": 1.0,
    "classification_temperature": 1.0,
}
DEFAULTS: Mapping[str, Any] = {
    "candidate_pool": "per_query",
    "candidate_attention_layers": 2,
    "query_attention_layers": 1,
    "content_soft_max_pool": False,
    "use_inside_evidence": True,
    "enable_abstention": True,
    "adaptive_threshold": False,
    "overlap_policy": "flat",
    "pair_temperature": 1.0,
    "classification_temperature": 1.0,
    "boundary_dim": 128,
    "pair_dim": 128,
    "content_dim": 64,
    "enable_span_content": False,
    "boundary_attention_layers": 0,
    "boundary_attention_heads": 4,
    "boundary_attention_window": 0,
    "boundary_refinement_layers": 1,
    "boundary_ffn_multiplier": 2.0,
    "pool_boundary_top_k": 64,
    "pool_size": 384,
    "min_pool_per_query": 8,
    "abstention_threshold": 0.5,
    "enable_relations": True,
    "relation_temperature": 1.0,
    "relation_heads_per_type": 32,
    "relation_tails_per_type": 32,
    "relation_pair_cap": 128,
    "relation_argument_proposal_threshold": 0.0,
    "directional_relation_states": False,
    "relation_biaffine_content": False,
    "enable_records": True,
    "record_temperature": 1.0,
    "record_dim": 128,
    "record_instance_queries": 32,
}


def scores(config: Any) -> tuple[HeadSpec, ...]:
    """The heads of a model whose settings are ``config.gliner2``. Raises CheckpointError."""
    settings = _settings(config)
    hidden, width = config.hidden_size, _number(settings, "boundary_dim", 1, _MOST_WIDTH)
    attention = _number(settings, "boundary_attention_layers", 0, _MOST_LAYERS)
    heads = _number(settings, "boundary_attention_heads", 1, width)
    if attention and width % heads:
        raise CheckpointError(
            f"config.json has boundary_dim = {width}, which its {heads} boundary_attention_heads do not divide."
        )
    layer = BoundaryScoresSpec(
        _NAME,
        hidden,
        width,
        _number(settings, "pair_dim", 1, _MOST_WIDTH),
        _number(settings, "content_dim", 1, _MOST_WIDTH) if settings["enable_span_content"] else 0,
        candidates_of(config).most_boundaries,
        attention,
        heads,
        _number(settings, "boundary_attention_window", 0, _MOST_WIDTH),
        _number(settings, "boundary_refinement_layers", 0, _MOST_LAYERS),
        max(1, int(width * _share(settings, "boundary_ffn_multiplier", 64.0))),
    )
    classifier = (
        DenseSpec("label_scores.0", hidden, 2 * hidden, activation="relu"),
        DenseSpec("label_scores.1", 2 * hidden, 1),
    )
    outputs = [HeadSpec("span_logits", token_layers=(layer,)), HeadSpec("label_logits", token_layers=classifier)]
    if settings["enable_relations"]:
        pairs = SpanPairScoresSpec(
            _RELATIONS,
            hidden,
            _number(settings, "relation_pair_cap", 1, _MOST_PAIRS),
            bool(settings["directional_relation_states"]),
            bool(settings["relation_biaffine_content"]),
        )
        outputs.append(HeadSpec("relation_logits", token_layers=(pairs,)))
    if settings["enable_records"]:
        records = _records(settings)
        states = RecordStatesSpec(_RECORDS, hidden, layer, records.width, records.num_queries)
        outputs.append(HeadSpec("record_states", token_layers=(states,)))
    return tuple(outputs)


def candidates_of(config: Any) -> Candidates:
    """How spans are chosen from a model's pairs. Raises CheckpointError."""
    settings = _settings(config)
    size = _number(settings, "pool_size", 1, _MOST_CANDIDATES)
    return Candidates(
        most_boundaries=_number(settings, "pool_boundary_top_k", 1, 128),
        pool_size=size,
        least_per_label=_number(settings, "min_pool_per_query", 0, size),
        absent_above=_share(settings, "abstention_threshold", 1.0),
        relations=_relations(settings) if settings["enable_relations"] else UNSET,
        records=_records(settings) if settings["enable_records"] else UNSET,
    )


def _records(settings: Mapping[str, Any]) -> Records:
    return Records(
        width=_number(settings, "record_dim", 1, _MOST_ENDS),
        num_queries=_number(settings, "record_instance_queries", 1, _MOST_ENDS),
    )


def _relations(settings: Mapping[str, Any]) -> RelationPairs:
    return RelationPairs(
        most_heads=_number(settings, "relation_heads_per_type", 1, _MOST_ENDS),
        most_tails=_number(settings, "relation_tails_per_type", 1, _MOST_ENDS),
        most_pairs=_number(settings, "relation_pair_cap", 1, _MOST_PAIRS),
        least_end=_share(settings, "relation_argument_proposal_threshold", 1.0),
    )


def _settings(config: Any) -> Mapping[str, Any]:
    given = config.gliner2.get("boundary_head") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json has boundary_head = {given!r}: it must hold settings by name.")
    settings = {**DEFAULTS, **given}
    for key, supported in _SUPPORTED.items():
        if settings[key] != supported:
            raise CheckpointError(
                f"config.json has {key} = {settings[key]!r} in boundary_head; bei's GLiNER2.5 is computed with "
                f"{supported!r} only: choose a model with that."
            )
    return settings


def _number(settings: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = settings[key]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(
            f"config.json has {key} = {value!r} in boundary_head: it must be a number from {least} to {most}."
        )
    return value


def _share(settings: Mapping[str, Any], key: str, most: float) -> float:
    value = settings[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise CheckpointError(
            f"config.json has {key} = {value!r} in boundary_head: it must be a number from 0 to {most:g}."
        )
    return float(value)


def _weights() -> dict[str, str | tuple[str, ...]]:
    encoder, query, pool, scorer = (
        f"boundary_head.{part}"
        for part in ("boundary_encoder", "boundary_query_head", "shared_pool_builder", "shared_pool_scorer")
    )
    names = {
        "bos": f"{encoder}.bos_state",
        "eos": f"{encoder}.eos_state",
        "left": f"{encoder}.left_projection",
        "right": f"{encoder}.right_projection",
        "joined": f"{encoder}.output_projection",
        "norm": f"{encoder}.layer_norm",
        "inside.word": f"{query}.inside_text_projection",
        "inside.label": f"{query}.inside_query_projection",
        "absent": "boundary_head.null_projection",
        "pair.length": f"{scorer}.length_projection",
        "pair.prior": f"{scorer}.prior_projection",
        "pair.norm": f"{scorer}.candidate_norm",
        "pair.label": f"{scorer}.query_projection",
        "pair.film": f"{scorer}.film",
        "pair.out.0": f"{scorer}.film_output.0",
        "pair.out.1": f"{scorer}.film_output.3",  # 1, 2: GELU and dropout
        "content.value": f"{scorer}.content_pooler.value_projection",
        "content.norm": f"{scorer}.content_pooler.layer_norm",
        "content.out": f"{scorer}.content_projection",
    }
    for side in ("start", "end"):
        names |= {
            f"{side}.boundary": f"{query}.{side}_boundary_projection",
            f"{side}.label": f"{query}.{side}_query_projection",
            f"pool.{side}": f"{pool}.{side}_projection",
            f"pair.{side}": f"{scorer}.{side}_projection",
        }
    for index in range(_MOST_LAYERS):
        block, refined = f"{encoder}.attention_blocks.{index}", f"{encoder}.refinement_blocks.{index}"
        names |= {
            f"attention.{index}.norm": f"{block}.norm",
            f"attention.{index}.input": f"{block}.qkv_projection",
            f"attention.{index}.output": f"{block}.output_projection",
            f"refinement.{index}.norm": f"{refined}.norm",
            f"refinement.{index}.up": f"{refined}.input_projection",
            f"refinement.{index}.down": f"{refined}.output_projection",
        }
    found: dict[str, str | tuple[str, ...]] = {f"{_NAME}.{ours}": theirs for ours, theirs in names.items()}
    found |= {f"{_RELATIONS}.{ours}": f"relation_scorer.{theirs}" for ours, theirs in _OF_RELATIONS.items()}
    found |= {f"{_RECORDS}.{ours}": f"record_decoder.{theirs}" for ours, theirs in _OF_RECORDS.items()}
    found[f"{_RECORDS}.encoder"] = "boundary_head.candidate_encoder"
    # A ReLU stands between the two, and dropout if there is any.
    return found | {"label_scores.0": "classifier.0", "label_scores.1": ("classifier.3", "classifier.2")}


_OF_RELATIONS: Mapping[str, str] = {
    "mlp.0": "mlp.0",
    "mlp.1": "mlp.3",  # 1, 2: GELU and dropout
    "head": "head_content_projection",
    "tail": "tail_content_projection",
    "gate": "relation_content_gate",
    "content": "content_linear",
}
_OF_RECORDS: Mapping[str, str] = {
    "instance": "inst_proj",
    "field": "field_proj",
    "candidate": "cand_proj",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "object": "object_head",
    "seed": "latent_seed_head",
    "nothing": "null_embed",
    "queries": "instance_embed",
}
WEIGHTS: Mapping[str, str | tuple[str, ...]] = _weights()
# Of one task each, of training, and of pools by query.
UNUSED = ("classifier.", "boundary_head.", "record_decoder.", "relation_scorer.")
