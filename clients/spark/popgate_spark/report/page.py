"""The page around plots and tables: head, style, verdict, sections. Everything is in the one file.

Owns looks only. What is written in it is escaped here; plots come ready from `plots`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1a2230;--soft:#5b6675;--rule:#dfe3e8;
--c0:#0b62c4;--c1:#b4540a;--c2:#12803c;--c3:#9333c7;--c4:#c01f3a;--c5:#55606e;--good:#12803c;--bad:#c01f3a;--warn:#a86400}
@media (prefers-color-scheme:dark){:root{--bg:#11161d;--card:#19202a;--ink:#e4e9f0;--soft:#98a4b3;--rule:#2c3644;
--c0:#6db1ff;--c1:#f2a054;--c2:#5fd38a;--c3:#c79bf5;--c4:#ff7d8f;--c5:#a4b0be;--good:#5fd38a;--bad:#ff7d8f;--warn:#f2b950}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:28px 20px 60px}h1{font-size:26px;margin:0 0 2px}h2{font-size:18px;margin:0 0 10px}
p.about{color:var(--soft);margin:0 0 20px}section{background:var(--card);border:1px solid var(--rule);border-radius:10px;
padding:18px 20px;margin:18px 0;overflow-x:auto}.verdict{border-left:6px solid var(--c5);font-size:17px}
.verdict.good{border-left-color:var(--good)}.verdict.bad{border-left-color:var(--bad)}.verdict.warn{border-left-color:var(--warn)}
.verdict b{display:block;font-size:20px}.good b{color:var(--good)}.bad b{color:var(--bad)}.warn b{color:var(--warn)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin:18px 0}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 16px}
.card strong{display:block;font-size:23px;font-variant-numeric:tabular-nums}.card span{color:var(--soft);font-size:13px}
table{border-collapse:collapse;width:100%;font-size:13.5px}th{text-align:left;color:var(--soft);font-weight:600}
th,td{padding:5px 10px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}td.n,th.n{text-align:right;
font-variant-numeric:tabular-nums}td code{font-size:12px}.note{color:var(--soft);font-size:13px;margin:10px 0 0}
svg.plot{display:block;width:100%;height:auto;margin:6px 0 14px;font:12px system-ui,sans-serif}svg text{fill:var(--ink)}
svg .title{font-weight:600;font-size:14px}svg .small{fill:var(--soft)}svg .grid{stroke:var(--rule)}
svg .line{fill:none;stroke-width:2}svg .line.c0{stroke:var(--c0)}svg .line.c1{stroke:var(--c1)}svg .line.c2{stroke:var(--c2)}
svg .line.c3{stroke:var(--c3)}svg .line.c4{stroke:var(--c4)}svg .line.c5{stroke:var(--c5)}svg .dot.c0{fill:var(--c0)}
svg .dot.c1{fill:var(--c1)}svg .dot.c2{fill:var(--c2)}svg .dot.c3{fill:var(--c3)}svg .dot.c4{fill:var(--c4)}
svg .dot.c5{fill:var(--c5)}svg .bar{fill:var(--c5)}svg .bar.acked,svg .bar.main{fill:var(--c0)}
svg .bar.redelivered,svg .bar.leased{fill:var(--c3)}svg .bar.dead_lettered,svg .bar.expired{fill:var(--c1)}
svg .bar.waiting{fill:var(--c2)}svg .bar.lost,svg .bar.stuck,svg .bar.fault{fill:var(--bad)}
.key{display:inline-block;margin-right:16px;font-size:13px;color:var(--soft)}.key i{display:inline-block;width:11px;height:11px;
border-radius:2px;margin-right:5px;background:var(--c5)}.key .acked,.key .main{background:var(--c0)}
.key .leased,.key .redelivered{background:var(--c3)}.key .dead_lettered,.key .expired{background:var(--c1)}
.key .waiting{background:var(--c2)}.key .lost,.key .stuck,.key .fault{background:var(--bad)}
"""


@dataclass(slots=True)
class Page:
    """Written from top to bottom."""

    title: str
    about: str
    parts: list[str] = field(default_factory=list[str])

    def verdict(self, tone: str, headline: str, text: str) -> None:
        """`tone`: good, warn, bad, or "" for none."""
        self.parts.append(f'<section class="verdict {tone}"><b>{escape(headline)}</b>{escape(text)}</section>')

    def cards(self, cards: Sequence[tuple[str, str]]) -> None:
        """Figures, each with what it counts."""
        inner = "".join(
            f'<div class="card"><strong>{escape(figure)}</strong><span>{escape(what)}</span></div>'
            for figure, what in cards
        )
        self.parts.append(f'<div class="cards">{inner}</div>')

    def section(self, title: str, *inner: str) -> None:
        """`inner` is HTML: plots, and what `table` and `note` return. Left out where all of it is empty."""
        if any(inner):
            self.parts.append(f"<section><h2>{escape(title)}</h2>{''.join(inner)}</section>")

    def html(self) -> str:
        """The whole file."""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head><body><main>"
            f'<h1>{escape(self.title)}</h1><p class="about">{escape(self.about)}</p>'
            f"{''.join(self.parts)}</main></body></html>\n"
        )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Numbers stand to the right."""
    if not rows:
        return ""
    numeric = [all(isinstance(row[index], int | float) or row[index] == "" for row in rows) for index in range(len(head))]
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
    """What the colours of bars mean."""
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
