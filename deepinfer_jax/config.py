"""ModelConfig: `config.json` of DeepSeek-V4.1-Flash, checked and frozen.

The classes have the nesting and the field names of the file. Reading reports every fault of a file at once;
nothing that this engine would compute differently is accepted.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from deepinfer_jax import engram_hash
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.layer_plan import LayerPlan, plan_draft_stages, plan_faults, plan_layers

QUANT_GROUP = 32
"""Channels that share a scale in every quantised matrix and in every quantised linear input."""

# Keys that Hugging Face tools add and that change nothing here.
_HARMLESS = frozenset(
    (
        *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
        *("attention_dropout", "initializer_range", "use_cache"),
    )
)

Rule = Callable[[Any], str | None]


def _at_least(low: float) -> Rule:
    return lambda v: None if v >= low else f"at least {low}"


def _exactly(value: Any) -> Rule:
    return lambda v: None if v == value else f"{value!r} (nothing else is supported)"


def _groups(v: int) -> str | None:
    return None if v > 0 and v % QUANT_GROUP == 0 else f"a positive multiple of {QUANT_GROUP}, the quantisation group"


def _even(v: int) -> str | None:
    return None if v > 0 and v % 2 == 0 else "a positive even number"


def _all_at_least(low: int) -> Rule:
    return lambda v: None if all(x >= low for x in v) else f"entries of at least {low}"


def _f(rule: Rule | None = None, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"rule": rule})


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """`quantization_config`: FP8 matrices with 32 x 32 scales, FP4 routed experts."""

    quant_method: str = _f(_exactly("fp8"))
    activation_scheme: str = _f(_exactly("dynamic"))
    weight_block_size: tuple[int, ...] = _f(_exactly((QUANT_GROUP, QUANT_GROUP)))
    scale_fmt: str = _f(_exactly("ue8m0"))
    expert_dtype: str = _f(_exactly("fp4"))


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """`rope_scaling`: YaRN for the compressed layers."""

    rope_type: str = _f(_exactly("yarn"))
    factor: float = _f(_at_least(1))
    beta_fast: float = _f(_at_least(0))
    beta_slow: float = _f(_at_least(0))
    original_max_position_embeddings: int = _f(_at_least(1))


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """`text_config`. Sizes are counts of channels, heads, experts or tokens."""

    vocab_size: int = _f(_at_least(1))
    hidden_size: int = _f(_groups)
    moe_intermediate_size: int = _f(_groups)
    num_hidden_layers: int = _f(_at_least(1))
    num_attention_heads: int = _f(_at_least(1))
    num_key_value_heads: int = _f(_exactly(1))
    head_dim: int = _f(_groups)
    qk_rope_head_dim: int = _f(_even)
    q_lora_rank: int = _f(_groups)
    o_lora_rank: int = _f(_at_least(1))
    o_groups: int = _f(_at_least(1))
    max_position_embeddings: int = _f(_at_least(1))
    rms_norm_eps: float = _f(_at_least(0))
    rope_theta: float = _f(_at_least(1))
    compress_rope_theta: float = _f(_at_least(1))
    rope_scaling: RopeScaling = _f()

    n_routed_experts: int = _f(_at_least(1))
    n_shared_experts: int = _f(_exactly(1))
    num_experts_per_tok: int = _f(_at_least(1))
    scoring_func: str = _f(_exactly("sqrtsoftplus"))
    topk_method: str = _f(_exactly("noaux_tc"))
    norm_topk_prob: bool = _f(_exactly(True))
    routed_scaling_factor: float = _f(_at_least(0))
    swiglu_limit: float = _f(_at_least(0))
    hidden_act: str = _f(_exactly("silu"))

    sliding_window: int = _f(_at_least(1))
    compress_ratios: tuple[int, ...] = _f(_all_at_least(0))
    kv_source_layer_ids: tuple[int, ...] = _f()
    index_source_layer_ids: tuple[int, ...] = _f()
    index_n_heads: int = _f(_at_least(1))
    index_head_dim: int = _f(_groups)
    index_topk: int = _f(_at_least(1))
    candidate_source_layer_id: int | None = _f(None, None)
    candidate_topk_blocks: int = _f(_at_least(1), 1)
    candidate_block_size: int = _f(_at_least(1), 1)

    hc_mult: int = _f(_at_least(1))
    hc_sinkhorn_iters: int = _f(_at_least(1))
    hc_eps: float = _f(_at_least(0))

    engram_layer_ids: tuple[int, ...] = _f(None, ())
    engram_num_embeddings: tuple[int, ...] = _f(None, ())
    engram_max_ngram_size: int = _f(_at_least(2), 4)
    engram_n_heads: int = _f(_at_least(1), 8)
    engram_head_dim: int = _f(_groups, 256)
    engram_vocab_size: int = _f(_at_least(2), 16_000_000)
    engram_pad_token_id: int = _f(_at_least(0), 2)
    engram_compressed_vocab_size: int = _f(_at_least(1), 1)

    num_nextn_predict_layers: int = _f(_at_least(0), 0)
    dspark_block_size: int = _f(_at_least(1), 1)
    dspark_noise_token_id: int = _f(_at_least(0), 0)
    dspark_target_layer_ids: tuple[int, ...] = _f(None, ())
    dspark_markov_rank: int = _f(_at_least(1), 1)
    dspark_n_routed_experts: int = _f(_at_least(1), 1)
    dspark_num_experts_per_tok: int = _f(_at_least(1), 1)

    model_type: str = _f(_exactly("deepseek_v41_text"), "deepseek_v41_text")
    attention_bias: bool = _f(_exactly(False), False)
    tie_word_embeddings: bool = _f(_exactly(False), False)

    def __post_init__(self):
        # Both null and -1 are written where there is no candidate pool.
        if self.candidate_source_layer_id == -1:
            object.__setattr__(self, "candidate_source_layer_id", None)

    @property
    def engram_columns(self) -> int:
        """Table rows looked up per token and Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """`vision_config`: the tower, the aligner and the limits of image preprocessing."""

    num_hidden_layers: int = _f(_at_least(1))
    hidden_size: int = _f(_at_least(1))
    num_attention_heads: int = _f(_at_least(1))
    intermediate_size: int = _f(_at_least(1))
    patch_size: int = _f(_at_least(1))
    rope_theta: float = _f(_at_least(1))
    downsample_ratio: int = _f(_at_least(1))
    max_image_tokens: int = _f(_at_least(4))
    min_pixels: int = _f(_at_least(1))
    max_wh_ratio: float | None = _f(None, None)
    model_type: str = _f(_exactly("deepseek_v41_vision"), "deepseek_v41_vision")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole `config.json`. Frozen and hashable, so that it can be a static argument of `jax.jit`.

    `vision_config` is None for a text-only checkpoint.
    """

    text_config: TextConfig
    quantization_config: QuantizationConfig
    vision_config: VisionConfig | None = _f(None, None)
    bos_token_id: int = _f(_at_least(0))
    eos_token_id: int = _f(_at_least(0))
    pad_token_id: int = _f(_at_least(0))
    image_token_id: int | None = _f(None, None)
    model_type: str = _f(_exactly("deepseek_v41"), "deepseek_v41")

    def __post_init__(self):
        faults = _consistency_faults(self)
        if faults:
            raise ConfigError("inconsistent configuration", faults)

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, source: str = "config", ignore_unknown: bool = False) -> ModelConfig:
        """Check a parsed `config.json`.

        Args:
            data: The parsed file.
            source: What to call it in an error.
            ignore_unknown: Accept keys that this engine does not know. They may change the model.

        Raises:
            ConfigError: With every fault: missing, unknown, mistyped, unsupported and inconsistent values.
        """
        faults: list[str] = []
        values = _read(cls, data, "", faults, ignore_unknown)
        if values is None or faults:
            raise ConfigError(f"{source} is not a supported configuration", faults)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source} is not a supported configuration", error.faults) from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, ignore_unknown: bool = False) -> ModelConfig:
        """Read `config.json`, or the one in a checkpoint directory. Raises ConfigError."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such file") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: not a readable JSON file: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a JSON object, found {type(data).__name__}")
        return cls.from_dict(data, source=str(path), ignore_unknown=ignore_unknown)

    @classmethod
    def named(cls, name: str) -> ModelConfig:
        """A configuration that ships with the package: `deepseek_v41_flash` (as released) or `tiny`."""
        folder = resources.files("deepinfer_jax") / "configs"
        file = folder / f"{name}.json"
        if not file.is_file():
            known = sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
            raise ConfigError(f"no configuration is named {name!r}; there are {', '.join(known)}")
        return cls.from_dict(json.loads(file.read_text(encoding="utf-8")), source=name)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `from_dict` reads back."""
        data = json.loads(json.dumps(dataclasses.asdict(self)))
        return {"architectures": ["DeepseekV41ForCausalLM"], "dtype": "bfloat16"} | data

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The plan of each main layer."""
        return _plans(self.text_config)[0]

    @property
    def draft_stages(self) -> tuple[LayerPlan, ...]:
        """The plan of each DSpark stage."""
        return _plans(self.text_config)[1]

    @property
    def kv_sources(self) -> tuple[LayerPlan, ...]:
        """The layers that own compressed KV."""
        return tuple(p for p in self.layers if p.owns_kv)

    @property
    def token_map_size(self) -> int:
        """Entries of the compressed token map; 0 without Engram."""
        return self.text_config.vocab_size if self.text_config.engram_layer_ids else 0


@functools.lru_cache(maxsize=64)
def _plans(text: TextConfig) -> tuple[tuple[LayerPlan, ...], tuple[LayerPlan, ...]]:
    return plan_layers(text), plan_draft_stages(text)


# ------------------------------------------------------------------------------------------- reading


def _read(cls: type, data: Any, where: str, faults: list[str], ignore_unknown: bool) -> dict[str, Any] | None:
    """Values for the fields of a configuration class; every fault is added to `faults`."""
    if not isinstance(data, dict):
        faults.append(f"{where.rstrip('.') or 'top level'}: expected an object, found {_show(data)}")
        return None
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for name, field in fields.items():
        if name not in data:
            if field.default is dataclasses.MISSING:
                faults.append(f"{where}{name}: missing")
            continue
        before = len(faults)
        value = _convert(hints[name], data[name], f"{where}{name}", faults, ignore_unknown)
        rule = field.metadata.get("rule")
        if len(faults) == before:
            expected = rule(value) if rule and value is not None else None
            if expected:
                faults.append(f"{where}{name}: found {_show(data[name])}, expected {expected}")
            values[name] = value
    for name in data.keys() - fields.keys() - _HARMLESS:
        if not ignore_unknown:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            faults.append(f"{where}{name}: unknown key with value {_show(data[name])}{hint}")
    return values


def _convert(hint: Any, value: Any, where: str, faults: list[str], ignore_unknown: bool) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(a for a in typing.get_args(hint) if a is not types.NoneType)
    if dataclasses.is_dataclass(hint):
        before = len(faults)
        values = _read(typing.cast(type, hint), value, f"{where}.", faults, ignore_unknown)
        return typing.cast(type, hint)(**values) if values is not None and len(faults) == before else None
    if typing.get_origin(hint) is tuple:
        if isinstance(value, list) and all(type(v) is int for v in value):
            return tuple(value)
        faults.append(f"{where}: found {_show(value)}, expected a list of integers")
        return None
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint or (hint is float and value != value):
        faults.append(f"{where}: found {_show(value)}, expected {hint.__name__}")
        return None
    return value


def _show(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


# -------------------------------------------------------------------------------------- consistency


def _consistency_faults(config: ModelConfig) -> list[str]:
    t = config.text_config
    checks = [
        (t.qk_rope_head_dim <= min(t.head_dim, t.index_head_dim),
         f"text_config.qk_rope_head_dim: {t.qk_rope_head_dim} exceeds head_dim {t.head_dim} or "
         f"index_head_dim {t.index_head_dim}"),
        (t.num_attention_heads % t.o_groups == 0,
         f"text_config.o_groups: {t.o_groups} does not divide num_attention_heads {t.num_attention_heads}"),
        (t.o_groups * t.o_lora_rank % QUANT_GROUP == 0,
         f"text_config.o_lora_rank: o_groups x o_lora_rank = {t.o_groups * t.o_lora_rank}, expected a multiple "
         f"of {QUANT_GROUP}"),
        (t.num_experts_per_tok <= t.n_routed_experts,
         f"text_config.num_experts_per_tok: {t.num_experts_per_tok} of only {t.n_routed_experts} experts"),
        (t.dspark_num_experts_per_tok <= t.dspark_n_routed_experts,
         f"text_config.dspark_num_experts_per_tok: {t.dspark_num_experts_per_tok} of only "
         f"{t.dspark_n_routed_experts} experts"),
        (t.rope_scaling.beta_fast > t.rope_scaling.beta_slow,
         f"text_config.rope_scaling.beta_fast: {t.rope_scaling.beta_fast} is not above beta_slow "
         f"{t.rope_scaling.beta_slow}"),
    ]  # fmt: skip
    faults = [text for holds, text in checks if not holds]
    faults += _token_faults(config) + _engram_faults(t) + plan_faults(t)
    return faults + (_vision_faults(config) if config.vision_config else [])


def _token_faults(config: ModelConfig) -> list[str]:
    t = config.text_config
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "image_token_id": config.image_token_id,
        "text_config.dspark_noise_token_id": t.dspark_noise_token_id,
        "text_config.engram_pad_token_id": t.engram_pad_token_id if t.engram_layer_ids else None,
    }
    return [
        f"{name}: {token} is not below vocab_size {t.vocab_size}"
        for name, token in ids.items()
        if token is not None and not 0 <= token < t.vocab_size
    ]


def _engram_faults(t: TextConfig) -> list[str]:
    if len(t.engram_num_embeddings) != len(t.engram_layer_ids):
        return [
            f"text_config.engram_num_embeddings: {len(t.engram_num_embeddings)} tables for "
            f"{len(t.engram_layer_ids)} engram_layer_ids"
        ]
    if not t.engram_layer_ids:
        return []
    if t.engram_compressed_vocab_size > t.vocab_size:
        return [
            f"text_config.engram_compressed_vocab_size: {t.engram_compressed_vocab_size} exceeds vocab_size "
            f"{t.vocab_size}"
        ]
    if t.engram_vocab_size > 2**30:
        return [f"text_config.engram_vocab_size: {t.engram_vocab_size}, expected at most 2^30"]
    rows = tuple(sum(p) for p in engram_primes(t))
    if rows != t.engram_num_embeddings:
        return [
            f"text_config.engram_num_embeddings: found {list(t.engram_num_embeddings)}, expected {list(rows)} "
            f"(sums of the primes from {t.engram_vocab_size})"
        ]
    return []


def engram_primes(t: TextConfig) -> tuple[tuple[int, ...], ...]:
    """Per Engram layer, the table size of each of its columns (`engram_hash.primes`)."""
    return engram_hash.primes(t.engram_layer_ids, t.engram_max_ngram_size, t.engram_n_heads, t.engram_vocab_size)


def _vision_faults(config: ModelConfig) -> list[str]:
    v = config.vision_config
    assert v is not None
    faults = []
    if v.hidden_size % (4 * v.num_attention_heads):
        faults.append(
            f"vision_config.hidden_size: {v.hidden_size} is not a multiple of 4 x num_attention_heads "
            f"{v.num_attention_heads} (2-D RoPE rotates quarters of a head)"
        )
    if config.image_token_id is None:
        faults.append("image_token_id: missing, but there is a vision_config")
    if v.max_wh_ratio is not None and v.max_wh_ratio <= 0:
        faults.append(f"vision_config.max_wh_ratio: found {v.max_wh_ratio}, expected a positive number or null")
    return faults
