"""The dashboard's style sheets: a class means one thing, in one sheet."""

from __future__ import annotations

import re
from collections import defaultdict
from importlib.resources import files

REFINED = {"theme.css", "narrow.css", "uplot.min.css"}
"""theme.css has the basics, which others refine, and narrow.css the changes for narrow screens; the last is uPlot's."""

STATIC = files("tinsmith.api.dashboard") / "static"
SHEETS = sorted({file.name for file in STATIC.iterdir() if file.name.endswith(".css")} - REFINED)

_MEDIA = re.compile(r"@media[^{]*\{(?:[^{}]|\{[^{}]*\})*\}")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_SELECTORS = re.compile(r"([^{}]+)\{")
_CLASS = re.compile(r"\.([a-zA-Z][\w-]*)")


def styled_classes(sheet: str) -> set[str]:
    """The classes that a sheet styles wherever they are: those of selectors for one element, on every screen."""
    text = _MEDIA.sub("", _COMMENT.sub("", (STATIC / sheet).read_text()))
    selectors = [selector.strip() for group in _SELECTORS.findall(text) for selector in group.split(",")]
    simple = [selector for selector in selectors if not re.search(r"[\s>+~@]", selector)]
    return {name for selector in simple for name in _CLASS.findall(selector)}


def test_two_style_sheets_style_no_class_alike() -> None:
    sheets_by_class: defaultdict[str, list[str]] = defaultdict(list)
    for sheet in SHEETS:
        for name in styled_classes(sheet):
            sheets_by_class[name].append(sheet)
    assert {name: sheets for name, sheets in sheets_by_class.items() if len(sheets) > 1} == {}


def test_the_page_loads_every_style_sheet() -> None:
    loaded = re.findall(r'href="/dashboard/([\w.]+\.css)"', (STATIC / "index.html").read_text())
    assert sorted(loaded) == sorted({*SHEETS, *REFINED})
