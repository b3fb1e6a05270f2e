"""Where the texts come from: Debian packages whose texts are in the public domain or permissively licensed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.nano import books, dictionaries, python_docs, wordnet
from scripts.nano.documents import Document
from scripts.nano.packages import fetch


@dataclass(frozen=True)
class Source:
    """One source of prose.

    Attributes:
        name: Name of its files.
        packages: Debian packages that are needed; the first holds the text.
        licence: Licence of the text, after the package's copyright file.
        read: From the unpacked packages by name to the documents.
    """

    name: str
    packages: tuple[str, ...]
    licence: str
    read: Callable[[dict[str, Path]], list[Document]]

    def documents(self, folder: Path) -> list[Document]:
        """The documents, from packages that are fetched into `folder` if they are not there."""
        return self.read({package: fetch(package, folder) for package in self.packages})


def _python_pages(packages: dict[str, Path]) -> list[Document]:
    return python_docs.pages(packages)[0]


SOURCES = (
    Source("bible", ("bible-kjv-text", "bible-kjv"), "public domain (King James Version, 1611)", books.bible),
    Source(
        "austen", ("r-cran-janeaustenr",), "public domain (novels of 1811 to 1817); the package is MIT", books.austen
    ),
    Source("devil", ("dict-devil",), "public domain (Ambrose Bierce, 1911, copyright expired)", dictionaries.devil),
    Source("jargon", ("dict-jargon",), "public domain (Jargon File 4.4.7)", dictionaries.jargon),
    Source(
        "wordnet",
        ("wordnet-base",),
        "WordNet 3.0 licence (permissive, notice required), Copyright 2006 Princeton University",
        wordnet.documents,
    ),
    Source(
        "python",
        ("python3.11-doc",),
        "PSF License 2; the code examples also 0BSD; Copyright 2001-2023 Python Software Foundation",
        _python_pages,
    ),
)
