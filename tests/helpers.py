"""What tests of generation share: reading compiled programs, counting compilations, and Ctrl-C at a dispatch."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from deepinfer_jax.engine.schedule import Schedule


def results_of(text: str, operation: str) -> Counter[tuple[int, ...]]:
    """Shapes of the results of an HLO operation in a compiled program."""
    found = re.findall(rf"= \w+\[([\d,]*)\]\S* {operation}\(", text)
    return Counter(tuple(int(n) for n in shape.split(",") if n) for shape in found)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects an entry for every program that is compiled, or taken from the compile cache, in the block."""
    names: list[str] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(kwargs.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def interrupted_at(dispatch: int) -> Callable:
    """A `Schedule._decode` that is interrupted at its n-th call."""
    decode, calls = Schedule._decode, []

    def interrupted(self: Schedule, state: object) -> object:
        calls.append(1)
        if len(calls) == dispatch:
            raise KeyboardInterrupt
        return decode(self, state)  # type: ignore[arg-type]

    return interrupted
