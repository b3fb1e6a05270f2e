"""`generate` and `chat` on the command line."""

import io
import json
import shutil
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

import deepinfer_jax as dj
from deepinfer_jax.cli import app, common
from deepinfer_jax.cli.chat import _answer
from deepinfer_jax.cli.generate import _print
from deepinfer_jax.engine.llm import ChatOutput
from deepinfer_jax.engine.schedule import Schedule
from deepinfer_jax.text.chat import ChatEncoder
from tests.helpers import interrupted_at
from tests.text.chat_tokenizer import chat_tokenizer_json

# The sizes of the shared fixture, so that its compiled programs serve here too.
SIZES = ["--numerics", "fp32", "--max-length", "256", "--steps", "4", "--chunk", "64"]


@pytest.fixture(autouse=True)
def _devices_of_the_tests(monkeypatch):
    """The tests have set JAX up already, with their own compile cache."""
    monkeypatch.setattr(common, "prepare_devices", lambda devices: None)
    monkeypatch.setattr(common, "keep_compiled", lambda compile_cache: None)


@pytest.fixture
def checkpoint(data_dir):
    return str(data_dir / "v41_tiny")


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [*map(str, arguments)], input=stdin, catch_exceptions=False)


def text_of(tiny, prompt, **sampling):
    sampling = {"temperature": 0, "max_tokens": 6, **sampling}
    return tiny.generate(prompt, dj.SamplingParams(**sampling))[0].outputs[0].text


GREEDY = ["--temperature", "0", "--max-tokens", "6"]


def test_a_prompt_prints_its_continuation(tiny, checkpoint):
    result = run("generate", checkpoint, "w3 W4 w5", *GREEDY, *SIZES)
    assert (result.exit_code, result.stdout) == (0, text_of(tiny, "w3 W4 w5") + "\n")


def test_stdin_is_a_prompt(tiny, checkpoint):
    result = run("generate", checkpoint, *GREEDY, *SIZES, stdin="w3 W4 w5\n")
    assert result.stdout == text_of(tiny, "w3 W4 w5") + "\n"


def test_a_file_of_lines_prints_every_result_in_order(tiny, checkpoint, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("w3 W4 w5\n\nw7\n")
    result = run("generate", checkpoint, "--file", file, "--format", "lines", *GREEDY, *SIZES)
    lines = result.stdout.splitlines()
    assert [lines[1], lines[3]] == [text_of(tiny, "w3 W4 w5"), text_of(tiny, "w7")]
    assert lines[0].startswith("prompt 0 (6 tokens, length)")


def test_text_is_printed_as_it_is(capsys):
    """No line is wrapped and no name of an emoji replaced, on a terminal or not."""
    text = "see :warning: [b]" + " word" * 60
    done = dj.Completion(0, text, (2,), "length", None, None)
    _print([dj.RequestOutput(0, "p", (1,), (done,), 0, "")])
    assert capsys.readouterr().out.splitlines()[1] == text


def test_json_lines_in_and_out(tiny, checkpoint, tmp_path):
    rows = [{"prompt": "w3 W4 w5"}, {"token_ids": [6, 9, 10], "max_tokens": 2, "logprobs": 1, "seed": 9}]
    file, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("generate", checkpoint, "--file", file, "--output", output, *GREEDY, *SIZES)
    assert (result.exit_code, result.stdout) == (0, "")
    one, two = map(json.loads, output.read_text().splitlines())
    assert one["outputs"][0]["text"] == text_of(tiny, "w3 W4 w5")
    assert (two["prompt"], two["seed"], len(two["outputs"][0]["logprobs"])) == (None, 9, 2)
    assert not output.with_name("results.jsonl.part").exists()
    shown = run("generate", checkpoint, "--file", file, "--json", *GREEDY, *SIZES)
    assert shown.stdout == output.read_text()


def test_every_bad_line_is_named(checkpoint, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w1"}\n{"prompt": "w1", "top_q": 1}\nnot json\n{"token_ids": [1], "prompt": "w"}\n[]\n')
    result = run("generate", checkpoint, "--file", file)
    assert result.exit_code == 2
    for line in ("line 2", "top_q: unknown, did you mean top_p?", "line 3", "line 4", "line 5"):
        assert line in result.stderr
    assert "line 1:" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["w1", "--temperature", "-1"], "temperature: found -1.0, expected a number of at least 0"),
        (["w1", "--file", "x.txt"], "found a prompt and --file, expected one of them"),
        (["--file", "nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["w1", "--data", "4", "--expert", "4"], "needs 16 devices, JAX has 8"),
        (["w1", "--output", "nowhere/x.jsonl", *SIZES], "nowhere/x.jsonl: No such file or directory"),
        (["w1", "--seed", "-1"], "seed: found -1, expected a whole number from 0"),
        (["w1", "--numerics", "fp16"], "numerics: found 'fp16'"),
        (["w1", "--max-length", "9999"], "max_length: found 9999, expected at most"),
        (["", *SIZES], "prompt 0: empty, expected at least one token"),
        (["w1 " * 300, *SIZES], "prompt 0: 300 tokens leave no room to generate"),
    ],
)
def test_bad_input_exits_with_2(checkpoint, arguments, said):
    result = run("generate", checkpoint, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_missing_checkpoint_is_named():
    result = run("generate", "nowhere", "w1")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr


def test_ctrl_c_writes_what_was_finished(tiny, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(Schedule, "_decode", interrupted_at(4))
    file, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps({"prompt": "w3", "max_tokens": n}) + "\n" for n in (4, 200, 4)))
    result = run("generate", checkpoint, "--file", file, "--output", output, *SIZES)
    assert result.exit_code == 130
    assert "interrupted: 2 of 3 prompts were finished" in result.stderr
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [0, 2]


@pytest.fixture(scope="module")
def chatty(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatty")
    shutil.copytree(data_dir / "v41_tiny_noengram", folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_text(chat_tokenizer_json(), encoding="utf-8")
    return folder


CHAT = [
    "--numerics",
    "fp32",
    "--max-length",
    "1024",
    "--steps",
    "4",
    "--chunk",
    "64",
    "--no-thinking",
    "--max-tokens",
    "12",
]


def test_chat_answers_a_message(chatty):
    shown = run("chat", chatty, "Hi", "--system", "Be brief.", *CHAT)
    as_json = run("chat", chatty, "--json", "--system", "Be brief.", *CHAT, stdin="Hi")
    assert shown.exit_code == as_json.exit_code == 0
    output = json.loads(as_json.stdout)
    content = output["replies"][0]["content"]
    # The terminal may wrap what it prints.
    assert shown.stdout.replace("\n", "") == content.replace("\n", "")
    assert "cut off at the length limit" in shown.stderr


@pytest.mark.parametrize(("hide", "text"), [(False, "Hmm.\n\nYes.\n"), (True, "Yes.\n")])
def test_reasoning_and_answer_are_apart_where_colours_are_lost(monkeypatch, hide, text):
    done = SimpleNamespace(outputs=[SimpleNamespace(finish_reason="stop")])
    output = ChatOutput(0, (SimpleNamespace(tool_calls=()),), done)
    pieces = [("reasoning", "Hm"), ("reasoning", "m."), ("content", "Y"), ("content", "es."), output]
    encoder = SimpleNamespace(prepare=lambda messages: messages)
    llm = SimpleNamespace(chat_encoder=encoder, chat_stream=lambda prompt, sampling: iter(pieces))
    shown = io.StringIO()
    monkeypatch.setattr(common, "console", Console(file=shown))
    assert _answer(llm, [], {}, None, hide) is output
    assert shown.getvalue() == text


def test_a_conversation_remembers_its_turns(chatty, monkeypatch):
    seen, prepare = [], ChatEncoder.prepare

    def watched(self, messages, **settings):
        seen.append([m["role"] for m in messages])
        return prepare(self, messages, **settings)

    monkeypatch.setattr(ChatEncoder, "prepare", watched)
    monkeypatch.setattr(common, "at_terminal", lambda: True)
    lines = iter(["Hi", "", "And?"])

    def ask(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(common.console, "input", ask)
    result = run("chat", chatty, "--system", "Be brief.", *CHAT)
    assert result.exit_code == 0
    assert seen == [["system", "user"], ["system", "user", "assistant", "user"]]


def test_chat_names_bad_input(chatty, checkpoint, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text("{")
    for arguments, said in (
        ([checkpoint, "hi", *CHAT], "<｜System｜>: missing"),
        ([chatty, "hi", "--tools", tools, *CHAT], "tools.json: not JSON"),
        ([chatty, "hi", "--effort", "heroic"], "reasoning_effort"),
        ([chatty, "hi", "--file", tools], "found a message and --file"),
    ):
        result = run("chat", *arguments)
        assert result.exit_code == 2
        assert said in result.stderr


def test_help_describes_every_option():
    for command in ("generate", "chat", "inspect", "compare"):
        result = run(command, "--help")
        assert result.exit_code == 0
    assert "Sampling" in run("generate", "--help").stdout
