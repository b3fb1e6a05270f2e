"""Requests that need a tool: the call, the result, and the answer; also requests that do not need the tools offered."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.nano import chat_names as names
from scripts.nano.chat_example import Example, Message, Reply, system, user

Make = Callable[[Random], dict[str, Any]]


@dataclass(frozen=True)
class Tool:
    """A tool in some spellings, and what is asked of it.

    Attributes:
        names: Names it may have.
        descriptions: Descriptions it may have.
        keys: Names that each parameter may have, by the name in the templates.
        make: Values of the parameters and, for the result and the answer, more values.
        questions: Templates of what a user asks.
        answers: Templates of what follows from the result.
        result: Names of the values that the tool returns.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    keys: dict[str, tuple[str, ...]]
    make: Make
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    result: tuple[str, ...]


def _weather(rng: Random) -> dict[str, Any]:
    return {"city": rng.choice(names.CITIES), "sky": rng.choice(names.WEATHER), "temperature": rng.randint(-10, 35)}


def _forecast(rng: Random) -> dict[str, Any]:
    return {**_weather(rng), "days": rng.randint(2, 9)}


def _sum(rng: Random) -> dict[str, Any]:
    a, b = rng.randint(1, 999), rng.randint(1, 999)
    return {"a": a, "b": b, "sum": a + b}


def _product(rng: Random) -> dict[str, Any]:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return {"a": a, "b": b, "product": a * b}


def _search(rng: Random) -> dict[str, Any]:
    return {"query": rng.choice(names.TOPICS), "count": rng.randint(2, 90)}


def _clock(rng: Random) -> dict[str, Any]:
    return {"city": rng.choice(names.CITIES), "time": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"}


def _timer(rng: Random) -> dict[str, Any]:
    return {"minutes": rng.randint(1, 90), "status": "started"}


def _message(rng: Random) -> dict[str, Any]:
    return {"to": rng.choice(names.PEOPLE), "text": rng.choice(names.MESSAGES), "status": "sent"}


def _song(rng: Random) -> dict[str, Any]:
    return {"title": rng.choice(names.SONGS), "status": "playing"}


def _task(rng: Random) -> dict[str, Any]:
    return {"task": rng.choice(names.TASKS), "status": "added"}


def _event(rng: Random) -> dict[str, Any]:
    return {
        "title": rng.choice(names.EVENTS),
        "day": rng.choice(names.DAYS),
        "hour": rng.randint(8, 20),
        "status": "created",
    }


def _light(rng: Random) -> dict[str, Any]:
    room = rng.choice(("kitchen", "bedroom", "hall", "garage", "bathroom", "office", "cellar"))
    on = rng.random() < 0.5
    return {"room": room, "on": on, "state": "on" if on else "off", "status": "done"}


TOOLS = (
    Tool(
        ("get_weather", "weather", "current_weather"),
        ("Get the weather of a city.", "The current weather in a city."),
        {"city": ("city", "location", "place")},
        _weather,
        (
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "weather in {city}?",
            "Is it warm in {city}?",
            "Tell me the weather in {city}.",
            "Do I need a coat in {city}?",
        ),
        ("It is {sky} in {city}, with {temperature} degrees.", "In {city} it is {sky} and {temperature} degrees."),
        ("sky", "temperature"),
    ),
    Tool(
        ("get_forecast", "forecast"),
        ("Weather forecast for some days.", "Forecast the weather of a city."),
        {"city": ("city", "location"), "days": ("days", "number_of_days")},
        _forecast,
        ("What will the weather be in {city} for the next {days} days?", "Give me a {days}-day forecast for {city}."),
        ("It will be {sky} in {city}, with about {temperature} degrees.",),
        ("sky", "temperature"),
    ),
    Tool(
        ("add_numbers", "add", "sum"),
        ("Add two numbers.", "The sum of two integers."),
        {"a": ("a", "x", "first"), "b": ("b", "y", "second")},
        _sum,
        ("What is {a} + {b}?", "Add {a} and {b}.", "What is {a} plus {b}?", "How much is {a} plus {b}?", "{a} + {b}?"),
        ("{a} plus {b} is {sum}.", "The sum is {sum}.", "{a} + {b} = {sum}."),
        ("sum",),
    ),
    Tool(
        ("multiply", "multiply_numbers", "times"),
        ("Multiply two numbers.", "The product of two integers."),
        {"a": ("a", "x"), "b": ("b", "y")},
        _product,
        ("What is {a} times {b}?", "Multiply {a} by {b}.", "How much is {a} times {b}?", "{a} * {b}?"),
        ("{a} times {b} is {product}.", "The product is {product}."),
        ("product",),
    ),
    Tool(
        ("search", "web_search", "search_library"),
        ("Search for texts.", "Find documents about a topic."),
        {"query": ("query", "q", "topic")},
        _search,
        (
            "Search for {query}.",
            "Find something about {query}.",
            "Look up {query}, please.",
            "I want to read about {query}.",
        ),
        ("I found {count} texts about {query}.", "There are {count} texts about {query}."),
        ("count",),
    ),
    Tool(
        ("get_time", "current_time", "clock"),
        ("The local time of a city.", "What time it is somewhere."),
        {"city": ("city", "place", "location")},
        _clock,
        ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"),
        ("It is {time} in {city}.", "The time in {city} is {time}."),
        ("time",),
    ),
    Tool(
        ("set_timer", "start_timer"),
        ("Start a timer.", "Set a timer of some minutes."),
        {"minutes": ("minutes", "duration")},
        _timer,
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Timer, {minutes} minutes."),
        ("The timer is set for {minutes} minutes.", "I started a timer of {minutes} minutes."),
        ("status",),
    ),
    Tool(
        ("send_message", "send_text", "message"),
        ("Send a message to a person.", "Send a text."),
        {"to": ("to", "recipient"), "text": ("text", "body", "message")},
        _message,
        ('Send {to} the message "{text}"', 'Write to {to}: "{text}"', "Tell {to}: {text}"),
        ("I sent the message to {to}.", "The message to {to} is sent."),
        ("status",),
    ),
    Tool(
        ("play_music", "play", "play_song"),
        ("Play a piece of music.", "Play a song by its title."),
        {"title": ("title", "song")},
        _song,
        ("Play {title}.", "I want to hear {title}.", "Please play {title}."),
        ("Now playing {title}.", "I am playing {title}."),
        ("status",),
    ),
    Tool(
        ("add_task", "create_task", "remember"),
        ("Add a task to the list.", "Remember a task."),
        {"task": ("task", "text", "title")},
        _task,
        ("Remind me to {task}.", "Add a task: {task}.", "I have to {task}. Put it on my list."),
        ('I added "{task}" to your list.', "Done: {task} is on your list."),
        ("status",),
    ),
    Tool(
        ("create_event", "add_event", "schedule"),
        ("Create an event in the calendar.", "Put something into the calendar."),
        {"title": ("title", "name"), "day": ("day", "weekday"), "hour": ("hour", "start")},
        _event,
        ("Put a {title} on {day} at {hour} into my calendar.", "Schedule the {title} for {day} at {hour} o'clock."),
        ("The {title} is in your calendar for {day} at {hour}.", "I scheduled the {title} for {day}."),
        ("status",),
    ),
    Tool(
        ("switch_light", "set_light"),
        ("Switch a light on or off.",),
        {"room": ("room",), "on": ("on", "enabled")},
        _light,
        ("Turn {state} the light in the {room}.", "Switch the {room} light {state}."),
        ("The light in the {room} is {state}.",),
        ("status",),
    ),
)
_SYSTEMS = ("You are a helpful assistant.", "Use the tools if they help.", "You can call tools.")
_KINDS = {str: "string", bool: "boolean", int: "integer"}


@dataclass(frozen=True)
class _Spelling:
    """One spelling of a tool."""

    tool: Tool
    name: str
    keys: dict[str, str]
    schema: dict[str, Any]

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        return {key: values[name] for name, key in self.keys.items()}


def _spell(tool: Tool, rng: Random) -> _Spelling:
    keys = {name: rng.choice(spellings) for name, spellings in tool.keys.items()}
    values = tool.make(rng)
    properties = {key: {"type": _KINDS[type(values[name])]} for name, key in keys.items()}
    name = rng.choice(tool.names)
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": rng.choice(tool.descriptions), "parameters": parameters}
    return _Spelling(tool, name, keys, {"type": "function", "function": function})


def tool_examples(count: int, data_tools: Sequence[Tool]) -> list[Example]:
    """Calls of one tool among one or two; most go on to the answer, some make two calls at once.

    Args:
        count: How many examples.
        data_tools: Tools whose results are real, beside those of this file.
    """
    rng = Random("tools")
    tools = [*TOOLS, *data_tools, *data_tools]
    return [_tool_example(rng.choice(tools), tools, rng) for _ in range(count)]


def _tool_example(tool: Tool, tools: Sequence[Tool], rng: Random) -> Example:
    used = _spell(tool, rng)
    values = tool.make(rng)
    asked = rng.choice(tool.questions).format(**values)
    all_values = [values]
    if tool is TOOLS[0] and rng.random() < 0.5:
        second = tool.make(rng)
        if second["city"] != values["city"]:
            all_values.append(second)
            asked = f"What is the weather in {values['city']} and in {second['city']}?"
    turns: list[Message | Reply] = [user(asked)]
    if rng.random() < 0.15:
        turns.insert(0, system(rng.choice(_SYSTEMS)))
    reasoning = f"The tool {used.name} can do this." if rng.random() < 0.05 else None
    calls = tuple((used.name, used.arguments(each)) for each in all_values)
    turns.append(Reply(calls=calls, reasoning=reasoning))
    if reasoning is None and rng.random() < 0.6:
        turns += [{"role": "tool", "content": _result(tool, each)} for each in all_values]
        turns.append(Reply(" ".join(rng.choice(tool.answers).format(**each) for each in all_values)))
    offered = _offered(used, tools, rng)
    origins = tuple(str(each["origin"]) for each in all_values if "origin" in each)
    return Example("tool", tuple(turns), origins=origins, fact="" if origins else asked, tools=offered)


def _offered(used: _Spelling, tools: Sequence[Tool], rng: Random) -> tuple[dict[str, Any], ...]:
    offered = [used.schema]
    other = rng.choice(tools)
    # Two tools for the same question would make the choice between them a matter of luck.
    if rng.random() < 0.6 and not set(other.keys) & set(used.tool.keys) and other is not used.tool:
        offered.insert(rng.randint(0, 1), _spell(other, rng).schema)
    return tuple(offered)


def _result(tool: Tool, values: dict[str, Any]) -> str:
    return json.dumps({name: values[name] for name in tool.result}, ensure_ascii=False)


def idle_tool_examples(examples: Sequence[Example]) -> list[Example]:
    """Questions that are answered without the tools offered.

    Args:
        examples: Questions that no tool of this file is made for.
    """
    rng = Random("idle tools")
    idle = []
    for example in examples:
        offered = (_spell(rng.choice(TOOLS), rng).schema,)
        idle.append(Example("tool not needed", example.turns, example.origins, example.fact, offered))
    return idle
