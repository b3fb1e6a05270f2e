"""`verify` on the command line: exit codes, report files, bad input."""

import json

import pytest
from typer.testing import CliRunner

from deepinfer_jax.cli import app

FAST = ["--axis", "batch size", "--requests", 3, "--max-tokens", 4, "--numerics", "fp32"]


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)], input=stdin)


@pytest.fixture(scope="module")
def tiny_path(data_dir):
    return data_dir / "v41_tiny"


def test_it_holds(tiny_path, tmp_path):
    prompts, report, shown = tmp_path / "p.txt", tmp_path / "r.json", tmp_path / "r.html"
    prompts.write_text("w3 W4 w5\nw7\n")
    result = run(tiny_path, prompts, *FAST, "--json", report, "--html", shown)
    assert result.exit_code == 0, result.output
    made = json.loads(report.read_text())
    assert made["holds"] is True and made["compared"] == 9 and made["origin"] is None
    assert made["numerics"]["numerics"]["batch_invariant"] is True
    assert f"numerics version {made['numerics_version']}" in result.stdout
    assert "holds: 9 comparisons" in result.stdout and "holds: 9 comparisons" in shown.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.txt", "r.html", "r.json"]


@pytest.mark.slow
@pytest.mark.optimized
def test_it_differs_without_the_mode_and_says_where(tiny_path):
    options = ["--axis", "teacher forcing", "--requests", 4, "--numerics", "fp32", "--no-batch-invariant"]
    result = run(tiny_path, "-", *options, stdin="w3 W4 w5 w9 w11 W4 w7\n")
    assert result.exit_code == 1, result.output
    assert "differs: " in result.stdout and "first in " in result.stdout


@pytest.mark.parametrize(
    ("options", "stdin", "said"),
    [
        (["--axis", "weather"], "w3\n", "axis: found 'weather'"),
        (["--numerics", "fp16"], "w3\n", "numerics: found 'fp16'"),
        (["--format", "jsonl"], '{"token_ids": [3], "temperature": 1.5}\n', "prompt 0 has sampling parameters"),
        (["--format", "jsonl"], '{"token_ids": [99999]}\n', "token id 99999"),
        ([], "", "prompts: found none"),
        (["--max-tokens", 5000], "w3\n", "exceed max_position_embeddings"),
    ],
)
def test_bad_input_is_named(tiny_path, options, stdin, said):
    result = run(tiny_path, "-", *options, stdin=stdin)
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")
