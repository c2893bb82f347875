"""Losses, optimizers and inputs by name in Python: the same step as with the objects that they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import InputError
from memplan.trace.naming.step_parts import loss_of, optimizer_of


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8))


NAMED: dict[str, Any] = {"targets": "4:int64<8", "loss": "cross_entropy", "optimizer": "adamw"}
GIVEN: dict[str, Any] = {
    "targets": torch.zeros(4, dtype=torch.int64), "loss": F.cross_entropy, "optimizer": torch.optim.AdamW,
}  # fmt: skip


@pytest.mark.parametrize("what", [(4, 3, 4, 4), torch.Size((4, 3, 4, 4)), "4x3x4x4"])
def test_explain_takes_names_and_shapes(what: Any) -> None:
    expected = memplan.explain(net, torch.zeros(4, 3, 4, 4), **GIVEN, device="cpu")
    found = memplan.explain(net, what, **NAMED, device="cpu")
    assert (found.by_cause, found.layers) == (expected.by_cause, expected.layers)
    assert found.timeline.events == expected.timeline.events


def test_every_verb_that_takes_a_step_takes_names() -> None:
    torch.manual_seed(0)
    model, x = net(), (4, 3, 4, 4)
    batches = memplan.sweep(net, {"batch": "4"}, x, **NAMED, device="cpu").rows, memplan.sweep(
        net, {"batch": "4"}, x, **GIVEN, device="cpu"
    ).rows  # fmt: skip
    assert batches[0][0]["peak"] == batches[1][0]["peak"]
    limits: dict[str, Any] = {"budget": "64 KiB", "device": "cpu"}
    assert memplan.largest(net, "batch", x, **NAMED, **limits) == memplan.largest(net, "batch", x, **GIVEN, **limits)
    peaks = {memplan.plan(model, x, **one, budget="1 GiB", costs="roofline").peak for one in (NAMED, GIVEN)}
    assert len(peaks) == 1
    assert not memplan.fit(model, x, **NAMED, budget="1 GiB", pairs=0).changed
    assert memplan.verify(model, model, x, **NAMED, pairs=0).same
    assert memplan.check(net, x, **NAMED, device="cpu") == memplan.check(net, x, **GIVEN, device="cpu")
    memplan.assert_peak(net, x, **NAMED, at_most="1 GiB", device="cpu")
    pair = memplan.compare(net, net, x, **NAMED, device="cpu", b_options={"loss": "mse_loss", "targets": (4, 8)})
    assert pair.a.peak == memplan.explain(net, x, **GIVEN, device="cpu").timeline.peak_allocated


def test_a_loss_of_a_name_joins_a_model() -> None:
    model, x, y = net(), torch.randn(4, 48), torch.zeros(4, dtype=torch.int64)
    assert torch.equal(memplan.with_loss(model, "cross_entropy")(x, y), F.cross_entropy(model(x), y))


def test_a_tuple_of_sizes_by_keyword_is_a_value() -> None:
    """Models take sizes: those of images, of patches."""

    class Resized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
            return F.interpolate(self.conv(x), size)

    x = (1, 3, 8, 8)
    small, large = (
        memplan.explain(Resized, x, kwargs={"size": size}, device="cpu").timeline.peak_allocated
        for size in ((4, 4), (64, 64))
    )
    assert large > small


def test_a_dtype_of_a_name() -> None:
    by_name = memplan.explain(net, "4x48:bf16", dtype="bf16", device="cpu")
    assert sum(row.weight_bytes for row in by_name.layers) == 2 * (48 * 8 + 8)


def test_options_of_an_optimizer() -> None:
    made: Any = optimizer_of("sgd:lr=0.5,momentum=0.9")
    group = made([nn.Parameter(torch.zeros(1))]).param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.5, 0.9)
    assert optimizer_of("none") is None


@pytest.mark.parametrize("loss", ["CrossEntropyLoss", nn.CrossEntropyLoss])
def test_of_a_class_of_losses_one_is_made(loss: Any) -> None:
    """``nn.CrossEntropyLoss`` without its parentheses would take output and targets for options."""
    assert loss_of(loss)(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)).item() > 0


def test_a_class_of_losses_with_options_is_refused() -> None:
    class Weighted(nn.Module):
        def __init__(self, weight: float) -> None:
            super().__init__()

    with pytest.raises(InputError, match="Weighted"):
        loss_of(Weighted)


@pytest.mark.parametrize(
    ("options", "found", "do"),
    [
        ({"optimizer": "adamww"}, "there is no optimizer 'adamww'", "Did you mean adamw"),
        ({"optimizer": "sgd:lrr=1"}, "has no argument 'lrr'", "Did you mean lr?"),
        ({"loss": "cross_entropyy"}, "there is no loss 'cross_entropyy'", "Did you mean cross_entropy"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "optimizer is of type SGD, which", "torch.optim.SGD, or a"),
        ({"loss": 3}, "loss is of type int, which cannot be called", "Pass one"),
        ({"dtype": "float33"}, "dtype 'float33'", "Did you mean float32"),
    ],
)
def test_what_is_no_name_is_said(options: dict[str, Any], found: str, do: str) -> None:
    with pytest.raises(InputError) as raised:
        memplan.explain(net, (4, 48), **options)
    assert found in str(raised.value)
    assert do in str(raised.value)
