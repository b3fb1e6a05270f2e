# mlx and mlx-vlm are in the venv that bench_cpu.py makes, not in this project's.
# pyright: reportMissingImports=false
"""The other side of bench_cpu.py: decodes a checkpoint with mlx-vlm on the CPU. Runs in mlx-vlm's own venv.

    python scripts/_bench_mlx.py CHECKPOINT

Speaks JSON, one object a line. First it prints what it is; then for each request on stdin, {"numerics", "prompts"
(token ids), "new", "chunk"}, it generates greedily and prints {"first", "whole", "ids"}: seconds to the first token
of all prompts and to the last, and the tokens. End of input ends it. One prompt goes through `generate_step`, several
through `BatchGenerator`; that is what mlx-vlm's own `generate` and `batch_generate` call once text has become token
ids. `chunk` is its `prefill_step_size`.

What `mlx_vlm.models.deepseek_v41` does: FP8 and FP4 matrices become bfloat16 when it loads them (`sanitize`), only
Engram's tables stay packed; inputs of linears and all cached rows go through FP8 or FP4 unless `fakequant.DISABLE` is
set; float32 throughout takes `set_dtype`. Attention runs prompt by prompt in a batch, everything else together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

# mlx-vlm makes its stream for the default device when it is imported.
mx.set_default_device(mx.cpu)

from mlx_vlm.generate import BatchGenerator, generate_step, generation_stream  # noqa: E402
from mlx_vlm.models.deepseek_v41 import fakequant  # noqa: E402
from mlx_vlm.models.switch_layers import SwitchLinear  # noqa: E402
from mlx_vlm.utils import load_model  # noqa: E402

NUMERICS = {
    # name: (activations and weights, whether activations and caches go through FP8 and FP4)
    "released": (mx.bfloat16, True),
    "bf16": (mx.bfloat16, False),
    "fp32_all": (mx.float32, True),
    "fp32": (mx.float32, False),
}
IMAGE_VECTORS = ("image_start", "image_end", "image_newline")
INDEX = "model.safetensors.index.json"


class NeverStops:
    """What `BatchGenerator` needs of a tokenizer, without any end-of-sequence id."""

    def __init__(self):
        self.stopping_criteria = self

    def add_eos_token_ids(self, ids: Any) -> None:
        """Nothing is added."""

    def __call__(self, token: int) -> bool:
        return False


def adapt(source: Path, target: Path) -> list[str]:
    """Copy a checkpoint to where mlx-vlm may load it, changed as little as it takes; returns what was changed.

    A copy also because mlx-vlm rewrites the headers of files in place whose dtypes its mlx does not know.
    """
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    changes = []
    if config.get("image_token_id", -1) is None:
        config["image_token_id"] = config["text_config"]["vocab_size"]
        changes.append("image_token_id null -> an id past the vocabulary (every token is compared with it)")
        (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    index = json.loads((target / INDEX).read_text(encoding="utf-8"))
    missing = [name for name in IMAGE_VECTORS if name not in index["weight_map"]]
    if missing:
        width = config["text_config"]["hidden_size"]
        file = "image_vectors.safetensors"
        mx.save_safetensors(str(target / file), {name: mx.zeros((width,), mx.bfloat16) for name in missing})
        index["weight_map"] |= dict.fromkeys(missing, file)
        (target / INDEX).write_text(json.dumps(index), encoding="utf-8")
        changes.append(f"zeros added for {', '.join(missing)} (demanded without vision too)")
    return changes


def experts_in_float32() -> str:
    """Let the experts' matrix products take and give bfloat16 but run in float32, where mlx has one on the CPU.

    The products of bfloat16 values are exact in float32, so this is a bfloat16 product with float32 sums.
    """
    product = SwitchLinear.__call__

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return product(self, x.astype(mx.float32), *args, **kwargs).astype(x.dtype)

    SwitchLinear.__call__ = call
    return (
        "bfloat16 modes: the experts' products run in float32 (mlx has no other on a CPU), results rounded to bfloat16"
    )


@dataclasses.dataclass
class Engine:
    """Models of one checkpoint, loaded when first asked for."""

    path: Path

    def __post_init__(self):
        self.model = functools.cache(self._load)

    def _load(self, dtype: Any) -> Any:
        model = load_model(self.path)
        if dtype == mx.bfloat16:
            for layer in model.layers:
                layer.ffn.switch_mlp.set_dtype(mx.float32)
        else:
            model.set_dtype(dtype)
        mx.eval(model.parameters())
        return model

    def answer(self, numerics: str, prompts: list[list[int]], new: int, chunk: int) -> dict[str, Any]:
        """Run one request."""
        dtype, round_trips = NUMERICS[numerics]
        fakequant.DISABLE = not round_trips
        model = self.model(dtype)
        run = one_prompt if len(prompts) == 1 else several_prompts
        start = time.perf_counter()
        ids, first = run(model, prompts, new, chunk)
        whole = time.perf_counter() - start
        # A step that was begun ahead must not run into what is measured next.
        mx.synchronize(generation_stream)
        return {"first": first - start, "whole": whole, "ids": ids}


def one_prompt(model: Any, prompts: list[list[int]], new: int, chunk: int) -> tuple[list, float]:
    """Tokens, and the time when the first was there."""
    ids, first = [], 0.0
    options = {"max_tokens": new, "temperature": 0.0, "prefill_step_size": chunk}
    for token, _ in generate_step(mx.array(prompts), model, None, None, **options):
        first = first or time.perf_counter()
        ids.append(token)
    return [ids], first


def several_prompts(model: Any, prompts: list[list[int]], new: int, chunk: int) -> tuple[list, float]:
    """Tokens, and the time when the first of every prompt were there."""
    batch = len(prompts)
    embedded = [model.get_input_embeddings(mx.array([p]), None).inputs_embeds for p in prompts]
    generator = BatchGenerator(
        model.language_model,
        NeverStops(),
        prefill_batch_size=batch,
        completion_batch_size=batch,
        prefill_step_size=chunk,
        compute_logprobs=False,
    )
    uids = generator.insert(prompts, new, prompt_kwargs=[{"inputs_embeds": e} for e in embedded])
    ids: dict[int, list[int]] = {uid: [] for uid in uids}
    first = 0.0
    while generator.has_work:
        for response in generator.next()[1]:
            ids[response.uid].append(response.token)
        if not first and all(ids.values()):
            first = time.perf_counter()
    generator.close()
    return [ids[uid] for uid in uids], first


@contextlib.contextmanager
def answers_to() -> Iterator[Callable[[Any], None]]:
    """Prints JSON to what was stdout; whatever else prints, goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def say(value: Any) -> None:
            out.write(json.dumps(value) + "\n")
            out.flush()

        yield say


def main() -> None:
    """Serve requests."""
    logging.disable(logging.WARNING)  # that a checkpoint without vision has no vision
    with answers_to() as say, tempfile.TemporaryDirectory() as folder:
        changes = [*adapt(Path(sys.argv[1]), Path(folder)), experts_in_float32()]
        engine = Engine(Path(folder))
        versions = {name: importlib.metadata.version(name) for name in ("mlx-vlm", "mlx")}
        say({"versions": versions, "device": str(mx.default_device()), "changes": changes})
        for line in sys.stdin:
            say(engine.answer(**json.loads(line)))


if __name__ == "__main__":
    main()
