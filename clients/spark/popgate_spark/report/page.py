"""The page around plots and tables: head, style, verdict, sections, all in one file.

Owns only the appearance. Texts are escaped here; `plots` makes the plots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

STYLE = files("popgate_spark.report").joinpath("page.css").read_text(encoding="utf-8")


@dataclass(slots=True)
class Page:
    """A page that is written from top to bottom."""

    title: str
    about: str
    parts: list[str] = field(default_factory=list[str])

    def verdict(self, tone: str, headline: str, text: str) -> None:
        """Add the verdict. `tone`: good, warn, bad, or "" for none."""
        self.parts.append(f'<section class="verdict {tone}"><b>{escape(headline)}</b>{escape(text)}</section>')

    def cards(self, cards: Sequence[tuple[str, str]]) -> None:
        """Add figures, each with a description."""
        inner = "".join(
            f'<div class="card"><strong>{escape(figure)}</strong><span>{escape(what)}</span></div>'
            for figure, what in cards
        )
        self.parts.append(f'<div class="cards">{inner}</div>')

    def section(self, title: str, *inner: str) -> None:
        """Add a section, unless all of `inner` is empty. `inner` is HTML: plots, and results of `table` and `note`."""
        if any(inner):
            self.parts.append(f"<section><h2>{escape(title)}</h2>{''.join(inner)}</section>")

    def html(self) -> str:
        """Return the whole file."""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head><body><main>"
            f'<h1>{escape(self.title)}</h1><p class="about">{escape(self.about)}</p>'
            f"{''.join(self.parts)}</main></body></html>\n"
        )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table whose numbers are right-aligned; empty if there are no rows."""
    if not rows:
        return ""
    numeric = [
        all(isinstance(row[index], int | float) or row[index] == "" for row in rows) for index in range(len(head))
    ]
    kinds = [' class="n"' if one else "" for one in numeric]
    top = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{_cell(value)}</td>' for kind, value in zip(kinds, row, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def key(kinds: Sequence[str]) -> str:
    """Return a legend for the colours of bars."""
    return "".join(
        f'<span class="key"><i class="{escape(kind)}"></i>{escape(kind.replace("_", " "))}</span>' for kind in kinds
    )


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return escape(str(value))
