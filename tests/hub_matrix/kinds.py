"""Structures that repositories share, by the name that ``repositories/*.yaml`` gives as ``kind``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from bei.core import Encoding, Float32Array
from tests.bei_build.families import jina, lfm2, nomic
from tests.bei_build.families import nomic_vision as vision_of_nomic
from tests.hub_matrix import shapes, stored, stored_modules, tokenizers
from tests.hub_matrix.structures import IMAGE_QUERY, ImagesOf, Late, Settings, Structure, Task, Template
from tests.support import colpali, colqwen2, embedding_gemma2, qwen2_vl, qwen3_vl
from tests.support.checkpoints import (
    Normalize,
    bpe_tokenizer,
    change_json,
    read_tensors,
    unigram_tokenizer,
    wordpiece_tokenizer,
)
from tests.support.gliner_models import save_gliner
from tests.support.gliner_reference import GlinerReference, GlirelReference
from tests.support.glirel_models import save_glirel
from tests.support.laya_models import LayaReference, save_laya
from tests.support.listwise import OwnCode, save_listwise
from tests.support.opendecider_models import OpenDeciderReference, save_opendecider
from tests.support.two_towers import library_vectors, save_naflex, save_siglip, save_tower, tower_vectors

UNIT = (Normalize(),)


# Vectors.


def embedder(hf_class: str, settings: Settings, pooling: str = "mean", *, unit: bool = True, **more: Any) -> Structure:
    """An embedder with sentence-transformers' files."""
    given: dict[str, Any] = {"modules": True, "tail": UNIT if unit else (), **more}
    return Structure("embed", hf_class, settings, pooling=pooling, **given)


def bare(hf_class: str, settings: Settings, pooling: str = "mean", **more: Any) -> Structure:
    """A checkpoint without files that say that it embeds, and how: the user does. Vectors get unit length."""
    options = {"task": "embed", "pooling": pooling, **more.pop("options", {})}
    return Structure("embed", hf_class, settings, pooling=pooling, tail=UNIT, options=options, **more)


def nomic_bert(pooling: str = "mean", changes: Settings | None = None) -> Structure:
    """NomicBERT as its own code saves it, which transformers' class reads in part; ``changes`` are of config.json."""
    return Structure(
        "embed",
        tokenizer=unigram_tokenizer,
        prepare=(partial(nomic.save, **(changes or {})), partial(stored.tokenizer_class, name="XLMRobertaTokenizer")),
        states=_nomic_states,
        pooling=pooling,
        tail=UNIT,
        options={"pooling": pooling},
        max_tokens=nomic.LONGEST,
        files={"config.json": {"model_type": "nomic_bert", "architectures": ["NomicBertModel"]}},
    )


def _nomic_states(folder: Path) -> Callable[[Encoding], torch.Tensor]:
    return nomic.Oracle(folder).states


def _lfm2_states(folder: Path) -> Callable[[Encoding], torch.Tensor]:
    return lfm2.Oracle(folder).states


# LFM2.5's remote code, on the weights of transformers' class.
_LFM2_5: Settings = {
    "hf_class": "Lfm2Model",
    "settings": shapes.LFM2,
    "states": _lfm2_states,
    "changes": {"architectures": ["Lfm2BidirectionalModel"], "auto_map": {"AutoModel": lfm2.CODE}},
}


def jina_bert(code: str = "PAPERS", tokenizer: Callable[[], Tokenizer] = wordpiece_tokenizer) -> Structure:
    """JinaBERT v2, which transformers does not have. ``code``: PAPERS or CODE."""
    repository = {"PAPERS": jina.PAPERS, "CODE": jina.CODE}[code]
    return Structure(
        "embed",
        tokenizer=tokenizer,
        prepare=(
            partial(jina.save, code=repository, tokenizer=tokenizer),
            *((partial(stored.tokenizer_class, name="RobertaTokenizer"),) if tokenizer is bpe_tokenizer else ()),
        ),
        states=_jina_states(repository),
        tail=UNIT,
        options={"pooling": "mean"},
        max_tokens=jina.LONGEST,
        files={"config.json": {"model_type": "bert", "architectures": ["JinaBertForMaskedLM"]}},
    )


def _jina_states(code: str, prefix: str = "") -> Callable[[Path], Callable[[Encoding], torch.Tensor]]:
    def states_of(folder: Path) -> Callable[[Encoding], torch.Tensor]:
        tensors = {name.removeprefix(prefix): tensor for name, tensor in read_tensors(folder).items()}
        return partial(jina.states, tensors, code=code)

    return states_of


def late_interaction(width: int = 16, query: str = "[Q] ", document: str = "[D] ", **more: Any) -> Structure:
    """Vectors of tokens, in PyLate's files unless ``more`` says otherwise."""
    given: dict[str, Any] = {
        "hf_class": "ModernBertModel",
        "settings": shapes.MODERN,
        "tokenizer": tokenizers.pylate,
        "prepare": (stored_modules.pylate,),
        **more,
    }
    late = {key: given.pop(key) for key in ("mask", "attended") if key in given}
    return Structure("embed_tokens", late=Late(width, query, document, **late), **given)


def gliner(labels: str | None = None, **settings: Any) -> Structure:
    """A GLiNER of spans with what the library loads beside it: its encoder's config and tokenizer, and those of its
    encoder of labels, of the type ``labels``. ``settings`` are of gliner_config.json."""
    read = {"max_len": 384, "max_width": 12, **settings}
    return Structure(
        "extract",
        prepare=(partial(save_gliner, labels=labels, **read),),
        spans=lambda folder: GlinerReference(folder).scores,
    )


def glirel() -> Structure:
    """A GLiREL with its encoder's config and tokenizer beside it."""
    return Structure("extract", prepare=(_save_glirel,), relations=lambda folder: GlirelReference(folder).scores)


def _save_glirel(folder: Path) -> None:
    encoder = Path(f"{save_glirel(folder, max_len=384)}-encoder")
    change_json(folder / "glirel_config.json", encoder_config=json.loads((encoder / "config.json").read_text()))
    for file in encoder.glob("tokenizer*"):
        shutil.copy(file, folder)


def two_towers(hf_class: str, save: Callable[[Path], Path]) -> Structure:
    """A model of texts and images, whose vectors of images are compared."""
    model_class = getattr(transformers, hf_class)

    def vectors(folder: Path, files: list[bytes]) -> Float32Array:
        return library_vectors(folder, model_class, files, [])

    return _of_images(hf_class, save, vectors)


def image_tower(hf_class: str, output: str, settings: Settings | None = None) -> Structure:
    """A model that reads images alone. ``output``: of the class, their vectors."""
    save = partial(save_tower, name=hf_class, **(settings or {}))
    return _of_images(hf_class, save, partial(tower_vectors, output=output))


def nomic_vision() -> Structure:
    """NomicVisionModel, which transformers does not have."""

    def vectors(folder: Path, files: list[bytes]) -> Float32Array:
        return vision_of_nomic.Oracle(folder).vectors(files)

    files = {"config.json": vision_of_nomic.config_of()}
    return Structure("embed", prepare=(vision_of_nomic.save,), files=files, images=vectors)


def decoder_of_images(
    hf_class: str,
    save: Callable[[Path], Path],
    rows: Callable[[Path, list[bytes], list[str]], Sequence[Float32Array]],
    task: Task = "embed_tokens",
) -> Structure:
    """A decoder that reads images, with a vector for each token, or one. ``rows``: the library's, of images and of
    texts."""

    def vectors(folder: Path, files: list[bytes]) -> Sequence[Float32Array]:
        return rows(folder, files, [])

    return replace(_of_images(hf_class, save, vectors), task=task)


def _qwen3_vl_reranker() -> Structure:
    """Qwen3-VL whose scores of two tokens count, in the template of the model's own code, which a user gives."""

    def scores(folder: Path, files: list[bytes]) -> Sequence[Float32Array]:
        pairs = [((IMAGE_QUERY,), (content,)) for content in files]
        return [np.array([score], np.float32) for score in qwen3_vl.library_scores(folder, pairs)]

    made = decoder_of_images("Qwen3VLForConditionalGeneration", qwen3_vl.save_reranker, qwen3_vl.library_rows, "rerank")
    return replace(made, images=scores, options=qwen3_vl.RERANKER)


def _jina_reranker_m0() -> Structure:
    """jina-reranker-m0, a class of its own on Qwen2-VL."""

    def scores(folder: Path, files: list[bytes]) -> Sequence[Float32Array]:
        pairs: list[tuple[str | bytes, str | bytes]] = [(IMAGE_QUERY, content) for content in files]
        return [np.array([score], np.float32) for score in qwen2_vl.library_scores(folder, pairs)]

    config = {"model_type": "qwen2_vl", "architectures": ["JinaVLForRanking"]}
    return Structure("rerank", prepare=(qwen2_vl.save_ranker,), files={"config.json": config}, images=scores)


def _of_images(hf_class: str, save: Callable[[Path], Path], vectors: ImagesOf) -> Structure:
    config = {"model_type": getattr(transformers, hf_class).config_class.model_type, "architectures": [hf_class]}
    return Structure("embed", prepare=(save,), files={"config.json": config}, images=vectors)


def _engine_adapter(folder: Path, *, second: bool) -> None:
    """A ColQwen2 of colpali-engine as an adapter of its decoder, whose base is elsewhere; beside both, the model in the
    form of transformers' class."""
    native = colqwen2.save_colqwen2(folder.with_name(f"{folder.name}-native"), second=second, width=128)
    shutil.copytree(native, folder, dirs_exist_ok=True)
    stored.adapter(colqwen2.as_colpali_engine(folder))


def engine_adapter(hf_class: str) -> Structure:
    """A model of colpali-engine's class ``hf_class``, which transformers does not have."""

    def vectors(folder: Path, files: list[bytes]) -> Sequence[Float32Array]:
        return colqwen2.library_rows(folder.with_name(f"{folder.name}-native"), files, [])

    second = hf_class == "ColQwen2_5"
    config = {"model_type": "qwen2_5_vl" if second else "qwen2_vl", "architectures": [hf_class]}
    made = (partial(_engine_adapter, second=second),)
    return Structure("embed_tokens", prepare=made, files={"config.json": config}, images=vectors)


# Scores.


def comparison(hf_class: str, settings: Settings, options: Settings, **more: Any) -> Structure:
    """A language model whose scores of one or two tokens count, behind a template that the user gives."""
    template = Template(
        options.get("rerank_prefix", ""),
        options["rerank_body"],
        options.get("rerank_suffix", ""),
        options["score_tokens"],
    )
    settings = {**settings, "max_position_embeddings": 1024}
    given = {"tokenizer": tokenizers.plain, "function": "sigmoid", "template": template, "options": options, **more}
    return Structure("rerank", hf_class, settings, **given)


def guard(hf_class: str, settings: Settings, options: Settings, **more: Any) -> Structure:
    """A language model that classifies by scores of tokens, behind a template that the user gives."""
    prefix, body, suffix = (options[f"classify_{part}"] for part in ("prefix", "body", "suffix"))
    tokens = options["score_tokens"]
    template = Template(prefix, body, suffix, tokens)
    given = {"tokenizer": tokenizers.guard, "function": "softmax" if len(tokens) > 2 else "sigmoid", **more}
    settings = {**settings, "max_position_embeddings": 1024}
    options = {"task": "classify", **options}
    return Structure("classify", hf_class, settings, template=template, options=options, **given)


def jina_reranker() -> Structure:
    """JinaBERT with one label."""
    config = {"model_type": "bert", "architectures": ["JinaBertForSequenceClassification"]}
    saved = partial(jina.save, prefix="bert.", architectures=config["architectures"], id2label={"0": "LABEL_0"})
    return Structure(
        "rerank",
        function="sigmoid",
        prepare=(saved, stored.one_label),
        states=_jina_states(jina.PAPERS, "bert."),
        max_tokens=jina.LONGEST,
        files={"config.json": config},
    )


def list_reranker(window: int | None = None) -> Structure:
    """jina-reranker-v3, or with ``window`` -v3.5. The list's pairs are lists of one document."""
    limits = (512, 2048) if window is None else (1024, 8192)
    return Structure(
        "rerank",
        prepare=(partial(save_listwise, window=window),),
        ranks=lambda folder: OwnCode(folder, limits).rerank,
        files={"config.json": {"model_type": "qwen3", "architectures": ["JinaForRanking"]}},
    )


def deberta_classifier(labels: int, settings: Settings | None = None, **more: Any) -> Structure:
    """DeBERTa v3's; ``settings`` are changes."""
    settings = {**shapes.DEBERTA, **(settings or {})}
    return Structure(
        "classify", "DebertaV2ForSequenceClassification", settings, labels=labels, tokenizer=unigram_tokenizer, **more
    )


# What is refused.


def config_only(model_type: str, architecture: str, **more: Any) -> Structure:
    """A repository of which only config.json is told."""
    config = {"model_type": model_type, "architectures": [architecture], **more}
    return Structure("embed", files={"config.json": config})


def one_module(module: str) -> Structure:
    """modules.json with one module of sentence-transformers for more than texts."""
    entry = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": f"sentence_transformers.models.{module}"}
    return Structure("embed", files={"modules.json": [entry]})


def quantized(method: str, **more: Any) -> Structure:
    """Qwen3 with a ``quantization_config``."""
    changes = {"quantization_config": {"quant_method": method, **more}}
    return Structure("embed", "Qwen3Model", shapes.QWEN3_06, tokenizers.ends_in_text_end, changes=changes)


_CLASSIFIER = partial(Structure, "classify")

KINDS: dict[str, Callable[..., Structure]] = {
    # With sentence-transformers' files.
    "embedder": embedder,
    "bert": partial(embedder, "BertModel", shapes.ENCODER),
    "xlm": partial(embedder, "XLMRobertaModel", shapes.ROBERTA, tokenizer=unigram_tokenizer),
    "roberta": partial(embedder, "RobertaModel", shapes.ROBERTA, tokenizer=bpe_tokenizer),
    "modern": partial(embedder, "ModernBertModel", shapes.MODERN, tokenizer=bpe_tokenizer),
    "mpnet": partial(embedder, "MPNetModel", shapes.MPNET, tokenizer=tokenizers.mpnet),
    "t5": partial(embedder, "T5EncoderModel", settings=shapes.T5, tokenizer=tokenizers.t5, max_tokens=512),
    "last": partial(embedder, pooling="last", tokenizer=tokenizers.plain),
    # Without.
    "bare": bare,
    "encoder": partial(bare, settings=shapes.ENCODER),
    "language_model": partial(bare, pooling="last", tokenizer=tokenizers.plain),
    "nomic": nomic_bert,
    "jina": jina_bert,
    "late_interaction": late_interaction,
    "siglip": partial(two_towers, "SiglipModel", save_siglip),
    "naflex": partial(two_towers, "Siglip2Model", save_naflex),
    "image_tower": image_tower,
    "nomic_vision": nomic_vision,
    "colpali": partial(decoder_of_images, "ColPaliForRetrieval", colpali.save_colpali, colpali.library_rows),
    "colqwen2": partial(decoder_of_images, "ColQwen2ForRetrieval", colqwen2.save_colqwen2, colqwen2.library_rows),
    "colpali_engine": engine_adapter,
    "embedding_gemma2": partial(
        decoder_of_images,
        "EmbeddingGemma2Model",
        embedding_gemma2.save_published,
        embedding_gemma2.library_rows,
        "embed",
    ),
    "qwen3_vl": partial(
        decoder_of_images,
        "Qwen3VLForConditionalGeneration",
        qwen3_vl.save_qwen3_vl,
        qwen3_vl.library_rows,
        "embed",
    ),
    "qwen2_vl": partial(
        decoder_of_images,
        "Qwen2VLForConditionalGeneration",
        qwen2_vl.save_qwen2_vl,
        qwen2_vl.library_rows,
        "embed",
    ),
    "gme": partial(decoder_of_images, "Qwen2VLForConditionalGeneration", qwen2_vl.save_gme, qwen2_vl.gme_rows, "embed"),
    "jina_reranker_m0": _jina_reranker_m0,
    "qwen3_vl_reranker": _qwen3_vl_reranker,
    "lfm2_5": partial(embedder, **_LFM2_5, pooling="cls", tokenizer=tokenizers.plain),
    "lfm2_5_late_interaction": partial(late_interaction, **_LFM2_5),
    "reranker": partial(Structure, "rerank", labels=1, function="sigmoid"),
    "comparison": comparison,
    "guard": guard,
    "jina_reranker": jina_reranker,
    "list_reranker": list_reranker,
    "classifier": _CLASSIFIER,
    "bert_classifier": partial(_CLASSIFIER, "BertForSequenceClassification", shapes.ENCODER),
    "roberta_classifier": partial(
        _CLASSIFIER, "RobertaForSequenceClassification", shapes.ROBERTA, tokenizer=bpe_tokenizer
    ),
    "xlm_classifier": partial(
        _CLASSIFIER, "XLMRobertaForSequenceClassification", shapes.ROBERTA, tokenizer=unigram_tokenizer
    ),
    "distilbert_classifier": partial(_CLASSIFIER, "DistilBertForSequenceClassification", shapes.DISTILBERT),
    "deberta_classifier": deberta_classifier,
    "gliner": gliner,
    "glirel": glirel,
    "laya": partial(
        Structure, "decide", prepare=(save_laya,), decides=lambda folder: LayaReference(folder).probabilities
    ),
    "opendecider": partial(
        Structure,
        "decide",
        prepare=(save_opendecider,),
        decides=lambda folder: OpenDeciderReference(folder).probabilities,
    ),
    "tagger": partial(Structure, "classify_tokens", labels=9),
    "config_only": config_only,
    "one_module": one_module,
    "quantized": quantized,
}
