"""LLM: text in, text out; chat; what a user sees when something is wrong or is interrupted."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import deepinfer_jax as dj
from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.progress import RunProgress
from deepinfer_jax.engine.schedule import Schedule
from deepinfer_jax.text.tokenizer import TextTokenizer
from tests.helpers import interrupted_at
from tests.text.chat_tokenizer import chat_tokenizer_json

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def chatty(data_dir, tmp_path_factory):
    """The tiny checkpoint without Engram, with a tokenizer that can chat."""
    folder = tmp_path_factory.mktemp("chatty")
    shutil.copytree(data_dir / "v41_tiny_noengram", folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_text(chat_tokenizer_json(), encoding="utf-8")
    # One token per character makes long prompts.
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    return dj.LLM(folder, numerics="fp32", max_length=1024, steps=4, chunk=64, progress=False)


def test_text_and_ids_give_the_same(tiny):
    by_text, by_ids = tiny.generate(["w3 W4 w5", [6, 9, 10]], GREEDY)
    assert by_text.outputs == by_ids.outputs
    assert (by_text.prompt, by_ids.prompt) == ("w3 W4 w5", None)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == (6, 9, 10)
    assert by_text.outputs[0].text == tiny.tokenizer.decode(by_text.outputs[0].token_ids)
    json.dumps(by_text.to_dict())


def test_one_prompt_is_a_list_of_one(tiny):
    (text,), (ids,) = tiny.generate("w3 W4", GREEDY), tiny.generate([6, 9], GREEDY)
    (array,) = tiny.generate(np.array([6, 9]), GREEDY)
    assert text.outputs == ids.outputs == array.outputs
    assert tiny.generate([]) == []


def test_results_come_in_order_or_as_they_finish(tiny, ragged):
    each = [SamplingParams(temperature=0, max_tokens=30 if i == 0 else 2) for i in range(12)]
    ordered = tiny.generate(ragged[:12], each)
    assert [o.index for o in ordered] == list(range(12))
    early = list(tiny.generate_iter(ragged[:12], each))
    assert early[-1].index == 0
    assert sorted(early, key=lambda o: o.index) == ordered


def test_an_unseeded_call_repeats_itself_and_its_prompts_differ(tiny):
    params = SamplingParams(max_tokens=8)
    first, again = tiny.generate([[5, 6]] * 3, params), tiny.generate([[5, 6]] * 3, params)
    assert first == again
    assert [o.seed for o in first] == [0, 1, 2]
    assert len({o.outputs[0].token_ids for o in first}) == 3
    # The seed that a result reports gives it alone as well.
    (alone,) = tiny.generate([5, 6], SamplingParams(max_tokens=8, seed=first[2].seed))
    assert alone.outputs == first[2].outputs


@pytest.mark.parametrize("steps", [1, 4, 16])
def test_a_stop_string_cuts_the_text_at_the_same_place_for_any_steps(tiny, steps):
    llm = dj.LLM.of(
        tiny.config, tiny.params, tiny.tokenizer, numerics="fp32", max_length=256, steps=steps, chunk=64, progress=False
    )
    (free,) = llm.generate(["w3 W4 w5"], GREEDY)
    words = free.outputs[0].text.split(" ")
    # From the middle of one word to the middle of the one after the next.
    stop = f"{words[4][1:]} {words[5]} {words[6][:2]}"
    before = free.outputs[0].text[: free.outputs[0].text.index(stop)]
    (cut,) = llm.generate(["w3 W4 w5"], SamplingParams(temperature=0, max_tokens=12, stop=("zz", stop)))
    (one,) = cut.outputs
    assert (one.text, one.finish_reason, one.stop_reason) == (before, "stop", stop)
    assert one.token_ids == free.outputs[0].token_ids[: len(one.token_ids)]
    assert len(one.token_ids) == 7
    kept = SamplingParams(temperature=0, max_tokens=12, stop=stop, include_stop=True)
    assert llm.generate(["w3 W4 w5"], kept)[0].outputs[0].text == before + stop
    late = SamplingParams(temperature=0, max_tokens=12, stop=stop, min_tokens=8)
    assert llm.generate(["w3 W4 w5"], late)[0].outputs[0].text == free.outputs[0].text


def test_a_stopped_sample_makes_room_for_the_next(tiny, ragged):
    """More prompts than slots, every one ended by a stop string."""
    params = SamplingParams(temperature=0, max_tokens=40, stop=(" ",))
    outputs = tiny.generate(ragged[:20], params)
    assert [o.index for o in outputs] == list(range(20))
    assert all(o.outputs[0].stop_reason == " " and " " not in o.outputs[0].text for o in outputs)


def test_a_stream_joins_to_the_text(tiny):
    params = SamplingParams(temperature=0, max_tokens=12)
    (whole,) = tiny.generate("w3 W4 w5", params)
    pieces = list(tiny.stream("w3 W4 w5", params))
    assert len(pieces) > 1
    assert "".join(pieces) == whole.outputs[0].text
    words = whole.outputs[0].text.split(" ")
    stopping = SamplingParams(temperature=0, max_tokens=12, stop=(f"{words[3]} {words[4]}",))
    assert "".join(tiny.stream("w3 W4 w5", stopping)) == tiny.generate("w3 W4 w5", stopping)[0].outputs[0].text
    with pytest.raises(dj.DeepInferError, match="stream: found n 2, expected 1"):
        next(tiny.stream("w3", SamplingParams(n=2)))


def test_ctrl_c_says_what_was_finished_and_leaves_no_half_state(tiny, ragged, monkeypatch):
    each = [SamplingParams(temperature=0, max_tokens=4 if i < 5 else 40) for i in range(20)]
    whole = tiny.generate(ragged[:20], each)
    with monkeypatch.context() as patch:
        patch.setattr(Schedule, "_decode", interrupted_at(4))
        with pytest.raises(dj.Interrupted, match="interrupted: 5 of 20 prompts were finished") as stopped:
            tiny.generate(ragged[:20], each)
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert stopped.value.finished == whole[:5]
    assert tiny.generate(ragged[:20], each) == whole


def test_every_bad_prompt_of_a_call_is_named_before_anything_runs(tiny, monkeypatch):
    monkeypatch.setattr(Schedule, "updates", None)
    with pytest.raises(dj.DeepInferError) as error:
        tiny.generate(["w1", "", "a\ud800", [128], [1] * 300])
    assert [fault.split(":")[0] for fault in error.value.faults] == [f"prompt {i}" for i in (1, 2, 3, 4)]
    assert "found the lone surrogate U+D800 at position 1" in error.value.faults[1]


def test_a_checkpoint_without_tokenizer_takes_ids_only(tiny, data_dir, tmp_path):
    shutil.copytree(data_dir / "v41_tiny_noengram", tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    llm = dj.LLM(tmp_path, numerics="fp32", max_length=256, steps=4, chunk=64, progress=False)
    for call in (
        lambda: llm.generate("w1"),
        lambda: next(llm.stream([5])),
        lambda: llm.generate([5], SamplingParams(stop="x")),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(dj.DeepInferError, match=r"the checkpoint has no tokenizer\.json"):
            call()
    options = {"numerics": "fp32", "max_length": 256, "steps": 4, "chunk": 64, "progress": False}
    (output,) = dj.LLM.of(tiny.config, tiny.params, **options).generate([6, 9], GREEDY)
    assert output.outputs[0].text is None
    assert output.outputs[0].token_ids == tiny.generate([6, 9], GREEDY)[0].outputs[0].token_ids


def test_a_tokenizer_without_chat_tokens_can_generate_but_not_chat(tiny):
    with pytest.raises(dj.DeepInferError) as error:
        tiny.chat([{"role": "user", "content": "hi"}])
    assert "<｜System｜>: missing" in error.value.faults
    assert "<｜User｜>: missing" in error.value.faults


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_length": 2048}, "max_length: found 2048, expected at most max_position_embeddings 1024"),
        ({"batch_size": 0}, "slots: found 0"),
        ({"steps": 0}, "steps: found 0"),
        ({"chunk": True}, "chunk: found True"),
        ({"numerics": "fp16"}, "numerics: found 'fp16'"),
        ({"data": 16}, "needs 16 devices, JAX has 8"),
        ({"data": 2, "batch_size": 3}, "3 slots do not divide over data 2"),
    ],
)
def test_a_bad_option_is_named_before_weights_are_read(data_dir, monkeypatch, options, said):
    monkeypatch.setattr("deepinfer_jax.engine.llm.load_params", None)
    with pytest.raises(dj.DeepInferError) as error:
        dj.LLM(data_dir / "v41_tiny", **options)
    assert said in str(error.value)


def test_chat_writes_the_prompt_and_reads_the_reply(chatty):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <think>"}]
    params = SamplingParams(max_tokens=20, seed=3)
    output = chatty.chat(messages, params, thinking=False)
    prompt = chatty.chat_encoder.prepare(messages, thinking=False)
    assert output.request.prompt_token_ids == prompt.ids
    assert output.content == output.replies[0].content
    # Random weights say nothing sensible, but what they say is what was generated.
    (plain,) = chatty.generate([prompt.ids], params)
    assert plain.outputs[0].token_ids == output.request.outputs[0].token_ids
    assert chatty.chat_encoder.parse(prompt, plain.outputs[0].token_ids, False) == output.replies[0]
    pieces = list(chatty.chat_stream(prompt, params))
    assert pieces[-1] == output
    assert "".join(text for kind, text in pieces[:-1] if kind == "content") == output.content
    several = chatty.chat([messages, messages[1:]], SamplingParams(max_tokens=4, n=2, seed=1))
    assert [(o.index, len(o.replies)) for o in several] == [(0, 2), (1, 2)]
    json.dumps(output.to_dict())


def test_a_reply_is_read_into_reasoning_content_and_calls(chatty, monkeypatch):
    """What the model would have to write, put in place of what it draws."""
    dsml = "｜DSML｜"
    written = (
        f'Look it up.</think>One moment.\n\n<{dsml} calls>\n<{dsml} invoke name="find">\n'
        f'<{dsml} parameter name="what" string="true">tea</{dsml} parameter>\n</{dsml} invoke>\n</{dsml} calls>'
    )
    tokens = [*chatty.tokenizer.encode(written), chatty.config.eos_token_id]
    tools = [
        {
            "type": "function",
            "function": {
                "name": "find",
                "description": "Finds",
                "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
            },
        }
    ]

    def scripted(logits, rows, positions):
        return table[(positions - start).clip(0, len(tokens) - 1)]

    messages = [{"role": "user", "content": "Tea?"}]
    start = len(chatty.chat_encoder.prepare(messages, tools=tools).ids)
    table = jnp.asarray(tokens, jnp.int32)
    llm = dj.LLM.of(
        chatty.config,
        chatty.params,
        chatty.tokenizer,
        numerics="fp32",
        max_length=2048,
        chunk=2048,
        sampler=scripted,
        progress=False,
    )
    output = llm.chat(messages, tools=tools)
    (reply,) = output.replies
    assert (reply.reasoning, reply.content.strip()) == ("Look it up.", "One moment.")
    assert [(call.name, call.parsed, call.fault) for call in reply.tool_calls] == [("find", {"what": "tea"}, None)]
    assert output.request.outputs[0].finish_reason == "stop"


def test_a_stop_cuts_a_reply_where_it_cuts_its_text(chatty):
    messages = [{"role": "user", "content": "What is a newt?"}]
    params = SamplingParams(max_tokens=40, seed=3)
    whole = chatty.chat(messages, params, thinking=False)
    stop = whole.content[7:9]
    before = whole.content[: whole.content.index(stop)]
    stopping = SamplingParams(max_tokens=40, seed=3, stop=stop)
    cut = chatty.chat(messages, stopping, thinking=False)
    assert (cut.content, cut.request.outputs[0].stop_reason) == (before, stop)
    pieces = list(chatty.chat_stream(chatty.chat_encoder.prepare(messages, thinking=False), stopping))
    assert pieces[-1] == cut
    assert "".join(text for _, text in pieces[:-1]) == before
    token = whole.request.outputs[0].token_ids[5]
    by_id = chatty.chat(messages, SamplingParams(max_tokens=40, seed=3, stop_token_ids=(token,)), thinking=False)
    last = by_id.request.outputs[0].token_ids
    assert last[-1] == token
    assert by_id.request.outputs[0].text == chatty.tokenizer.decode(last[:-1], skip_special_tokens=False)
    assert by_id.content in by_id.request.outputs[0].text


def test_what_can_be_no_prompt_is_refused(tiny, chatty):
    for prompts, kind in ((None, "NoneType"), (5, "int"), (b"abc", "bytes"), ({"prompt": "a"}, "dict")):
        with pytest.raises(dj.DeepInferError, match=f"prompts: found {kind}, expected texts or lists of token ids"):
            tiny.generate(prompts)
    for empty in ([], ""):
        with pytest.raises(dj.DeepInferError, match="prompt 0: empty, expected at least one token"):
            next(tiny.stream(empty))
    for messages in (None, "hi", 5):
        with pytest.raises(dj.DeepInferError, match=r"messages: found .*, expected a conversation or a list of them"):
            chatty.chat(messages)
    (array,) = tiny.generate(jnp.asarray([6, 9]), GREEDY)
    assert array.outputs == tiny.generate([6, 9], GREEDY)[0].outputs


def test_bad_conversations_are_named(chatty):
    with pytest.raises(dj.DeepInferError, match="robot"):
        chatty.chat([{"role": "robot", "content": "hi"}])
    with pytest.raises(dj.DeepInferError, match="reasoning_effort"):
        chatty.chat([{"role": "user", "content": "hi"}], reasoning_effort="heroic")
    with pytest.raises(dj.DeepInferError, match="exceed max_length 1024"):
        chatty.chat([{"role": "user", "content": "x" * 900}], SamplingParams(max_tokens=1000))


def test_the_bar_counts_prompts_and_tokens(capsys):
    console = Console(force_terminal=True, width=100)
    with RunProgress(3, True, console) as bar:
        bar.advance(bar.tokens, 1234)
        bar.advance(bar.prompts)
    shown = capsys.readouterr().out
    assert "1/3" in shown
    assert "1,234 tokens" in shown


def test_a_tokenizer_of_the_wrong_model_is_refused(tiny):
    other = TextTokenizer(chat_tokenizer_json(without=("<｜User｜>",)))
    llm = dj.LLM.of(tiny.config, tiny.params, other, numerics="fp32", max_length=256, progress=False)
    with pytest.raises(dj.DeepInferError, match="<｜User｜>: missing"):
        llm.chat([{"role": "user", "content": "hi"}])
