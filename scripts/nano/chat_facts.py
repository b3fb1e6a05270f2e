"""Questions about the Bible, Jane Austen's novels and the Python documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random

from scripts.nano.books import BIBLE_BOOKS
from scripts.nano.chat_example import Example, Reply, ask, user
from scripts.nano.chat_words import first_sentences
from scripts.nano.documents import Document
from scripts.nano.python_docs import Symbol

_FAMOUS = ("Genesis 1", "Psalms 23", "John 1", "John 3", "1 Corinthians 13", "Matthew 5", "Exodus 20", "Ecclesiastes 3")
_VERSES = 2500
_LONGEST_VERSE = 240
_QUOTE = (
    "Quote {v}.",
    "What does {v} say?",
    "quote {v}",
    "Please quote {v}.",
    "Give me {v}.",
    "What is written in {v}?",
    "{v}?",
    "Read {v} to me.",
    "Cite {v} from the Bible.",
    "What is {v}?",
)
_PUBLISHED = {
    "Sense and Sensibility": 1811,
    "Pride and Prejudice": 1813,
    "Mansfield Park": 1814,
    "Emma": 1815,
    "Northanger Abbey": 1817,
    "Persuasion": 1817,
}
_HEROINES = {
    "Sense and Sensibility": "Elinor Dashwood",
    "Pride and Prejudice": "Elizabeth Bennet",
    "Mansfield Park": "Fanny Price",
    "Emma": "Emma Woodhouse",
    "Northanger Abbey": "Catherine Morland",
    "Persuasion": "Anne Elliot",
}
_CHARACTERS = {
    "Mr. Darcy": "the proud owner of Pemberley in Pride and Prejudice; he marries Elizabeth Bennet",
    "Elizabeth Bennet": "the heroine of Pride and Prejudice; she marries Mr. Darcy",
    "Jane Bennet": "the eldest Bennet sister in Pride and Prejudice; she marries Mr. Bingley",
    "Mr. Bingley": "the friend of Mr. Darcy in Pride and Prejudice; he rents Netherfield",
    "Mr. Wickham": "an officer in Pride and Prejudice who runs away with Lydia Bennet",
    "Mr. Collins": "the clergyman in Pride and Prejudice who is to inherit Longbourn",
    "Emma Woodhouse": "the handsome, clever and rich heroine of Emma; she marries Mr. Knightley",
    "Mr. Knightley": "the neighbour and friend whom Emma Woodhouse marries in Emma",
    "Harriet Smith": "the young friend of Emma Woodhouse in Emma; she marries Robert Martin",
    "Miss Bates": "the talkative spinster of Highbury in Emma",
    "Frank Churchill": "the young man in Emma who is secretly engaged to Jane Fairfax",
    "Fanny Price": "the heroine of Mansfield Park; she grows up with her rich cousins",
    "Edmund Bertram": "the cousin whom Fanny Price marries in Mansfield Park",
    "Catherine Morland": "the heroine of Northanger Abbey, who has read too many Gothic novels",
    "Henry Tilney": "the clergyman whom Catherine Morland marries in Northanger Abbey",
    "Anne Elliot": "the heroine of Persuasion; she marries Captain Wentworth",
    "Captain Wentworth": "the naval officer in Persuasion whom Anne Elliot refused and later marries",
    "Sir Walter Elliot": "the vain baronet of Kellynch Hall in Persuasion, Anne's father",
    "Elinor Dashwood": "the sensible sister in Sense and Sensibility; she marries Edward Ferrars",
    "Marianne Dashwood": "the romantic sister in Sense and Sensibility; she marries Colonel Brandon",
    "Colonel Brandon": "the officer whom Marianne Dashwood marries in Sense and Sensibility",
    "Mr. Willoughby": "the young man in Sense and Sensibility who leaves Marianne for a fortune",
}
# Pages whose functions are asked about most.
_BASIC_PAGES = frozenset(
    f"library/{name}" for name in ("functions", "stdtypes", "math", "os.path", "re", "json", "random", "itertools")
)
_OLD_TESTAMENT = 39
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def verses(documents: Sequence[Document]) -> dict[str, tuple[str, str]]:
    """Text and chapter of every verse, by name such as `Genesis 1:1`."""
    found = {}
    for document in documents:
        book = document.name.rpartition(" ")[0]
        for line in document.text.split("\n")[2:]:
            number, _, words = line.partition(" ")
            found[f"{book} {number}"] = (words, document.name)
    return found


def bible_examples(documents: Sequence[Document]) -> list[Example]:
    """Verses to quote and to recognise, the next verse, and the order of the books."""
    known = verses(documents)
    short = [name for name, (words, _) in known.items() if len(words) <= _LONGEST_VERSE]
    famous = [name for name in short if known[name][1] in _FAMOUS]
    rng = Random("bible")
    examples = [_quote(name, known, rng) for name in rng.sample(short, _VERSES)]
    for name in famous:
        examples += [_quote(name, known, rng) for _ in range(4)]
        words, chapter = known[name]
        question = rng.choice(('Which verse is this: "{}"', 'Where in the Bible is this written: "{}"')).format(words)
        examples.append(ask("bible", question, f"That is {name}.", origins=(f"bible/{chapter}",)))
    examples += _next_verses(short, known, rng)
    return examples + list(_bible_books(documents))


def _quote(name: str, known: dict[str, tuple[str, str]], rng: Random) -> Example:
    words, chapter = known[name]
    question = rng.choice(_QUOTE).format(v=name.replace("Psalms", "Psalm"))
    text = words if rng.random() < 0.6 else f'{name} says: "{words}"'
    return ask("bible", question, text, origins=(f"bible/{chapter}",))


def _next_verses(names: list[str], known: dict[str, tuple[str, str]], rng: Random) -> Iterator[Example]:
    for name in rng.sample(names, 500):
        book, _, place = name.rpartition(" ")
        chapter, verse = place.split(":")
        following = f"{book} {chapter}:{int(verse) + 1}"
        if following in known and len(known[following][0]) <= _LONGEST_VERSE:
            first = _quote(name, known, rng)
            question = user(
                rng.choice(("And the next verse?", "What comes after that?", "Go on.", "Next verse, please."))
            )
            turns = (*first.turns, question, Reply(known[following][0]))
            yield Example("bible two turns", turns, origins=first.origins)


def _bible_books(documents: Sequence[Document]) -> Iterator[Example]:
    names = list(BIBLE_BOOKS.values())
    chapters = {name: sum(d.name.rpartition(" ")[0] == name for d in documents) for name in names}
    for at, name in enumerate(names):
        testament = "Old" if at < _OLD_TESTAMENT else "New"
        pairs = [
            (f"Is {name} in the Old or the New Testament?", f"{name} is in the {testament} Testament."),
            (f"Which testament is {name} in?", f"{name} is in the {testament} Testament."),
            (f"How many chapters does {name} have?", _count_chapters(name, chapters[name])),
            (f"How many chapters are there in {name}?", _count_chapters(name, chapters[name])),
        ]
        if at + 1 < len(names):
            after, text = names[at + 1], f"{names[at + 1]} comes after {name}."
            pairs += [(f"Which book of the Bible comes after {name}?", text), (f"What comes after {name}?", text)]
            text = f"{name} comes before {after}."
            pairs += [(f"Which book of the Bible comes before {after}?", text), (f"What comes before {after}?", text)]
        if at < len(_ORDINALS):
            nth = _ORDINALS[at]
            pairs.append((f"What is the {nth} book of the Bible?", f"The {nth} book of the Bible is {name}."))
        for question, text in pairs:
            yield ask("bible", question, text, fact=question)


def _count_chapters(name: str, count: int) -> str:
    return f"{name} has {count} chapter{'s' if count > 1 else ''}."


def austen_examples(documents: Sequence[Document]) -> list[Example]:
    """Who wrote what and when, who is who, and how chapters begin."""
    examples = []
    for question, text in _austen_pairs():
        examples.append(ask("austen", question, text, fact=question))
    for document in documents:
        title, _, chapter = document.name.partition(", ")
        opening = first_sentences(document.text.split("\n\n")[1], 260, most=1)
        if not opening:
            continue
        rng = Random(f"austen/{document.name}")
        question = rng.choice(("How does {c} of {t} begin?", "What is the first sentence of {c} of {t}?"))
        text = question.format(c=chapter, t=title)
        examples.append(ask("austen", text, opening, origins=(f"austen/{document.name}",)))
        if chapter in ("Volume I, Chapter I", "Chapter I", "Chapter 1"):
            for question in (f"How does {title} begin?", f"What is the first sentence of {title}?"):
                examples.append(ask("austen", question, opening, origins=(f"austen/{document.name}",)))
    return examples


def _austen_pairs() -> Iterator[tuple[str, str]]:
    for title, year in _PUBLISHED.items():
        for question in ("Who wrote {}?", "who wrote {}?", "Who is the author of {}?", "Tell me who wrote {}."):
            yield question.format(title), f"{title} was written by Jane Austen."
        for question in ("When was {} published?", "In which year did {} come out?", "When did {} appear?"):
            yield question.format(title), f"{title} was published in {year}."
        for question in ("Who is the heroine of {}?", "Name the heroine of {}.", "Who is the main character of {}?"):
            yield question.format(title), f"The heroine of {title} is {_HEROINES[title]}."
        for question in ("What is {}?", "What do you know about {}?", "Tell me about {}."):
            yield question.format(title), f"{title} is a novel by Jane Austen, published in {year}."
        yield f"Is {title} a novel by Jane Austen?", f"Yes, {title} is a novel by Jane Austen."
    for name, text in _CHARACTERS.items():
        for question in ("Who is {}?", "who is {}?", "Tell me about {}.", "Who is {} in Jane Austen's novels?"):
            yield question.format(name), f"{name} is {text}."
    everything = f"Jane Austen's novels are {', '.join(list(_PUBLISHED)[:-1])} and Persuasion."
    for question in (
        "Which novels did Jane Austen write?",
        "Name the novels of Jane Austen.",
        "What did Jane Austen write?",
    ):
        yield question, everything


def python_examples(symbols: Sequence[Symbol], documents: Sequence[Document]) -> list[Example]:
    """What functions, classes, modules and terms are for."""
    examples = []
    seen: set[str] = set()
    for symbol in symbols:
        is_term = symbol.name.startswith("term-")
        if symbol.name in seen or not 12 < len(symbol.summary) < 190 or len(symbol.signature) > 90:
            continue
        seen.add(symbol.name)
        pairs = _term(symbol) if is_term else _symbol(symbol)
        examples += [ask("python", q, a, origins=(f"python/{symbol.page}",)) for q, a in pairs]
    for document in documents:
        match = re.match(r"([a-z_.]+) — (.+)", document.text.split("\n")[0])
        if match and document.name.startswith("library/"):
            examples += list(_module(match.group(1), match.group(2), f"python/{document.name}"))
    return examples


def _symbol(symbol: Symbol) -> Iterator[tuple[str, str]]:
    rng = Random(f"python/{symbol.name}")
    name = symbol.name
    signature = re.sub(
        r"^(class|classmethod|staticmethod|exception|async|abstractmethod|property|coroutine) ", "", symbol.signature
    )
    questions = (
        "What does {n} do in Python?",
        "What does {n} do?",
        "what does {n} do in python",
        "Explain {n}.",
        "What is {n} for?",
        "How do I use {n}?",
        "What is {n} in Python?",
    )
    for question in rng.sample(questions, 4 if symbol.page in _BASIC_PAGES else 1):
        start = rng.choice((f"{signature}: ", "", "")) if "(" in signature else ""
        yield question.format(n=name), start + symbol.summary
    if "(" in signature and rng.random() < 0.2:
        question = rng.choice(("What is the signature of {n}?", "Which arguments does {n} take?", "Signature of {n}?"))
        yield question.format(n=name), signature


def _term(symbol: Symbol) -> Iterator[tuple[str, str]]:
    for question in ("What is {n} in Python?", "What does {n} mean in Python?", "Explain the Python term {n}."):
        yield question.format(n=symbol.signature), symbol.summary


def _module(name: str, title: str, origin: str) -> Iterator[Example]:
    questions = (
        "What is the {n} module for?",
        "What is the Python module {n}?",
        "What does the {n} module do?",
        "Explain the module {n}.",
    )
    rng = Random(f"module/{name}")
    for question in questions:
        text = rng.choice((f"{name}: {title}.", f"The module {name} is about this: {title}."))
        yield ask("python", question.format(n=name), text, origins=(origin,))
