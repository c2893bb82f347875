"""An op of a library or of the user's takes what nobody but its kernel knows: a note says so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import memplan
from memplan.trace.records import loud


@torch.library.custom_op("memplan_recorded::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """A kernel with temporaries."""
    return (x.sin() * 2).cos()


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_the_kernel_of_an_op_that_is_not_torchs_is_said_not_to_be_counted() -> None:
    def build() -> Callable[[], object]:
        x = torch.rand(10, 10)
        return lambda: twice(x)

    trace = memplan.record(build, device="cpu")
    (note,) = loud(trace.assumptions)
    assert note.kind == "library"
    assert note.text.startswith("memplan_recorded::twice: ")
    assert note.text.endswith("NOT COUNTED")


def test_of_torchs_own_ops_nothing_is_said() -> None:
    def build() -> Callable[[], object]:
        x = torch.rand(10, 10)
        return lambda: torch.softmax(x, 0)

    assert memplan.record(build, device="cpu").assumptions == ()
