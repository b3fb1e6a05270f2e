"""All conversations of the small checkpoint, what is held out of them, and their ids."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.nano import chat_facts, chat_json, chat_talk, chat_tools, chat_words
from scripts.nano.chat_example import Example, ExampleEncoder, Reply, reply_text, system, to_messages
from scripts.nano.documents import HELD_OUT_SHARE, Document, rank
from scripts.nano.python_docs import Symbol
from scripts.nano.wordnet import Sense

DEFINITIONS = 62_000
_TOOL_CALLS = 7_000
_JSON = 6_000
_JSON_WORDS = 2_500
_SYSTEM_SHARE = 0.06
_SYSTEM_KINDS = ("definition", "synonym", "bible", "python")


@dataclass(frozen=True)
class Material:
    """What the conversations are made from.

    Attributes:
        documents: All documents by source.
        senses: The meanings of all words.
        symbols: The entries of the Python documentation.
    """

    documents: Mapping[str, Sequence[Document]]
    senses: Sequence[Sense]
    symbols: Sequence[Symbol]


def make_examples(material: Material) -> list[Example]:
    """All conversations in a random but fixed order, without repeats of those that are not small talk."""
    documents = material.documents
    words = chat_words.wordnet_examples(material.senses, DEFINITIONS)
    definitions = [example for example in words if example.kind == "definition"]
    common = [sense for sense in material.senses if sense.number == 1 and sense.count > 1 and chat_words.usable(sense)]
    rng = Random("chat")
    sums = chat_talk.sum_examples(1_500)
    bible = chat_facts.bible_examples(documents["bible"])
    talk = chat_talk.talk_examples()
    examples = [
        *words,
        *chat_words.devil_examples(documents["devil"]),
        *chat_words.jargon_examples(documents["jargon"]),
        *bible,
        *chat_facts.austen_examples(documents["austen"]),
        *chat_facts.python_examples(material.symbols, documents["python"]),
        *chat_json.json_examples(_JSON),
        *chat_json.json_words(common, _JSON_WORDS),
        *chat_tools.tool_examples(_TOOL_CALLS, (_define_tool(common), _verse_tool(documents["bible"]))),
        *chat_tools.idle_tool_examples(
            [*rng.sample(definitions, 500), *rng.sample(bible, 100), *rng.sample(talk, 100)]
        ),
        *talk,
        *sums,
        *chat_talk.thinking_examples(rng.sample(definitions, 1_500), sums[:500]),
        *chat_talk.two_turn_examples(definitions, 3_500),
    ]
    examples = [_with_system(example, rng) for example in examples]
    rng.shuffle(examples)
    return examples


def _with_system(example: Example, rng: Random) -> Example:
    if example.kind in _SYSTEM_KINDS and rng.random() < _SYSTEM_SHARE:
        return example.after(system(rng.choice(chat_talk.SYSTEMS)))
    return example


def _define_tool(senses: Sequence[Sense]) -> chat_tools.Tool:
    def make(rng: Random) -> dict[str, Any]:
        sense = rng.choice(senses)
        definition = chat_words.shorten(sense.synset.definition)
        return {"word": chat_words.written(sense), "definition": definition, "origin": f"wordnet/{sense.synset.group}"}

    return chat_tools.Tool(
        names=("define_word", "define", "look_up_word"),
        descriptions=("Look up a word in the dictionary.", "The definition of a word."),
        keys={"word": ("word", "term")},
        make=make,
        questions=("Look up the word {word}.", "What does {word} mean?", "Define {word}.", "Please look up {word}."),
        answers=("{word} means: {definition}.", "The dictionary says about {word}: {definition}."),
        result=("definition",),
    )


def _verse_tool(documents: Sequence[Document]) -> chat_tools.Tool:
    verses = chat_facts.verses(documents)
    short = [name for name, (words, _) in verses.items() if len(words) < 160]

    def make(rng: Random) -> dict[str, Any]:
        name = rng.choice(short)
        book, _, place = name.rpartition(" ")
        chapter, verse = map(int, place.split(":"))
        values = {"name": name, "book": book, "chapter": chapter, "verse": verse, "text": verses[name][0]}
        return values | {"origin": f"bible/{verses[name][1]}"}

    return chat_tools.Tool(
        names=("get_verse", "bible_verse", "read_verse"),
        descriptions=("Get a verse of the Bible.", "Read a Bible verse."),
        keys={"book": ("book",), "chapter": ("chapter",), "verse": ("verse",)},
        make=make,
        questions=("Quote {name}.", "What does {name} say?", "Read {name}, please.", "Show me {name}."),
        answers=('{name} says: "{text}"', "{text}"),
        result=("text",),
    )


def is_held_out(example: Example, held_out: Mapping[str, set[str]]) -> bool:
    """Whether training must not see an example.

    An example is held out with any of the documents that its answers come from; one without such documents by the
    rank of its fact.

    Args:
        example: The example.
        held_out: Names of held-out documents, by source.
    """
    if example.origins:
        pairs = (origin.split("/", 1) for origin in example.origins)
        return any(name in held_out[source] for source, name in pairs)
    return rank(f"chat/{example.fact}") < HELD_OUT_SHARE


def encode_examples(
    encoder: ExampleEncoder, examples: Sequence[Example]
) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """The ids of all examples after each other, and which of them belong to replies.

    Raises:
        ValueError: If a reply is read as something else than was meant.
    """
    encoded = [encoder.encode(example) for example in examples]
    ids = np.concatenate([np.asarray(each.ids, np.uint16) for each in encoded])
    mask = np.concatenate([np.asarray(each.mask, np.uint8) for each in encoded])
    return ids, mask


def count_kinds(examples: Sequence[Example]) -> dict[str, int]:
    """How many examples of each kind there are, the most frequent kind first."""
    return dict(Counter(example.kind for example in examples).most_common())


def as_document(example: Example, name: str) -> Document:
    """What an example adds to the texts of a conversation: its messages and the schemas of its tools."""
    texts = [reply_text(turn) if isinstance(turn, Reply) else str(turn["content"]) for turn in example.turns]
    return Document(name, "\n".join([*texts, *(json.dumps(tool["function"]) for tool in example.tools)]))


def as_row(example: Example) -> dict[str, Any]:
    """An example as JSON: arguments of `ChatEncoder.prepare`, and the reply that is expected."""
    reply = example.turns[-1]
    if not isinstance(reply, Reply):
        raise ValueError(f"example: found {reply}, expected a reply at the end")
    return {
        "kind": example.kind,
        "messages": to_messages(example.turns[:-1]),
        "tools": list(example.tools),
        "thinking": example.thinking,
        "response_format": example.response_format,
        "reply": {"reasoning": reply.reasoning, "content": reply.content, "calls": reply.calls},
    }


def show(example: Example) -> str:
    """An example for people to read."""
    rows = [f"[{example.kind}]"]
    for turn in example.turns:
        if isinstance(turn, Reply):
            thoughts = f" (thinks: {turn.reasoning})" if turn.reasoning else ""
            calls = "".join(f" -> {name}({arguments})" for name, arguments in turn.calls)
            rows.append(f"  assistant{thoughts}: {turn.content}{calls}")
        else:
            rows.append(f"  {turn['role']}: {turn['content']}")
    return "\n".join(rows)
