"""The result of a verification, as values, as JSON, and as a page that shows where a difference arose."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any, NamedTuple

from deepinfer_jax.verify.locate import Difference, Finding
from deepinfer_jax.verify.subject import Comparison


class CaseResult(NamedTuple):
    """One case of an axis."""

    axis: str
    name: str
    comparisons: tuple[Comparison, ...]

    @property
    def differing(self) -> int:
        """Requests that differ."""
        return sum(c.at is not None for c in self.comparisons)


class Report(NamedTuple):
    """A verification.

    Attributes:
        results: Of every case.
        left_out: Axes that did not apply to this model or machine.
        finding: Where a difference arises; None without one, or when it cannot be traced.
        numerics_version, numerics: Of the arithmetic (`numerics_version.py`).
    """

    results: tuple[CaseResult, ...]
    left_out: tuple[str, ...]
    finding: Finding | None
    numerics_version: str
    numerics: dict[str, Any]

    @property
    def compared(self) -> int:
        """Requests that were compared."""
        return sum(len(r.comparisons) for r in self.results)

    @property
    def differing(self) -> int:
        """Those that differ."""
        return sum(r.differing for r in self.results)

    @property
    def holds(self) -> bool:
        """Whether everything is equal, and something was compared."""
        return self.compared > 0 and self.differing == 0

    def summary(self) -> str:
        """One sentence."""
        if self.holds:
            return f"holds: {self.compared:,} comparisons, all equal to the bit"
        if not self.compared:
            return "nothing was compared: no axis applies"
        return f"differs: {self.differing:,} of {self.compared:,} comparisons"

    def origin(self) -> str | None:
        """Where the difference arises, in words; None without one."""
        if not self.differing:
            return None
        if self.finding is None:
            return "not located: the difference does not appear when intermediates are kept, or lies outside the layers"
        d = self.finding.origin
        assert d is not None
        place = "outside the layers" if d.layer is None else f"layer {d.layer}"
        return (
            f"first in {place}, {d.op}: {d.name} at position {d.first} of request {self.finding.request}, up to "
            f"{d.largest:.2g}, {self.finding.ways[0]} against {self.finding.ways[1]}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        finding = self.finding
        return {
            "holds": self.holds,
            "compared": self.compared,
            "differing": self.differing,
            "numerics_version": self.numerics_version,
            "numerics": self.numerics,
            "left_out": list(self.left_out),
            "cases": [
                {
                    "axis": r.axis,
                    "case": r.name,
                    "compared": len(r.comparisons),
                    "differing": [c._asdict() for c in r.comparisons if c.at is not None],
                }
                for r in self.results
            ],
            "origin": self.origin(),
            "differences": None
            if finding is None
            else {
                "ways": [str(way) for way in finding.ways],
                "request": finding.request,
                "intermediates": [d._asdict() | {"op": d.op} for d in finding.differences],
            },
        }


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em; max-width: 75em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .15em .6em; text-align: left }
th { border-bottom: 1px solid #999 } .n { text-align: right } .bad { color: #b00020 } .good { color: #1b7f3b }
.grid td { width: 1.5em; height: 1.2em; padding: 0; border: 1px solid #fff } .grid th { font-weight: normal; border: 0 }
.top th { writing-mode: vertical-rl; vertical-align: bottom; padding: .4em .1em } .first { outline: 3px solid #000 }
"""


def page(report: Report, title: str) -> str:
    """A self-contained HTML page."""
    cases = "".join(_case_row(r) for r in report.results)
    origin = report.origin()
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="{"good" if report.holds else "bad"}">{html.escape(report.summary())}</p>',
        f"<p>Numerics version <code>{report.numerics_version}</code></p>",
        f"<p>{html.escape(origin)}</p>" if origin else "",
        "<table><tr><th>axis</th><th>case</th><th>compared</th><th>differ</th><th>first token</th></tr>",
        cases,
        "</table>",
        f"<p>Did not apply: {html.escape(', '.join(report.left_out))}</p>" if report.left_out else "",
        "" if report.finding is None else _grid(report.finding),
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _case_row(r: CaseResult) -> str:
    first = min((c.at for c in r.comparisons if c.at is not None), default="")
    cells = f"<td>{html.escape(r.axis)}</td><td>{html.escape(r.name)}</td><td class=n>{len(r.comparisons)}</td>"
    state = "bad" if r.differing else "good"
    return f'<tr>{cells}<td class="n {state}">{r.differing}</td><td class=n>{first}</td></tr>'


def _grid(finding: Finding) -> str:
    """Layers from top to bottom, intermediates from left to right; the darker, the more positions differ."""
    inside = [d for d in finding.differences if d.layer is not None]
    columns = _in_order(inside)
    by_place = {(d.layer, _end(d)): d for d in inside}
    rows = []
    for layer in dict.fromkeys(d.layer for d in inside):
        cells = "".join(_cell(by_place.get((layer, column)), finding.origin) for column in columns)
        rows.append(f"<tr><th>layer {layer}</th>{cells}</tr>")
    for d in finding.differences:
        if d.layer is None:
            rows.append(f"<tr><th>{html.escape(d.name)}</th>{_cell(d, finding.origin)}</tr>")
    heads = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    words = (
        f"Request {finding.request}, {finding.ways[0]} against {finding.ways[1]}. Red: the share of positions that "
        "differ; green: equal to the bit; framed: the first that differs."
    )
    return f"<p>{words}</p><table class=grid><tr class=top><th></th>{heads}</tr>{''.join(rows)}</table>"


def _cell(d: Difference | None, origin: Difference | None) -> str:
    if d is None:
        return "<td></td>"
    colour = "#cfe8d5" if d.first is None else f"hsl(0 75% {85 - 50 * d.share:.0f}%)"
    words = f"{d.name}: {d.op}; {d.share:.0%} of the positions differ, up to {d.largest:.3g}"
    first = " class=first" if d is origin else ""
    return f'<td{first} style="background:{colour}" title="{html.escape(words)}"></td>'


def _end(d: Difference) -> str:
    return ".".join(d.name.split(".")[2:])


def _in_order(differences: Iterable[Difference]) -> list[str]:
    """Intermediates of a layer in the order of computation, over all layers: each before those that follow it."""
    order: list[str] = []
    at = 0
    for d in differences:
        end = _end(d)
        if end in order:
            at = order.index(end) + 1
        else:
            order.insert(at, end)
            at += 1
    return order
