"""The frame of inline SVG charts. Colours come from the page's style sheet; each chart has a description in words."""

from __future__ import annotations

from collections.abc import Sequence

from bei.utils.html.document import safe

WIDTH = 720


def chart(name: str, title: str, description: str, height: int, parts: Sequence[str]) -> str:
    """An SVG of ``WIDTH`` by ``height`` units around ``parts``; ``name`` is unique on the page."""
    content = "\n".join(parts)
    return (
        f'<svg role="img" aria-labelledby="{name}-title {name}-words" viewBox="0 0 {WIDTH} {height}">\n'
        f'<title id="{name}-title">{safe(title)}</title>\n<desc id="{name}-words">{safe(description)}.</desc>\n'
        f"{content}\n</svg>"
    )
