"""The budget of the host's memory: how it is read, and which memory is said to be exceeded first."""

from __future__ import annotations

import pytest
import torch

import memplan
from memplan.errors import InputError, UnitError
from memplan.explanation.host import host_sentence, read_host


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("32", "has no unit"),
        ("0", "no memory at all"),
        ("0GiB", "no memory at all"),
        (0, "no memory at all"),
        ("much", "bytes"),
    ],
)
def test_what_is_no_budget(value: object, words: str) -> None:
    with pytest.raises(UnitError, match=words):
        read_host(value)


def test_a_measured_step_has_no_budget_of_the_host() -> None:
    def small() -> object:
        return lambda: torch.zeros(3).sum()

    trace = memplan.measure(small, device="cpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="measured step"):
        memplan.explain(trace, host="8 GiB")


def test_budgets() -> None:
    assert (read_host(None), read_host("32 GiB"), read_host(1 << 30)) == (None, 32 << 30, 1 << 30)


def build() -> object:
    on_host = torch.zeros(1 << 28)  # 1 GiB
    on_card = torch.zeros(1 << 28, device="cuda")
    return lambda: on_host.sum() + on_card.cpu().sum()


@pytest.mark.parametrize(("budget", "first"), [("512 MiB", "host"), ("64 GiB", "")])
def test_the_memory_that_is_exceeded_first(budget: str, first: str) -> None:
    need = memplan.explain(build, device="h100", host=budget).host
    assert need is not None
    assert need.first == first
    assert need.fits == (not first)
    assert ("exceeded first" in host_sentence(need, "h100")) == bool(first)


def test_a_card_that_is_exceeded_before_the_host() -> None:
    def large() -> object:
        on_card = torch.zeros(30 << 30, dtype=torch.uint8, device="cuda")
        return lambda: on_card.cpu()

    need = memplan.explain(large, device="rtx4090", host="8 GiB").host
    assert need is not None
    assert (need.first, need.fits) == ("card", False)


def test_the_cpu_alone_has_no_host_beside_it() -> None:
    def small() -> object:
        return lambda: torch.zeros(3).sum()

    assert memplan.explain(small, device="cpu").host is None
    need = memplan.explain(small, device="cpu", host="8 GiB").host
    assert need is not None
    assert need.fits
