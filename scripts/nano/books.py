"""Two old books as chapters: the King James Bible, and the six novels of Jane Austen."""

from __future__ import annotations

import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

from scripts.nano.documents import Document, blocks, clean, join_lines

# The program's short names, in its order, with those of the title pages.
_BOOKS = (
    "Ge=Genesis,Exo=Exodus,Lev=Leviticus,Num=Numbers,Deu=Deuteronomy,Josh=Joshua,Jdgs=Judges,Ruth=Ruth,"
    "1Sm=1 Samuel,2Sm=2 Samuel,1Ki=1 Kings,2Ki=2 Kings,1Chr=1 Chronicles,2Chr=2 Chronicles,Ezra=Ezra,"
    "Neh=Nehemiah,Est=Esther,Job=Job,Psa=Psalms,Prv=Proverbs,Eccl=Ecclesiastes,SSol=Song of Solomon,Isa=Isaiah,"
    "Jer=Jeremiah,Lam=Lamentations,Eze=Ezekiel,Dan=Daniel,Hos=Hosea,Joel=Joel,Amos=Amos,Obad=Obadiah,"
    "Jonah=Jonah,Mic=Micah,Nahum=Nahum,Hab=Habakkuk,Zep=Zephaniah,Hag=Haggai,Zec=Zechariah,Mal=Malachi,"
    "Mat=Matthew,Mark=Mark,Luke=Luke,John=John,Acts=Acts,Rom=Romans,1Cor=1 Corinthians,2Cor=2 Corinthians,"
    "Gal=Galatians,Eph=Ephesians,Phi=Philippians,Col=Colossians,1Th=1 Thessalonians,2Th=2 Thessalonians,"
    "1Tim=1 Timothy,2Tim=2 Timothy,Titus=Titus,Phmn=Philemon,Heb=Hebrews,Jas=James,1Pet=1 Peter,2Pet=2 Peter,"
    "1Jn=1 John,2Jn=2 John,3Jn=3 John,Jude=Jude,Rev=Revelation"
)
BIBLE_BOOKS: dict[str, str] = {short: full for short, _, full in (pair.partition("=") for pair in _BOOKS.split(","))}
NOVELS = {
    "EMMA": "Emma",
    "MANSFIELD PARK": "Mansfield Park",
    "NORTHANGER ABBEY": "Northanger Abbey",
    "PERSUASION": "Persuasion",
    "PRIDE AND PREJUDICE": "Pride and Prejudice",
    "SENSE AND SENSIBILITY": "Sense and Sensibility",
}

_VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)")
_CHAPTER = re.compile(r"\s*chapter ([ivxlc]+|\d+)\b\.?\s*$", re.I)
_VOLUME = re.compile(r"\s*volume ([ivx]+)\b\.?\s*$", re.I)
_STRSXP = 16


def bible(packages: dict[str, Path]) -> list[Document]:
    """The chapters of the Bible, one verse a line; named like `Genesis 1`.

    The package's own program reads the package's compressed file.
    """
    program = packages["bible-kjv"] / "usr/bin/bible"
    data = packages["bible-kjv-text"] / "usr/lib"
    command = [str(program), "-p", str(data), "-f", "gen1:1-rev22:21"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return bible_chapters(result.stdout)


def bible_chapters(text: str) -> list[Document]:
    """Chapters from lines such as `Ge1:1 In the beginning ...`."""
    chapters: dict[str, list[str]] = {}
    for line in clean(text).split("\n"):
        match = _VERSE.fullmatch(line)
        if match is None:
            raise ValueError(f"bible: found the line {line!r}, expected a verse")
        book, chapter, verse, words = match.groups()
        chapters.setdefault(f"{BIBLE_BOOKS[book]} {chapter}", []).append(f"{chapter}:{verse} {words.strip()}")
    return [Document(name, "\n".join([name, "", *verses])) for name, verses in chapters.items()]


def austen(packages: dict[str, Path]) -> list[Document]:
    """The chapters of the novels; named like `Emma, Volume I, Chapter IV`."""
    file = packages["r-cran-janeaustenr"] / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    documents: list[Document] = []
    for lines in read_rdb(file.read_bytes()):
        if lines and (title := NOVELS.get(lines[0].strip().upper())):
            documents += novel_chapters(title, lines[1:])
    return documents


def novel_chapters(title: str, lines: list[str]) -> list[Document]:
    """Cut the lines of a novel at its chapter headings; what stands before the first is dropped."""
    documents: list[Document] = []
    volume, name, body = "", "", []

    def close() -> None:
        paragraphs = [join_lines(block) for block in blocks(clean("\n".join(body)))]
        if name and paragraphs:
            documents.append(Document(name, "\n\n".join([name, *paragraphs])))

    for line in lines:
        if match := _VOLUME.match(line):
            volume = f"Volume {match.group(1).upper()}, "
        elif match := _CHAPTER.match(line):
            close()
            name, body = f"{title}, {volume}Chapter {match.group(1).upper()}", []
        elif line.strip().rstrip(".").upper() not in ("FINIS", "THE END", "END OF VOLUME I", "END OF VOLUME II"):
            body.append(line)
    close()
    return documents


def read_rdb(data: bytes) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database.

    Each object is its length in four bytes and a zlib stream of R's binary serialisation, version 3.
    """
    at = 0
    while at < len(data):
        stream = zlib.decompressobj()
        content = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        if (lines := _character_vector(content)) is not None:
            yield lines


def _character_vector(content: bytes) -> list[str] | None:
    # "X\n", three version numbers, and the name of the encoding with its length before the first object.
    (name_length,) = struct.unpack_from(">I", content, 14)
    at = 18 + name_length
    kind, count = struct.unpack_from(">II", content, at)
    if kind & 0xFF != _STRSXP:
        return None
    at += 8
    lines = []
    for _ in range(count):
        _, length = struct.unpack_from(">Ii", content, at)
        at += 8
        lines.append(content[at : at + max(length, 0)].decode())
        at += max(length, 0)
    return lines
