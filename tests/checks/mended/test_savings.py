"""By how many bytes a peak falls, of steps with expected workspaces: against sums by hand."""

from __future__ import annotations

from memplan.checks.mended.savings import peak_of, saving
from memplan.trace.records import ExpectedSize, Storage
from memplan.trace.trace import Trace

MIB = 1 << 20


def storage(number: int, size: int, born: int, died: int | None, cause: str = "activation") -> Storage:
    return Storage(number, size, born=born, died=died, device="cuda:0", cause=cause, op=None)  # pyright: ignore[reportArgumentType]


def test_expected_workspaces_count_with_their_expected_bytes() -> None:
    """A tensor of 3 MiB is left out; then the storages are numbered anew, and the band is of none of them."""
    storages = storage(0, 3 * MIB, 1, 9), storage(1, 40 * MIB, 2, 3, "workspace"), storage(2, 50 * MIB, 4, 5)
    trace = Trace(
        origin="recorded", device="a100-80gb", torch="2.13", ops=(), storages=storages, layers=(), steps=(0,), end=10,
        expected=(ExpectedSize(1, 0, 90 * MIB),),
    )  # fmt: skip
    assert peak_of(trace) == 53 * MIB
    assert saving(trace, {0: None}) == 3 * MIB
    assert saving(trace, {2: None}) == 10 * MIB


def test_an_expected_workspace_can_have_the_last_number() -> None:
    """Without the tensor before it, no storage has the workspace's number any more."""
    storages = storage(0, 3 * MIB, 1, 9), storage(1, 40 * MIB, 2, 3, "workspace")
    trace = Trace(
        origin="recorded", device="a100-80gb", torch="2.13", ops=(), storages=storages, layers=(), steps=(0,), end=10,
        expected=(ExpectedSize(1, 0, 90 * MIB),),
    )  # fmt: skip
    assert saving(trace, {0: None}) == 3 * MIB
