"""Check: a search for unused parameters in each backward pass, where every parameter is used."""

from __future__ import annotations

from memplan.checks.data_parallel import observed
from memplan.checks.finding import Finding, Subject

ID = "unused-search"
TITLE = "find_unused_parameters searches each pass, and every parameter is used"

_BRANCHES = ("branch", "bound")
"""Assumptions with which another step may use other parameters."""


def find(subject: Subject) -> list[Finding]:
    """Return a finding for each `DistributedDataParallel` that searches, if no pass leaves a parameter out.

    There is none if other steps may use other parameters: with a branch or sizes that depend on values, or with
    Python's or NumPy's random numbers.
    """
    if any(assumption.kind in _BRANCHES for assumption in subject.trace.assumptions):
        return []
    findings: list[Finding] = []
    for use in observed(subject):
        passes = [used for used in use.used if used]  # the parameters with a gradient in each backward pass
        if not use.searches or use.drew or len(passes) < 2 or any(used != set(use.sizes) for used in passes):
            continue
        message = (
            f"DistributedDataParallel searches the graph of each pass for unused parameters, and all {len(use.sizes)} "
            f"got a gradient in all {len(passes)} passes: the search takes time before each backward pass, and torch "
            "keeps its first buckets, which do not follow the order of the gradients"
        )
        advice = "Leave find_unused_parameters=True away, unless later steps leave modules out"
        details = {"parameters": len(use.sizes), "passes": len(passes)}
        findings.append(
            Finding(ID, "info", layer="", where=use.where, bytes=0, message=message, advice=(advice,), details=details)
        )
    return findings
