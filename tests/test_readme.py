"""The example of the README runs as it stands there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_ten_lines_of_the_readme_generate(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code = re.search(r"<!-- test: generate -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code is not None
    exec(compile(code[1], "README.md", "exec"), {})
    tokens = eval(capsys.readouterr().out.strip().splitlines()[-1])
    assert len(tokens) == 8
    assert all(0 <= t < 128 for t in tokens)
