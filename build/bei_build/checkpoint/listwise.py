"""How a listwise reranker reads a list of documents: figures of the code in its repository, which no file has."""

from __future__ import annotations

from tokenizers import Tokenizer

from bei.artifact.label_layouts import Listwise
from bei.errors import CheckpointError
from bei.tokenizer.list_prompt import list_prompt
from bei_build.spec.model_spec import ModelSpec

# Of jina-reranker-v3's modeling.py. That of -v3.5 has these two larger limits and is the same otherwise; its layers
# have windows, which those of -v3 have not.
_MARKERS = ("<|embed_token|>", "<|rerank_token|>")
_MOST_DOCUMENTS = 125
_MOST_TOKENS = (512, 2048)  # of a query, of a document
_MOST_TOKENS_WITH_WINDOWS = (1024, 8192)


def listwise_of(spec: ModelSpec, tokenizer: Tokenizer, max_seq_len: int, own_length: int | None) -> Listwise | None:
    """How lists are laid out for a model that projects markers; None for others. ``own_length``: the tokenizer's
    ``model_max_length``, up to which the model's own code fills a text. Raises CheckpointError."""
    if spec.head("token_projection") is None:
        return None
    document_id, query_id = (_marker_id(token, spec, tokenizer) for token in _MARKERS)
    with_windows = any(attention.window is not None for attention in spec.attentions)
    most_query, most_document = _MOST_TOKENS_WITH_WINDOWS if with_windows else _MOST_TOKENS
    found = Listwise(
        document_token=_MARKERS[0],
        query_token=_MARKERS[1],
        document_id=document_id,
        query_id=query_id,
        max_query_tokens=most_query,
        max_document_tokens=most_document,
        max_documents=_MOST_DOCUMENTS,
        max_tokens=own_length or max_seq_len,
    )
    frame = len(tokenizer.encode(list_prompt("", [""], None, found)).ids)
    if max_seq_len < 2 * frame:
        raise CheckpointError(
            f"The text around a query and its documents has {frame} tokens: max_seq_len {max_seq_len} leaves too few "
            f"for them. Set --max-seq-len to {2 * frame} or more."
        )
    return found


def _marker_id(token: str, spec: ModelSpec, tokenizer: Tokenizer) -> int:
    index = tokenizer.token_to_id(token)
    if index is None or tokenizer.encode(f"a{token}b", add_special_tokens=False).ids.count(index) != 1:
        raise CheckpointError(
            f"{spec.architecture} reads the state of the token {token}, which the tokenizer does not find in a text. "
            "Download tokenizer.json again."
        )
    return int(index)
