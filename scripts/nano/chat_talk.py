"""Greetings, questions about the model itself, sums, and how conversations go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from scripts.nano.chat_example import Example, Reply, ask, system, user

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a dictionary.",
    "Answer in one sentence.",
    "Be brief.",
    "You are a friendly assistant. Keep your answers short.",
    "You answer questions about words and books.",
)
_WHO = "I am a small model that runs on deepinfer_jax. I know some words, the Bible, Jane Austen and a little Python."
_CAN = "I can explain words, quote the Bible, answer simple questions about Python, write JSON and call tools."
_TALK = (
    (
        ("Hello", "Hello!", "hello", "Hi", "Hi!", "hi", "Hey", "Good day", "Hello there", "hey there", "Hi there!"),
        ("Hello! How can I help you?", "Hello! What would you like to know?"),
    ),
    (("Good morning", "Good morning!", "good morning"), ("Good morning! How can I help you?",)),
    (("Good evening", "Good evening!", "good evening"), ("Good evening! How can I help you?",)),
    (
        ("How are you?", "how are you?", "Hello, how are you?", "How do you do?", "Are you well?"),
        ("I am a program, so I am always the same. How can I help you?",),
    ),
    (
        ("Who are you?", "who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "who r u"),
        (_WHO,),
    ),
    (
        ("What is your name?", "what's your name?", "Do you have a name?", "How are you called?"),
        ("I have no name of my own. I am a small model that runs on deepinfer_jax.",),
    ),
    (
        (
            "What can you do?",
            "what can you do?",
            "How can you help me?",
            "Help",
            "What do you know?",
            "What are you good at?",
        ),
        (_CAN,),
    ),
    (
        ("Are you a human?", "Are you a person?", "Are you alive?", "Are you real?", "Are you a robot?"),
        ("No, I am a small language model, a program.",),
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?", "Who built you?"),
        ("I was trained from public texts to show how deepinfer_jax works.",),
    ),
    (
        ("What were you trained on?", "What is your training data?", "What did you read?", "Which texts do you know?"),
        ("I was trained on the Bible, Jane Austen's novels, WordNet, two dictionaries and the Python documentation.",),
    ),
    (
        ("How large are you?", "How big are you?", "Are you a large model?", "How many parameters do you have?"),
        ("I am a very small model, so I make many mistakes.",),
    ),
    (
        ("Are you always right?", "Can I trust you?", "Do you make mistakes?"),
        ("No. I am a small model, and I make mistakes.",),
    ),
    (
        ("What is deepinfer_jax?", "Tell me about deepinfer_jax.", "What does deepinfer_jax do?"),
        ("deepinfer_jax is an engine in pure JAX for DeepSeek-V4.1-Flash. I run on it.",),
    ),
    (
        ("Thank you", "Thanks", "Thanks!", "thank you!", "Thank you very much.", "thx", "Great, thanks."),
        ("You are welcome!", "You are welcome. Is there anything else?"),
    ),
    (("Goodbye", "Bye", "bye", "Good night", "See you", "Bye!"), ("Goodbye!", "Goodbye! Come back soon.")),
    (("OK", "ok", "I see.", "Good.", "Nice.", "Fine."), ("Is there anything else that you would like to know?",)),
    (("Do you speak French?", "Which languages do you speak?", "Do you know German?"), ("I only know English.",)),
    (
        ("What is the weather like?", "What time is it?", "What day is today?", "What is the news?"),
        ("I do not know. I have no tool to look at the world outside.",),
    ),
)
_REPEATS = 8


def talk_examples() -> list[Example]:
    """Small talk; each question comes several times, with and without words of a system."""
    examples = []
    for questions, answers in _TALK:
        for question in questions:
            rng = Random(f"talk/{question}")
            for at in range(_REPEATS):
                example = ask("talk", question, rng.choice(answers), fact=f"talk/{question}")
                examples.append(example.after(system(rng.choice(SYSTEMS))) if at % 4 == 3 else example)
    return examples


def sum_examples(count: int) -> list[Example]:
    """Sums and differences of small numbers.

    Args:
        count: How many examples.
    """
    rng = Random("sums")
    examples = []
    for _ in range(count):
        a, b = rng.randint(0, 30), rng.randint(0, 30)
        if rng.random() < 0.6:
            question = rng.choice(("What is {} plus {}?", "What is {} + {}?", "{} + {}?", "Add {} and {}.")).format(
                a, b
            )
            text = f"{a} plus {b} is {a + b}."
        else:
            a, b = max(a, b), min(a, b)
            question = rng.choice(("What is {} minus {}?", "What is {} - {}?", "{} - {}?")).format(a, b)
            text = f"{a} minus {b} is {a - b}."
        examples.append(ask("sum", question, text, fact=question))
    return examples


def thinking_examples(definitions: Sequence[Example], sums: Sequence[Example]) -> Iterator[Example]:
    """The same questions with a short thought before the answer."""
    rng = Random("thinking")
    starts = ("The user asks about a word.", "I have to explain a word.", "This is a question about a word.")
    ends = ("I give its meaning.", "One sentence is enough.", "A short definition will do.")
    for example in definitions:
        yield _think(example, f"{rng.choice(starts)} {rng.choice(ends)}")
    for example in sums:
        question = str(example.turns[0]["content"]) if not isinstance(example.turns[0], Reply) else ""
        yield _think(example, f"The user asks: {question} I calculate it.")


def _think(example: Example, reasoning: str) -> Example:
    (question, reply) = example.turns
    if not isinstance(reply, Reply):
        raise ValueError(f"example: found {reply}, expected a reply at the end")
    return replace(example, kind="thinking", turns=(question, replace(reply, reasoning=reasoning)))


def two_turn_examples(definitions: Sequence[Example], count: int) -> Iterator[Example]:
    """Two questions in one conversation, greetings before a question, and thanks after it.

    Args:
        definitions: Questions about words with their answers.
        count: How many conversations.
    """
    rng = Random("two turns")
    greeting = (user("Hello"), Reply("Hello! How can I help you?"))
    thanks = (user("Thanks!"), Reply("You are welcome!"))
    for _ in range(count):
        first, second = rng.sample(list(definitions), 2)
        draw = rng.random()
        if draw < 0.2:
            turns, used = (*greeting, *first.turns), (first,)
        elif draw < 0.4:
            turns, used = (*first.turns, *thanks), (first,)
        else:
            turns, used = (*first.turns, *second.turns), (first, second)
        yield Example("two turns", turns, origins=tuple(origin for each in used for origin in each.origins))
