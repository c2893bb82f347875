"""Bytes that calls take: of known calls, counted by hand, with data and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memplan.planning.capture.allocation_probe import Allocations


@torch.library.custom_op("memplan_allocations_tests::through", mutates_args=())
def through(x: Tensor) -> Tensor:
    return (x + x).sum(0, keepdim=True)


def counted(real: bool, call: Callable[[Tensor], Tensor]) -> tuple[int, int, int, int]:
    """The most and the rest of a call, and of freeing what it returned."""
    x = torch.ones(1000)
    with Allocations(real=real) as taken:
        x = x if real else torch.ones(1000)
        with taken.span("call"):
            y = call(x)
        with taken.span("after"):
            del y
    return (
        taken.peak_bytes("call"),
        taken.remaining_bytes("call"),
        taken.peak_bytes("after"),
        taken.remaining_bytes("after"),
    )


@pytest.mark.parametrize("real", [False, True])
def test_temporaries_and_results_are_counted(real: bool) -> None:
    assert counted(real, lambda x: x.exp().sum()) == (4004, 4, 0, -4)


def test_what_an_op_of_a_library_takes_inside_is_counted() -> None:
    assert counted(True, through) == (4004, 4, 0, -4)


def test_what_was_there_before_does_not_count() -> None:
    x = torch.ones(1000)
    with Allocations(real=True) as taken, taken.span("call"):
        del x
    assert (taken.peak_bytes("call"), taken.remaining_bytes("call")) == (0, 0)
