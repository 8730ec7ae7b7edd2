"""Rerankers whose pairs go through a chat template: scores are those of transformers on the rendered template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from bei.core import PackedBatch
from bei.errors import BeiError, CheckpointError
from bei.tokenizer.encoder import EncodingOptions, TextEncoder
from bei.tokenizer.special_tokens import TextFrame
from bei_build.tokenizer import chat_template
from tests.support.builds import build_artifact, running
from tests.support.checkpoints import write_json
from tests.support.reading import read
from tests.support.zoo import CASES, save_case

# Qwen3-Reranker's, as sentence-transformers 6.2 saves it.
QWEN = (
    '<|im_start|>system\nJudge the pair. Answer "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    '<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    '| default("find answers") }}\n'
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    '<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>\n'
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
# Like zerank's: every message by its role.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRUCTURED = CHATML.replace("message.content", "message.content[0].text")
PAIRS = [
    ("what is it?", "a cat on the mat"),
    ("hello", "world, hello.\n\nThe cat; " * 3),
    (" q\n", " {query} {document} <|im_end|> "),
]


def save_reranker(
    folder: Path,
    template: str = QWEN,
    *,
    prompts: dict[str, str] | None = None,
    default: str | None = None,
    ids: dict[str, int | None] | None = None,
    settings: dict[str, Any] | None = None,
    form: str = "flat",
    is_file: bool = True,
) -> Path:
    """A Qwen3 reranker, with the files of sentence-transformers' CrossEncoder."""
    case = next(case for case in CASES if case.name == "Qwen3ForCausalLM")
    sizes = {"vocab_size": 320, "max_position_embeddings": 512}
    save_case(folder, replace(case, settings={**case.settings, **sizes}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer.post_processor = None
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
    }
    if is_file:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        config["chat_template"] = template
    write_json(folder / "tokenizer_config.json", config)
    modules = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.LogitScore"}
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(modules.items())
    ]
    write_json(folder / "modules.json", entries)
    message = {"method": "forward", "method_output_name": "logits", "format": form}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}, "message": message},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    write_json(folder / "sentence_bert_config.json", {**transformer, **(settings or {})})
    score = ids or {"true_token_id": 40, "false_token_id": 9}
    write_json(folder / "1_LogitScore" / "config.json", {**score, "module_input_name": "causal_logits"})
    model = {"model_type": "CrossEncoder", "prompts": prompts or {}, "default_prompt_name": default}
    model["activation_fn"] = "torch.nn.modules.linear.Identity"
    write_json(folder / "config_sentence_transformers.json", model)
    return folder


def expected_scores(
    folder: Path, pairs: Sequence[tuple[str, str]], system: str | None, *, structured: bool = False
) -> list[float]:
    """LogitScore of the chat template, rendered by the tokenizer's own method, in transformers' class."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    ids = json.loads((folder / "1_LogitScore" / "config.json").read_text())
    scores = []
    for query, document in pairs:
        texts = {"system": system, "query": query, "document": document}
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if structured else text}
            for role, text in texts.items()
            if text is not None
        ]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        score = logits[ids["true_token_id"]]
        if ids.get("false_token_id") is not None:
            score = score - logits[ids["false_token_id"]]
        scores.append(float(score))
    return scores


def served_scores(folder: Path, pairs: Sequence[tuple[str, str]], **settings: Any) -> list[float]:
    """The runtime's scores: the template's body filled, between its frame."""
    artifact = build_artifact(folder, folder.with_name(folder.name + "-artifact"), **settings)
    template = artifact.manifest.rerank_template
    assert template is not None
    assert artifact.manifest.tasks == ["rerank"]
    frame = TextFrame(template.prefix, template.suffix)
    encoder = TextEncoder(artifact.path / "tokenizer.json", artifact.manifest.max_seq_len, frame=frame)
    bodies = []
    for query, document in pairs:
        before, _, rest = template.body.partition("{query}")
        between, _, behind = rest.partition("{document}")
        said = template.instruction
        before, between, behind = (part.replace("{instruction}", said) for part in (before, between, behind))
        bodies.append(before + query + between + document + behind)
    encodings = encoder.encode(bodies, EncodingOptions(framed=True))
    with running(artifact) as engine:
        return [float(row[0]) for row in engine.run(PackedBatch.from_encodings(encodings))["logits"]]


@pytest.mark.parametrize(
    "ids", [{"true_token_id": 40, "false_token_id": 9}, {"true_token_id": 40, "false_token_id": None}]
)
@pytest.mark.parametrize(
    ("template", "default", "form"),
    [
        (QWEN, None, "flat"),
        (QWEN, "judge", "flat"),
        (CHATML, None, "flat"),
        (CHATML, "judge", "auto"),
        (STRUCTURED, "judge", "auto"),
        (STRUCTURED, None, "structured"),
    ],
)
def test_scores_are_those_of_the_rendered_template(
    template: str, default: str | None, form: str, ids: dict[str, int | None], tmp_path: Path
) -> None:
    folder = save_reranker(
        tmp_path / "reranker", template, prompts={"judge": "Judge well. "}, default=default, ids=ids, form=form
    )
    system = "Judge well. " if default else None
    expected = expected_scores(folder, PAIRS, system, structured=template == STRUCTURED)
    np.testing.assert_allclose(served_scores(folder, PAIRS, max_seq_len=400), expected, atol=2e-4)


def test_the_template_is_the_recipes_of_qwen3_reranker(tmp_path: Path) -> None:
    template = build_artifact(save_reranker(tmp_path / "reranker"), tmp_path / "artifact").manifest.rerank_template
    assert template is not None
    assert template.prefix.endswith("<|im_start|>")
    assert template.body == "user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    assert template.suffix == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert template.instruction == "find answers"


def test_a_template_in_tokenizer_config_json_is_read_too(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path / "reranker", is_file=False)
    np.testing.assert_allclose(
        served_scores(folder, PAIRS, max_seq_len=400), expected_scores(folder, PAIRS, None), atol=2e-4
    )


def test_what_the_user_says_of_a_pair_comes_first(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path / "reranker", "{{ raise_exception('no') }}")
    artifact = build_artifact(folder, tmp_path / "artifact", rerank_body="{query} {document}")
    assert artifact.manifest.rerank_template is not None
    assert artifact.manifest.rerank_template.body == "{query} {document}"


ROLES = "{{ messages[0].content }}<|im_end|>{{ messages[1].content }}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            QWEN.replace("| first }}<|im_end|>", "| first | trim }}<|im_end|>"),
            "does not write messages of the role doc",
        ),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "of the role query"),
        ("{% if messages[1].content|length > 20 %}x{% endif %}" + ROLES, "treats some texts differently from others"),
        (QWEN.replace("Judge the pair", "Judge {query}"), "itself has a text like {query}"),
        (CHATML + "\nRelevant:", None),
        (ROLES + "\nRelevant:", "ends in text without a special token"),
        ("{{ strftime_now('%Y') }}" + ROLES, "writes the current time"),
        ("{{ raise_exception('only users') }}", "cannot be rendered .only users"),
        ("{{ ''.__class__.__mro__ }}" + ROLES, "cannot be rendered"),
        ("{% if %}", "cannot be rendered"),
    ],
)
def test_templates_that_do_not_say_what_a_pair_is_are_refused(
    template: str, message: str | None, tmp_path: Path
) -> None:
    folder = save_reranker(tmp_path / "reranker", template)
    if message is None:
        build_artifact(folder, tmp_path / "artifact")
        return
    with pytest.raises(CheckpointError, match=message) as caught:
        build_artifact(folder, tmp_path / "artifact")
    assert "--rerank-body" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "most_s", "reason"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            0.3,
            "it took more than 0.3 s",
        ),
        ("{{ 'a' * 10000000000 }}", 60.0, "MemoryError"),
        ("{{ 10 ** 100000000 }}", 0.3, "it took more than 0.3 s"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 60.0, "recursion"),
    ],
)
def test_templates_that_take_all_time_or_memory_are_refused(
    template: str, most_s: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_MOST_S", most_s)
    folder = save_reranker(tmp_path / "reranker", template + ROLES)
    with pytest.raises(CheckpointError, match=rf"cannot be rendered \(.*{re.escape(reason)}"):
        build_artifact(folder, tmp_path / "artifact")


def test_a_template_of_no_utf_8_is_refused(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path / "reranker")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is no chat template"):
        build_artifact(folder, tmp_path / "artifact")


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path / "reranker")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match=r"has no chat template \(chat_template\.jinja"):
        build_artifact(folder, tmp_path / "artifact")


@pytest.mark.parametrize(
    ("processing", "message"),
    [
        ({"text": {"max_length": 7}}, "processing_kwargs with text max_length"),
        ({"common": {"add_special_tokens": False}}, "processing_kwargs with common add_special_tokens"),
        ({"chat_template": {"max_length": 7}}, "gives the chat template max_length"),
        ({"chat_template": {"restore_suffix": False}}, "lets the end of the chat template be cut"),
    ],
)
def test_settings_of_messages_that_bei_does_not_have_are_refused(
    processing: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_reranker(tmp_path / "reranker", settings={"processing_kwargs": processing})
    with pytest.raises(CheckpointError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("processing", "key"),
    [({"chat_template": "x"}, "chat_template"), ({"text": [1]}, "text"), ({"common": "ab"}, "common")],
)
def test_settings_of_messages_that_are_no_objects_are_refused(processing: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=f"has {key} = .*a value of type dict"):
        chat_template.chat_settings(Path("sentence_bert_config.json"), {"processing_kwargs": processing})


def test_an_embedder_that_puts_texts_into_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path / "embedder")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1] = {**modules[1], "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "lasttoken"})
    with pytest.raises(CheckpointError, match=r"puts texts into a chat template .* before it embeds them"):
        read(folder)


def test_a_score_without_a_token_is_refused(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path / "reranker", ids={"true_token_id": None, "false_token_id": 9})
    with pytest.raises(BeiError, match="lacks true_token_id"):
        read(folder)
