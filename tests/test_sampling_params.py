"""SamplingParams are checked when they are made."""

import json
import math

import pytest

from deepinfer_jax import DeepInferError, SamplingParams
from deepinfer_jax.sampling_params import MAX_LOGPROBS


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -0.1}, "temperature: found -0.1, expected a number of at least 0"),
        ({"temperature": math.nan}, "temperature: found nan"),
        ({"temperature": math.inf}, "temperature: found inf"),
        ({"temperature": "1"}, "temperature: found '1'"),
        ({"top_p": 0}, "top_p: found 0, expected a number above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p: found 1.01"),
        ({"top_k": -1}, "top_k: found -1, expected a whole number of at least 0"),
        ({"top_k": 1.5}, "top_k: found 1.5"),
        ({"top_k": True}, "top_k: found True"),
        ({"min_p": 1.5}, "min_p: found 1.5, expected a number of at least 0 and at most 1"),
        ({"n": 0}, "n: found 0, expected a whole number from 1 to"),
        ({"seed": -1}, "seed: found -1"),
        ({"seed": 2**64}, "seed: found 18446744073709551616, expected a whole number from 0 to 18446744073709551615"),
        ({"max_tokens": 0}, "max_tokens: found 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: found 9, expected at most max_tokens 8"),
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs: found 1025, expected a whole number from 0 to 1024"),
        ({"stop": ("a", "")}, "stop: found ('a', ''), expected strings that are not empty"),
        ({"stop": 3}, "stop: found 3"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids: found -1"),
        ({"stop_token_ids": 3}, "stop_token_ids: found 3, expected token ids"),
        ({"ignore_eos": 1}, "ignore_eos: found 1, expected True or False"),
    ],
)
def test_a_value_out_of_range_is_named(values, said):
    with pytest.raises(DeepInferError) as error:
        SamplingParams(**values)
    assert said in str(error.value)


def test_all_faults_are_reported_together():
    with pytest.raises(DeepInferError) as error:
        SamplingParams(temperature=-1, top_p=2, n=0, min_p=-1)
    assert [fault.split(":")[0] for fault in error.value.faults] == ["n", "temperature", "top_p", "min_p"]


def test_values_survive_json():
    params = SamplingParams(n=3, temperature=0.7, seed=2**63 + 5, stop=["x", "yz"], stop_token_ids=[5], logprobs=0)
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
    assert SamplingParams(stop="end").stop == ("end",)


def test_an_unknown_field_gets_a_suggestion():
    with pytest.raises(DeepInferError, match="topp: unknown, did you mean top_p"):
        SamplingParams.from_dict({"topp": 0.5})
