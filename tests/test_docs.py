"""The examples of the README and of the documents run as they stand there.

A block is run when `<!-- test: NAME -->` stands above it; a python block that is not run says why with
`<!-- not run: REASON -->`. The blocks of a document share one namespace, in order; `tmp` is a folder for files.
`<!-- setup ... -->` holds code that readers need not see. Shell blocks run the commands of `deepinfer-jax` in this
process.
"""

import re
import shlex
import traceback
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
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
    """(lines before it, kind, code) of every block; kind is python, sh, setup, or None for one that is not run."""
    text = document.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        part = "setup" if match["setup"] is not None else "code"
        marked = (match["marker"] or "").startswith("test: ")
        kind = "setup" if part == "setup" else match["language"] if marked else None
        yield text.count("\n", 0, match.start(part)), kind, match[part]


def with_examples():
    return [d for d in DOCUMENTS if any(kind for _, kind, _ in blocks(d))]


@pytest.mark.slow
@pytest.mark.parametrize("document", with_examples(), ids=lambda d: d.name)
def test_the_examples_run(document, tmp_path, monkeypatch, capsys):
    matplotlib.use("Agg")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(common, "prepare_devices", lambda devices: None)
    monkeypatch.setattr(common, "keep_compiled", lambda compile_cache: None)
    run_blocks(document, tmp_path)
    plt.close("all")


def run_blocks(document, tmp):
    namespace = {"tmp": tmp, "__name__": document.stem}
    for before, kind, code in blocks(document):
        if kind in ("python", "setup"):
            # With the lines before it, an error says its line in the document.
            exec(compile("\n" * before + code, str(document), "exec"), namespace)
        elif kind == "sh":
            for command in code.replace("\\\n", " ").splitlines():
                run_command(command, tmp)


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


def test_an_example_that_fails_is_found_with_its_line(tmp_path):
    document = tmp_path / "bad.md"
    document.write_text("# Title\n\n<!-- test: one -->\n```python\nx = 1\n```\n\n<!-- setup\ny = 2\n-->\n\n"
                        "<!-- test: two -->\n```python\nassert (x, y) == (1, 2)\nassert x == y\n```\n")  # fmt: skip
    with pytest.raises(AssertionError) as error:
        run_blocks(document, tmp_path)
    assert traceback.extract_tb(error.tb)[-1].lineno == 15


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_every_python_block_is_run_or_says_why_not(document):
    text = document.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match["language"] == "python":
            assert re.match(r"test: \w+|not run: \w", match["marker"] or ""), match["code"]
    # A marker that does not stand right above a block would switch it off in silence.
    assert text.count("<!-- test") == sum(kind in ("python", "sh") for _, kind, _ in blocks(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_every_document_has_examples_that_run_or_says_how_to_check_it(document):
    assert document in with_examples() or "\nCheck: " in document.read_text(encoding="utf-8")
    if not re.match(r"[1-4]-|bench-", document.name):
        assert document in with_examples()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_every_link_leads_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target
