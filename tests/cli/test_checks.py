"""The commands: what they print and how they exit."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from deepinfer_jax.cli import app

runner = CliRunner()


def run(*arguments: object):
    return runner.invoke(app, [str(a) for a in arguments])


def test_help_lists_the_commands():
    text = run("--help").stdout
    assert "inspect" in text and "compare" in text


def test_inspect_prints_plan_counts_and_memory_of_the_released_model(tmp_path):
    from deepinfer_jax.config import ModelConfig

    path = tmp_path / "config.json"
    path.write_text(json.dumps(ModelConfig.named("deepseek_v41_flash").to_dict()))
    result = run("inspect", path, "--devices", 8)
    assert result.exit_code == 0
    for text in ("96,085 tensors, 510,286,023,000 bytes", "890 bytes per token", "each of 8 device(s)", "24"):
        assert text in result.stdout


def test_inspect_finds_what_is_wrong_without_loading(data_dir, tmp_path):
    assert run("inspect", data_dir / "v41_tiny").exit_code == 0
    folder = shutil.copytree(data_dir / "v41_tiny_noengram", tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["n_routed_experts"] = 9
    (folder / "config.json").write_text(json.dumps(config))
    result = run("inspect", folder)
    assert result.exit_code == 1
    assert "layers.0.ffn.experts.8.w1.weight: missing" in result.stdout
    everything = run("inspect", folder, "--all-faults").stdout
    assert everything.count("fault") > 50 > result.stdout.count("layers.5")
    (folder / "model.safetensors").write_bytes(b"123")
    assert run("inspect", folder).exit_code == 1
    (folder / "config.json").unlink()
    assert run("inspect", folder).exit_code == 2


@pytest.mark.slow
def test_compare_prints_a_table_and_its_exit_code_is_the_verdict(data_dir, tmp_path):
    result = run("compare", data_dir / "v41_tiny_noengram", "--tag", "fp32", "--chunk", 16)
    assert result.exit_code == 0, result.stdout
    for text in ("logits", "features", "draft logits", "confidence", "ok", "fp32: all <= 0.0001"):
        assert text in result.stdout
    result = run("compare", data_dir / "v41_tiny_noengram", "--tag", "fp32", "--chunk", 16, "--tolerance", 1e-9)
    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout and "row 0 pos 0" in result.stdout


def test_compare_exits_with_2_on_bad_input(data_dir, tmp_path):
    assert run("compare", tmp_path).exit_code == 2
    assert run("compare", data_dir / "v41_tiny", "--tag", "fp8").exit_code == 2


def test_devices_says_what_can_be_used_and_why_not(monkeypatch):
    facts = json.loads(run("devices", "--json").stdout)
    assert facts["devices"][0]["platform"] == "cpu"
    reasons = {(row["op"], row["backend"]): row["why_not"] for row in facts["kernels"]}
    assert reasons["linear", "reference"] is None
    assert "linear has no cuda kernel" in reasons["linear", "cuda"] or "CUDA" in reasons["linear", "cuda"]
    monkeypatch.setattr("deepinfer_jax.ops.custom_call.unavailable", lambda backend, op=None: f"no {backend} here")
    text = " ".join(run("devices").stdout.split())
    assert "no: no cpu here" in text


def test_kernels_that_are_not_there_are_bad_input(data_dir):
    result = run("generate", data_dir / "v41_tiny", "x", "--kernels", "cuda")
    assert result.exit_code == 2
    assert "--kernels cuda:" in result.stderr
    result = run("generate", data_dir / "v41_tiny", "x", "--kernels", "tpu")
    assert result.exit_code == 2 and "expected one of reference, cpu, cuda" in result.stderr
