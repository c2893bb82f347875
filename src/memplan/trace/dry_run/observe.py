"""Runs the step in the process with the emulated card, and returns its Trace."""

from __future__ import annotations

import ctypes
import os

import torch

from memplan import _torch
from memplan.devices import Device
from memplan.dry.card import DRIVER_LOG, newest_binary
from memplan.errors import DeviceError
from memplan.trace.card_run.observed import observed
from memplan.trace.dry_run.reads import Reads
from memplan.trace.recording.boundaries import Runs
from memplan.trace.recording.causes import trace_of
from memplan.trace.records import Assumption
from memplan.trace.trace import Trace

DRY = (
    "a dry run: torch's own code chose and allocated everything, but no kernel computed anything; losses and other "
    "results are zeros or what lay there before"
)


def observe(build: Runs, card: Device, steps: int, snapshot: str | None) -> Trace:
    """Run a step on the emulated card of this process, and return the trace of torch's allocator.

    Raises:
        StepError: ``build`` or the step raised.
        DeviceError: torch does not see the card, or has no code for it.
    """
    check_card(card)
    reads = Reads()
    with _torch.HostValues():
        run = observed(build, steps, snapshot_file=snapshot, around=reads.noted)
    return trace_of(
        run.step.parts, origin="dry", device=card.name, assumptions=(*reads.assumptions(), *driver_assumptions()),
        notes=(DRY, *run.notes), calls=run.step.calls, counters=run.counters,
    )  # fmt: skip


def check_card(card: Device) -> None:
    """Check that torch sees the card, and set the compute capability of torch's binaries in the emulated driver. Raises
    DeviceError if torch does not see the card, or has no code for it."""
    if not torch.cuda.is_available():
        raise DeviceError(
            f"torch {torch.__version__} does not see the emulated card",
            expected="a CUDA build of torch that loads it",
            do="Report it, with the versions of torch and of the C library",
        )
    names = [name for name in torch.cuda.get_arch_list() if name.startswith("sm_") and name[3:].isdigit()]
    built = tuple((int(name[3:-1]), int(name[-1])) for name in names)  # "sm_120" is (12, 0)
    binary = newest_binary(card.architecture, built)
    if not binary:
        raise DeviceError(
            f"torch {torch.__version__} has no code for {card.name} (compute capability "
            f"{'.'.join(map(str, card.architecture))})",
            expected=f"a card that it was built for: {', '.join(torch.cuda.get_arch_list())}",
            do="Take an older torch, or another card",
        )
    ctypes.CDLL(None).memplan_dry_binary(binary)


def driver_assumptions() -> tuple[Assumption, ...]:
    """Return the assumptions that the emulated driver logged, about calls that it does not know."""
    path = os.environ.get(DRIVER_LOG)
    if path is None or not os.path.exists(path):
        return ()
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.startswith(("assumed: ", "refused: "))]
    return tuple(Assumption("dry", text.removeprefix("assumed: "), where=None) for text in dict.fromkeys(lines))
