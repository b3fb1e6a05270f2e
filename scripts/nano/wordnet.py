"""WordNet: synsets with their glosses, how common words are, and the synsets as lines of prose."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from scripts.nano.documents import Document, clean, is_slur

PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
GROUP = 40

_SENSE_KINDS = {"1": "noun", "2": "verb", "3": "adjective", "4": "adverb", "5": "adjective"}
_EXAMPLE = re.compile(r'"([^"]*)"')
_MARKER = re.compile(r"\((?:a|p|ip)\)$")


@dataclass(frozen=True)
class Synset:
    """Words that share one meaning.

    Attributes:
        key: Part of speech and offset; unique.
        part: "noun", "verb", "adjective" or "adverb".
        words: The words, as they are written.
        definition: What they mean.
        examples: Sentences or phrases that use one of them.
        group: Name of the document that the synset belongs to.
        topic: Number of WordNet's file: 5 for animals, 18 for persons, and so on.
        instance: Whether it is one single thing, such as a person or a town.
    """

    key: str
    part: str
    words: tuple[str, ...]
    definition: str
    examples: tuple[str, ...]
    group: str
    topic: int = 0
    instance: bool = False


@dataclass(frozen=True)
class Sense:
    """One meaning of one word.

    Attributes:
        word: The word in lower case.
        synset: The meaning.
        number: 1 for the most common meaning of the word in this part of speech.
        count: How often the word has this meaning in WordNet's tagged texts.
    """

    word: str
    synset: Synset
    number: int
    count: int


def documents(packages: dict[str, Path]) -> list[Document]:
    """Groups of neighbouring synsets, a line for each; named like `noun-0012`."""
    groups: dict[str, list[str]] = {}
    for synset in read_synsets(folder(packages)):
        groups.setdefault(synset.group, []).append(line(synset))
    return [Document(name, clean("\n".join(lines))) for name, lines in groups.items()]


def folder(packages: dict[str, Path]) -> Path:
    """Where the database files of the package are."""
    return packages["wordnet-base"] / "usr/share/wordnet"


def line(synset: Synset) -> str:
    """A synset as prose: `zebra (noun): any of several fleet black-and-white striped African equines.`"""
    text = f"{', '.join(synset.words)} ({synset.part}): {synset.definition}."
    return " ".join([text, *(f'"{example}"' for example in synset.examples)])


def read_synsets(database: Path) -> list[Synset]:
    """The synsets without slurs, in the order of the files `data.noun`, `data.verb`, `data.adj` and `data.adv`."""
    synsets = []
    for suffix, part in PARTS.items():
        rows = (database / f"data.{suffix}").read_text(encoding="utf-8").split("\n")
        # The licence at the top is indented.
        rows = [row for row in rows if row and not row.startswith(" ")]
        synsets += [parse_synset(row, part, f"{part}-{n // GROUP:04d}") for n, row in enumerate(rows)]
    return [synset for synset in synsets if not is_slur(line(synset))]


def parse_synset(row: str, part: str, group: str) -> Synset:
    """A row of a data file: offset, file number, kind, hexadecimal number of words, words, pointers, `|`, gloss."""
    head, _, gloss = row.partition(" | ")
    fields = head.split()
    names = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
    words = tuple(dict.fromkeys(_MARKER.sub("", name).replace("_", " ") for name in names))
    definition, examples = _split_gloss(gloss)
    return Synset(f"{part}-{fields[0]}", part, words, definition, examples, group, int(fields[1]), " @i " in head)


def _split_gloss(gloss: str) -> tuple[str, tuple[str, ...]]:
    gloss = " ".join(gloss.replace("`", "'").split())
    first = gloss.find('; "')
    cut = first if first >= 0 else len(gloss)
    examples = tuple(text.strip() for text in _EXAMPLE.findall(gloss[cut:]) if text.strip())
    return gloss[:cut].strip(" ;:."), examples


def read_senses(database: Path, synsets: list[Synset]) -> list[Sense]:
    """The meanings of all words, the most common ones of each part of speech first."""
    counts = _tag_counts((database / "cntlist.rev").read_text(encoding="utf-8"))
    by_key = {synset.key: synset for synset in synsets}
    senses = []
    for suffix, part in PARTS.items():
        for row in (database / f"index.{suffix}").read_text(encoding="utf-8").split("\n"):
            if not row or row.startswith(" "):
                continue
            fields = row.split()
            offsets = fields[-int(fields[2]) :]
            for number, offset in enumerate(offsets, 1):
                if (synset := by_key.get(f"{part}-{offset}")) is None:
                    continue
                count = counts.get((fields[0], part, number), 0)
                senses.append(Sense(fields[0].replace("_", " "), synset, number, count))
    return senses


def _tag_counts(text: str) -> dict[tuple[str, str, int], int]:
    """From rows such as `dog%1:05:00:: 1 42`: sense key, number of the sense, count."""
    counts = {}
    for row in text.split("\n"):
        if row:
            key, number, count = row.split()
            lemma, _, rest = key.rpartition("%")
            counts[lemma, _SENSE_KINDS[rest[0]], int(number)] = int(count)
    return counts
