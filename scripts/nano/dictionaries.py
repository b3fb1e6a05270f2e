"""Two dictionaries in dictd's format: Ambrose Bierce's Devil's Dictionary, and the Jargon File."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from scripts.nano.documents import Document, blocks, clean, indent, is_slur, join_lines

_DIGITS = {c: n for n, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}
_LINK = re.compile(r"\{\s*([^{}\n;]{1,60}?)\s*\}")
_FAR_RIGHT = 30


def devil(packages: dict[str, Path]) -> list[Document]:
    """The entries of the Devil's Dictionary; named by their headwords, as `ABDOMEN`."""
    entries = read_dictd(packages["dict-devil"] / "usr/share/dictd", "devil")
    documents = []
    for entry in entries:
        text = "\n\n".join(_devil_block(lines) for lines in blocks(clean(entry)))
        headword = re.match(r"[^,.(\[]+", text)
        if headword and headword.group().isupper():
            documents.append(Document(headword.group().strip(), text))
    return _distinct(documents)


def _devil_block(lines: list[str]) -> str:
    """Prose flows; verse, which is indented, keeps its lines, and the name below it is moved to the left."""
    if indent(lines[0]) == 0:
        return join_lines(lines)
    least = min(indent(line) for line in lines)
    return "\n".join(f"    {line.strip() if indent(line) >= _FAR_RIGHT else line[least:]}" for line in lines)


def jargon(packages: dict[str, Path]) -> list[Document]:
    """The entries of the Jargon File; named by their headwords."""
    entries = read_dictd(packages["dict-jargon"] / "usr/share/dictd", "jargon")
    return _distinct([document for entry in entries if (document := jargon_entry(entry)) is not None])


def jargon_entry(entry: str) -> Document | None:
    """One entry: the headword, its pronunciation and part of speech, then paragraphs; None for an empty one."""
    lines = clean(entry).split("\n")
    headword = " ".join(lines[0].split())
    body = blocks("\n".join(lines[1:]))
    if not headword or not body:
        return None
    label = re.sub(r"^//,? ?", "", join_lines(body[0])) if indent(body[0][0]) < 4 else None
    paragraphs = [_jargon_block(block) for block in (body if label is None else body[1:])]
    # A letter of the alphabet that opens a chapter ends the entry before it.
    while paragraphs and re.fullmatch(r"[A-Z]", paragraphs[-1]):
        paragraphs.pop()
    if not paragraphs:
        return None
    head = f"{headword}: {label}" if label else headword
    return Document(headword, _LINK.sub(r"\1", "\n\n".join([head, *paragraphs])))


def _jargon_block(lines: list[str]) -> str:
    if all(indent(line) <= 4 for line in lines):
        return join_lines(lines)
    least = min(indent(line) for line in lines)
    return "\n".join(line[least:] for line in lines)


def read_dictd(folder: Path, name: str) -> list[str]:
    """The entries of a dictd dictionary, in the order of its text, without those that describe the dictionary.

    Each line of the index is a headword, an offset and a length; several headwords may share an entry. A `.dz` file is
    a gzip file.
    """
    data = gzip.decompress((folder / f"{name}.dict.dz").read_bytes())
    places = set()
    for line in (folder / f"{name}.index").read_text(encoding="utf-8").splitlines():
        headword, offset, length = line.split("\t")[:3]
        if not headword.startswith(("00database", "00-database")):
            places.add((_number(offset), _number(length)))
    return [data[offset : offset + length].decode("utf-8") for offset, length in sorted(places)]


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * 64 + _DIGITS[digit]
    return value


def _distinct(documents: list[Document]) -> list[Document]:
    """The documents without slurs; those with the same name get numbers."""
    seen: dict[str, int] = {}
    result = []
    for document in documents:
        if is_slur(document.text):
            continue
        count = seen[document.name] = seen.get(document.name, 0) + 1
        result.append(Document(f"{document.name} {count}", document.text) if count > 1 else document)
    return result
