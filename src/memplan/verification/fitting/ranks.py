"""Ranks of a process group that fit together: results and errors of all, and one plan for all."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TypeVar

from memplan import _torch
from memplan.errors import MemplanError, UsageError
from memplan.planning.plan import choices_json
from memplan.planning.plan.plan import Plan

_Result = TypeVar("_Result")


def together(result: _Result, error: MemplanError | None) -> list[_Result]:
    """Return the results of all ranks; if any rank has an error, raise it in every rank. Every rank calls this, with
    its own result and its own error, if it has one."""
    outcomes = _torch.gathered((result, error))
    own_rank = _torch.ranks()[0]
    for rank, (_, error_of_rank) in enumerate(outcomes):
        if error_of_rank is not None:
            raise error if error is not None and rank == own_rank else error_of_rank.about(f"rank {rank}")
    return [result_of_rank for result_of_rank, _ in outcomes]


def refuse_differing(fingerprints: list[str]) -> None:
    """Raise UsageError unless all ranks have the same plan. ``fingerprints``: of the plan of each rank."""
    for rank, fingerprint_of_rank in enumerate(fingerprints):
        if fingerprint_of_rank != fingerprints[0]:
            raise UsageError(
                f"Rank 0 would run by plan {fingerprints[0]}, and rank {rank} by plan {fingerprint_of_rank}",
                expected="one plan for all ranks",
                do="Fit the same model with the same arguments on each rank, and inputs of the same shapes",
            )


def fingerprint(plan: Plan) -> str:
    """Return a hash of a plan's graph and decisions. Which results are written in pieces is left out: that depends on
    what each rank's kernels allocate."""
    choices = choices_json.to_plain(replace(plan.choices, pieces=None), plan.names)
    text = json.dumps([plan.fingerprint, str(plan.precision), choices], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
