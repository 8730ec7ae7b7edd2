"""Self-contained HTML pages: frame, tables and style. Equal input gives equal bytes.

The style follows the reader's light or dark scheme; printed pages are light.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TypeAlias

# A table cell: its text, and whether it is a number.
Cell: TypeAlias = "tuple[str, bool]"

_NUMBER = ' class="number"'

_FRAME_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1f24; --quiet: #57606a; --line: #d0d7de; --bar: #2f6fb0;
  --low: #b3261e; --high: #c77700; --pass: #1a6b35; --fail: #b3261e; --open: #8a5a00; --tint: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --text: #e4e8ec; --quiet: #a3adb8; --line: #3a424a;
  --bar: #6fa8dc; --low: #ff8a80; --high: #f2b34c; --pass: #6fcf8d; --fail: #ff8a80; --open: #f2b34c;
  --tint: #1d2227; } }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 56rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
@media print { :root { color-scheme: light; --page: #ffffff; --text: #000000; --quiet: #444444; --line: #999999;
  --bar: #2f6fb0; --low: #b3261e; --high: #c77700; --pass: #1a6b35; --fail: #b3261e; --open: #8a5a00; --tint: #ffffff; }
  body { max-width: none; padding: 0; font-size: 11pt; } }
"""

# The style of a page's content without colours: the server's page (/ui) shows it in its own colours.
CONTENT_STYLE = """
* { box-sizing: border-box; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .75rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p { margin: .5rem 0; }
.verdict { border-left: 6px solid; margin: .75rem 0; padding: .5rem .9rem; background: var(--tint); font-size: 1.1rem; }
.pass { border-color: var(--pass); } .pass strong { color: var(--pass); }
.fail { border-color: var(--fail); } .fail strong { color: var(--fail); }
.open { border-color: var(--open); } .open strong { color: var(--open); }
.quiet { color: var(--quiet); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; color: var(--quiet); padding: .25rem 0; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } tbody th { font-weight: 500; }
td { overflow-wrap: anywhere; } td:not(.number) { min-width: 5.5rem; }
.number { width: 1%; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.facts th { width: 14rem; color: var(--quiet); }
svg { display: block; width: 100%; height: auto; margin: .5rem 0; font: 10.5px system-ui, sans-serif; }
svg text { fill: var(--text); } svg .count, svg .tick { text-anchor: middle; } svg .tick { fill: var(--quiet); }
svg .count { paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
svg .name { text-anchor: end; } svg .limit { fill: var(--quiet); }
svg .bar { fill: var(--bar); } svg .low { fill: var(--low); } svg .high { fill: var(--high); }
svg .hatch { stroke: var(--page); stroke-width: 4; } svg .axis { stroke: var(--quiet); }
svg .threshold { stroke: var(--quiet); stroke-dasharray: 4 3; }
.from-end { direction: rtl; } .from-end svg { direction: ltr; }
@media (max-width: 40rem) { svg { width: 40rem; } .facts th { width: 8rem; } }
@media print { * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  table { font-size: 8.5pt; } th, td { padding-right: .5rem; }
  svg, tr, .verdict { break-inside: avoid; } h2, h3 { break-after: avoid; } .scroll { overflow: visible; } }
"""


def safe(text: str) -> str:
    """``text`` escaped for HTML and SVG; control characters and direction overrides are replaced, so that untrusted
    text stays in its place."""
    shown = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "\ufffd", text)
    return escape(shown, quote=True)


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """A whole page around ``parts`` (HTML); ``style`` is appended to the common style."""
    content = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)}</title>\n<style>{_FRAME_STYLE}{CONTENT_STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n"
    )


def facts_table(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    cells = "\n".join(
        f'<tr><th scope="row">{safe(name)}</th><td><bdi>{safe(value)}</bdi></td></tr>' for name, value in rows
    )
    return f'<div class="scroll"><table class="facts">\n<tbody>\n{cells}\n</tbody>\n</table></div>'


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table. A first cell that is not a number becomes its row's header."""
    rows = list(rows)
    is_number = [all(row[column][1] for row in rows) for column in range(len(header))]
    head = "".join(
        f'<th scope="col"{_NUMBER if number else ""}>{safe(name)}</th>'
        for name, number in zip(header, is_number, strict=True)
    )
    body = "\n".join("<tr>" + "".join(_cells(row)) + "</tr>" for row in rows)
    content = (
        f"<table>\n<caption>{safe(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>"
    )
    return scrolling(caption, content)


def scrolling(label: str, content: str, kind: str = "scroll") -> str:
    """``content`` in a box that scrolls horizontally, by keyboard too."""
    return f'<div class="{kind}" role="group" aria-label="{safe(label)}" tabindex="0">{content}</div>'


def _cells(row: Sequence[Cell]) -> Iterator[str]:
    for column, (value, is_number) in enumerate(row):
        if is_number:
            yield f"<td{_NUMBER}>{safe(value)}</td>"
        elif column == 0:
            yield f'<th scope="row">{safe(value)}</th>'
        else:
            yield f"<td><bdi>{safe(value)}</bdi></td>"
