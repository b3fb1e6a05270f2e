"""Requests for a JSON object: facts of a sentence, or an entry of WordNet."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from scripts.nano import chat_names as names
from scripts.nano.chat_example import Example, Message, Reply, system, user
from scripts.nano.chat_words import shorten, written
from scripts.nano.wordnet import Sense

_ASK = (
    "Give {k} of this sentence as JSON: {s}",
    "Extract {k} as JSON. {s}",
    "Turn this into a JSON object with {k}: {s}",
    "{s} Answer in JSON with {k}.",
    "Read the sentence and return JSON with {k}. {s}",
    "As JSON ({k}): {s}",
    "Return a JSON object with {k}.\n\n{s}",
    "Sentence: {s}\nJSON with {k}:",
)
_ASK_FREELY = (
    "Extract the facts as JSON: {s}",
    "Turn this into JSON: {s}",
    "JSON, please: {s}",
    "Give me the facts as JSON. {s}",
)
_ASK_WORD = (
    "Define {w} as JSON with {k}.",
    "Give me {w} as a JSON object with {k}.",
    "Write a dictionary entry for {w} in JSON with {k}.",
    "Look at the word {w}. Return JSON with {k}.",
)
_SYSTEMS = ("Answer in JSON.", "You return JSON and nothing else.", "You extract facts. Reply with one JSON object.")

Facts = dict[str, Any]


def _person(rng: Random) -> tuple[str, Facts]:
    facts = {"name": rng.choice(names.PEOPLE), "age": rng.randint(5, 95), "city": rng.choice(names.CITIES)}
    sentences = (
        "{name} is {age} years old and lives in {city}.",
        "{name}, {age}, comes from {city}.",
        "My friend {name} from {city} is {age} years old.",
        "In {city} lives {name}, who is {age}.",
        "{name} moved to {city} at the age of {age}.",
        "At {age}, {name} still lives in {city}.",
    )
    return rng.choice(sentences).format(**facts), facts


def _worker(rng: Random) -> tuple[str, Facts]:
    name = f"{rng.choice(names.PEOPLE)} {rng.choice(names.SURNAMES)}"
    facts = {"name": name, "job": rng.choice(names.JOBS), "city": rng.choice(names.CITIES)}
    article = "an" if facts["job"][0] in "aeiou" else "a"
    sentences = (
        f"{{name}} works as {article} {{job}} in {{city}}.",
        f"{{name}} is {article} {{job}} from {{city}}.",
        "The {job} {name} lives in {city}.",
        "In {city} everybody knows the {job} {name}.",
    )
    return rng.choice(sentences).format(**facts), facts


def _order(rng: Random) -> tuple[str, Facts]:
    facts = {"customer": rng.choice(names.PEOPLE), "item": rng.choice(names.GOODS), "quantity": rng.randint(2, 60)}
    sentences = (
        "{customer} orders {quantity} {item}.",
        "Please send {quantity} {item} to {customer}.",
        "{customer} bought {quantity} {item} yesterday.",
        "We sold {quantity} {item} to {customer}.",
    )
    text = rng.choice(sentences).format(**facts)
    if rng.random() < 0.5:
        facts["price"] = rng.randint(2, 400)
        text += f" The price is {facts['price']} {rng.choice(names.CURRENCIES)}."
    return text, facts


def _event(rng: Random) -> tuple[str, Facts]:
    facts = {"event": rng.choice(names.EVENTS), "day": rng.choice(names.DAYS), "hour": rng.randint(8, 21)}
    facts["place"] = rng.choice(names.CITIES)
    sentences = (
        "The {event} is on {day} at {hour} o'clock in {place}.",
        "On {day} at {hour} o'clock there is a {event} in {place}.",
        "Come to {place} on {day}: the {event} begins at {hour} o'clock.",
    )
    return rng.choice(sentences).format(**facts).replace(" a e", " an e").replace(" a i", " an i"), facts


def _pet(rng: Random) -> tuple[str, Facts]:
    facts = {"owner": rng.choice(names.PEOPLE), "animal": rng.choice(names.ANIMALS), "name": rng.choice(names.PETS)}
    facts["colour"] = rng.choice(names.COLOURS)
    sentences = (
        "{owner} has a {colour} {animal} called {name}.",
        "{name} is the {colour} {animal} of {owner}.",
        "The {animal} {name} is {colour} and belongs to {owner}.",
    )
    return rng.choice(sentences).format(**facts).replace(" a orange", " an orange"), facts


def _weather(rng: Random) -> tuple[str, Facts]:
    facts = {
        "city": rng.choice(names.CITIES),
        "temperature": rng.randint(-15, 38),
        "weather": rng.choice(names.WEATHER),
    }
    sentences = (
        "It is {weather} in {city} and {temperature} degrees.",
        "{city}: {weather}, {temperature} degrees.",
        "With {temperature} degrees, {city} is {weather} today.",
    )
    return rng.choice(sentences).format(**facts), facts


def _basket(rng: Random) -> tuple[str, Facts]:
    fruits = rng.sample(names.FRUITS, rng.randint(2, 4))
    facts = {"buyer": rng.choice(names.PEOPLE), "fruits": fruits}
    listed = f"{', '.join(fruits[:-1])} and {fruits[-1]}"
    return rng.choice(("{} bought {}.", "{} likes {}.", "{} sells {}.")).format(facts["buyer"], listed), facts


def _date(rng: Random) -> tuple[str, Facts]:
    facts = {"name": rng.choice(names.PEOPLE), "day": rng.randint(1, 28), "month": rng.choice(names.MONTHS)}
    facts["year"] = rng.randint(1900, 2020)
    sentences = ("{name} was born on {month} {day}, {year}.", "{name} was born on {day} {month} {year}.")
    return rng.choice(sentences).format(**facts), facts


_MAKERS: tuple[Callable[[Random], tuple[str, Facts]], ...] = (
    *(_person, _person, _worker, _order, _event, _pet, _weather, _basket, _date),
)
# Other keys that may be asked for.
_SYNONYMS = {
    "name": ("full_name", "who"),
    "city": ("place", "town", "location"),
    "job": ("profession", "occupation"),
    "quantity": ("count", "number", "amount"),
    "item": ("product", "article"),
    "weather": ("condition", "sky"),
    "colour": ("color",),
    "age": ("years",),
    "event": ("title",),
    "temperature": ("degrees",),
}


def json_examples(count: int) -> list[Example]:
    """Objects from made-up sentences; the request names the keys and their order.

    Args:
        count: How many examples.
    """
    rng = Random("json")
    return [_from_sentence(*rng.choice(_MAKERS)(rng), rng) for _ in range(count)]


def _from_sentence(text: str, facts: Facts, rng: Random) -> Example:
    draw = rng.random()
    if draw < 0.15:
        return _example([user(rng.choice(_ASK_FREELY).format(s=text))], facts, {"type": "json_object"}, rng)
    keys = list(facts)
    rng.shuffle(keys)
    if len(keys) > 2 and rng.random() < 0.25:
        keys.pop()
    renamed = {
        rng.choice(_SYNONYMS.get(key, ())) if rng.random() < 0.2 and key in _SYNONYMS else key: facts[key]
        for key in keys
    }
    question = rng.choice(_ASK).format(k=_listed(list(renamed), rng), s=text)
    wanted: dict[str, Any] = {"type": "json_object"}
    if draw > 0.8:
        wanted = {"type": "json_schema", "json_schema": {"name": "facts", "schema": _schema(renamed)}}
        question = text if draw > 0.9 else question
    return _example([user(question)], renamed, wanted, rng)


def _example(messages: list[Message], facts: Facts, wanted: dict[str, Any], rng: Random, **more: Any) -> Example:
    if rng.random() < 0.1:
        messages = [system(rng.choice(_SYSTEMS)), *messages]
    content = json.dumps(facts, ensure_ascii=False)
    more.setdefault("fact", str(messages[-1]["content"]))
    return Example("json", (*messages, Reply(content)), response_format=wanted, **more)


def _listed(keys: list[str], rng: Random) -> str:
    if len(keys) == 1:
        return f"the key {keys[0]}"
    together = f"{', '.join(keys[:-1])} and {keys[-1]}"
    return rng.choice((f"the keys {together}", together, f"the keys {', '.join(keys)}"))


def _schema(facts: Facts) -> dict[str, Any]:
    kinds = {str: {"type": "string"}, int: {"type": "integer"}, list: {"type": "array", "items": {"type": "string"}}}
    return {"type": "object", "properties": {k: kinds[type(v)] for k, v in facts.items()}, "required": list(facts)}


def json_words(senses: Sequence[Sense], count: int) -> list[Example]:
    """Entries of WordNet as objects.

    Args:
        senses: Common meanings.
        count: How many examples.
    """
    rng = Random("json words")
    examples = []
    for sense in rng.sample(list(senses), count):
        word, synset = written(sense), sense.synset
        facts: Facts = {"word": word, "part_of_speech": synset.part, "definition": shorten(synset.definition)}
        keys = list(facts)
        if rng.random() < 0.4:
            rng.shuffle(keys)
        question = rng.choice(_ASK_WORD).format(w=word, k=_listed(keys, rng))
        ordered = {key: facts[key] for key in keys}
        origins = (f"wordnet/{synset.group}",)
        examples.append(_example([user(question)], ordered, {"type": "json_object"}, rng, origins=origins, fact=""))
    return examples
