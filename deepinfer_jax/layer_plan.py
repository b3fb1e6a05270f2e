"""LayerPlan: what each layer owns and what it reads.

The only place that turns the lists of `config.json` (`compress_ratios`, `kv_source_layer_ids`, ...) into
roles. Everything else asks the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from deepinfer_jax.config import TextConfig

Kind = Literal["window", "full", "reindex", "reuse"]


@dataclass(frozen=True)
class LayerPlan:
    """The role of one layer.

    Attributes:
        index: Position in the stack; draft stages are numbered after the layers.
        kind: `window`: sliding window only. `full`: owns compressor, indexer, index keys and compressed
            KV. `reindex`: owns an indexer and scores the source's keys anew. `reuse`: reads the source's
            compressed KV through the last selection.
        ratio: Tokens per compressed entry; 0 for `window`.
        kv_source: The `full` layer whose compressed KV is read (itself for `full`), or None.
        index_source: The layer whose selection is read (itself for `full` and `reindex`), or None.
        candidates: `publishes`: its block scores make the candidate pool. `limited`: its indexer chooses
            inside that pool. None: no part in it.
        rope: `plain` (theta `rope_theta`) or `yarn` (theta `compress_rope_theta`, YaRN).
        engram: Ordinal among the Engram layers, or None.
        dspark_tap: Ordinal among the layers whose entering stream feeds the drafter, or None.
        draft: True for a DSpark stage (`mtp.*` in the checkpoint).
    """

    index: int
    kind: Kind
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidates: Literal["publishes", "limited"] | None
    rope: Literal["plain", "yarn"]
    engram: int | None
    dspark_tap: int | None
    draft: bool = False

    @property
    def owns_kv(self) -> bool:
        """Whether the layer makes compressed KV and index keys."""
        return self.kind == "full"

    @property
    def owns_indexer(self) -> bool:
        """Whether the layer selects entries itself."""
        return self.kind in ("full", "reindex")

    def describe(self) -> str:
        """The plan in one plain sentence."""
        if self.kind == "window":
            text = "draft stage, window only" if self.draft else "window only"
        elif self.kind == "full":
            text = f"full: compresses {self.ratio}:1, indexes and keeps its own keys"
        elif self.kind == "reindex":
            text = f"re-index: selects anew among the entries of layer {self.kv_source}"
        else:
            text = f"re-use: entries of layer {self.kv_source}, selection of layer {self.index_source}"
        if self.candidates == "publishes":
            text += "; publishes the candidate pool"
        elif self.candidates == "limited":
            text += "; chooses inside the candidate pool"
        if self.engram is not None:
            text += f"; Engram {self.engram}"
        if self.dspark_tap is not None:
            text += f"; DSpark tap {self.dspark_tap}"
        return f"{text}; {self.rope} RoPE"


def plan_layers(text: TextConfig) -> tuple[LayerPlan, ...]:
    """Roles of the main layers, in order. Expects lists that `plan_faults` has passed."""
    kv_source = index_source = None
    plans = []
    for i in range(text.num_hidden_layers):
        ratio = text.compress_ratios[i]
        if i in text.kv_source_layer_ids:
            kv_source = i
        if i in text.index_source_layer_ids:
            index_source = i
        plans.append(
            LayerPlan(
                index=i,
                kind=_kind(text, i),
                ratio=ratio,
                kv_source=kv_source if ratio else None,
                index_source=index_source if ratio else None,
                candidates=_candidates(text, i),
                rope="yarn" if ratio else "plain",
                engram=_ordinal(text.engram_layer_ids, i),
                dspark_tap=_ordinal(text.dspark_target_layer_ids, i) if text.num_nextn_predict_layers else None,
            )
        )
    return tuple(plans)


def plan_draft_stages(text: TextConfig) -> tuple[LayerPlan, ...]:
    """Roles of the DSpark stages: all are window layers with plain RoPE."""
    first = text.num_hidden_layers
    return tuple(
        LayerPlan(first + m, "window", 0, None, None, None, "plain", None, None, draft=True)
        for m in range(text.num_nextn_predict_layers)
    )


def plan_faults(text: TextConfig) -> list[str]:
    """Everything that keeps the lists of a `text_config` from being a consistent plan."""
    layers, drafts = text.num_hidden_layers, text.num_nextn_predict_layers
    faults = []
    if len(text.compress_ratios) != layers + drafts:
        faults.append(
            f"text_config.compress_ratios: {len(text.compress_ratios)} entries, expected "
            f"{layers} layers + {drafts} draft stages = {layers + drafts}"
        )
        return faults
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(text, name)
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < layers for i in ids):
            faults.append(
                f"text_config.{name}: found {list(ids)}, expected ascending, distinct layers in 0..{layers - 1}"
            )
    if faults:
        return faults
    for m, ratio in enumerate(text.compress_ratios[layers:]):
        if ratio != 0:
            faults.append(f"text_config.compress_ratios[{layers + m}]: draft stage {m} has {ratio}, expected 0")
    if drafts and not text.dspark_target_layer_ids:
        faults.append("text_config.dspark_target_layer_ids: empty, but there are draft stages")
    return faults + _source_faults(text) + _candidate_faults(text)


def _source_faults(text: TextConfig) -> list[str]:
    faults = []
    for i in text.kv_source_layer_ids:
        if i not in text.index_source_layer_ids:
            faults.append(
                f"text_config.index_source_layer_ids: KV source {i} is missing (its selection would be stale)"
            )
    source = None
    for i, ratio in enumerate(text.compress_ratios[: text.num_hidden_layers]):
        if i in text.kv_source_layer_ids:
            source = i
            if ratio == 0:
                faults.append(f"text_config.compress_ratios[{i}]: 0, but layer {i} is a KV source")
        elif ratio == 0:
            if i in text.index_source_layer_ids:
                faults.append(f"text_config.compress_ratios[{i}]: 0, but layer {i} is an index source")
        elif source is None:
            faults.append(f"text_config.compress_ratios[{i}]: {ratio}, but no KV source stands at or before layer {i}")
        elif ratio != text.compress_ratios[source]:
            faults.append(
                f"text_config.compress_ratios[{i}]: {ratio}, but its KV source {source} compresses "
                f"{text.compress_ratios[source]}:1"
            )
    return faults


def _candidate_faults(text: TextConfig) -> list[str]:
    source = text.candidate_source_layer_id
    if source is None:
        return []
    if source not in text.index_source_layer_ids:
        return [f"text_config.candidate_source_layer_id: {source} is not in index_source_layer_ids"]
    later = [i for i in text.kv_source_layer_ids if i > source]
    if later:
        return [
            f"text_config.candidate_source_layer_id: {source}, but layer {later[0]} starts another KV cache "
            "that its pool does not describe"
        ]
    return []


def _kind(text: TextConfig, i: int) -> Kind:
    if text.compress_ratios[i] == 0:
        return "window"
    if i in text.kv_source_layer_ids:
        return "full"
    return "reindex" if i in text.index_source_layer_ids else "reuse"


def _candidates(text: TextConfig, i: int) -> Literal["publishes", "limited"] | None:
    source = text.candidate_source_layer_id
    if source is None or i < source or i not in text.index_source_layer_ids:
        return None
    return "publishes" if i == source else "limited"


def _ordinal(ids: tuple[int, ...], i: int) -> int | None:
    return ids.index(i) if i in ids else None
