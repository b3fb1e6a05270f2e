"""The mesh, and what is split over which of its axes.

Two axes over the same devices. Slots (sequences with their caches) are split over `data`; along `expert` they are
repeated, or split as well when there are enough of them, so that no device does another's attention again. Routed
experts and Engram tables are split over both axes; every other weight is on each device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.errors import InputError
from deepinfer_jax.formats import QuantizedTensor
from deepinfer_jax.ops.exchange import Exchange

AXES = ("data", "expert")

Path = tuple[str | int, ...]


def make_mesh(data: int = 1, expert: int = 1) -> Mesh:
    """A mesh of data x expert devices. Raises InputError when JAX has fewer."""
    if data < 1 or expert < 1:
        raise InputError(f"mesh: found data {data} x expert {expert}, expected at least 1 each")
    devices = jax.devices()
    if data * expert > len(devices):
        raise InputError(
            f"mesh: data {data} x expert {expert} needs {data * expert} devices, JAX has {len(devices)} "
            f"({devices[0].platform})"
        )
    # Automatic axes: outside the shard_map nothing is sharded by hand.
    return jax.make_mesh((data, expert), AXES, (AxisType.Auto,) * 2, devices=devices[: data * expert])


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and the axes that split slots. Static.

    Attributes:
        mesh: Of `make_mesh`.
        slot_axes: (`data`,), or both axes.
    """

    mesh: Mesh
    slot_axes: tuple[str, ...] = AXES

    @classmethod
    def of(cls, mesh: Mesh, slots: int) -> Layout:
        """Slots over both axes where their number allows it, else over `data`. Raises InputError if neither does."""
        if slots % mesh.size == 0:
            return cls(mesh, AXES)
        if slots % mesh.shape["data"]:
            raise InputError(
                f"{slots} slots do not divide over data {mesh.shape['data']}: expected a multiple of it (best one of "
                f"all {mesh.size} devices)"
            )
        return cls(mesh, ("data",))

    @property
    def shards(self) -> int:
        """Parts that the slots are split into."""
        return self.mesh.size if self.slot_axes == AXES else self.mesh.shape["data"]

    @property
    def exchange(self) -> Exchange:
        """What `forward` is told; axes of one device are left out, so that one device exchanges nothing."""
        shape = self.mesh.shape
        return Exchange(
            tuple(a for a in self.slot_axes if shape[a] > 1),
            tuple(a for a in AXES if shape[a] > 1),
        )

    @property
    def rows(self) -> P:
        """Spec of arrays whose leading axis is slots, rows of a batch or pages: each device has its own."""
        return P(self.slot_axes)

    def spmd(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`f`, written for one device's share, over the whole mesh."""
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def put_rows(self, tree: Any) -> Any:
        """Host arrays onto the mesh, split along their leading axis."""
        return jax.device_put(tree, NamedSharding(self.mesh, self.rows))


def is_split(path: Path) -> bool:
    """Whether a weight is split along its leading axis: routed experts and Engram tables."""
    return path[-2:] in (("ffn", "w13"), ("ffn", "w2"), ("engram", "embed"))


def param_specs(params: Any, devices: int) -> Any:
    """Specs of a weight tree (of arrays or of shapes).

    A stage with fewer experts than devices (a small drafter) is held by each device whole.

    Raises:
        InputError: With every leaf whose leading axis does not divide over the devices.
    """
    faults: list[str] = []

    def one(keys: Any, leaf: Any) -> P:
        path = tuple(k.key for k in keys)
        length = (leaf.record if isinstance(leaf, QuantizedTensor) else leaf).shape[0]
        if not is_split(path) or length < devices:
            return P()
        if length % devices:
            what = "table rows" if path[-1] == "embed" else "experts"
            faults.append(f"{'.'.join(map(str, path))}: {length} {what}")
        return P(AXES)

    specs = jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, QuantizedTensor))
    if faults:
        raise InputError(f"weights that do not divide over {devices} devices", faults)
    return specs


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """Shardings of a weight tree: what `load(shardings=...)` takes. `params` may be `abstract_params(config)`."""
    return jax.tree.map(
        functools.partial(NamedSharding, mesh), param_specs(params, mesh.size), is_leaf=lambda x: isinstance(x, P)
    )
