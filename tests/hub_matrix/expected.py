"""The right answers: transformers' own class, and in torch what the repository's files say comes behind it.

Uses nothing of bei but its nouns. Texts are read one by one, without padding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Encoding as Tokens
from tokenizers import Tokenizer

from bei.core import Encoding, Float32Array
from tests.hub_matrix.structures import LABELS, QUESTIONS, LayerNorm, Structure
from tests.support.checkpoints import WEIGHTS, Dense, Normalize
from tests.support.oracle import static_embed
from tests.support.stable_static import stable_embed
from tests.support.two_towers import drawn_files

TEXTS = (
    "hello world",
    "a",
    "The Cat sat on a mat, didn't it?",
    "Gr\u00fc\u00dfe, \u4e16\u754c!",
    "hello the world, " * 20,
)
RELATED = tuple(text for text in TEXTS if " " in text)  # that have two words
PAIRS = (
    ("what is it?", "a cat on the mat"),
    ("hello", "the world said hello. " * 12),
    ("the mat", "The Cat"),
)
Answers = Mapping[str, Sequence[Float32Array]]

functional = torch.nn.functional
_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda value: value,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
}
_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "none": lambda logits: logits,
}


def expected_answers(structure: Structure, model: Any, folder: Path) -> Answers:
    """The answers of the repository's own code to TEXTS, to PAIRS, or to drawn images, by task."""
    if structure.images:
        return {structure.task: list(structure.images(folder, drawn_files()))}
    if structure.spans:
        scores = structure.spans(folder)
        return {structure.task: [scores(text, LABELS) for text in TEXTS]}
    if structure.relations:
        scores = structure.relations(folder)
        return {structure.task: [scores(text, LABELS) for text in RELATED]}
    if structure.decides:
        decide = structure.decides(folder)
        shares = [decide(text, question) for text in TEXTS for question in QUESTIONS.values()]
        return {structure.task: [np.array(row, np.float32) for row in shares]}
    with torch.no_grad():
        return {task: [row.numpy() for row in rows] for task, rows in _Oracle(structure, model, folder).answers()}


def _vector(features: Any) -> torch.Tensor:
    """CLIP's vector, which transformers 5 returns with the states."""
    vectors: torch.Tensor = features if isinstance(features, torch.Tensor) else features.pooler_output
    return vectors[0]


class _Oracle:
    """One checkpoint, its class's ``model``, and the tokenizer as its file has it."""

    def __init__(self, structure: Structure, model: Any, folder: Path) -> None:
        self._structure = structure
        self._model = model
        self._folder = folder
        stored = next(folder.rglob("tokenizer.json"), None)
        self._tokenizer = Tokenizer.from_file(str(stored)) if stored else structure.tokenizer()
        self._tokenizer.no_padding()
        self._states_of = structure.states(folder) if structure.states else None

    def answers(self) -> list[tuple[str, list[torch.Tensor]]]:
        """Rows by task."""
        task = self._structure.task
        answers: Mapping[str, Callable[[], list[torch.Tensor]]] = {
            "embed": self._embeddings,
            "embed_sparse": self._sparse,
            "embed_tokens": self._token_embeddings,
            "rerank": self._scores,
            "classify": self._scores,
            "classify_tokens": lambda: [self._logits(tokens) for tokens in self._read(TEXTS)],
        }
        return [(task, answers[task]()), *(self._linear_answers() if self._structure.linear_files else [])]

    def _read(self, inputs: Sequence[Any]) -> list[Tokens]:
        """Tokens of texts or pairs, cut as transformers cuts them."""
        extra = self._structure.last_token is not None
        self._tokenizer.enable_truncation(self._structure.max_tokens - extra)
        encoded: list[Tokens] = [
            self._tokenizer.encode(*(value if isinstance(value, tuple) else (value,))) for value in inputs
        ]
        return encoded

    def _inputs(self, tokens: Tokens) -> dict[str, torch.Tensor]:
        """The model's arguments."""
        last = self._structure.last_token
        ids = torch.tensor([[*tokens.ids, *([self._tokenizer.token_to_id(last)] if last else [])]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self._structure.unmasked:
            inputs["attention_mask"] = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        if self._structure.types and getattr(self._model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = torch.tensor([tokens.type_ids])
        return inputs

    def _states(self, tokens: Tokens) -> torch.Tensor:
        """The last layer's states, [tokens, hidden]."""
        if self._states_of:
            types = np.array(tokens.type_ids, np.int32)
            return self._states_of(Encoding(np.array(tokens.ids, np.int32), types))
        base = self._model.base_model
        inputs = self._inputs(tokens)
        if base.config.is_encoder_decoder and type(base).__name__.startswith(("T5", "MT5", "UMT5")):
            base = base.encoder
        outputs = base(**inputs)
        states: torch.Tensor = outputs[0][0] if isinstance(outputs, tuple) else outputs.last_hidden_state[0]
        return self._structure.behind(self._folder, states) if self._structure.behind else states

    def _logits(self, tokens: Tokens) -> torch.Tensor:
        """The output of the class with a head."""
        logits: torch.Tensor = self._model(**self._inputs(tokens)).logits[0]
        return logits

    def _embeddings(self) -> list[torch.Tensor]:
        prompt = next(iter(self._structure.prompts.values()), "")
        texts = [prompt + text for text in TEXTS]
        if self._structure.static == "stable":
            return [torch.from_numpy(row) for row in stable_embed(self._folder, texts)]
        if self._structure.static:
            with_unknown = self._structure.static == "with unknown"
            rows = static_embed(next(self._folder.rglob(WEIGHTS)).parent, texts, 512, with_unknown=with_unknown)
            return [self._tail(torch.from_numpy(row)) for row in rows]
        if hasattr(self._model, "get_text_features"):
            read = [self._inputs(tokens) for tokens in self._read(texts)]
            return [self._tail(_vector(self._model.get_text_features(**inputs))) for inputs in read]
        return [self._tail(self._pooled(self._states(tokens))) for tokens in self._read(texts)]

    def _pooled(self, states: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(1, len(states) + 1, dtype=torch.float32)[:, None]
        poolings: Mapping[str, Callable[[], torch.Tensor]] = {
            "mean": lambda: states.mean(0),
            "cls": lambda: states[0],
            "last": lambda: states[-1],
            "max": lambda: states.max(0).values,
            "mean_sqrt_len": lambda: states.sum(0) / len(states) ** 0.5,
            "weighted_mean": lambda: (states * weights).sum(0) / weights.sum(),
        }
        return poolings[self._structure.pooling]()

    def _tail(self, vector: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self._structure.tail, start=2):
            folder = self._folder / f"{index}_{type(layer).__name__}"
            if isinstance(layer, Normalize):
                vector = functional.normalize(vector, dim=-1)
            elif isinstance(layer, LayerNorm):
                tensors = load_file(folder / WEIGHTS)
                vector = functional.layer_norm(vector, vector.shape, tensors["norm.weight"], tensors["norm.bias"])
            else:
                vector = self._dense(folder, layer, vector)
        return torch.tanh(vector) if self._structure.rounded else vector

    def _dense(self, folder: Path, layer: Dense, value: torch.Tensor) -> torch.Tensor:
        tensors = load_file(folder / WEIGHTS)
        return _ACTIVATIONS[layer.activation](
            functional.linear(value, tensors["linear.weight"], tensors.get("linear.bias"))
        )

    def _sparse(self) -> list[torch.Tensor]:
        prompt = next(iter(self._structure.prompts.values()), "")
        rows = [torch.relu(self._logits(tokens)) for tokens in self._read([prompt + text for text in TEXTS])]
        pooling = next(self._folder.glob("*SpladePooling/config.json"), None)
        twice = pooling and json.loads(pooling.read_text())["activation_function"] == "log1p_relu"
        return [torch.log1p(torch.log1p(row) if twice else row).max(0).values for row in rows]

    def _scores(self) -> list[torch.Tensor]:
        function = _FUNCTIONS[self._structure.function]
        if self._structure.ranks:
            ranks = self._structure.ranks(self._folder)
            return [torch.from_numpy(ranks(query, [document])) for query, document in PAIRS]
        if self._structure.template and self._structure.task == "classify":
            return [function(self._template_score({"text": text})) for text in TEXTS]
        if self._structure.template:
            return [function(self._template_score({"query": query, "document": text})) for query, text in PAIRS]
        inputs: Sequence[Any] = PAIRS if self._structure.pairs or self._structure.task == "rerank" else TEXTS
        if self._structure.modules:
            read = self._read(inputs)
            return [function(self._tail(self._pooled(self._states(tokens)))) for tokens in read]
        if self._states_of:
            return [function(self._remote_logits(self._states(tokens))) for tokens in self._read(inputs)]
        if self._structure.behind:
            return [function(self._states(tokens)) for tokens in self._read(inputs)]
        if self._structure.unmasked:
            read = self._read(inputs)
            return [function(self._model.score(self._pooled(self._states(tokens)))) for tokens in read]
        return [function(self._logits(tokens)) for tokens in self._read(inputs)]

    def _remote_logits(self, states: torch.Tensor) -> torch.Tensor:
        """BERT's pooler and classifier on the states of remote code."""
        tensors = load_file(self._folder / WEIGHTS)
        names = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
        pooled = torch.tanh(functional.linear(states[0], names["pooler.dense.weight"], names["pooler.dense.bias"]))
        return functional.linear(pooled, names["classifier.weight"], names["classifier.bias"])

    def _template_score(self, slots: Mapping[str, str]) -> torch.Tensor:
        """The score of "yes", less that of "no" where there is one, behind the template's text; of more tokens each
        one's."""
        template = self._structure.template
        assert template is not None
        if template.chat:
            parts = [self._rendered(**slots)]
        else:
            body = template.body
            for name, text in slots.items():
                body = body.replace(f"{{{name}}}", text)
            parts = [template.prefix, body, template.suffix]
        self._tokenizer.no_truncation()
        pieces = [self._tokenizer.encode(part, add_special_tokens=False).ids for part in parts]
        ids = torch.tensor([[index for piece in pieces for index in piece]])
        scores = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
        *no, yes = (scores[self._tokenizer.token_to_id(token)] for token in template.tokens)
        if len(no) > 1:
            return torch.stack([*no, yes])
        value: torch.Tensor = yes - sum(no)
        return value[None]

    def _rendered(self, query: str, document: str) -> str:
        """The checkpoint's chat template, rendered by transformers."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._folder)
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _token_embeddings(self) -> list[torch.Tensor]:
        """Unit vectors of each text's tokens, as a query and as a document (PyLate's ColBERT.encode)."""
        late = self._structure.late
        assert late is not None
        return [*self._side(late.query, query=True), *self._side(late.document, query=False)]

    def _side(self, marker: str, *, query: bool) -> list[torch.Tensor]:
        late = self._structure.late
        assert late is not None
        length = min(late.query_length if query else late.document_length, self._structure.max_tokens)
        vocabulary = self._tokenizer.get_vocab()
        marker_id = vocabulary[marker if marker in vocabulary else marker.strip()]
        self._tokenizer.enable_truncation(length - 1)
        rows = []
        for text in TEXTS:
            ids = self._tokenizer.encode(text).ids
            ids = [ids[0], marker_id, *ids[1:]]
            count = len(ids)
            if query and late.expansion:
                ids += [vocabulary[late.mask]] * (length - len(ids))
            if self._states_of:
                states = self._states_of(Encoding(np.array(ids, np.int32), num_keys=count))
            else:
                keys = len(ids) if late.attended else count
                mask = torch.tensor([[1] * keys + [0] * (len(ids) - keys)])
                if self._structure.unmasked:
                    mask = torch.where(mask > 0, 0.0, -torch.inf)[:, None, None].expand(1, 1, len(ids), -1)
                states = self._model.base_model(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
            vectors = functional.normalize(states @ self._late_weight().T, dim=-1)
            skipped = {vocabulary.get(word) for word in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"}
            kept = [query or index not in skipped for index in ids]
            rows.append(vectors[torch.tensor(kept)])
        return rows

    def _late_weight(self) -> torch.Tensor:
        """The product of PyLate's modules' weights, each plus its residual's, or the original ColBERT's weight."""
        weight: torch.Tensor | None = None
        for path in sorted(self._folder.glob(f"*_Dense/{WEIGHTS}")) or [self._folder / WEIGHTS]:
            tensors = load_file(path)
            layer = tensors["linear.weight"] + tensors.get("residual.weight", torch.zeros(()))
            weight = layer if weight is None else layer @ weight
        assert weight is not None
        return weight

    def _linear_answers(self) -> list[tuple[str, list[torch.Tensor]]]:
        """BGE-M3's weights of words and vectors of tokens."""
        layers = {name: torch.load(self._folder / f"{name}.pt") for name in ("sparse_linear", "colbert_linear")}
        special = [index for index, token in self._tokenizer.get_added_tokens_decoder().items() if token.special]
        sparse, tokens_rows = [], []
        for tokens in self._read(TEXTS):
            states = self._states(tokens)
            row = torch.zeros(self._tokenizer.get_vocab_size())
            weights = torch.relu(functional.linear(states, **layers["sparse_linear"]))[:, 0]
            for index, weight in zip(tokens.ids, weights, strict=True):
                if index not in special:
                    row[index] = torch.maximum(row[index], weight)
            sparse.append(row)
            tokens_rows.append(functional.normalize(functional.linear(states, **layers["colbert_linear"]), dim=-1))
        return [("embed_sparse", sparse), ("embed_tokens", tokens_rows)]
