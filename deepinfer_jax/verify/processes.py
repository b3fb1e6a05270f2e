"""Axes of the process: another one, fewer threads, compiled anew or not, and a cache that was saved elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepinfer_jax.cache_file import save_cache
from deepinfer_jax.errors import DeepInferError
from deepinfer_jax.verify.child import outcomes_of
from deepinfer_jax.verify.passes import Reader
from deepinfer_jax.verify.schedules import Case
from deepinfer_jax.verify.subject import Comparison, Outcome, Subject, compared

REQUESTS = 4


class ProcessError(DeepInferError):
    """A process that was started for a comparison failed."""


def processes(subject: Subject, short: bool) -> Iterator[Case]:
    """The same requests in other processes. Nothing for a model that is in no file, or is a fork of one."""
    if subject.path is None or subject.definition is not None:
        return

    def case(**settings: Any) -> list[Comparison]:
        which = range(min(REQUESTS, len(subject.workload)))
        return compared(which, (subject.alone[i] for i in which), _run(subject, which, **settings))

    one = {"cpus": 1} if hasattr(os, "sched_setaffinity") else {}
    with tempfile.TemporaryDirectory(prefix="deepinfer-jax-verify-") as folder:
        yield "compile cache cold" + (", 1 processor" if one else ""), lambda: case(compile_cache=folder, **one)
        if not short:
            yield "compile cache warm", lambda: case(compile_cache=folder)
            yield "products on one thread", lambda: case(xla_flags="--xla_cpu_multi_thread_eigen=false")
    yield "cache saved here, resumed there", lambda: _resumed(subject)


def _resumed(subject: Subject) -> list[Comparison]:
    reader, which = Reader(subject), max(range(len(subject.workload)), key=lambda i: len(subject.workload.prompts[i]))
    prompt, expected = subject.workload.prompts[which], subject.alone[which]
    with tempfile.TemporaryDirectory(prefix="deepinfer-jax-verify-") as folder:
        _, cache = reader.read(prompt, reader.empty(), 0)
        file = Path(folder) / "cache.safetensors"
        save_cache(file, cache, subject.config, subject.numerics)
        (found,) = _run(subject, [which], cache=str(file), ids=list(expected.ids))
    rest = Outcome(expected.ids[1:], expected.bits[1:])
    return [Comparison(which, None if (at := rest.first_difference(found)) is None else at + 1)]


def _run(subject: Subject, which: Any, **settings: Any) -> list[Outcome]:
    """What another process gives for requests. Raises ProcessError."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-jax-verify-") as folder:
        job = {
            "path": str(subject.path),
            "numerics": dataclasses.asdict(subject.numerics),
            "prompts": [subject.workload.prompts[i] for i in which],
            "sampling": [subject.workload.sampling[i].to_dict() for i in which],
            "out": str(Path(folder) / "outcomes.json"),
            "cpus": None,
            "xla_flags": None,
            "compile_cache": None,
            "cache": None,
        }
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job | settings), encoding="utf-8")
        command = [sys.executable, "-m", "deepinfer_jax.verify.child", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines()[-5:]
            raise ProcessError(f"a process for verification ended with {done.returncode}", lines)
        return outcomes_of(Path(job["out"]))
