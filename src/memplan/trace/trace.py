"""The Trace: a step as data, which can be saved to a file."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Literal

from memplan._display import Displayed
from memplan._json import Unreadable, read_text
from memplan._text import counted, write_whole
from memplan.errors import TraceFormatError
from memplan.trace import codec
from memplan.trace.records import (
    HOST,
    SCHEMA,
    Assumption,
    BackwardPass,
    Call,
    Counters,
    Engines,
    Form,
    FunctionLines,
    Layer,
    Op,
    Returned,
    Storage,
)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Trace(Displayed):
    """Steps as data: ops in order, storages with allocation, free, cause and sharers.

    ``origin``: predicted on fake tensors, measured in a real run, or measured on an emulated card (``dry``), which
    allocates as a real one and computes nothing.

    ``steps[k]`` is the tick at which step k begins; ``end`` the last tick of all. What happens up to ``steps[0]`` is
    the building of model, data and optimizer. Bytes are as the tensors' storages request them.

    Example:
        >>> trace = memplan.record(build, device="h100")
        >>> memplan.simulate(trace).peak_allocated
        70521856
    """

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
    """Cards of the catalogue on which an op runs another kernel than here."""
    schema: int = SCHEMA
    forms: tuple[Form, ...] = ()
    """Forward ops of the first step, in order."""
    returned: tuple[Returned, ...] = ()
    """Results of outermost modules in the first step, in order."""
    counters: tuple[Counters, ...] = ()
    """Dry runs: torch's own counters of building, then of each step."""
    engines: tuple[Engines, ...] = ()
    """Workspaces for which cuDNN was asked, in the order of their storages."""
    measured: tuple[int, ...] = ()
    """Storages in ``engines`` whose bytes were measured on a real card instead of answered by cuDNN."""
    lines: tuple[FunctionLines, ...] = ()
    """Functions followed line by line (`memplan.profile`), in the order of their first calls."""
    passes: tuple[BackwardPass, ...] = ()
    """Recordings: backward passes, in the order of their ends."""
    collected: tuple[int, ...] = ()
    """Recordings: ticks at which garbage collection began, after building and after each step."""
    optimized: tuple[int, ...] = ()
    """Recordings: storages of the parameters that optimizers update and that require a gradient."""
    ungraded: tuple[int, ...] = ()
    """Those of ``optimized`` that had no gradient at any update."""

    @property
    def counted(self) -> tuple[Storage, ...]:
        """Return the storages that count: all for a step on the CPU, those on the card for a step on a card."""
        if self.device == HOST:
            return self.storages
        return tuple(storage for storage in self.storages if storage.device != HOST)

    def to_json(self) -> str:
        """Return the trace as JSON text; `from_json` reads it back to an equal value."""
        return codec.dumps(self)

    @classmethod
    def from_json(cls, text: str, source: str = "the text") -> Trace:
        """Read the trace that `to_json` wrote.

        Args:
            text: JSON.
            source: how to name the text in an error.

        Raises:
            TraceFormatError: not JSON, not a trace, of another schema version, or inconsistent in itself.
        """
        return codec.loads(text, cls, source)

    def __str__(self) -> str:
        lines = [
            f"{self.origin} on {self.device}: {counted(len(self.steps), 'step')}, {counted(len(self.ops), 'op')}, "
            f"{counted(len(self.storages), 'storage')} (torch {self.torch})"
        ]
        lines += [f"assumed: {a.text}" + (f" at {a.where}" if a.where else "") for a in self.assumptions]
        return "\n".join(lines + list(self.notes))


def at_least(trace: Trace) -> Trace:
    """Return the trace with every interval of bytes replaced by its lower end."""
    if all(storage.low is None for storage in trace.storages):
        return trace
    storages = tuple(
        storage if storage.low is None else dataclasses.replace(storage, bytes=storage.low, low=None)
        for storage in trace.storages
    )
    return dataclasses.replace(trace, storages=storages)


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace to a file; an existing file is replaced only when the new one is complete."""
    write_whole(path, trace.to_json())


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from a file that `save_trace` wrote. Raises TraceFormatError, OSError."""
    try:
        text = read_text(path)
    except Unreadable as error:
        raise TraceFormatError(
            f"{path} cannot be read: {error}", expected="a trace written by memplan", do="Record the step again"
        ) from None
    return Trace.from_json(text, str(path))
