"""Documents: clean text, paragraphs from hard-wrapped lines, and the split into training and held-out documents."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HELD_OUT_SHARE = 0.02
HELD_OUT_BYTES = 60_000
_HELD_OUT_MOST = 0.05
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200b\ufeff]")
# Old dictionaries have entries that a demo should not repeat; these words mark them.
_SLURS = re.compile(
    r"\bnigger|\bnegro|\bkikes?\b|\bdark(?:ey|y)\b|mongolian soul|shebrew|ethnic slur|\bobscene"
    r"|(?:offensive|disparaging|derogatory|vulgar) (?:terms?|names?|words?|slang)",
    re.I,
)
_OPENING = ("(", "[", "{", "“", "‘")
_CLOSING = ")]}”,.;:"


@dataclass(frozen=True)
class Document:
    """One text that stands by itself.

    Attributes:
        name: Unique within its source; decides whether the document is held out.
        text: Clean text without a line break at the end.
    """

    name: str
    text: str


def clean(text: str) -> str:
    """NFC, line feeds only, no control characters, no spaces at line ends, at most one blank line in a row."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " "))
    text = _CONTROL.sub("", text.expandtabs(4))
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def join_lines(lines: Iterable[str]) -> str:
    """One line of text from the lines of a hard-wrapped paragraph.

    No space is put after an opening bracket or a hyphen or dash that follows a word, nor before a closing bracket.
    """
    joined = ""
    for line in (" ".join(line.split()) for line in lines):
        if not line:
            continue
        tight = joined.endswith(_OPENING) or re.search(r"[^\s-]-+$", joined) is not None
        joined += line if not joined or tight or line[0] in _CLOSING else f" {line}"
    return joined


def blocks(text: str) -> list[list[str]]:
    """The runs of lines between blank lines."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [lines for lines in found if lines]


def is_slur(text: str) -> bool:
    """Whether an entry of a dictionary insults a people, or explains a word that does."""
    return _SLURS.search(text) is not None


def indent(line: str) -> int:
    """Number of spaces at the start of a line."""
    return len(line) - len(line.lstrip(" "))


def rank(name: str) -> float:
    """A number from 0 to 1 that depends on the name alone: the same in every process and version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def held_out_names(source: str, documents: Sequence[Document]) -> set[str]:
    """Names of the documents that training must not see.

    The documents with the lowest ranks are taken until there is 2 % of the bytes, or 60 kB if that is more and not
    above 5 %.

    Args:
        source: Name of the source; part of what is ranked.
        documents: All documents of the source.
    """
    sizes = {document.name: len(document.text.encode()) for document in documents}
    total = sum(sizes.values())
    wanted = min(max(HELD_OUT_SHARE * total, HELD_OUT_BYTES), _HELD_OUT_MOST * total)
    taken: set[str] = set()
    count = 0
    for name in sorted(sizes, key=lambda name: rank(f"{source}/{name}")):
        if count >= wanted:
            break
        taken.add(name)
        count += sizes[name]
    return taken


def split(source: str, documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, each in the order given."""
    names = held_out_names(source, documents)
    return [d for d in documents if d.name not in names], [d for d in documents if d.name in names]
