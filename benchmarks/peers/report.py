"""docs/comparison.md and a page with bars, made of results/peers-MODEL.json and peers-MODEL-amx.json.

    python -m benchmarks.peers report [--check] [--html FILE]

``--check`` writes nothing, and ends with 1 where the document disagrees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bei.utils.html.bar_chart import chart
from bei.utils.html.document import Cell, document, safe, table
from benchmarks.harness.arguments import parsed
from benchmarks.harness.record import COMMITTED
from benchmarks.peers.cells import CELLS
from benchmarks.peers.data import table as data

DOCUMENT = Path(__file__).parents[2] / "docs" / "comparison.md"
_PRECISIONS = ("fp32", "bf16", "int8")
_OURS = "bei"
_AMX = "-amx"
_BAR_WIDTH, _NAME_WIDTH, _ROW = 380, 250, 22

Rows = list[list[str]]

_INTRODUCTION = """# bei beside other servers and libraries

`python -m benchmarks.peers install`, then `python -m benchmarks.peers --model NAME --repetitions N`.
This page is generated: `python -m benchmarks.peers report`.

All peers of a table run at once on the same cores, and one at a time is at work: each gets the first of the same texts
(English prose that it has not met), in turn, every second repetition backwards, as many as last about {seconds:.1f} s
by its own speed. Servers are driven by the client of `bei bench` over HTTP, on their cores; libraries are called in a
process of their own, where "64 at once" means one call with 64 texts. All have as many threads as there are cores.

Figures are medians; where one is missing, the peer refuses such requests. The JSON
([benchmarks/results](../benchmarks/results)) has every value, the versions of all packages, and the share of the
machine that others used: where that is above a tenth, a ratio says which side is ahead and not by how much, and near 1
not even that. Cosines are to the reference that each section names. Pins and flags:
[peers.toml](../benchmarks/peers/peers.toml), [servers.py](../benchmarks/peers/servers.py)."""


def main(arguments: Sequence[str]) -> int:
    options = parsed(__doc__, arguments, check=False, html=Path)
    found, wanted = results(), rendered(results())
    if options.html is not None:
        options.html.write_text(page(found), encoding="utf-8")
    if options.check:
        return 0 if DOCUMENT.read_text(encoding="utf-8") == wanted else 1
    DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0


def results(folder: Path = COMMITTED) -> dict[str, dict[str, Any]]:
    """What each JSON holds, by model, or by model and what its CPU has (a file that was renamed, to be kept)."""
    names = [f"{model}{suffix}" for model in data().models for suffix in ("", _AMX)]
    return {name: json.loads(path.read_bytes()) for name in names if (path := folder / f"peers-{name}.json").is_file()}


def rendered(found: dict[str, dict[str, Any]]) -> str:
    """The whole document."""
    parts = [_INTRODUCTION.format(seconds=next(iter(CELLS.values())).seconds)]
    for model, content in found.items():
        parts += [f"## {model}", _described(model, content)]
        for title, header, rows in tables(content["results"]):
            parts += [f"### {title}", _markdown(header, rows)]
    missing = [name for name in data().models if name not in found]
    if missing:
        parts += ["## Not measured", f"Models of peers.toml without results: {', '.join(missing)}."]
    return "\n\n".join(parts) + "\n"


def tables(measured: dict[str, Any]) -> Iterator[tuple[str, list[str], Rows]]:
    """Title, header and rows."""
    cells, peers = measured["cells"], measured["peers"]
    speeds = [name for name in CELLS if name in cells]
    if speeds:
        yield "Speed and quality", *_speeds(measured, speeds)
        yield "bei by the fastest peer of the same precision", *_ratios(cells, speeds)
        yield "Latency, P50 / P99, ms", *_latencies(peers, cells, speeds)
    if "beside-bulk" in cells:
        yield "Single texts beside bulk work, ms", *_beside(cells["beside-bulk"])
    yield "Memory, start and size", *_footprints(measured)
    if measured["not run"]:
        yield "Not run", ["", "why"], [[name, _line(why)] for name, why in measured["not run"].items()]


def ratios(cells: dict[str, Any], cell: str) -> Iterator[tuple[str, bool, str, str, float]]:
    """Precision, whether of servers, bei's name, the fastest peer's, and how many times as fast bei is."""
    rates = {name: row["per_s"]["median"] for name, row in cells[cell].items()}
    for precision in _PRECISIONS:
        for transport in ("http", "process"):
            names = [
                name
                for name in rates
                if data().peers[name].precision == precision and data().peers[name].transport == transport
            ]
            ours = [name for name in names if data().peers[name].software == _OURS]
            others = [name for name in names if data().peers[name].software != _OURS]
            if ours and others:
                best = max(others, key=lambda name: rates[name])
                yield precision, transport == "http", ours[0], best, rates[ours[0]] / rates[best]


def _speeds(measured: dict[str, Any], speeds: list[str]) -> tuple[list[str], Rows]:
    cells = measured["cells"]
    quality = cells.get("quality", {}).get("sides", {})
    ndcg = cells.get("scifact", {})
    unit = "documents/s" if "rerank-100" in speeds else "texts/s"
    header = ["", *(f"{CELLS[name].title}, {unit}" for name in speeds), "cosine: mean, lowest"]
    if "rerank-100" in speeds:
        header[-1] = "order (Spearman): mean, lowest"
    header += ["SciFact, nDCG@10"] if ndcg else []
    rows = []
    for peer in measured["peers"]:
        figures = [f"{cells[name][peer]['per_s']['median']:,.0f}" if peer in cells[name] else "" for name in speeds]
        same = ", ".join(f"{value:.4f}" for value in quality.get(peer, {}).values())
        rows.append([peer, *figures, same, *([f"{ndcg[peer]:.4f}" if peer in ndcg else ""] if ndcg else [])])
    return header, rows


def _ratios(cells: dict[str, Any], speeds: list[str]) -> tuple[list[str], Rows]:
    rows = [
        [CELLS[cell].title, precision.upper(), "servers" if is_server else "libraries", other, f"{ratio:.2f}"]
        for cell in speeds
        for precision, is_server, _, other, ratio in ratios(cells, cell)
    ]
    return ["", "precision", "among", "fastest peer", "times as fast"], rows


def _latencies(peers: list[str], cells: dict[str, Any], speeds: list[str]) -> tuple[list[str], Rows]:
    def of(name: str, peer: str) -> str:
        found = cells[name].get(peer, {}).get("latency_ms")
        return f"{found['p50']:,.1f} / {found['p99']:,.1f}" if found else ""

    return ["", *(CELLS[name].title for name in speeds)], [
        [peer, *(of(name, peer) for name in speeds)] for peer in peers
    ]


def _beside(found: dict[str, Any]) -> tuple[list[str], Rows]:
    header = ["", "alone: P50 / P99", "beside: P50 / P99", "answers", "bulk work, texts/s"]
    rows = []
    for peer, row in found.items():
        alone, beside = row["alone_ms"], row["beside_ms"]
        latencies = [f"{each['p50']:,.0f} / {each['p99']:,.0f}" for each in (alone, beside)]
        rows.append([peer, *latencies, str(beside["count"]), f"{row['bulk_per_s']['median']:,.0f}"])
    return header, rows


def _footprints(measured: dict[str, Any]) -> tuple[list[str], Rows]:
    cells = measured["cells"]
    rows = []
    for peer in measured["peers"]:
        memory = cells.get("memory", {}).get(peer)
        start = cells.get("cold-start", {}).get(peer)
        record = measured["install"].get(data().peers[peer].environment)
        rows.append(
            [
                peer,
                f"{memory:,.0f}" if memory else "",
                f"{start['median']:.1f}" if start else "",
                f"{record['megabytes']:,}" if record else "",
            ]
        )
    return ["", "memory after the cells, MB", "start to first answer, s", "installed, MB"], rows


def _described(model: str, content: dict[str, Any]) -> str:
    machine, measured = content["machine"], content["results"]
    cells = measured["cells"]
    loads = [load for cell in CELLS if cell in cells for row in cells[cell].values() for load in row["foreign_load"]]
    repetitions = {len(row["per_s"]["values"]) for cell in CELLS if cell in cells for row in cells[cell].values()}
    words = [
        f"{measured['date']}, commit {measured['commit']}; {machine['cpu']}, {machine['cores']} cores, computes in "
        f"{', '.join(machine['computes in'])}; {'/'.join(map(str, sorted(repetitions)))} repetitions."
    ]
    if loads:
        middle = sorted(loads)[len(loads) // 2]
        words.append(f"Others used {middle:.0%} of the machine in the median measurement, {max(loads):.0%} at most.")
    if reference := cells.get("quality", {}).get("reference"):
        words.append(f"The reference of quality is {reference}.")
    absent = [cell.title for cell in CELLS.values() if cell.name not in cells and _is_for(model, cell.documents)]
    absent += [
        title
        for name, title in (
            ("beside-bulk", "single texts beside bulk work"),
            ("cold-start", "start"),
            ("scifact", "SciFact"),
        )
        if name not in cells
    ]
    if absent:
        words.append(f"Not measured in this run: {'; '.join(absent)}.")
    return " ".join(words).replace("%", " %")


def _is_for(model: str, documents: int) -> bool:
    return (documents > 0) == (data().models[model.removesuffix(_AMX)].task == "rerank")


def _markdown(header: Sequence[str], rows: Rows) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _line(text: str) -> str:
    """The last line that is not empty: of a traceback the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].replace("|", "/") if lines else ""


# Titles of columns are longer than their figures, and captions are the headings of tables.
_STYLE = """
svg .theirs { fill: var(--quiet); } svg text.figure { font-weight: 600; }
caption { margin-top: 1.75rem; color: var(--text); font-size: 1rem; font-weight: 700; }
thead th.number { min-width: 6rem; white-space: normal; vertical-align: bottom; } tbody th { white-space: nowrap; }
"""


def page(found: dict[str, dict[str, Any]]) -> str:
    """Bars of every cell and the tables, as HTML that needs nothing else."""
    parts = ["<h1>bei beside other servers and libraries</h1>"]
    for model, content in found.items():
        measured = content["results"]
        parts += [f"<h2>{safe(model)}</h2>", f"<p>{safe(_described(model, content))}</p>"]
        for cell in (cell for name, cell in CELLS.items() if name in measured["cells"]):
            rates = {name: row["per_s"]["median"] for name, row in measured["cells"][cell.name].items()}
            parts += [f"<h3>{safe(cell.title)}</h3>", _bars(f"{model}-{cell.name}", cell.title, rates)]
        for title, header, rows in tables(measured):
            cells: list[list[Cell]] = [
                [(value, column > 0 and (not value or _is_number(value))) for column, value in enumerate(row)]
                for row in rows
            ]
            parts.append(table(title, header, cells))
    return document("bei beside others", parts, _STYLE)


def _bars(name: str, title: str, rates: dict[str, float]) -> str:
    most = max(rates.values())
    parts = []
    for row, (peer, rate) in enumerate(sorted(rates.items(), key=lambda item: -item[1])):
        top, width = row * _ROW, _BAR_WIDTH * rate / most
        kind = "bar" if data().peers[peer].software == _OURS else "theirs"
        parts.append(
            f'<text class="name" x="{_NAME_WIDTH - 8}" y="{top + 15}">{safe(peer)}</text>'
            f'<rect class="{kind}" x="{_NAME_WIDTH}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}"/>'
            f'<text class="figure" x="{_NAME_WIDTH + width + 6:.1f}" y="{top + 15}">{rate:,.0f}</text>'
        )
    words = "; ".join(f"{peer} {rate:,.0f} a second" for peer, rate in rates.items())
    return chart(name, title, words, len(rates) * _ROW, parts)


def _is_number(value: str) -> bool:
    return value.replace(",", "").replace(".", "").replace("/", "").replace(" ", "").isdigit()
