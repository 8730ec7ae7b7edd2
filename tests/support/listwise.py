"""A random jina-reranker-v3 or -v3.5, and its own code: ``modeling.py`` of jinaai/jina-reranker-v3, written again.

Written after the published code, which is not at hand here: the text of ``format_docs_prompts_func``, what
``_truncate_texts`` cuts, how ``rerank`` groups documents, weighs the texts' queries and takes cosines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

from bei.core import Float32Array
from tests.support.checkpoints import save_tokenizer, write_json

MARKERS = {"query_embed_token": "<|rerank_token|>", "doc_embed_token": "<|embed_token|>"}
_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
PROJECTED = 24


def listwise_tokenizer() -> Tokenizer:
    """As Qwen's: byte-level BPE without tokens around a text."""
    merges = [("h", "e"), ("t", "he"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("r", "e"), ("e", "r"), ("o", "n")]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", MARKERS["doc_embed_token"], MARKERS["query_embed_token"]]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def save_listwise(folder: Path, *, window: int | None = None, max_length: int = 8192, **settings: Any) -> Path:
    """A random checkpoint; ``window``: as -v3.5, whose first layers have windows."""
    tokenizer = listwise_tokenizer()
    layers: dict[str, Any] = (
        {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    )
    if window is not None:
        layers["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Qwen3Config(**{**_SHAPE, **layers, "vocab_size": tokenizer.get_vocab_size(), **settings})
    width = config.hidden_size
    with torch.random.fork_rng():
        torch.manual_seed(38)
        tensors = {f"model.{name}": value for name, value in Qwen3Model(config).state_dict().items()}
        tensors = {name: torch.randn_like(value) * 0.2 if value.ndim > 1 else value for name, value in tensors.items()}
        tensors["projector.0.weight"] = torch.randn(width // 2, width) * 0.3
        tensors["projector.2.weight"] = torch.randn(PROJECTED, width // 2) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    saved = {
        **config.to_dict(),
        "architectures": ["JinaForRanking"],
        "auto_map": {"AutoModel": "modeling.JinaForRanking"},
    }
    write_json(folder / "config.json", saved)
    save_tokenizer(folder, tokenizer)
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, "pad_token": "<|endoftext|>"},
    )
    return folder


class OwnCode:
    """The repository's ``JinaForRanking``, in FP32. ``limits``: tokens of a query and of a document."""

    def __init__(self, folder: Path, limits: tuple[int, int] = (512, 2048), most_documents: int = 125) -> None:
        from safetensors.torch import load_file

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model = Qwen3Model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()  # type: ignore[no-untyped-call]
        tensors = load_file(folder / "model.safetensors")
        self.first, self.second = tensors["projector.0.weight"], tensors["projector.2.weight"]
        self.limits = limits
        self.most_documents = most_documents

    def rerank(self, query: str, documents: list[str], instruction: str | None = None) -> Float32Array:
        """The score of every document, in their order."""
        most_query, most_document = self.limits
        cut = [self._truncated(document, most_document) for document in documents]
        query, query_length = self._truncated(query, most_query)
        capacity = self.tokenizer.model_max_length - 2 * query_length
        states, queries, weights, block = [], [], [], []
        for number, (document, length) in enumerate(cut, 1):
            block.append(document)
            capacity -= length
            if len(block) >= self.most_documents or capacity <= most_document or number == len(cut):
                own_query, own = self._states(query, block, instruction)
                states.append(own)
                queries.append(own_query)
                weights.append(((1.0 + _cosine(own, own_query)) / 2.0).max())
                block, capacity = [], self.tokenizer.model_max_length - 2 * query_length
        return _cosine(np.concatenate(states), np.average(queries, axis=0, weights=weights))

    def _truncated(self, text: str, most: int) -> tuple[str, int]:
        ids = self.tokenizer(text, truncation=True, max_length=most)["input_ids"]
        return (self.tokenizer.decode(ids) if len(ids) >= most else text), len(ids)

    @torch.no_grad()
    def _states(self, query: str, documents: list[str], instruction: str | None) -> tuple[Float32Array, Float32Array]:
        ids = self.tokenizer([prompt(query, documents, instruction)], return_tensors="pt")["input_ids"]
        hidden = self.model(input_ids=ids).last_hidden_state[0]
        places = [ids[0] == self.tokenizer.convert_tokens_to_ids(MARKERS[name]) for name in sorted(MARKERS)]
        documents_, queries = (torch.relu(hidden[place] @ self.first.T) @ self.second.T for place in places)
        assert len(queries) == 1
        return queries[0].numpy(), documents_.numpy()


def prompt(query: str, documents: list[str], instruction: str | None) -> str:
    """``format_docs_prompts_func`` with ``no_thinking``."""
    for marker in MARKERS.values():
        query = query.replace(marker, "")
        documents = [document.replace(marker, "") for document in documents]
    text = (
        "<|im_start|>system\n"
        "You are a search relevance expert who can determine a ranking of the passages based on how relevant they "
        "are to the query. If the query is a question, how relevant a passage is depends on how well it "
        "answers the question. If not, try to analyze the intent of the query and assess how well each passage "
        "satisfies the intent. If an instruction is provided, you should follow the instruction when determining the "
        "ranking.<|im_end|>\n<|im_start|>user\n"
        f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. "
        f"Rank the passages based on their relevance to query: {query}\n"
    )
    if instruction:
        text += f"<instruct>\n{instruction}\n</instruct>\n"
    for index, document in enumerate(documents):
        text += f'<passage id="{index}">\n{document}<|embed_token|>\n</passage>\n'
    text += f"<query>\n{query}<|rerank_token|>\n</query>"
    return text + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def _cosine(documents: Float32Array, query: Float32Array) -> Float32Array:
    norms = np.linalg.norm(documents, axis=1) * np.linalg.norm(query)
    found: Float32Array = documents @ query / norms
    return found
