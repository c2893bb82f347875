"""Decision: a lever applied in a place of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from memplan import _json
from memplan._display import Printed
from memplan._json import Json, Signed
from memplan.planning.levers.lever import Grade

ScopeKind = Literal["value", "segment", "parameter", "step"]


@dataclass(frozen=True, slots=True)
class Scope(Printed):
    """Part of the step that a decision is about."""

    kind: ScopeKind
    names: tuple[str, ...] = ()
    """Names of the values or parameters, or the first and last value of a segment; none for the step."""

    def __str__(self) -> str:
        return ", ".join(self.names) or self.kind


@dataclass(frozen=True, slots=True)
class Decision:
    """A lever applied in a place of a step."""

    lever: str
    """``keep``, or the name of a lever."""
    scope: Scope
    grade: Grade
    bytes: int
    """For ``keep``, the bytes that live from the forward to the backward pass. For other levers, the bytes that they
    free of the value, or of the step."""
    seconds: Signed
    """Seconds that the decision adds to the step; below 0 for a kernel that is faster than the ops that it replaces."""
    layer: str = ""
    where: str | None = None
    """``file:line`` of the user's code."""
    reason: str = ""
    details: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Further data for carrying out the lever: texts, numbers, and tuples and mappings of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", _json.frozen(self.details, "details"))
