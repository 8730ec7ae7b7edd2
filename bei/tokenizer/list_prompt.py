"""A query and documents in one text, as listwise rerankers read them (jina-reranker-v3, arXiv:2509.25085).

The text is that of the model's own code (``format_docs_prompts_func``): a marker behind each document and one behind
the query, which stands in front of the documents and behind them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from bei.artifact.label_layouts import Listwise

_SYSTEM = (
    "<|im_start|>system\n"
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking.<|im_end|>\n"
    "<|im_start|>user\n"
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def list_prompt(query: str, documents: Seq[str], instruction: str | None, layout: Listwise) -> str:
    """The text of ``query`` and ``documents``, which have no markers of their own (``without_markers``)."""
    asked = f"<instruct>\n{instruction}\n</instruct>\n" if instruction else ""
    passages = "\n".join(passage(index, document, layout) for index, document in enumerate(documents))
    return (
        f"{_SYSTEM}I will provide you with {len(documents)} passages, each indicated by a numerical identifier. "
        f"Rank the passages based on their relevance to query: {query}\n{asked}{passages}\n"
        f"<query>\n{query}{layout.query_token}\n</query>{_ANSWER}"
    )


def passage(index: int, document: str, layout: Listwise) -> str:
    """The part of the text that belongs to document number ``index`` alone."""
    return f'<passage id="{index}">\n{document}{layout.document_token}\n</passage>'


def without_markers(text: str, layout: Listwise) -> str:
    """``text`` without what reads as a marker, also where taking one out makes another one."""
    while layout.query_token in text or layout.document_token in text:
        text = text.replace(layout.query_token, "").replace(layout.document_token, "")
    return text
