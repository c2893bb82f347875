"""FLOPs against torch's own counter on the step that really runs, seconds against the formula by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.networks import SmallGPT, SmallResNet
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import memplan
from memplan.planning.graph.roofline import CPU
from memplan.studies.step_time import rates_for, step_time


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


class Transposed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3, 2), nn.ConvTranspose2d(8, 3, 3, 2))


def images() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (SmallResNet, images),
        (SmallGPT, lambda: torch.randint(0, 40, (2, 12))),
        (Checkpointed, lambda: torch.randn(4, 8)),
        (Transposed, images),
    ],
)
@pytest.mark.parametrize("train", [True, False])
def test_flops_are_those_of_torch(make: type[nn.Module], inputs: Callable[[], torch.Tensor], train: bool) -> None:
    def build() -> Callable[[], None]:
        model, data = make(), inputs()

        def step() -> None:
            with torch.set_grad_enabled(train):
                output = model(data)
            if train:
                output.sum().backward()

        return step

    step = build()
    with FlopCounterMode(display=False) as counter:
        step()
    found = step_time(memplan.record(build, device="cpu"), CPU)
    assert found is not None
    assert found.flops == counter.get_total_flops()


def test_flops_of_groups() -> None:
    """By hand: torch's counter takes a grouped convolution's weight gradient for that of one without groups."""

    def build() -> Callable[[], None]:
        conv, data = nn.Conv2d(6, 6, 3, groups=6, bias=False), torch.randn(2, 6, 10, 10, requires_grad=True)
        return lambda: conv(data).sum().backward()

    found = step_time(memplan.record(build, device="cpu", steps=1), CPU)
    assert found is not None
    assert found.flops == 3 * 2 * (2 * 6 * 8 * 8) * 9


def test_seconds_of_a_product_and_a_sum() -> None:
    def build() -> Callable[[], torch.Tensor]:
        a, b = torch.randn(256, 512), torch.randn(512, 128)
        return lambda: (a @ b).add(1.0)

    found = step_time(memplan.record(build, device="cpu", steps=1), CPU)
    assert found is not None
    read, made = 4 * (256 * 512 + 512 * 128), 4 * 256 * 128
    flops, rate = 2 * 256 * 512 * 128, dict(CPU.flops_per_second)["float32"]
    product = max(flops / rate, (read + made) / CPU.bandwidth) + CPU.call_seconds
    assert found.bytes == read + made + 2 * made
    assert found.seconds == pytest.approx(product + 2 * made / CPU.bandwidth + CPU.call_seconds, rel=1e-12)


def test_views_take_no_time() -> None:
    def build() -> Callable[[], torch.Tensor]:
        a = torch.randn(256, 512)
        return lambda: a.t().reshape(-1)[3:].view(-1, 1).exp_()

    found = step_time(memplan.record(build, device="cpu", steps=1), CPU)
    assert found is not None
    copied, changed = 2 * 256 * 512 * 4, 2 * (256 * 512 - 3) * 4
    assert found.bytes == copied + changed


def test_copies_into_a_part_move_that_part_and_empty_tensors_nothing() -> None:
    def build() -> Callable[[], None]:
        bucket = torch.zeros(1 << 20)
        parts = [torch.ones(1 << 10, requires_grad=True) for _ in range(4)]

        def copy(part: torch.Tensor) -> None:
            assert part.grad is not None
            bucket[: 1 << 10].copy_(part.grad)

        for part in parts:
            part.register_post_accumulate_grad_hook(copy)

        def step() -> None:
            torch.empty(1 << 20)
            for part in parts:
                (part * 2).sum().backward()

        return step

    found = step_time(memplan.record(build, device="cpu", steps=1), CPU)
    assert found is not None
    assert found.bytes < 4 * 16 * 4096  # a dozen tensors of a part's size each, and never the bucket


def test_it_is_near_what_a_plan_says() -> None:
    """The same formula on another graph: captured by AOTAutograd rather than recorded."""
    model = SmallResNet()
    trace = memplan.record(_build_of(model), device="cpu")
    planned = memplan.plan(
        model, torch.randn(8, 3, 32, 32), targets=torch.zeros(8, dtype=torch.int64), loss=F.cross_entropy,
        budget="1 GiB", costs="roofline",
    )  # fmt: skip
    found = step_time(trace, CPU)
    assert found is not None
    assert planned.step_seconds is not None
    assert found.seconds == pytest.approx(planned.step_seconds, rel=0.15)


def _build_of(model: nn.Module) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        made = type(model)()
        data, labels = torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)
        return lambda: F.cross_entropy(made(data), labels).backward()

    return build


def test_rates_of_devices() -> None:
    assert rates_for("cpu") == (CPU, "roofline of two CPU cores")
    card = rates_for("h100")
    assert card is not None
    assert card[1] == "roofline of h100"
    assert rates_for("no such card") is None


def test_without_forms_nothing_is_said() -> None:
    from dataclasses import replace

    trace = memplan.record(_build_of(SmallResNet()), device="cpu", steps=1)
    assert step_time(replace(trace, forms=()), CPU) is None
