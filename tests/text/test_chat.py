import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deepinfer_jax.errors import InputError, TokenizerError
from deepinfer_jax.text.chat import ChatEncoder, ChatReply
from deepinfer_jax.text.tokenizer import TextTokenizer
from tests.text.chat_tokenizer import EOS, SPECIAL, TEXT, chat_tokenizer_json

TOKENIZER = TextTokenizer(chat_tokenizer_json(), bos_token_id=0)
ENCODER = ChatEncoder(TOKENIZER)
ID = TOKENIZER.added_tokens

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
HELLO = [{"role": "user", "content": "Hello"}]
CITY = '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'


def days(value):
    return f'<｜DSML｜ parameter name="days" string="false">{value}</｜DSML｜ parameter>\n'


def invoke(*parameters, name="get_weather"):
    return f'<｜DSML｜ invoke name="{name}">\n{"".join(parameters)}</｜DSML｜ invoke>\n'


def block(*invokes):
    return f"<｜DSML｜ calls>\n{''.join(invokes)}</｜DSML｜ calls>"


def read(text, finished=True, **options):
    """The reply to a prompt without thinking that offers the tools."""
    options = {"tools": [WEATHER, CLOCK], "thinking": False} | options
    return ENCODER.parse(ENCODER.prepare(HELLO, **options), TOKENIZER.encode(text), finished)


def only_call(text, finished=True, **options):
    reply = read(text, finished, **options)
    assert len(reply.tool_calls) == 1
    return reply.tool_calls[0]


# Prompts


def test_a_prompt_opens_the_reasoning_of_the_assistant():
    prompt = ENCODER.prepare([{"role": "system", "content": "Be kind."}, *HELLO])
    assert prompt.text == (
        "<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough "
        "the reasoning)\n\nBe kind.<｜User｜>Hello<｜Assistant｜><think>"
    )
    assert TOKENIZER.decode(prompt.ids, skip_special_tokens=False) == prompt.text
    assert prompt.ids[0] == 0 and prompt.ids[-1] == ID["<think>"]
    assert prompt.starts_in_reasoning and not prompt.starts_in_tool_calls


def test_without_thinking_the_reasoning_is_closed_and_no_effort_is_named():
    prompt = ENCODER.prepare(HELLO, thinking=False)
    assert prompt.text == "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜></think>"
    assert not prompt.starts_in_reasoning


@pytest.mark.parametrize(
    ("effort", "number"), [("minimal", 50), ("low", 50), ("medium", 75), ("high", 75), ("xhigh", 75), ("max", 100)]
)
def test_reasoning_effort_is_a_number_in_the_prompt(effort, number):
    assert f"Reasoning Effort: {number} " in ENCODER.prepare(HELLO, reasoning_effort=effort).text


@pytest.mark.parametrize("special", SPECIAL)
def test_a_special_token_that_a_user_types_stays_text(special):
    def count(content):
        return ENCODER.prepare([{"role": "user", "content": content}]).ids.count(ID[special])

    assert special in ENCODER.prepare([{"role": "user", "content": special}]).text
    assert count(special) == count("x")
    assert TOKENIZER.encode(special) == [ID[special]]  # the control: plain encoding does make the special token


@given(st.text(TEXT))
def test_any_text_of_a_user_stands_in_the_ids(text):
    ids = ENCODER.prepare([{"role": "user", "content": text}], thinking=False).ids
    assert ids[:2] == (0, ID["<｜User｜>"]) and ids[-2:] == (ID["<｜Assistant｜>"], ID["</think>"])
    assert TOKENIZER.decode(ids[2:-2], skip_special_tokens=False) == text


def test_text_parts_and_tuples_are_read():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = ENCODER.prepare(({"role": "user", "content": parts},), thinking=False)
    assert prompt.text == "<｜begin▁of▁sentence｜><｜User｜>a\n\nb<｜Assistant｜></think>"


def test_a_history_of_tool_calls_is_written_in_the_markup_of_replies():
    function = {"name": "get_weather", "arguments": '{"city": "Paris", "days": 2}'}
    call = {"id": "c1", "type": "function", "function": function}
    history = [
        *HELLO,
        {"role": "assistant", "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    text = ENCODER.prepare(history, tools=[WEATHER]).text
    assert text.endswith(
        "<｜Assistant｜><think>Ask.</think>\n\n"
        + block(invoke(CITY, days(2)))
        + "<｜end▁of▁sentence｜><｜User｜><tool_result>sunny</tool_result><｜Assistant｜><think>"
    )


def test_a_prefix_is_continued():
    prompt = ENCODER.prepare([*HELLO, {"role": "assistant", "content": "Sure, ", "prefix": True}], thinking=False)
    assert prompt.text.endswith("<｜Assistant｜></think>Sure, ")
    assert ENCODER.parse(prompt, TOKENIZER.encode("\nyes")) == ChatReply(None, "\nyes", ())


def test_a_forced_call_starts_inside_its_block():
    prompt = ENCODER.prepare(HELLO, tools=[WEATHER], tool_choice="required", thinking=False)
    assert prompt.text.endswith("</think>\n\n<｜DSML｜ calls>\n")
    assert prompt.starts_in_tool_calls
    markup = invoke(CITY) + "</｜DSML｜ calls>"
    assert only_call(markup, tool_choice="required").parsed == {"city": "Paris"}
    named = {"type": "function", "function": {"name": "clock"}}
    prompt = ENCODER.prepare(HELLO, tools=[WEATHER, CLOCK], tool_choice=named, thinking=False)
    assert list(prompt.tools) == ["clock"]
    assert read("no call", tool_choice="required") == ChatReply(None, "no call", ())


def test_tools_are_not_read_where_none_may_be_called():
    text = block(invoke(CITY))
    assert read(text, tool_choice="none") == ChatReply(None, text, ())
    assert read(text, tools=None) == ChatReply(None, text, ())


# Faults of a conversation


def faults_of(messages=HELLO, **options):
    with pytest.raises(InputError) as caught:
        ENCODER.prepare(messages, **options)
    return list(caught.value.faults)


def test_all_faults_of_messages_come_together():
    messages = [
        "hi",
        {"role": "wizard", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": "ab\ud83d"},
        {"role": "user", "content": [{"type": "image_url"}, {"type": "text"}, {"type": "audio"}, 1]},
        {"role": "assistant", "content": "x", "prefix": True},
        {"role": "user", "content": 3, "name": {1, 2}},
    ]
    assert faults_of(messages, reasoning_effort="huge", tool_choice="required") == [
        "messages[3].content: found the lone surrogate U+D83D at position 2, expected text that UTF-8 can hold",
        "messages[6].name: found set, expected a JSON value",
        "messages[0]: found str, expected a dict with role and content",
        "messages[1].role: found 'wizard', expected one of system, user, assistant, tool, latest_reminder",
        "messages[2].content: missing, expected a str or a list of parts",
        "messages[4].content[0]: images in chat are not supported yet",
        "messages[4].content[1].text: found NoneType, expected a str",
        "messages[4].content[2].type: found 'audio', expected 'text'",
        "messages[4].content[3]: found int, expected a dict with type and text",
        "messages[5].prefix: found on message of role 'assistant', expected only on a last one of assistant",
        "messages[6].content: found int, expected a str or a list of parts",
        "reasoning_effort: found 'huge', expected one of minimal, low, medium, high, xhigh, max",
        "tool_choice: found 'required' while thinking, which cannot force a call: pass thinking=False",
        "tool_choice: found 'required' without tools, expected 'auto' or 'none'",
    ]


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "messages: found none, expected at least one"),
        ("hi", "messages: found str, expected a list of messages"),
        (None, "messages: found NoneType, expected a list of messages"),
    ],
)
def test_no_messages_is_a_fault(messages, fault):
    assert faults_of(messages) == [fault]


def test_arguments_that_contradict_each_other_are_faults():
    assert faults_of(thinking=False, reasoning_effort="low") == [
        "reasoning_effort: found 'low' with thinking=False, expected None"
    ]
    assert faults_of(thinking="no") == ["thinking: found 'no', expected True or False"]
    assert faults_of(tool_choice="any")[0].startswith("tool_choice: found 'any', expected 'auto', 'none', 'required'")
    deep = {}
    deep["a"] = deep
    assert "nested more than 100 levels" in faults_of(tools=[deep])[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages: missing field `tool_call_id`"),
        ({"response_format": {"type": "json_object"}}, "messages: Prompt must contain the word 'json'"),
        ({"response_format": {"type": "xml"}}, "response_format: unknown variant `xml`"),
        ({"tools": [{"type": "function"}]}, "tools: missing field `function`"),
        ({"tools": [WEATHER, WEATHER]}, "tools: Tool names must be unique"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools: Invalid 'tools"),
        (
            {
                "tools": [WEATHER],
                "thinking": False,
                "tool_choice": {"type": "function", "function": {"name": "zz"}},
            },
            "tool_choice: .* no function named 'zz'",
        ),
    ],
)
def test_what_the_recipe_refuses_is_one_sentence_with_its_argument(options, message):
    with pytest.raises(InputError, match=message) as caught:
        ENCODER.prepare(**({"messages": HELLO} | options))
    assert "\n" not in str(caught.value)


def test_missing_special_tokens_are_listed_together():
    lacking = TextTokenizer(chat_tokenizer_json(without=("<think>", "｜DSML｜", "<｜box｜>")), bos_token_id=4)
    with pytest.raises(TokenizerError, match="not those of DeepSeek") as caught:
        ChatEncoder(lacking)
    assert caught.value.faults == (
        "<think>: missing",
        "｜DSML｜: missing",
        "<｜begin▁of▁sentence｜>: found id 0, expected bos_token_id 4",
    )


# Replies


@pytest.mark.parametrize("end", [[], [EOS]])
def test_a_reply_is_reasoning_then_content(end):
    prompt = ENCODER.prepare(HELLO)
    ids = TOKENIZER.encode("\nThey greet.\n</think>\n\nHi there\n")
    assert ENCODER.parse(prompt, ids + end) == ChatReply("\nThey greet.\n".strip("\n"), "Hi there\n", ())


def test_a_reply_that_is_cut_off_while_thinking_has_no_content():
    assert ENCODER.parse(ENCODER.prepare(HELLO), TOKENIZER.encode("They"), finished=False) == ChatReply("They", "", ())


def test_ids_after_the_end_token_are_text():
    assert read("a<｜end▁of▁sentence｜>b").content == "a<｜end▁of▁sentence｜>b"
    assert read("a<｜end▁of▁sentence｜><｜end▁of▁sentence｜>").content == "a"


def test_json_replies_keep_the_text_around_the_json():
    messages = [{"role": "user", "content": "json please"}]
    prompt = ENCODER.prepare(messages, thinking=False, response_format={"type": "json_object"})
    assert ENCODER.parse(prompt, TOKENIZER.encode('Sure: {"a": 1}')).content == 'Sure: {"a": 1}'


def test_calls_are_read_from_ids():
    prompt = ENCODER.prepare(HELLO, tools=[WEATHER, CLOCK])
    ids = TOKENIZER.encode("Ask.</think>Wait\n\n" + block(invoke(CITY, days(2)), invoke(name="clock")))
    reply = ENCODER.parse(prompt, [*ids, EOS])
    assert (reply.reasoning, reply.content) == ("Ask.", "Wait")
    first, second = reply.tool_calls
    assert (first.name, first.arguments) == ("get_weather", '{"city": "Paris", "days": 2}')
    assert (first.parsed, first.fault) == ({"city": "Paris", "days": 2}, None)
    assert (second.name, second.parsed, second.fault) == ("clock", {}, None)
    assert first.id != second.id
    assert ENCODER.parse(prompt, ids) == reply  # ids of calls included: the same prompt gives the same


@pytest.mark.parametrize(
    ("markup", "fault"),
    [
        (invoke(CITY, days("two")), "get_weather: the arguments are not valid JSON"),
        (invoke(CITY, days("NaN")), "NaN is no JSON value"),
        (invoke(CITY, CITY), "a key stands twice"),
        (invoke(days(2)), "get_weather: the arguments lack the required 'city'"),
        (invoke(name="rm"), "rm: the tool is not among those offered (get_weather, clock)"),
        (invoke(CITY.replace('"true"', '"yes"')), "get_weather: the call is not well-formed"),
        (invoke("junk", CITY), "junk"),
        (invoke(CITY.replace(' string="true"', "")), "Paris"),
    ],
)
def test_a_call_that_should_not_run_has_a_fault(markup, fault):
    call = only_call(block(markup))
    assert fault in call.fault
    assert only_call(block(invoke(CITY))).fault is None  # the control


def test_a_call_with_a_missing_parameter_is_still_parsed():
    assert only_call(block(invoke(days(2)))).parsed == {"days": 2}
    assert only_call(block(invoke(CITY, days("two")))).parsed is None


def test_a_cut_off_call_has_a_fault_at_every_cut():
    prompt = ENCODER.prepare(HELLO, tools=[WEATHER], thinking=False)
    start, end = "<｜DSML｜ calls>\n<｜DSML｜ invoke name=", "\n</｜DSML｜ calls>"
    ids = TOKENIZER.encode(block(invoke(CITY)))
    first, complete = len(TOKENIZER.encode(start + '"get_weather"')), len(ids) - len(TOKENIZER.encode(end))
    for cut in range(1, len(ids) + 1):
        reply = ENCODER.parse(prompt, ids[:cut], finished=False)
        if cut < first:
            assert (reply.content, reply.tool_calls) == (TOKENIZER.decode(ids[:cut], False), ())
        elif cut < complete:
            call = reply.tool_calls[0]
            assert (reply.content, call.parsed) == ("", None)
            assert "get_weather: the call was cut off by the length limit" in str(call.fault)
        else:  # only the end of the block is missing
            assert (reply.content, reply.tool_calls[0].fault) == ("", None)
            assert reply.tool_calls[0].parsed == {"city": "Paris"}


@pytest.mark.parametrize(
    "markup",
    [
        "<｜DSML｜ calls>",
        "<｜DSML｜ calls>\n<｜DSML｜ invoke name=",
        "<｜DSML｜ other> word",
        block("word"),
        block(invoke(CITY).replace(' name="get_weather"', "")),
        "x ｜DSML｜ y",
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_markup_that_is_no_call_is_content(markup, finished):
    assert read("Hm\n\n" + markup, finished) == ChatReply(None, "Hm\n\n" + markup, ())


def test_text_after_the_calls_is_content():
    reply = read("Before\n\n" + block(invoke(CITY)) + "After")
    assert (reply.content, reply.tool_calls[0].parsed) == ("BeforeAfter", {"city": "Paris"})


PARTS = [
    *["W", " W ", "\n", "</think>", "<", '"', "｜DSML｜", "<｜DSML｜ W>", "<｜DSML｜ calls>\n", "</｜DSML｜ calls>"],
    *['<｜DSML｜ invoke name="get_weather">\n', "</｜DSML｜ invoke>\n", "</｜DSML｜ parameter>\n"],
    *[
        '<｜DSML｜ parameter name="W" string="true">',
        days('"W"'),
        CITY.replace("Paris", "W"),
        block(invoke(CITY + "W")),
    ],
]
PROMPTS = [
    ENCODER.prepare(HELLO, tools=[WEATHER]),
    ENCODER.prepare(HELLO, tools=[WEATHER], thinking=False),
    ENCODER.prepare(HELLO, tools=[WEATHER], thinking=False, tool_choice="required"),
    ENCODER.prepare(HELLO),
]


@given(st.sampled_from(PROMPTS), st.lists(st.sampled_from(PARTS), max_size=8), st.integers(1, 9), st.booleans())
def test_no_word_of_a_reply_is_lost_and_pieces_join_to_the_reply(prompt, parts, size, finished):
    text, words = "", []
    for part in parts:
        while "W" in part:
            words.append(f"w{len(words)}w")
            part = part.replace("W", words[-1], 1)
        text += part
    ids = TOKENIZER.encode(text)
    stream = ENCODER.stream(prompt)
    pieces = [piece for at in range(0, len(ids), size) for piece in stream.push(ids[at : at + size])]
    pieces += stream.finish(finished)
    reply = stream.reply
    assert reply == ENCODER.parse(prompt, ids, finished)
    assert "".join(text for kind, text in pieces if kind == "reasoning") == (reply.reasoning or "")
    assert "".join(text for kind, text in pieces if kind == "content") == reply.content
    said = (reply.reasoning or "") + reply.content
    called = "".join(call.name + call.arguments for call in reply.tool_calls)
    faults = "".join(call.fault or "" for call in reply.tool_calls)
    for word in words:
        assert word in said + called + faults
        assert said.count(word) <= 1 and not (word in said and word in called)


def test_pieces_come_as_soon_as_they_are_final():
    stream = ENCODER.stream(ENCODER.prepare(HELLO, tools=[WEATHER]))
    assert stream.push(TOKENIZER.encode("Ask")) == [("reasoning", "Ask")]
    assert stream.push([ID["</think>"], *TOKENIZER.encode("Hi")]) == [("content", "Hi")]
    markup = TOKENIZER.encode("\n\n" + block(invoke(CITY), invoke(CITY)))
    tool = [text for token in markup for kind, text in stream.push([token]) if kind == "tool"]
    assert "".join(tool) == 'get_weather {"city": "Paris"}\nget_weather {"city": "Paris"}'
    assert len(tool) > 10
    with pytest.raises(InputError, match="the stream is not finished"):
        _ = stream.reply
    assert stream.push([EOS]) == [] and stream.finish() == []
    for call in (lambda: stream.push([1]), stream.finish):
        with pytest.raises(InputError, match="the stream is finished"):
            call()


def test_a_character_that_was_cut_off_is_shown():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={character: token for token, character in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer = TextTokenizer(raw.to_str())
    encoder = ChatEncoder(tokenizer)
    prompt = encoder.prepare([{"role": "user", "content": "毕🎉"}], thinking=False)
    assert re.search("毕🎉", tokenizer.decode(prompt.ids))
    ids = tokenizer.encode("a 🎉")
    stream = encoder.stream(prompt)
    assert [stream.push([token]) for token in ids[2:-1]] == [[], [], []]
    assert stream.push(ids[-1:]) == [("content", "🎉")]
    assert encoder.parse(prompt, ids[:-1], finished=False).content == "a \ufffd"


def test_spare_ids_of_the_model_are_no_text_and_wrong_ids_are_named():
    prompt = ENCODER.prepare(HELLO, thinking=False)
    assert ENCODER.parse(prompt, [126, *TOKENIZER.encode("a"), 127]).content == "a"
    with pytest.raises(InputError) as caught:
        ENCODER.parse(prompt, [20, -1])
    assert caught.value.faults == ("ids[1]: found -1, expected 0 to 4294967295",)


def test_one_prompt_serves_many_replies():
    prompt = ENCODER.prepare(HELLO, tools=[WEATHER])
    replies = [ENCODER.parse(prompt, TOKENIZER.encode(f"{n}</think>{n}")).content for n in range(3)]
    assert replies == ["0", "1", "2"]


def test_arguments_are_the_json_that_a_history_takes():
    call = only_call(block(invoke(CITY.replace("Paris", 'a"b\\n<&amp;>\n'))))
    assert json.loads(call.arguments) == call.parsed == {"city": 'a"b\\n<&amp;>\n'}
