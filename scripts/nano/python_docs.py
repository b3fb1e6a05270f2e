"""The documentation of Python as pages of text with code examples, and what each documented function does."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from scripts.nano.documents import Document, clean

_LEFT_OUT = ("contents", "copyright", "download", "py-modindex", "search", "whatsnew/changelog", "license")
_BLOCKS = frozenset(
    {
        "p",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "dt",
        "dd",
        "li",
        "tr",
        "ul",
        "ol",
        "dl",
        "table",
        "div",
        "section",
        "blockquote",
        "pre",
        "caption",
    }
)
_VOID = frozenset({"br", "img", "hr", "input", "meta", "link", "col", "wbr"})
_DROPPED = frozenset({"script", "style", "svg", "nav"})
_CELLS = ("td", "th")
# A full stop ends the sentence, unless it belongs to an abbreviation.
_SENTENCE = re.compile(r"(.+?(?<!e\.g)(?<!i\.e)(?<!etc)(?<!vs)\.)(?:\s|$)")


@dataclass(frozen=True)
class Symbol:
    """One documented function, class or constant, or an entry of the glossary.

    Attributes:
        name: Full name, as `str.split`; of an entry of the glossary, `term-` and its heading.
        signature: As the page shows it.
        summary: The first sentence of its description.
        page: Name of the page.
    """

    name: str
    signature: str
    summary: str
    page: str


def pages(packages: dict[str, Path]) -> tuple[list[Document], list[Symbol]]:
    """All pages, without indexes, licences and the change log; named like `library/shelve`."""
    root = packages["python3.11-doc"] / "usr/share/doc/python3.11/html"
    documents, symbols = [], []
    for file in sorted(root.rglob("*.html")):
        name = file.relative_to(root).with_suffix("").as_posix()
        if name.startswith((*_LEFT_OUT, "genindex", "_static", "_downloads")):
            continue
        text, found = read_page(file.read_text(encoding="utf-8"), name)
        if len(text) > 200:
            documents.append(Document(name, text))
            symbols += found
    return documents, symbols


def read_page(html: str, name: str) -> tuple[str, list[Symbol]]:
    """Text and symbols of a page's main part."""
    start = html.find('role="main"')
    start = html.rfind("<", 0, start) if start >= 0 else 0
    end = html.find('<div class="sphinxsidebar', start)
    reader = _Reader()
    reader.feed(html[start : end if end >= 0 else len(html)])
    reader.close()
    reader.flush()
    text = clean("\n\n".join(reader.paragraphs))
    # The entries of a list belong together.
    text = re.sub(r"\n\n(?=- )", "\n", text)
    symbols = [Symbol(s.name, s.signature, s.summary, name) for s in reader.symbols if s.signature and s.summary]
    return text, symbols


@dataclass
class _Pending:
    name: str
    signature: str = ""
    summary: str = ""
    waiting: bool = True


@dataclass
class _Element:
    tag: str
    classes: frozenset[str] = field(default_factory=frozenset)
    identifier: str = ""


class _Reader(HTMLParser):
    """Gathers paragraphs: flowing text becomes one line, code keeps its lines and is indented by four spaces."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self.symbols: list[_Pending] = []
        self._open: list[_Element] = []
        self._words: list[str] = []
        self._bullet = False
        self._code = 0
        self._cells = 0
        self._dropped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        classes = frozenset((values.get("class") or "").split())
        if tag in _BLOCKS and not self._code and not self._cells:
            self.flush()
        if tag == "br":
            self._words.append("\n" if self._code else " ")
        if tag in _VOID:
            return
        element = _Element(tag, classes, values.get("id") or "")
        self._open.append(element)
        self._dropped += self._is_dropped(element)
        self._code += tag == "pre"
        self._cells += tag in _CELLS
        if tag == "li":
            self._bullet = True
        if tag == "dt" and ("py" in classes or element.identifier.startswith("term-")) and element.identifier:
            self.symbols.append(_Pending(element.identifier))
        if tag in _CELLS and "".join(self._words).strip():
            self._words.append(" | ")

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID or all(element.tag != tag for element in self._open):
            return
        if tag in _BLOCKS and not self._cells and (tag == "pre" or not self._code):
            self.flush()
        while self._open:
            element = self._open.pop()
            self._dropped -= self._is_dropped(element)
            self._code -= element.tag == "pre"
            self._cells -= element.tag in _CELLS
            if element.tag == tag:
                break

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self._words.append(data)

    @staticmethod
    def _is_dropped(element: _Element) -> bool:
        return element.tag in _DROPPED or "headerlink" in element.classes or "toctree-wrapper" in element.classes

    def flush(self) -> None:
        """End a paragraph."""
        text, self._words = "".join(self._words), []
        if not text.strip():
            return
        if self._code:
            lines = text.strip("\n").split("\n")
            self.paragraphs.append("\n".join(f"    {line}" if line.strip() else "" for line in lines))
            return
        text = " ".join(text.split())
        self._note(text)
        self.paragraphs.append(f"- {text}" if self._bullet else text)
        self._bullet = False

    def _note(self, text: str) -> None:
        """Take a paragraph as signature or description of the last symbol."""
        if not self.symbols:
            return
        symbol, inside = self.symbols[-1], [element.tag for element in self._open]
        if inside[-1:] == ["dt"] and not symbol.signature:
            symbol.signature = text
        elif inside[-2:] == ["dd", "p"] and symbol.signature and not symbol.summary and symbol.waiting:
            match = _SENTENCE.match(text)
            symbol.summary = match.group(1) if match else ""
            symbol.waiting = False
