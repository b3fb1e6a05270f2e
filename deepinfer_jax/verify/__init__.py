"""Verification of the determinism promise on somebody's own checkpoint, prompts and machine."""

from deepinfer_jax.verify.report import Report
from deepinfer_jax.verify.run import AXES, verify
from deepinfer_jax.verify.subject import Subject, Workload

__all__ = ["AXES", "Report", "Subject", "Workload", "verify"]
