"""bei: an embedding, reranking and classification server with engines compiled ahead of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bei.version import __version__ as __version__

if TYPE_CHECKING:
    from bei.offline.model import Model as Model
else:

    def __getattr__(name: str) -> object:
        """``bei.Model``, when it is asked for: it needs numpy and a tokenizer, and many who import bei do not."""
        if name != "Model":
            raise AttributeError(f"module 'bei' has no attribute {name!r}")
        from bei.offline.model import Model

        return Model
