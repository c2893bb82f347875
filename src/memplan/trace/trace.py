"""The Trace: a step as data, which can be saved to a file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from memplan._display import Displayed
from memplan._json import Saved, Unreadable, text_of
from memplan._text import counted
from memplan.trace import codec
from memplan.trace.records import (
    HOST,
    Assumption,
    BackwardPass,
    Call,
    Counters,
    Engines,
    ExpectedSize,
    Form,
    FunctionLines,
    HostStorage,
    Layer,
    LoaderUse,
    Op,
    RankGroup,
    Returned,
    Storage,
)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Trace(Saved, Displayed):
    """Steps as data: ops in order, storages with allocation, free, cause and sharers.

    ``origin``: predicted on fake tensors, measured in a real run, or measured on an emulated card (``dry``), which
    allocates like a real card and computes nothing.

    ``steps[k]`` is the tick at which step k begins; ``end`` is the last tick. Up to ``steps[0]``, model, data and
    optimizer are built. Bytes are as requested, before an allocator's rounding.

    Example:
        >>> trace = memplan.record(build, device="h100")
        >>> memplan.simulate(trace).peak_allocated
        70521856
    """

    FORMAT: ClassVar[str] = "memplan.trace"
    SCHEMA: ClassVar[int] = 2
    AGAIN: ClassVar[str] = "Record the step again with this memplan"
    AS_ROWS: ClassVar[bool] = True

    origin: Literal["recorded", "measured", "dry"]
    device: str
    torch: str
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    layers: tuple[Layer, ...]
    steps: tuple[int, ...]
    end: int
    assumptions: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    other_kernels: tuple[str, ...] = ()
    """Cards of the catalogue on which an op runs another kernel than on ``device``."""
    alike: tuple[str, ...] = ()
    """Other cards of the catalogue for which a recording would have the same storages and bytes. Empty if cuDNN was
    queried for workspaces."""
    forms: tuple[Form, ...] = ()
    """Forward ops of the first step, in order."""
    returned: tuple[Returned, ...] = ()
    """Results of outermost modules in the first step, in order."""
    counters: tuple[Counters, ...] = ()
    """Dry runs: torch's own counters of building, then of each step."""
    engines: tuple[Engines, ...] = ()
    """Workspaces whose sizes cuDNN was queried for, in the order of their storages."""
    measured: tuple[int, ...] = ()
    """Storages in ``engines`` whose bytes were measured on a real card instead of queried from cuDNN."""
    expected: tuple[ExpectedSize, ...] = ()
    """Workspaces of convolutions whose bytes are expected by a model of cuDNN's choice, in the order of storages."""
    lines: tuple[FunctionLines, ...] = ()
    """Functions followed line by line (`memplan.profile`), in the order of their first calls."""
    passes: tuple[BackwardPass, ...] = ()
    """Recordings: backward passes, in the order of their ends."""
    collected: tuple[int, ...] = ()
    """Recordings: ticks at which garbage collection began, after building and after each step."""
    optimized: tuple[int, ...] = ()
    """Recordings: storages of the parameters that optimizers update and that require a gradient."""
    ungraded: tuple[int, ...] = ()
    """Storages of ``optimized`` that had no gradient at any update."""
    loaders: tuple[LoaderUse, ...] = ()
    """Recordings: passes over data loaders, in the order in which they began."""
    host: tuple[HostStorage, ...] = ()
    """Recordings: storages on the host in pinned or shared memory, in order."""
    groups: tuple[RankGroup, ...] = ()
    """Recordings of a rank: the process groups of at least two ranks that include the rank."""

    @property
    def counted(self) -> tuple[Storage, ...]:
        """Return the storages that count: all for a step on the CPU, those on the card for a step on a card."""
        if self.device == HOST:
            return self.storages
        return tuple(storage for storage in self.storages if storage.device != HOST)

    def to_json(self) -> str:
        """Return JSON text with a line for each op or storage; equal traces give equal texts."""
        return text_of({"format": self.FORMAT, "schema": self.SCHEMA, **codec.sections_of(self)})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return json.loads(self.to_json())

    @classmethod
    def _prepared(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a Trace from its JSON; raise Unreadable if sections are missing or malformed."""
        try:
            return codec.fields_of(plain)
        except (KeyError, TypeError, ValueError) as error:
            raise Unreadable(f"is damaged ({type(error).__name__}: {error})") from None

    def _check(self) -> None:
        codec.check(self)

    def __str__(self) -> str:
        lines = [
            f"{self.origin} on {self.device}: {counted(len(self.steps), 'step')}, {counted(len(self.ops), 'op')}, "
            f"{counted(len(self.storages), 'storage')} (torch {self.torch})"
        ]
        for assumption in self.assumptions:
            lines.append(f"assumed: {assumption.text}" + (f" at {assumption.where}" if assumption.where else ""))
        return "\n".join(lines + list(self.notes))


def at_least(trace: Trace) -> Trace:
    """Return the trace with each storage whose size is only known as an interval at its least bytes."""
    if all(storage.low is None for storage in trace.storages):
        return trace
    storages = tuple(
        storage if storage.low is None else dataclasses.replace(storage, bytes=storage.low, low=None)
        for storage in trace.storages
    )
    return dataclasses.replace(trace, storages=storages)


def band_end(trace: Trace, end: Literal["low", "high"]) -> Trace:
    """Return the trace with the expected workspaces replaced by their sizes at an end of the 95 % band."""
    if not trace.expected:
        return trace
    sizes = {size.storage: size.low if end == "low" else size.high for size in trace.expected}
    storages = tuple(
        dataclasses.replace(storage, bytes=sizes[storage.id]) if storage.id in sizes else storage
        for storage in trace.storages
    )
    return dataclasses.replace(trace, storages=storages, expected=())
