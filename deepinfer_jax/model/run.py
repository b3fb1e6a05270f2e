"""Run: how one call is computed, handed down to every module, and the intermediates that a caller asked for."""

from __future__ import annotations

import dataclasses
import fnmatch

import jax

from deepinfer_jax.errors import InputError
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.exchange import LOCAL, Exchange


@dataclasses.dataclass(frozen=True)
class Run:
    """Static settings of a call and its taps. Exists at trace time only.

    Attributes:
        numerics: Which roundings apply.
        exchange: How the devices of a mesh share rows.
        taps: Patterns of `fnmatch` over the names of intermediates.
        prefix: Where in the model we are; names are prefix + name.
        found: Intermediates by full name, filled while the model is traced.
        names: Every name that came by.
    """

    numerics: Numerics
    exchange: Exchange = LOCAL
    taps: tuple[str, ...] = ()
    prefix: str = ""
    found: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    names: list[str] = dataclasses.field(default_factory=list)

    def at(self, place: str) -> Run:
        """The same run one level down: names get `place.` in front."""
        return dataclasses.replace(self, prefix=f"{self.prefix}{place}.")

    def tap(self, name: str, value: jax.Array) -> None:
        """Offer an intermediate. It is kept when a pattern asks for it, and costs nothing otherwise."""
        name = self.prefix + name
        self.names.append(name)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.taps):
            self.found[name] = value

    def tapped(self) -> dict[str, jax.Array]:
        """What was asked for. Raises InputError for patterns that no intermediate matches."""
        missing = [p for p in self.taps if not any(fnmatch.fnmatchcase(name, p) for name in self.names)]
        if missing:
            raise InputError(
                f"taps: nothing is called {', '.join(map(repr, missing))}; the intermediates are "
                f"{', '.join(self.names[:40])}{', ...' if len(self.names) > 40 else ''}"
            )
        return self.found
