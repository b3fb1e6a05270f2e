"""The progress bar of a run: prompts done and tokens per second."""

from __future__ import annotations

import rich.console
from rich import progress
from rich.text import Text


class _TokensPerSecond(progress.ProgressColumn):
    """The speed of the task `tokens`, shown beside the prompts."""

    def __init__(self, bar: RunProgress):
        super().__init__()
        self.bar = bar

    def render(self, task: progress.Task) -> Text:
        tokens = self.bar.tasks[self.bar.tokens]
        speed = tokens.finished_speed or tokens.speed
        return Text(f"{tokens.completed:,.0f} tokens" + (f", {speed:,.0f} tok/s" if speed else ""))


class RunProgress(progress.Progress):
    """A bar over prompts. `advance(self.tokens, n)` counts tokens, `advance(self.prompts)` prompts."""

    def __init__(self, prompts: int, show: bool, console: rich.console.Console | None = None):
        super().__init__(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            _TokensPerSecond(self),
            progress.TimeElapsedColumn(),
            disable=not show,
            console=console or rich.console.Console(stderr=True),
        )
        self.tokens = self.add_task("tokens", total=None, visible=False)
        self.prompts = self.add_task("prompts", total=prompts)
