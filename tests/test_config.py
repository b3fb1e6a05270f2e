"""Configuration: what ships, what is refused, and the plan of the layers."""

import copy
import dataclasses
import json

import jax
import pytest

from deepinfer_jax.cache import abstract_cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.layer_slice import slice_layers
from deepinfer_jax.model.v41 import abstract_params
from deepinfer_jax.numerics import Numerics


@pytest.fixture
def released() -> dict:
    return ModelConfig.named("deepseek_v41_flash").to_dict()


def test_shipped_configurations_survive_a_round_trip_and_are_hashable():
    for name in ("deepseek_v41_flash", "tiny"):
        config = ModelConfig.named(name)
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert hash(config) == hash(ModelConfig.named(name))


def test_the_tiny_configuration_is_that_of_the_tiny_checkpoint(data_dir):
    assert ModelConfig.from_file(data_dir / "v41_tiny") == ModelConfig.named("tiny")


def test_the_released_plan_has_the_published_roles():
    config = ModelConfig.named("deepseek_v41_flash")
    kinds = {kind: [p.index for p in config.layers if p.kind == kind] for kind in ("window", "full", "reindex")}
    assert kinds == {"window": [0, 1], "full": [2, 8, 14, 20], "reindex": [24, 28, 32, 36]}
    assert [p.kv_source for p in config.layers] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [p.index_source for p in config.layers[20:]] == [i for i in (20, 24, 28, 32, 36) for _ in range(4)]
    assert [p.ratio for p in config.layers] == [0] * 2 + [2] * 18 + [1] * 20
    assert [p.index for p in config.layers if p.rope == "plain"] == [0, 1]
    assert {p.index: p.engram for p in config.layers if p.engram is not None} == {1: 0, 14: 1}
    assert {p.index: p.dspark_tap for p in config.layers if p.dspark_tap is not None} == {37: 0, 38: 1, 39: 2}
    assert {p.index: p.candidates for p in config.layers if p.candidates} == {20: "publishes"} | dict.fromkeys(
        (24, 28, 32, 36), "limited"
    )
    assert [p.draft for p in config.draft_stages] == [True] * 3


# One change each, and what the message must name.
BROKEN = [
    (("text_config", "hidden_size", 5121), "text_config.hidden_size: found 5121, expected a positive multiple of 32"),
    (("text_config", "num_key_value_heads", 8), "text_config.num_key_value_heads: found 8, expected 1"),
    (
        ("text_config", "scoring_func", "sigmoid"),
        "text_config.scoring_func: found \"sigmoid\", expected 'sqrtsoftplus'",
    ),
    (("text_config", "vocab_size", "big"), 'text_config.vocab_size: found "big", expected int'),
    (("text_config", "vocab_size", True), "text_config.vocab_size: found true, expected int"),
    (("text_config", "compress_ratios", [0, 0]), "text_config.compress_ratios: 2 entries, expected 40 layers + 3"),
    (("text_config", "kv_source_layer_ids", [3, 8, 14, 20]), "text_config.index_source_layer_ids: KV source 3 is"),
    (("text_config", "kv_source_layer_ids", [8, 2, 14, 20]), "expected ascending, distinct layers in 0..39"),
    (("text_config", "index_source_layer_ids", [2, 8, 14, 20, 99]), "text_config.index_source_layer_ids: found"),
    (("text_config", "candidate_source_layer_id", 21), "candidate_source_layer_id: 21 is not in index_source"),
    (("text_config", "candidate_source_layer_id", 14), "candidate_source_layer_id: 14, but layer 20 starts another"),
    (("text_config", "engram_num_embeddings", [384006168, 5]), "expected [384006168, 384016682] (sums of the primes"),
    (("text_config", "engram_num_embeddings", [1]), "engram_num_embeddings: 1 tables for 2 engram_layer_ids"),
    (("text_config", "num_experts_per_tok", 385), "num_experts_per_tok: 385 of only 384 experts"),
    (("text_config", "o_groups", 7), "o_groups: 7 does not divide num_attention_heads 64"),
    (("text_config", "rope_scaling", {"rope_type": "linear"}), "text_config.rope_scaling.factor: missing"),
    (("text_config", "dspark_noise_token_id", 129280), "dspark_noise_token_id: 129280 is not below vocab_size 129280"),
    (("text_config", "dspark_target_layer_ids", []), "dspark_target_layer_ids: empty, but there are draft stages"),
    (("text_config", "sliding_windw", 128), "text_config.sliding_windw: unknown key with value 128; did you mean"),
    (("text_config", "rms_norm_eps", None), "text_config.rms_norm_eps: found null, expected float"),
    (
        ("quantization_config", "weight_block_size", [128, 128]),
        "quantization_config.weight_block_size: found [128, 128]",
    ),
    (("quantization_config", "expert_dtype", "fp8"), 'quantization_config.expert_dtype: found "fp8", expected'),
    (("vision_config", "num_attention_heads", 5), "vision_config.hidden_size: 1024 is not a multiple of 4 x"),
    (("vision_config", "max_wh_ratio", -1.0), "vision_config.max_wh_ratio: found -1.0, expected a positive number"),
    (("model_type", None, "deepseek_v4"), "model_type: found \"deepseek_v4\", expected 'deepseek_v41'"),
    (("eos_token_id", None, 129280), "eos_token_id: 129280 is not below vocab_size 129280"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[m[:40] for _, m in BROKEN])
def test_a_broken_value_is_refused_by_name(released, change, message):
    section, key, value = change
    if key is None:
        released[section] = value
    else:
        released[section][key] = value
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(released)
    assert message in str(error.value)


def test_all_faults_come_in_one_error(released):
    del released["text_config"]["head_dim"]
    released["text_config"]["hidden_act"] = "gelu"
    released["quantization_config"] = []
    released["unheard_of"] = 1
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(released, source="somewhere/config.json")
    text = str(error.value)
    assert text.startswith("somewhere/config.json is not a supported configuration (4 faults)")
    for part in ("head_dim: missing", "hidden_act", "quantization_config: expected an object", "unheard_of: unknown"):
        assert part in text


def test_unknown_keys_can_be_waved_through_and_harmless_ones_are(released):
    released["transformers_version"] = "5.0"
    released["text_config"]["use_cache"] = True
    assert ModelConfig.from_dict(released) == ModelConfig.named("deepseek_v41_flash")
    released["text_config"]["new_thing"] = 1
    assert ModelConfig.from_dict(released, ignore_unknown=True) == ModelConfig.named("deepseek_v41_flash")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff\xfe", '{"a": ' * 100_000])
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_file(path)
    with pytest.raises(ConfigError, match="there is no such file"):
        ModelConfig.from_file(tmp_path / "other" / "config.json")


def test_a_value_nested_too_deeply_to_print_is_named_all_the_same(released):
    value: list = []
    for _ in range(100_000):
        value = [value]
    released["text_config"]["vocab_size"] = value
    with pytest.raises(ConfigError, match=r"text_config\.vocab_size: found list, expected int"):
        ModelConfig.from_dict(released)


def test_changing_a_configuration_in_code_is_checked_too():
    config = ModelConfig.named("tiny")
    with pytest.raises(ConfigError, match="engram_layer_ids"):
        dataclasses.replace(config, text_config=dataclasses.replace(config.text_config, engram_layer_ids=(9,)))


@pytest.mark.parametrize(("first", "last"), [(0, 39), (2, 7), (3, 5), (13, 21), (24, 24), (25, 29), (37, 39)])
def test_a_slice_of_layers_is_a_model_at_real_width(first, last):
    whole = ModelConfig.named("deepseek_v41_flash")
    part = slice_layers(whole, first, last)
    assert ModelConfig.from_dict(part.to_dict()) == part
    assert [p.ratio for p in part.layers] == [p.ratio for p in whole.layers[first : last + 1]]
    for plan in part.layers:
        assert (plan.kv_source is None) == (plan.ratio == 0)
    assert part.text_config.hidden_size == whole.text_config.hidden_size
    shapes = jax.tree.map(lambda x: x.shape, abstract_params(part)["layers"][0]["ffn"])
    assert shapes == jax.tree.map(lambda x: x.shape, abstract_params(whole)["layers"][first]["ffn"])
    abstract_cache(part, Numerics(), 1, 64)


def test_minus_one_means_no_candidate_pool(released):
    released["text_config"]["candidate_source_layer_id"] = -1
    config = ModelConfig.from_dict(released)
    assert {p.candidates for p in config.layers} == {None}
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_a_slice_outside_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"layers 38\.\.40"):
        slice_layers(ModelConfig.named("deepseek_v41_flash"), 38, 40)


def test_text_only_and_plain_variants_are_valid(released):
    small = copy.deepcopy(released)
    small["vision_config"] = None
    small["text_config"] |= {"num_nextn_predict_layers": 0, "engram_layer_ids": [], "engram_num_embeddings": []}
    small["text_config"]["compress_ratios"] = small["text_config"]["compress_ratios"][:40]
    small["text_config"]["candidate_source_layer_id"] = None
    config = ModelConfig.from_dict(small)
    tree = abstract_params(config)
    assert set(tree) == {"embed", "head", "layers", "vectors"}
