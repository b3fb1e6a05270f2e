"""A process of its own that runs some requests and writes what they gave: started by `processes.py`.

python -m deepinfer_jax.verify.child JOB.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.cache_file import load_cache
from deepinfer_jax.checkpoint import load
from deepinfer_jax.kernels import Kernels
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.verify.passes import Reader
from deepinfer_jax.verify.subject import Outcome, Subject, Workload


def main(job: dict[str, Any]) -> None:
    """Run a job; its results go to the file `out`."""
    # XLA reads its flags, and counts the processors, when the first device is used: later than this.
    if job["cpus"] is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["cpus"]])
    if job["xla_flags"]:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {job['xla_flags']}".strip()
    if job["compile_cache"] is not None:
        jax.config.update("jax_compilation_cache_dir", job["compile_cache"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    numerics = Numerics(**job["numerics"] | {"kernels": Kernels(**job["numerics"]["kernels"])})
    config, params = load(job["path"], numerics=numerics, progress=False)
    sampling = tuple(SamplingParams.from_dict(row) for row in job["sampling"])
    subject = Subject(config, params, numerics, Workload(tuple(map(tuple, job["prompts"])), sampling))
    if job["cache"] is None:
        outcomes = [o[0] for o in subject.generate(range(len(sampling)), batch_size=len(sampling))]
    else:
        outcomes = [_resumed(subject, job)]
    written = [{"ids": list(o.ids), "bits": o.bits.tolist()} for o in outcomes]
    Path(job["out"]).write_text(json.dumps(written), encoding="utf-8")


def _resumed(subject: Subject, job: dict[str, Any]) -> Outcome:
    """The continuation of a saved cache, read at once; the logits of its first token came with the cache."""
    reader, (prompt,), ids = Reader(subject), subject.workload.prompts, job["ids"]
    cache = load_cache(job["cache"], subject.config, subject.numerics)
    logits, _ = reader.read(ids[:-1], cache, len(prompt))
    return reader.outcome(logits, ids[1:])


def outcomes_of(file: Path) -> list[Outcome]:
    """What `main` wrote."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    return [Outcome(tuple(row["ids"]), np.array(row["bits"], np.uint32)) for row in rows]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
