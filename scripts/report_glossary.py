"""What the steps' READMEs say of their metrics, for the report: one text, written once, shown in both places."""

import re
from dataclasses import dataclass
from pathlib import Path

from latex2mathml.converter import convert
from markupsafe import Markup, escape

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("step1_sft/README.md", "step2_reward/README.md", "step3_rlhf/README.md")


@dataclass(frozen=True)
class Entry:
    """One row of a metrics table. `names` may hold a placeholder: rewards/<source>/mean."""

    names: tuple[str, ...]
    formula: Markup
    healthy: Markup
    outside: Markup

    def explains(self, metric: str) -> bool:
        patterns = (re.sub(r"<\w+>", "\0", name) for name in self.names)
        return any(re.fullmatch(re.escape(pattern).replace("\0", ".+"), metric) for pattern in patterns)


@dataclass(frozen=True)
class Chapter:
    """A step's README: its path, its title, and what it says of metrics and of timings."""

    path: str
    title: str
    entries: tuple[Entry, ...]
    timings: tuple[Entry, ...]

    def find(self, metric: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.explains(metric)), None)


def read_chapters() -> list[Chapter]:
    """Every chapter that is there: a report of files does not end because a page has moved."""
    return [_read(page) for page in PAGES if (ROOT / page).exists()]


def _read(page: str) -> Chapter:
    text = (ROOT / page).read_text(encoding="utf-8")
    section = re.search(r"^## Metrics\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    found: dict[bool, list[Entry]] = {True: [], False: []}
    for table in re.findall(r"(?:^\|.*\|\n)+", section[1] if section else "", re.M):
        heading, _, *rows = ([c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines())
        for cells in rows:
            names = tuple(re.findall(r"`([^`]+)`", cells[0]))
            found[heading[1] == "formula"].append(Entry(names, *(inline(c) for c in (cells[1:] + ["", ""])[:3])))
    return Chapter(page, text.splitlines()[0].lstrip("# "), tuple(found[True]), tuple(found[False]))


def inline(text: str) -> Markup:
    """A table cell's Markdown as HTML: `code`, $formulas$ (as MathML), links as their words."""
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace(r"\|", "|")
    html = Markup()
    for part in re.split(r"(`[^`]+`|\$[^$]+\$)", text):
        if part[:1] == "`":
            html += Markup("<code>%s</code>") % part[1:-1]
        elif part[:1] == "$":
            html += Markup(convert(part[1:-1]).replace("<mi>log</mi>", "<mi>log</mi><mspace width='0.15em'/>"))
        else:
            html += escape(part)
    return html
