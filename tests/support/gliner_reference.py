"""Scores of GLiNER's spans and GLiREL's pairs, computed in torch as the libraries gliner (0.2.29) and glirel (1.2.1)
do, without these and text by text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import AutoConfig

from bei.core import Float32Array
from tests.support.gliner_models import encoder_model
from tests.support.glirel_models import TOKENS

_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")


class _Reference:
    """An encoder's states of words, and layers on them."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], settings: dict[str, Any], encoder: dict[str, Any], tokenizer: Tokenizer
    ) -> None:
        self._tensors = tensors
        self._settings = settings
        self._tokenizer = tokenizer
        self._encoder = self._filled("token_rep_layer.bert_layer.model", encoder)
        width = settings["hidden_size"]
        self._lstm = nn.LSTM(width, width // 2, bidirectional=True).eval()
        self._lstm.load_state_dict(self._under("rnn.lstm"))

    def _read(self, words: Sequence[str]) -> torch.Tensor:
        """The state of the first token of each word."""
        tokens = self._tokenizer.encode([*words], is_pretokenized=True)
        states = self._encoder(input_ids=torch.tensor([tokens.ids])).last_hidden_state[0]
        states = self._linear("token_rep_layer.projection", states)
        return states[[tokens.word_ids.index(place) for place in range(len(words))]]

    def _mlp(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Two linear layers, or the one of models of the form ``marker``."""
        if f"{name}.weight" in self._tensors:
            return self._linear(name, value)
        return self._linear(f"{name}.3", self._linear(f"{name}.0", value).relu())

    def _linear(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """``value`` itself where there is no such layer."""
        if f"{name}.weight" not in self._tensors:
            return value
        return nn.functional.linear(value, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def _filled(self, prefix: str, settings: dict[str, Any]) -> Any:
        kind = settings["model_type"]
        model = encoder_model(kind, AutoConfig.for_model(**settings))
        model.load_state_dict(self._under(prefix))
        return model.eval()

    def _under(self, prefix: str) -> dict[str, torch.Tensor]:
        start = f"{prefix}."
        return {name.removeprefix(start): value for name, value in self._tensors.items() if name.startswith(start)}


class GlinerReference(_Reference):
    """The model of ``folder``, which holds its encoder's config and tokenizer, and those of its encoder of labels where
    it has one."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "gliner_config.json").read_text())
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        super().__init__(load_file(folder / "model.safetensors"), settings, settings["encoder_config"], tokenizer)
        self._of_labels: Any = None
        if config := settings.get("labels_encoder_config"):
            self._of_labels = self._filled("token_rep_layer.labels_encoder.model", config)
            self._labels_tokenizer = Tokenizer.from_file(str(folder / "labels_tokenizer" / "tokenizer.json"))

    def scores(self, text: str, labels: Sequence[str]) -> Float32Array:
        """Of all spans of words, by first word, then width, then label."""
        words = [found.group() for found in _WORD.finditer(text)]
        with torch.no_grad():
            states, of_labels = self._states(words, labels)
            if self._of_labels is None:  # the library's models with two encoders do not run theirs
                states = self._lstm(states[:, None])[0][:, 0]
            span = "span_rep_layer.span_rep_layer"
            first, last = (self._mlp(f"{span}.project_{side}", states) for side in ("start", "end"))
            count, most = len(words), self._settings["max_width"]
            places = [(at, end) for at in range(count) for end in range(at, min(count, at + most))]
            ends = torch.cat([first[[at for at, _ in places]], last[[end for _, end in places]]], dim=1).relu()
            spans = self._mlp(f"{span}.out_project", ends)
            found: Float32Array = (spans @ self._mlp("prompt_rep_layer", of_labels).T).sigmoid().flatten().numpy()
        return found

    def _states(self, words: Sequence[str], labels: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each word its first token's, and of each label its marker's, or its vector."""
        if self._of_labels is not None:
            vectors = [self._vector(label) for label in labels]
            return self._read(words), torch.stack(vectors)
        marker, separator = self._settings["ent_token"], self._settings["sep_token"]
        prompt = [part for label in labels for part in (marker, label)]
        by_word = self._read([*prompt, separator, *words])
        return by_word[len(prompt) + 1 :], by_word[: len(prompt) : 2]

    def _vector(self, label: str) -> torch.Tensor:
        ids = self._labels_tokenizer.encode(label).ids
        state = self._of_labels(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
        return self._linear("token_rep_layer.labels_projection", state)


class GlirelReference(_Reference):
    """The GLiREL of ``folder``, which holds its encoder's config and tokenizer (glirel 1.2.1)."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "glirel_config.json").read_text())
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_tokens([AddedToken(name, normalized=True) for name in TOKENS])
        encoder = {**settings["encoder_config"], "vocab_size": tokenizer.get_vocab_size()}
        super().__init__(torch.load(folder / "pytorch_model.bin"), settings, encoder, tokenizer)

    def scores(self, text: str, labels: Sequence[str]) -> Float32Array:
        """Of all pairs of different entities, by label, head and tail. Each of the first words is an entity."""
        words = [found.group() for found in _WORD.finditer(text)]
        prompt = [part for label in labels for part in ("[REL]", label)]
        count, pairs = len(entities_of(text)), "span_rep_layer.rel_rep_layer"
        with torch.no_grad():
            states = self._read([*prompt, "[SEP]", *words])
            markers, names = states[: len(prompt) : 2], states[1 : len(prompt) : 2]
            read = self._lstm(states[len(prompt) + 1 :, None])[0][:count, 0]
            ends = [self._mlp(f"{pairs}.span_marker.project_{side}", read) for side in ("start", "end")]
            entities = self._mlp(f"{pairs}.span_marker.out_project", torch.cat(ends, dim=1).relu())
            places = [(head, tail) for head in range(count) for tail in range(count) if head != tail]
            both = torch.cat([entities[[one for one, _ in places]], entities[[one for _, one in places]]], dim=1)
            of_labels = self._mlp("prompt_rep_layer", (markers + names) / 2)
            found: Float32Array = (of_labels @ self._mlp(f"{pairs}.out_project", both).T).sigmoid().flatten().numpy()
        return found


def entities_of(text: str) -> list[dict[str, int]]:
    """Where the first words of ``text`` stand."""
    return [{"start": found.start(), "end": found.end()} for found in _WORD.finditer(text)][:4]
