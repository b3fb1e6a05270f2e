"""Questions about words, answered from WordNet, the Devil's Dictionary and the Jargon File."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from random import Random

from scripts.nano.chat_example import Example, ask
from scripts.nano.documents import Document, rank
from scripts.nano.wordnet import Sense, Synset

# Topics of nouns that are counted: animals, artifacts, parts of the body, groups, places, natural objects, persons,
# plants, shapes. The most general nouns have a topic of their own.
_COUNTED = frozenset({5, 6, 8, 14, 15, 17, 18, 20, 25})
_COUNTED_WORDS = frozenset({"animal", "beast", "person", "plant", "organism", "creature", "human being"})
_PERSON = 18
_LONGEST = 150
_TAGGED_MOST = 6
_UNWANTED = re.compile(
    r"slur|offensive|obscene|vulgar|disparag|derogat|sexual|genital|prostitut|excrement|fuck|shit\b|bitch|\brape|\bjews?\b",
    re.I,
)
_ARTICLE = re.compile(
    r"(a|an|any|one|the|some|either|each|every|someone|somebody|anyone|something|anything|this|that|all|what)\b", re.I
)
# Ends the first noun of a definition.
_HEAD_END = re.compile(
    r",|;| \(| (?:of|that|which|who|whose|with|used|for|in|on|to|from|having|by|at|made|as|or|and)\b"
)

_PLAIN = (
    "What does {w} mean?",
    "what does {w} mean",
    "Define {w}.",
    "define {w}",
    'Define "{w}".',
    "What does the word {w} mean?",
    "What is the meaning of {w}?",
    "meaning of {w}",
    "{w} definition",
    "Give me a definition of {w}.",
    "Explain the word {w}.",
    'What is the meaning of the word "{w}"?',
    "Can you tell me what {w} means?",
    "Please define {w}.",
    "What's the definition of {w}?",
    "I don't know the word {w}. What does it mean?",
    "How would you define {w}?",
    "Tell me what {w} means.",
)
_NOUN = (
    "What is {a}?",
    "what is {a}?",
    "What's {a}?",
    "what is {a}",
    "What is {a}?",
    "Tell me what {a} is.",
    "Tell me about {w}.",
    "Can you explain what {a} is?",
    "Explain what {a} is.",
    "In one sentence, what is {a}?",
    "Do you know what {a} is?",
    "Hi, what is {a}?",
    "Could you tell me what {a} is?",
)
_NAME = (
    "Tell me about {w}.",
    "What do you know about {w}?",
    "{w}?",
    "Can you tell me about {w}?",
    "What is {w}?",
    "what is {w}?",
    "Please tell me something about {w}.",
    "Describe {w} in one sentence.",
)
_PERSON_NAME = (
    "Who was {w}?",
    "who was {w}?",
    "Tell me about {w}.",
    "Who is {w}?",
    "What do you know about {w}?",
    "Can you tell me who {w} was?",
    "Describe {w} in one sentence.",
)
_VERB = (
    "What does it mean to {w}?",
    "what does it mean to {w}?",
    "What does the verb {w} mean?",
    "Define the verb {w}.",
    "If you {w}, what do you do?",
    "Explain the verb {w}.",
    "What does to {w} mean?",
)
_OTHER = ("What does the {p} {w} mean?", "Define the {p} {w}.", "Explain the {p} {w}.", "What does {w} mean as a {p}?")
_SYNONYM = (
    "Give me a synonym of {w}.",
    "What is another word for {w}?",
    "Another word for {w}?",
    "Name a synonym for {w}.",
)
_DEVIL = (
    "How does the Devil's Dictionary define {w}?",
    "What does the Devil's Dictionary say about {w}?",
    "Define {w} as the Devil's Dictionary does.",
    "What did Ambrose Bierce say about {w}?",
    "How did Ambrose Bierce define {w}?",
)
_JARGON = (
    "What does {w} mean in the Jargon File?",
    "What do hackers mean by {w}?",
    "How does the Jargon File define {w}?",
    "What is the hacker meaning of {w}?",
    "Explain {w} as hackers use it.",
    "{w} in hacker slang?",
)


def wordnet_examples(senses: Sequence[Sense], count: int) -> list[Example]:
    """Definitions, most of all for common words; also synonyms and words with two meanings.

    Args:
        senses: All meanings of all words.
        count: How many definitions.
    """
    chosen = [sense for sense in senses if sense.number == 1 and usable(sense)]
    common = [sense for sense in chosen if sense.count > 0]
    rare = sorted((s for s in chosen if s.count == 0), key=lambda s: rank(f"rare/{s.synset.part}/{s.word}"))
    weighted = [(sense, min(1 + int(math.log2(sense.count + 1)), _TAGGED_MOST)) for sense in common]
    weighted += [(sense, 1) for sense in rare[: max(0, count - sum(n for _, n in weighted))]]
    main_parts = _main_parts(chosen)
    examples = []
    for sense, repeats in weighted:
        rng = Random(f"wordnet/{sense.synset.part}/{sense.word}")
        questions = _questions(sense, main_parts[sense.word] == sense.synset.part, rng)
        for question in questions[:repeats]:
            examples.append(_wordnet(question, answer(sense, rng), sense.synset))
    examples += _synonyms(common)
    examples += _two_meanings(common)
    return examples


def _wordnet(question: str, text: str, *synsets: Synset, kind: str = "definition") -> Example:
    return ask(kind, question, text, origins=tuple(f"wordnet/{synset.group}" for synset in synsets))


def usable(sense: Sense) -> bool:
    synset = sense.synset
    if _UNWANTED.search(" ".join((sense.word, synset.definition, *synset.examples))):
        return False
    if not 2 < len(shorten(synset.definition)) <= _LONGEST + 40:
        return False
    word = written(sense)
    return len(word) > 1 and word.count(" ") < 3 and not re.search(r"\d", word) and len(word) < 28


def written(sense: Sense) -> str:
    """The word with its capital letters."""
    return next((word for word in sense.synset.words if word.lower() == sense.word), sense.word)


def _main_parts(senses: Sequence[Sense]) -> dict[str, str]:
    """The most common part of speech of each word."""
    best: dict[str, Sense] = {}
    for sense in senses:
        if sense.word not in best or sense.count > best[sense.word].count:
            best[sense.word] = sense
    return {word: sense.synset.part for word, sense in best.items()}


def _questions(sense: Sense, is_main: bool, rng: Random) -> list[str]:
    """Different questions for a meaning, in random order; they name the part of speech if it is not the usual one."""
    word, part = written(sense), sense.synset.part
    if sense.synset.instance:
        templates = list(_PERSON_NAME if sense.synset.topic == _PERSON else _NAME)
    elif part == "noun" and is_main:
        templates = [*_PLAIN, *_NOUN, *_NOUN]
    elif part == "verb":
        templates = [*_VERB, *_PLAIN] if is_main else [*_VERB[:4], _VERB[-1]]
    else:
        templates = [*_PLAIN, *_OTHER] if is_main else list(_OTHER)
    rng.shuffle(templates)
    phrase = with_article(word) if is_counted(sense) else word
    texts = (template.format(w=word, a=phrase, p=part) for template in templates)
    return list(dict.fromkeys(text.replace("as a ad", "as an ad") for text in texts))


def is_counted(sense: Sense) -> bool:
    """Whether "a" may stand before the noun."""
    word, synset = written(sense), sense.synset
    topical = synset.topic in _COUNTED or word in _COUNTED_WORDS
    if synset.part != "noun" or not topical or synset.instance or word != word.lower():
        return False
    plural = word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return not plural and re.match(r"[a-z-]+ [a-z]+", synset.definition) is not None


def with_article(phrase: str) -> str:
    """The phrase with "a" or "an" before it."""
    silent = re.match(r"(hour|honest|honou?r|heir)", phrase, re.I)
    as_consonant = re.match(r"(uni(?!n|m)|use|usu|util|eu|ewe|one\b|once|u-|ufo|ur[ai])", phrase, re.I)
    vowel = silent or (phrase[:1].lower() in "aeiou" and not as_consonant)
    return f"{'an' if vowel else 'a'} {phrase}"


def sentence(text: str) -> str:
    """Upper case at the start, a full stop at the end."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def shorten(definition: str) -> str:
    """As many of the parts between semicolons as are not too long."""
    parts = definition.split("; ")
    while len(parts) > 1 and len("; ".join(parts)) > _LONGEST:
        parts.pop()
    return "; ".join(parts)


def answer(sense: Sense, rng: Random) -> str:
    """A definition as a sentence, sometimes with an example."""
    text = _definition(sense, rng)
    good = [e for e in sense.synset.examples if written(sense) in e and len(e) < 80]
    if good and rng.random() < 0.35:
        text += f' For example: "{good[0]}".'
    return text


def _definition(sense: Sense, rng: Random) -> str:
    word, synset = written(sense), sense.synset
    definition = shorten(synset.definition)
    if rng.random() < 0.08 or definition.startswith(("(", '"', "'")):
        return f"{word[:1].upper() + word[1:]} ({synset.part}): {definition}."
    if synset.instance:
        return sentence(_about_name(word, definition, synset))
    if synset.part == "verb":
        return sentence(f"to {word} means {'' if definition.startswith('to ') else 'to '}{definition}")
    if synset.part == "noun" and is_counted(sense):
        if _ARTICLE.match(definition):
            return sentence(f"{with_article(word)} is {definition}")
        if not _is_plural(definition):
            return sentence(f"{with_article(word)} is {with_article(definition)}")
    if synset.part == "noun" and _ARTICLE.match(definition) and word == word.lower() and not word.endswith("s"):
        return sentence(f"{word} is {definition}")
    return sentence(f"{word} means {definition}")


def _is_plural(definition: str) -> bool:
    """Whether the first noun of a definition seems to be a plural."""
    head = _HEAD_END.split(definition, maxsplit=1)[0]
    return head.startswith(("those", "these", "people")) or (
        head.endswith("s") and not head.endswith(("ss", "us", "is"))
    )


def _about_name(word: str, definition: str, synset: Synset) -> str:
    dead = synset.topic == _PERSON and re.search(r"\d\)|died|ancient|\bBC\b", definition)
    is_bare = not _ARTICLE.match(definition)
    if is_bare and synset.topic != _PERSON:
        return f"{word}: {definition}"
    return f"{word} {'was' if dead else 'is'} {with_article(definition) if is_bare else definition}"


def _synonyms(common: Sequence[Sense]) -> Iterator[Example]:
    for sense in common:
        others = [word for word in sense.synset.words if word.lower() != sense.word]
        if others and sense.count > 4:
            rng = Random(f"synonym/{sense.synset.part}/{sense.word}")
            question = rng.choice(_SYNONYM).format(w=written(sense))
            start = rng.choice(("Another word for {w} is", "A synonym of {w} is")).format(w=written(sense))
            yield _wordnet(question, f"{start} {others[0]}.", sense.synset, kind="synonym")


def _two_meanings(common: Sequence[Sense]) -> Iterator[Example]:
    by_word: dict[str, list[Sense]] = {}
    for sense in common:
        by_word.setdefault(sense.word, []).append(sense)
    for word, senses in by_word.items():
        first, second = [*sorted(senses, key=lambda s: -s.count), None, None][:2]
        if first is None or second is None or second.count < 3:
            continue
        rng = Random(f"meanings/{word}")
        texts = [shorten(sense.synset.definition) for sense in (first, second)]
        if sum(map(len, texts)) < _LONGEST + 50:
            question = rng.choice(
                ("What are the meanings of {w}?", "What can {w} mean?", "Which meanings does {w} have?")
            )
            parts = [_as_part(sense.synset.part, text) for sense, text in zip((first, second), texts, strict=True)]
            text = f"{sentence(parts[0])} {sentence(parts[1])}"
            yield _wordnet(question.format(w=word), text, first.synset, second.synset, kind="meanings")


def _as_part(part: str, definition: str) -> str:
    return f"as {with_article(part)} it means {'to ' if part == 'verb' and definition[:3] != 'to ' else ''}{definition}"


def devil_examples(documents: Sequence[Document]) -> list[Example]:
    """What the Devil's Dictionary says, cut after some sentences."""
    examples = []
    for document in documents:
        match = re.match(r"[^a-z]+, (?:[a-z]+\.\s?)+ ?(.+)", document.text.split("\n")[0])
        if match is None or not (text := first_sentences(match.group(1))):
            continue
        if _UNWANTED.search(document.text):
            continue
        word = document.name.lower()
        rng = Random(f"devil/{word}")
        for template in rng.sample(_DEVIL, 3):
            start = rng.choice(("", "", f"{word.capitalize()}: ", "The Devil's Dictionary says: "))
            origin = (f"devil/{document.name}",)
            examples.append(ask("devil", template.format(w=word), start + text, origins=origin))
    return examples


def jargon_examples(documents: Sequence[Document]) -> list[Example]:
    """What the Jargon File says, cut after some sentences."""
    examples = []
    for document in documents:
        paragraphs = document.text.split("\n\n")[1:]
        text = re.sub(r"^(\[[^\]]*\] ?|1\. ?|(n|v|vi|vt|adj|interj)\. )+", "", paragraphs[0] if paragraphs else "")
        text = first_sentences(text)
        if len(text) < 15 or text.startswith(("[", "See ", "(")) or _UNWANTED.search(document.name + text):
            continue
        rng = Random(f"jargon/{document.name}")
        for template in rng.sample(_JARGON, 3):
            start = rng.choice(("", "", "In the Jargon File: "))
            origin = (f"jargon/{document.name}",)
            examples.append(ask("jargon", template.format(w=document.name), start + text, origins=origin))
    return examples


def first_sentences(text: str, longest: int = 240, most: int = 9) -> str:
    """As many whole sentences as fit, at most `most`; nothing if the first one is too long."""
    end = count = 0
    for match in re.finditer(r"[.!?][”\"’']?(?= [A-Z“\"‘(]|$)", text):
        short = re.search(r"\b(e\.g|i\.e|cf|esp|Mr|Mrs|Dr|St|vs|etc|[A-Z])\.$", text[: match.end()])
        if match.end() > longest or count == most:
            break
        if not short or match.end() == len(text):
            end, count = match.end(), count + 1
    return text[:end]
