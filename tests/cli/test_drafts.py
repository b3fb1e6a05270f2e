"""`acceptance` and `calibrate` on the command line."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from deepinfer_jax import speculative
from deepinfer_jax.calibration import Outcomes, errors, fit_scaling, load_calibration, split
from deepinfer_jax.cli import app, common, drafts

FAST = ["--numerics", "fp32", "--batch-size", "8", "--chunk", "16", "--max-tokens", "12"]


@pytest.fixture(autouse=True)
def _devices_of_the_tests(monkeypatch):
    """The tests have set JAX up already, with their own compile cache; a wide terminal wraps no table."""
    monkeypatch.setattr(common, "prepare_devices", lambda devices: None)
    monkeypatch.setattr(common, "keep_compiled", lambda compile_cache: None)
    for console in (drafts.console, drafts.error_console):
        monkeypatch.setattr(console, "_width", 160)


@pytest.fixture(scope="module")
def checkpoint(data_dir, tmp_path_factory):
    """A copy, because what is written goes beside the checkpoint."""
    return shutil.copytree(data_dir / "v41_tiny", tmp_path_factory.mktemp("drafts") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("".join(f"w{i} W{i + 1} w{i + 2}\n" for i in range(3, 13)) + "\n")
    return file


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [*map(str, arguments)], input=stdin, catch_exceptions=False)


@pytest.fixture(scope="module")
def results(tiny, prompts):
    """What the commands measure, by the function behind them."""
    ids = [tiny.tokenizer.encode(line) for line in prompts.read_text().split("\n") if line]

    def results(temperature):
        return speculative.speculate(
            tiny.params, tiny.config, ids, numerics=tiny.numerics, temperature=temperature, max_tokens=12, chunk=16
        )

    return results


def rows(text):
    """Cells of the lines that begin with a position."""
    return [line.split() for line in text.splitlines() if re.match(r"\s*\d+ {2}", line)]


def test_acceptance_prints_both_temperatures_and_every_position(checkpoint, prompts, results):
    result = run("acceptance", checkpoint, prompts, *FAST)
    assert result.exit_code == 0
    sampled = results(1.0)
    for temperature, found in ((0, results(0.0)), (1, sampled)):
        rounds, length = sum(r.rounds for r in found), speculative.accepted_length(found)
        assert (
            f"temperature {temperature}: {length:.2f} tokens per round, {rounds} rounds of 10 prompts" in result.stdout
        )
    outcomes = Outcomes.join(r.outcomes for r in sampled)
    verified = (outcomes.accepted >= 0).sum(axis=0)
    share = (outcomes.accepted == 1).sum(axis=0) / verified
    assert [row[1:3] for row in rows(result.stdout)[3:]] == [
        [str(n), f"{p:.1%}"] for n, p in zip(verified, share, strict=True)
    ]


def test_calibrate_fits_one_part_and_measures_the_other(checkpoint, prompts, results):
    result = run("calibrate", checkpoint, prompts, *FAST)
    assert result.exit_code == 0, result.stderr
    made = load_calibration(checkpoint, block_size=3)
    found = results(1.0)
    fit, held = (Outcomes.join(found[i].outcomes for i in part) for part in split(10, 0.5, 0))
    assert made.scaling == fit_scaling(fit)
    assert made.ece_after == pytest.approx(errors(held, made.scaling))
    # The control: measured on what it was fitted on, it would look better than it is.
    assert made.ece_after != pytest.approx(errors(fit, made.scaling))
    assert (made.sampling_temperature, made.labels, made.fitted) == (1.0, "sampled", len(fit.accepted))
    assert [row[4] for row in rows(result.stdout)] == [f"{t:.3f}" for t in made.temperatures]
    assert [row[5] for row in rows(result.stdout)] == [f"{b:+.3f}" for b in made.offsets]
    assert [row[6:] for row in rows(result.stdout)] == [
        [f"{b:.2%}", f"{a:.2%}"] for b, a in zip(made.ece_before, made.ece_after, strict=True)
    ]
    assert f"fitted on {made.fitted} rounds of 5 prompts" in result.stdout
    assert "fewer than 1,000 rounds" in result.stderr
    assert (checkpoint / "confidence.png").read_bytes().startswith(b"\x89PNG")


def test_calibrate_writes_where_it_is_told(checkpoint, prompts, tmp_path):
    output, diagram = tmp_path / "c.json", tmp_path / "d.png"
    lines = [{"prompt": line} for line in prompts.read_text().split("\n") if line] + [{"token_ids": [6, 9]}]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--output", output, "--diagram", diagram, "--held-back", 0.2, "--analytic", "--temperature", 0.7]
    result = run("calibrate", checkpoint, file, *options, *FAST)
    assert result.exit_code == 0, result.stderr
    assert "of 9 prompts" in result.stdout and f"wrote {output}" in result.stdout
    made = load_calibration(output)
    assert (made.labels, made.sampling_temperature) == ("analytic", 0.7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.json", "d.png", "p.jsonl"]
    again = run("calibrate", checkpoint, file, "--output", output, "--no-diagram", *options[4:], *FAST)
    assert again.exit_code == 0 and load_calibration(output) == made


def test_prompts_come_from_stdin(checkpoint, results):
    result = run("acceptance", checkpoint, "-", *FAST, "--temperature", 0, stdin="w3 W4 w5\n")
    assert f"{results(0.0)[0].rounds} rounds of 1 prompts" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "-1"], "temperature: found -1.0, expected a number of at least 0"),
        (["--max-tokens", "0"], "max_tokens: found 0, expected a whole number of at least 1"),
        (["--seed", "-1"], "seed: found -1"),
        (["--numerics", "fp16"], "numerics: found 'fp16'"),
        (["--batch-size", "0"], "slots: found 0"),
        (["--chunk", "0"], "chunk: found 0"),
        (["--max-tokens", "2000", "--numerics", "fp32"], "and max_tokens 2000 exceed max_length 1021"),
    ],
)
def test_bad_options_exit_with_2(checkpoint, prompts, arguments, said):
    for command in ("acceptance", "calibrate"):
        result = run(command, checkpoint, prompts, *arguments)
        assert result.exit_code == 2
        assert said in result.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "found no prompts, expected at least one"),
        ('{"prompt": "w1", "temperature": 0.5}\n', "prompt 0 has sampling parameters"),
        ('{"token_ids": [1, 999]}\n', "prompt 0: token id 999 at 1 is not in 0..127"),
        ("{}\n", "line 1: expected an object with either prompt or token_ids"),
        (None, "No such file or directory"),
    ],
)
def test_bad_prompts_exit_with_2(checkpoint, tmp_path, content, said):
    file = tmp_path / "p.jsonl"
    if content is not None:
        file.write_text(content)
    result = run("acceptance", checkpoint, file, *FAST)
    assert result.exit_code == 2
    assert said in result.stderr


def test_calibrate_names_what_it_cannot_split_or_write(checkpoint, prompts, tmp_path, monkeypatch):
    one = tmp_path / "one.txt"
    one.write_text("w1\n")
    monkeypatch.setattr(drafts, "_open", None)  # all of these are found before the model is read
    for arguments, said in (
        ([one], "prompts: found 1, expected at least 2"),
        ([prompts, "--held-back", 1], "held-back: found 1.0, expected a share above 0 and below 1"),
        ([prompts, "--output", tmp_path / "no" / "c.json"], "c.json: No such file or directory"),
        ([prompts, "--diagram", tmp_path / "no" / "c.png"], "c.png: No such file or directory"),
    ):
        result = run("calibrate", checkpoint, *arguments)
        assert result.exit_code == 2
        assert said in result.stderr


def test_a_checkpoint_without_a_drafter_or_none_at_all_is_named(checkpoint, prompts, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 0
    config["text_config"]["compress_ratios"] = config["text_config"]["compress_ratios"][:6]
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("acceptance", tmp_path, prompts)
    assert (result.exit_code, "num_nextn_predict_layers: found 0" in result.stderr) == (2, True)
    result = run("calibrate", tmp_path / "nowhere", prompts)
    assert (result.exit_code, "nowhere" in result.stderr) == (2, True)


def test_ctrl_c_writes_nothing(checkpoint, prompts, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(speculative, "speculate", interrupted)
    result = run("calibrate", checkpoint, prompts, "--output", tmp_path / "c.json", *FAST)
    assert (result.exit_code, list(tmp_path.iterdir())) == (130, [])
    assert "interrupted" in result.stderr


def test_help_lists_the_commands():
    shown = run("--help").stdout
    assert "acceptance" in shown and "calibrate" in shown
    for command in ("acceptance", "calibrate"):
        assert run(command, "--help").exit_code == 0
