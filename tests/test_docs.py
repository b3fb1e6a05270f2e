"""The examples of the README and of the documents run as they stand there.

A block is run when `<!-- test: NAME -->` stands above it. The blocks of a document share one namespace, in order;
`tmp` is a folder for files. `<!-- setup ... -->` holds code that readers need not see. Shell blocks run the commands
of `deepinfer-jax` in this process.
"""

import re
import shlex
from pathlib import Path

import matplotlib
import pytest
from typer.testing import CliRunner

from deepinfer_jax.cli import app, common

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# (marker above a block or None, language, code) or (setup code)
BLOCK = re.compile(
    r"<!-- setup\n(?P<setup>.*?)-->|(?:<!-- (?P<marker>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)```", re.S
)


def blocks(document):
    """(line, kind, code) of every block; kind is python, sh, setup, or None for one that is not run."""
    text = document.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["setup"] is not None:
            yield line, "setup", match["setup"]
        else:
            marked = (match["marker"] or "").startswith("test: ")
            yield line, match["language"] if marked else None, match["code"]


def with_examples():
    return [d for d in DOCUMENTS if any(kind for _, kind, _ in blocks(d))]


@pytest.mark.slow
@pytest.mark.parametrize("document", with_examples(), ids=lambda d: d.name)
def test_the_examples_run(document, tmp_path, monkeypatch, capsys):
    matplotlib.use("Agg")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(common, "prepare_devices", lambda devices: None)
    monkeypatch.setattr(common, "keep_compiled", lambda compile_cache: None)
    namespace = {"tmp": tmp_path, "__name__": document.stem}
    for line, kind, code in blocks(document):
        if kind in ("python", "setup"):
            exec(compile("\n" * line + code, str(document), "exec"), namespace)
        elif kind == "sh":
            for command in code.replace("\\\n", " ").splitlines():
                run_command(command, tmp_path)


def run_command(command, tmp):
    """One line of a shell block: `deepinfer-jax ...`, with `tmp/` for the folder and `echo X |` before it."""
    stdin = None
    if command.startswith("echo "):
        said, command = command.split("|", 1)
        stdin = " ".join(shlex.split(said)[1:]) + "\n"
    words = [w.replace("tmp/", f"{tmp}/") for w in shlex.split(command, comments=True)]
    if words:
        assert words[0] == "deepinfer-jax"
        result = CliRunner().invoke(app, words[1:], input=stdin, catch_exceptions=False)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_every_python_block_is_run_or_says_why_not(document):
    text = document.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match["language"] == "python":
            assert re.match(r"test: \w+|not run: ", match["marker"] or ""), match["code"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_every_link_leads_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target
