"""Distances of engines from the Hugging Face classes, for each case of ``tests.support.zoo``.

``python -m tests.model_matrix`` measures all of them and writes docs/models.md; with ``--width 768 --layers 4`` the
table of realistic widths in it, and with ``--width 2048 --layers 4 --first`` that of the first case of each family.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.auto import modeling_auto

from bei.artifact.manifest import Artifact
from bei.core import Encoding, Float32Array, PackedBatch, rows_of_sequences
from bei_build.targets.openvino import cpu_capabilities
from tests.support.builds import build_artifact, running
from tests.support.zoo import CASES, FIRST_OF_FAMILY, MAX_TOKENS, Case, encodings_of, hf_outputs, save_case, widened

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"

# Shortest and longest, both sides of a bucket, and both sides of what zoo checkpoints call long and a window.
LENGTHS = (1, MAX_TOKENS, 2, 17, 16, 5, 33, 9)

_TITLE = """# Models

Every row is a random checkpoint, saved by the Hugging Face class that the row names, built for the target `cpu` and run
beside that class: the largest absolute difference between the two in FP32, where all sequences share one packed batch
and where each is alone, and the smallest cosine between the rows of the engine in BF16 and of the class in FP32 (of
logits: the cosine of all sequences' logits together). Sequences have {lengths} tokens; embeddings are
not normalized. In FP32 they are pooled in two ways, of which the larger difference counts: mean, and what decoders give
by default, the last token's state, or for encoders the first one's. In BF16 they are pooled as by default.

Written by `python -m tests.model_matrix`, with `--width 768 --layers 4`, and with `--width 2048 --layers 4 --first`.
`tests/bei_build/test_parity_matrix.py` holds the small ones to 2e-4 and 0.999, and fails where a case has no row or a
class that a family reads is not named here. Classes without rows of their own:

| class | why |
|---|---|
| `BertForPreTraining`, `AlbertForPreTraining` | read as their base model; what they predict is left aside |
| `T5ForConditionalGeneration`, `MT5ForConditionalGeneration` | the decoder is left aside; the encoder's rows |
| `ErnieForPreTraining`, `MegatronBertForPreTraining`, `BigBirdForPreTraining` | the same |
| `LlamaBidirectionalModel`, `LlamaBidirectionalForSequenceClassification` | remote code; Llama's row "bidirectional" |
| `NewModel`, `NewForSequenceClassification`, `NewForTokenClassification`, `NewForMaskedLM` | remote code, now GTE |
| `NomicBertForPreTraining` | remote code, read as NomicBERT's base model |
| `ElectraForPreTraining` | read as its base model |
| `CLIPModel` | its text tower's rows; of the image tower: `tests/bei_build/test_image_towers.py` |
| `SiglipModel`, `SiglipTextModel` | SigLIP's towers: `tests/bei_build/families/test_siglip.py`, `tests/bei_build/test_image_towers.py` |
| `Siglip2Model`, `Siglip2TextModel` | SigLIP 2 for images in their own proportions: `tests/bei_build/test_naflex.py` |
| `NomicVisionModel` | remote code (nomic-embed-vision): `tests/bei_build/families/test_nomic_vision.py` |
| `CLIPVisionModelWithProjection`, `CLIPVisionModel`, `SiglipVisionModel`, `Siglip2VisionModel`, `ViTModel`, `Dinov2Model`, `Dinov2WithRegistersModel`, `DINOv3ViTModel` | read images alone ([images](images.md)): `tests/bei_build/test_image_models.py`, `tests/bei_build/test_naflex.py` |
| `ColPaliForRetrieval` | a vector for each token of [images](images.md) and queries: `tests/bei_build/families/test_colpali.py`, within 2e-4 in FP32 and 0.999 in BF16 |
| `ColQwen2ForRetrieval` | a vector for each token of [images](images.md) of many sizes and queries: `tests/bei_build/families/test_colqwen2.py`, with Qwen2.5-VL `test_colqwen2_5.py`, within 2e-4 in FP32 and 0.999 in BF16 |
| `ColQwen2_5`, `ColQwen2` | the same as colpali-engine saves them, adapters too: `test_colqwen2_5.py` |
| `Qwen2VLForConditionalGeneration`, `Qwen2VLModel`, `Qwen2_5_VLForConditionalGeneration`, `Qwen2_5_VLModel`, `GmeQwen2VL` | gme-Qwen2-VL, DSE, Ops-MM-embedding, of texts and [images](images.md): `tests/bei_build/families/test_qwen2_vl.py`, within 2e-4 in FP32 and 0.999 in BF16 |
| `JinaVLForRanking` | remote code (jina-reranker-m0): Qwen2-VL and two layers on the last token's state, of texts and [images](images.md): `tests/bei_build/families/test_jina_reranker_m0.py`, within 2e-4 in FP32 |
| `Qwen3VLForConditionalGeneration`, `Qwen3VLModel` | Qwen3-VL-Embedding and -Reranker, of texts and [images](images.md): `tests/bei_build/families/test_qwen3_vl.py`, `test_qwen3_vl_reranker.py`, within 2e-4 in FP32 and 0.999 in BF16 |
| `Contriever` | facebook/contriever's own class: BERT |
| `HF_ColBERT` | remote code: BERT and a linear layer on every token |
| `JinaBertModel`, `JinaBertForMaskedLM`, `JinaBertForSequenceClassification` | remote code in two forms |
| `Lfm2BidirectionalModel`, `Lfm2BidirectionalForMaskedLM` | remote code (LFM2.5): `tests/bei_build/families/test_lfm2.py` |
| `EmbeddingGemma2Model` | its text model's rows; the towers of images and audio are not built |
| `Qwen2ForRewardModel` | remote code: Qwen2 and two linear layers on the last token's state |
| `NVEmbedModel` | remote code: Mistral, and latent attention on tokens; `tests/bei_build/families/test_nv_embed.py` |
| `Qwen3BidirectionalModel` | remote code: Qwen3 without a causal mask (Giga-Embeddings 0826), and a linear layer on tokens (voyage-4-nano) |
| `JinaEmbeddingsV5Model` | remote code: Qwen3 or EuroBERT with [adapters](#adapters) |
| `JinaForRanking` | remote code: Qwen3 on [lists of documents](#lists-of-documents); `tests/bei_build/families/test_jina_reranker.py` |
| `GLiClassModel` | the library gliclass's models with one encoder, on DeBERTa and ModernBERT; `tests/bei_build/families/test_gliclass.py` |
| `UniEncoderSpanGLiNER`, `UniEncoderTokenGLiNER` | the library gliner's models of spans and of words, on DeBERTa and ModernBERT; `tests/bei_build/families/test_gliner.py` |
| `BiEncoderSpanGLiNER`, `BiEncoderTokenGLiNER` | the same with an encoder of labels of any family that gives embeddings; `tests/bei_build/families/test_gliner_bi.py` |
| `GLiNER2` | the library gliner2's models of spans, whose config.json has the type `extractor`, on DeBERTa and ModernBERT: [entities, structures, relations and classifications](#gliner2); `tests/bei_build/families/test_gliner2.py` |
| `PPLXQwen3Model` | remote code (pplx-embed-v1): Qwen3 without a causal mask; `tests/bei_build/families/test_own_modules.py` |
| `StaticModel`, `StaticEmbedding` | static embeddings |
| `SSE` | a module of RikkaBotan's repositories, and SSEQ with a table of 4 bits: static embeddings with a tanh behind; the same tests |
| `SparseStaticEmbedding` | a weight for each token, beside a ForMaskedLM class |

transformers has no class of JinaBERT v2, of static embeddings (model2vec's StaticModel, sentence-transformers'
StaticEmbedding), and of NomicBERT with biases or experts: `tests/bei_build/families` holds them to implementations in
torch and numpy.

### GLiNER

bei builds what the library's `save_pretrained` writes: models with one encoder for labels and text (DeBERTa v3, ModernBERT) that score spans (`markerV0`) or words (token-level). Repositories with no more
than `gliner_config.json` and weights are built where `model_name` is one of microsoft's DeBERTa v3 and its tokenizer's files (`spm.model`, `tokenizer_config.json`) were put beside them. Equal to gliner 0.2.29
on 500 texts (random weights; the published ones were not run). Not built, and refused by name: decoders of labels, relations, fusion of labels and text, other span representations and backbones; GLiREL.

Bi-encoders have a second engine (`labels/` in the artifact) with a row of its own in the certificate. A label is computed once and kept in a cache of 16 MB, thousands of labels, which `bei_sequences_shared`
counts; its vector goes to the engine of texts beside each text. A label's scores do not depend on the other labels, of which a request may have 256 (fewer where spans have more than 12 words; 64 for models that score words). Config and
tokenizer of the encoder of labels are read beside the weights (`labels_encoder_config`, `labels_tokenizer/`, as `save_pretrained` of gliner 0.2.29 leaves them), else from the model that `labels_encoder` names.
Labels are read up to 512 tokens, fewer by `--max-seq-len`; `--tokenizer`, `--max-num-tokens` and `--max-batch-size` are of both engines.

### GLiNER2

Models of the library gliner2 (`model_type` "extractor", architecture `span`; counting layers `count_lstm` and `count_lstm_v2`; DeBERTa v3 and ModernBERT; whether gliner2-base-v1, -large-v1 and -multi-v1 are of these was not seen, and a build says it) find entities, structures and relations, as task
`extract`, and classify, as task `zero_shot`. Labels stand in front of the text as the library's schema has them, words are split and made lower case as there, and nothing is found where the model counts 0 instances. A label's scores depend on the other labels.
Descriptions of labels are read as the library's (`labels` as `{{name: description}}`, or with `threshold` and `dtype`, as in its schema), and for classifications `examples`.
With `multi_label` each label's spans are chosen by themselves, as the library does; `flat: false` is its `overlap_policy` "nested". Without `multi_label` (the default) spans of all labels compete, as with every other model.
The library puts a full stop behind a text that has none: bei's model reads it too, and no span ends there. Words without tokens (zero-width spaces) begin and end no span. Long texts are read in windows of `max_len` words, 384 unless
config.json has it.

Classifications are those of [GLiClass](#gliclass), but not on the decision routes, nor on `POST /`, which finds entities unless the model was built with `--task zero_shot`: labels share one whole, or have a probability each (`multi_label`, or a single label). The library's tasks have names; there bei's is always "category". A text that is too
long is cut.

Structures and relations are parts of the same schema, read in one pass: `structures` is `{{name: {{fields: [{{name, dtype, choices, description, threshold}}]}}}}` (also `{{name: [field, ...]}}`; a field may be its name alone), `relations` a list of names, `{{name: description}}`, or `{{name: {{description, threshold}}}}`.
A text has so many instances of each as the model counts, up to 19: `structures: {{name: [{{field: value}}]}}`, where a value is `{{start, end, text, score}}`, null, or with `dtype` `list` (the default) a list of these, and `relations: {{name: [{{head, tail}}]}}`. Choices stand nowhere (`start` is null).
A text is read with room for 4 instances, and again where more are counted. There are at most 256 fields, heads and tails, and as many in all instances of a text. Of equal instances in two windows the better one is left, as in the library's `extract_long`. Refused by name: `mode`, `anchor`, `cardinality`, `exclusive` and
`occurrence_policy`, which only `boundary` models read, `validators` and `entity_attributes`.

`classifications` are a part of the schema too, for models that were built without `--task`: `[{{task, labels, multi_label, cls_threshold, top_k, class_act, prompt, examples}}]`, as in the library's schema; `labels` are two names or more, or `{{name: description}}`. The answer is
`classifications: {{task: {{label, score}}}}`, with `multi_label` a list of the labels from `cls_threshold` (0.5), `top_k` of them at most, else the best one, and both fields are refused. Of a text in windows each label has its largest probability. `threshold` and `multi_label` of the request are those of spans.

Equal to gliner2 2.1.0 within 2e-4, entities and classes on 500 texts, structures and relations on 300, all parts of a schema in one pass on 150 (random weights; the published ones were not run) ([why](decisions.md#gliner2-what-fits-one-step)). Refused by name: the architecture `boundary`, the counting layer `count_lstm_moe`, and mean and max of a word's tokens.

### GLiClass

Models with one encoder (DeBERTa v3, ModernBERT) and the scorers simple, weighted-dot and mlp, as task `zero_shot`: `/v1/classify` with `labels`, `POST /` with `candidate_labels`,
`Model.zero_shot` (shares of one whole; with `multi_label`, or a single label, the sigmoid of each), and the decision routes. All labels stand in one text with the text, as they are written,
as in the library's pipeline (versions of 2024 made them lower case: send them so to models of that time), and see each other: their order may change scores (decisions sort choices). A text that is too long is cut, labels never; labels are
read as they are, and `hypothesis_template` is refused. Poolings avg, max, sum and last are those of a text without padding, as the library has them for one text alone.
Scores equal those of gliclass 0.1.21 within 2e-4 on 500 texts and on cut ones (random weights, six sets of settings; the published models were not run). Not built, and refused by name: bi-encoders, encoder-decoders, LSTMs, attention over layers, segments, averaged class tokens, other scorers and backbones.

### Adapters

Low-rank adapters (LoRA) lie beside the weights in one artifact, and each request chooses one; texts of several adapters, and of none, share a step.

| what | how it is built | how a request chooses |
|---|---|---|
| jina-embeddings-v3 (`lora_adaptations`), -v5 (`adapters/TASK`) | `bei build MODEL`; one merged: `--adapter TASK`; none: `--adapter none` | `task` or `input_type`: a task, `retrieval.query`, `retrieval.passage`, `query`, `document`, or `none`; or `model: "MODEL:TASK"` |
| any adapter that PEFT saved, of an encoder or decoder | `bei build MODEL --lora NAME=PATH`, repeatable | `model: "MODEL:NAME"` |
| a repository that holds an adapter and no model | `bei build REPOSITORY`: its base is found by `base_model_name_or_path`, and the adapter merged | |

- A request without a name gets the weights without adapters. jina-embeddings-v5's own code does not run without one, so there it is a 400 with the tasks.
- **Prompts** go with tasks: of v3 those called like the task, of v5 `query` and `document`, as `retrieval.query` or beside the task (`task: retrieval`,
  `prompt_name: query`).
- **Computed**: linear layers of attention and MLPs, and word and type tables; rsLoRA, `rank_pattern`, `alpha_pattern` and the matching of their
  patterns are peft's (tested against peft 0.21). Everything else in adapter_config.json is refused by name: DoRA, `bias`, `modules_to_save`,
  `fan_in_fan_out`, initializations that change the base (PiSSA, OLoRA, CorDA, LoftQ), other `peft_type`s, and adapters of other modules.
- **Verified** with every adapter: held-out texts are dealt out to them, and the reference has each merged into its weights. `--verify-budget` is refused.
- **Targets**: `cpu` (every precision), `tensorrt`, `tensorrt-rtx`, `cuda` and `cuda-twin` (not `fp8`). `trtllm` refuses them by name.
- `bei.Model(MODEL, adapter=NAME)` and `bei embed --adapter NAME` read everything with one adapter; tasks are an `input_type` there too.
- **Cost** against a merged adapter, of a CPU engine of BERT-base's shape with four: [71 to 83 % of its tokens a second](../benchmarks/README.md#adapters), whatever a step mixes.
- What an answer depends on includes the adapter: equal texts, the cache of answers, `bei embed` and swaps tell them apart.

### Lists of documents

`JinaForRanking` (jina-reranker-v3, -v3.5) reads a query with all its documents in one causal text, and scores a document by the cosine of two projected
states: behind the document, and behind the query, which stands last. Read from its `modeling.py` in public copies; `tests/support/listwise.py` is a fixture
written after it.

- **A score depends on the other documents and on their order.** Scores of two requests are not comparable, and a document alone gets another one. Scores
  lie between -1 and 1; `raw_scores` changes nothing. Pairs of one query, on every route, are one list in their order.
- **What is cut**, as in its own code: a query behind 512 tokens, a document behind 2048 (-v3.5: 1024 and 8192), or behind what fits the artifact's
  `--max-seq-len`; `max_tokens_per_doc` and `truncate_prompt_tokens` shorten documents further. Places are reported as for all models
  (`x-truncated-inputs`); `truncate: false` refuses instead. Markers that a text spells are taken out.
- **How many fit**: 125 documents, and no more than fill the tokenizer's `model_max_length`, as in its own code, or `--max-seq-len`. More go into further
  texts of the same request; the query's state is then the texts' mean, weighted by each one's best score.
- `instruction` fills the text's slot for one. Tokens of a text that belong to no document count with its first one.
- `bei embed --task rerank` refuses such models: it reads rows one by one. `bei.Model.rerank` reads the whole list.

### Classifiers by tokens

A language model that answers with one word (guards) is a classifier with `--task classify` and its `--score-tokens`, as the vocabulary spells them:

- One token: one label, the sigmoid of its logit. Two: one label, the share of the last of them. More: a label each, their softmax (not of models that bend
  their scores, as Gemma 2). `--score-labels` names the labels; without it they have the tokens' names.
- `classify_prefix`, `classify_body` (with `{{text}}`) and `classify_suffix` are the prompt, tokenized one by one, and only the body is cut. With `{{response}}`
  inputs are pairs, as a guard of answers reads them; other inputs are a 400. Texts are inserted as they are: blanks around them stay. Token ids are run
  without the template.
- `/predict`, `/v1/classify` and every other route of classifiers, `Model.classify` and, for single texts, `bei embed --task classify` answer with them. Nothing is generated:
  what a guard would write behind its first word (categories, reasons) is not computed.
- Recipes: [shieldgemma-2b](../configs/shieldgemma-2b.yaml), [Qwen3Guard-Gen](../configs/qwen3guard-gen-0.6b.yaml), [Llama Guard 3](../configs/llama-guard-3-8b.yaml). Qwen3, Llama, Gemma 2 and Granite were compared with transformers' logits (random weights; no
  published guard was run).

### Decisions by language models

`--task decide` builds a language model for `/v1/decisions`, `/v1/systemone`, `POST /` and `Model.decide`. `decide_body` is all that it reads before it answers, chat
template and special tokens included (none are added), with `{{text}}`, `{{question}}` (the instructions) and `{{options}}`. Nothing is cut, and nothing is generated.

- **Likelihoods**, without `score_tokens` (target `cpu`, BF16 and FP32): an option's share is the softmax of the log likelihoods of the options' names behind the body, as
  `decide_option` writes them (` {{option}}`; tokenized by itself, without the blank where the tokenizer puts one in front of every text), over the whole vocabulary, not divided by their lengths: longer options are less likely. Engines compute
  the body once for all options of a step, but for attention, which reads it for each. An option whose tokens another one begins with is a 400, unless `decide_option` ends an answer (` {{option}}<|im_end|>`).
- **Tokens**, with `score_tokens` such as `A,B,C,D` (any target; `cpu` alone was run): one pass for all options, which `{{options}}` shows behind the tokens (`A. billing: payments`), and the softmax
  of as many of the tokens' scores. More options than tokens are a 400. Models that bend their scores (Gemma 2) decide by likelihoods.
- **Order.** Choices are shown sorted, so that the same set has the same answer in any order; which letter an option has may still favour it. The levels of a score keep
  their order, and no stands before yes. Likelihoods behind a body without `{{options}}` depend on no order. Questions that describe options, or have no instructions, are a 400 there: the model would not read them.
- Qwen3, Llama, Granite, Cohere and, by likelihoods, Gemma 2 were compared with transformers' causal models (random weights); no published model was run.

Of sentence-transformers' Router (Asym) one route is built, its default or `--route`; requests that name texts of
another one are refused. Where the other route is a SparseStaticEmbedding
(opensearch-neural-sparse-encoding-doc-v3-distill), one artifact has both: documents are the engine's, queries are
looked up.

[coverage.md](coverage.md) lists repositories of the hub: what is built of each, or why it is refused.

What may stand beside a class, each held to its library's own definition; everything else is refused by name:

- Activations, by transformers' names: `gelu`, `gelu_python`, `gelu_10`, `gelu_new`, `gelu_fast`, `gelu_accurate`,
  `gelu_pytorch_tanh`, `gelu_python_tanh`, `quick_gelu`, `relu`, `relu2`, `relu6`, `leaky_relu`, `silu`, `swish`,
  `hardswish`, `mish`, `tanh`, `sigmoid`, `linear`. Not `laplace`, `prelu`, `sqrtsoftplus`, `xielu`.
- pplx-embed's module FlexibleQuantizer: a tanh of the mean. Its code then rounds to 127 steps or to signs; bei's vectors are those before that, not of unit
  length.
- Dense modules: torch's Identity, Tanh, ReLU, ReLU6, LeakyReLU, ELU, GELU, SiLU, Hardswish, Mish and Sigmoid, with
  their default arguments, as sentence-transformers loads them; `use_residual`.
- WeightedLayerPooling in front of the Pooling, where config.json has `output_hidden_states`.
- Cross-encoders: `activation_fn` Identity, Sigmoid, Tanh, ReLU, Softplus, of several labels Softmax; the default
  prompt, in front of the query; classifiers of two labels as rerankers, with `--task rerank`.
"""  # noqa: E501  # rows of tables
_COLUMNS = ("Family", "Architecture", "Special", "Output", "FP32, in batches", "FP32, alone", "BF16, min cosine")


@dataclass(frozen=True)
class Measured:
    """The figures of one case. ``bf16`` is None where the CPU does not compute in it."""

    in_batches: float
    alone: float
    bf16: float | None


def run(
    artifact: Artifact, output: str, encodings: Sequence[Encoding]
) -> tuple[list[Float32Array], list[Float32Array]]:
    """``output`` of each encoding, [width], or [tokens, width] of an output per token: all in one batch, and alone."""
    with running(artifact) as engine:

        def rows(members: Sequence[Encoding]) -> list[Float32Array]:
            batch = PackedBatch.from_encodings(members)
            return rows_of_sequences(engine.run(batch)[output], batch, per_token=output in engine.info.per_token)

        return rows(encodings), [rows([encoding])[0] for encoding in encodings]


def poolings_of(case: Case) -> tuple[str | None, ...]:
    """What an embedder is built with: as its class says, and another way. None: as the class says."""
    if case.output != "embedding" or case.vector:
        return (None,)
    return (None, "cls" if default_pooling(case) == "mean" else "mean")


def default_pooling(case: Case) -> str:
    """How an embedder is pooled whose files do not say it: decoders give the last token's state."""
    if case.vector:
        return case.vector[1]
    # Classes that are embedders only: EmbeddingGemma's and, by another name, Nemotron's.
    embeds_only = case.architecture == "Gemma3TextModel" or "architectures" in case.changes
    return "last" if _is_decoder(case) and not embeds_only else "mean"


def _is_decoder(case: Case) -> bool:
    """As transformers' own tables say it: a causal language model, and no masked one (BERT's type has both)."""
    model_type = getattr(transformers, case.architecture).config_class.model_type
    causal, masked = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return model_type in causal and model_type not in masked


def pooled(case: Case, rows: Sequence[Float32Array], pooling: str | None) -> list[Float32Array]:
    """Rows of ``hf_outputs``, token states pooled by ``pooling``; other outputs as they are."""
    if case.output != "embedding" or case.vector:
        return list(rows)
    pool = {"mean": lambda states: states.mean(0), "cls": lambda states: states[0], "last": lambda states: states[-1]}
    return [pool[pooling or default_pooling(case)](states) for states in rows]


def difference(actual: Sequence[Float32Array], expected: Sequence[Float32Array]) -> float:
    """The largest, over all values of all sequences."""
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(actual, expected, strict=True))


def least_cosine(case: Case, actual: Sequence[Float32Array], expected: Sequence[Float32Array]) -> float:
    """Over vectors; logits are too few for a cosine each, so those of all sequences are one vector."""
    ours, theirs = (np.concatenate([np.atleast_2d(part) for part in side]) for side in (actual, expected))
    if case.output in ("logits", "token_logits"):
        ours, theirs = ours.reshape(1, -1), theirs.reshape(1, -1)
    products = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    return float(products.min())


def build_fp32(folder: Path, out: Path, pooling: str | None) -> Artifact:
    """Certified against the HF model: below 0.99999 the build fails."""
    return build_artifact(folder, out, pooling=pooling)


def build_bf16(folder: Path, out: Path) -> Artifact:
    """Whatever the certificate says: it is stricter with logits, which it centres, than random weights allow."""
    return build_artifact(folder, out, precision="bf16", allow_below_threshold=True)


def measure(case: Case) -> Measured:
    """Save, build, run and compare ``case``."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_case(Path(scratch) / "checkpoint", case)
        encodings = encodings_of(case, LENGTHS, case.tokenizer().get_vocab_size())
        rows = hf_outputs(folder, case, encodings)
        in_batches, alone, bf16 = [], [], None
        for pooling in poolings_of(case):
            expected = pooled(case, rows, pooling)
            artifact = build_fp32(folder, Path(scratch) / "fp32", pooling)
            in_one, by_itself = run(artifact, case.output, encodings)
            in_batches.append(difference(in_one, expected))
            alone.append(difference(by_itself, expected))
            if pooling is None and "BF16" in cpu_capabilities():
                artifact = build_bf16(folder, Path(scratch) / "bf16")
                bf16 = least_cosine(case, run(artifact, case.output, encodings)[0], expected)
    return Measured(max(in_batches), max(alone), bf16)


def row_start(case: Case) -> str:
    """What the row of ``case`` begins with."""
    return f"| {case.family} | `{case.architecture}` | {case.note} | {case.output} |"


def _row(case: Case, measured: Measured) -> str:
    bf16 = "not measured" if measured.bf16 is None else f"{measured.bf16:.5f}"
    return f"{row_start(case)} {measured.in_batches:.1e} | {measured.alone:.1e} | {bf16} |"


def _sections() -> dict[str, str]:
    """The tables of the document by title."""
    texts = DOCUMENT.read_text().split("\n## ")[1:] if DOCUMENT.exists() else []
    return {text.split("\n")[0]: f"## {text.rstrip()}\n" for text in texts}


def _write(title: str, note: str, rows: Sequence[str]) -> None:
    """Put the table into the document, in place of the one with its ``title``; the others stay."""
    header = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    sections = {**_sections(), title: "\n".join([f"## {title}", "", note, "", *header, *rows, ""])}
    # By the first number in the title, the width.
    ordered = [sections[title] for title in sorted(sections, key=lambda title: int(re.findall(r"\d+", title)[0]))]
    DOCUMENT.write_text("\n".join([head(), *ordered]))


def head() -> str:
    """What stands above the tables."""
    return _TITLE.format(lengths=", ".join(map(str, LENGTHS)))


def main() -> None:
    """Measure and write."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, help="hidden size, a multiple of 64 (default: that of tests.zoo)")
    parser.add_argument("--layers", type=int, default=4, help="layers, where --width is given")
    parser.add_argument("--first", action="store_true", help="only the first case of each family")
    parser.add_argument("--missing", action="store_true", help="only cases without a row; the other rows stay")
    arguments = parser.parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # tiny matrices are slower on several
    title = "Small: hidden size 32, 3 layers, heads of 8 or 12"
    if arguments.width:
        title = f"Realistic widths: hidden size {arguments.width}, {arguments.layers} layers, heads of 64"
    if arguments.first:
        title += ", the first case of each family"
    old = _sections().get(title, "").split("\n") if arguments.missing else []
    started_s, rows = time.monotonic(), []
    for case in FIRST_OF_FAMILY if arguments.first else CASES:
        kept = next((line for line in old if line.startswith(row_start(case))), None)
        resized = widened(case, arguments.width, arguments.layers) if arguments.width else case
        rows.append(kept or _row(case, measure(resized)))
        print(rows[-1], flush=True)  # noqa: T201
    minutes = (time.monotonic() - started_s) / 60
    note = f"Measured in {minutes:.1f} minutes, PyTorch {torch.__version__}."
    _write(title, old[2] if old else note, rows)


if __name__ == "__main__":
    main()
