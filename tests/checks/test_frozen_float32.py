"""Frozen weights in float32 under autocast, against a measured step that stores them in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.sharded_steps import LOWER, Transformer, one_dimension, sharded
from torch import nn
from truth.cpu_allocator import measured_peak
from truth.rank_peak import measured_peak_of_rank

import memplan

ID = "frozen-float32"
pytestmark = pytest.mark.usefixtures("this_check_alone")
WIDTH, LAYERS = 512, 6
Build = Callable[[], Callable[[], Any]]


def finetuning(dtype: torch.dtype, *, rows: int = 64, device: str = "cpu", autocast: bool = True) -> Build:
    """A frozen trunk between two layers that train, as adapters around a base model."""

    def build() -> Callable[[], Any]:
        trunk = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)]).requires_grad_(False)
        first, head, x = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), torch.randn(rows, WIDTH)
        trunk, first, head, x = trunk.to(device), first.to(device), head.to(device), x.to(device)
        optimizer = torch.optim.AdamW([*first.parameters(), *head.parameters()])

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = head(trunk(first(x))).float().sum()
            loss.backward()
            optimizer.step()

        return step

    return build


def found(build: Build, device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build, device=device) if finding.id == ID]


@pytest.mark.parametrize("rows", [64, 2048])
def test_the_bytes_are_what_a_measured_step_takes_less(rows: int) -> None:
    """With few rows the update holds the peak, where the copies for the backward pass are gone."""
    (finding,) = found(finetuning(torch.float32, rows=rows))
    spared = measured_peak(finetuning(torch.float32, rows=rows)) - measured_peak(finetuning(torch.bfloat16, rows=rows))
    assert finding.severity == "warning"
    assert finding.bytes == spared > LAYERS * WIDTH * WIDTH * 2
    assert finding.details["stored"] == LAYERS * (WIDTH + 1) * WIDTH * 4
    assert found(finetuning(torch.bfloat16, rows=rows)) == []


def test_on_a_card() -> None:
    def peak(dtype: torch.dtype) -> int:
        recorded = memplan.record(finetuning(dtype, device="cuda"), device="h100")
        return memplan.simulate(recorded, workspace="low").peak_allocated

    (finding,) = found(finetuning(torch.float32, device="cuda"), "h100")
    assert finding.bytes == pytest.approx(peak(torch.float32) - peak(torch.bfloat16), rel=0.01)
    assert found(finetuning(torch.bfloat16, device="cuda"), "h100") == []


def test_in_float32_throughout_the_weights_are_needed_so() -> None:
    assert found(finetuning(torch.float32, autocast=False)) == []


def test_weights_that_train_stay_in_float32() -> None:
    """The optimizer updates them there, and autocast's copies are for a step."""

    def build() -> Callable[[], Any]:
        model, x = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]), torch.randn(64, WIDTH)
        optimizer = torch.optim.SGD(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().sum()
            loss.backward()
            optimizer.step()

        return step

    assert found(build) == []


def teaching(*, follow: Callable[[torch.Tensor, torch.Tensor], Any] | None) -> Build:
    """A teacher under autocast, whose weights are those at the beginning or follow the student's."""

    def build() -> Callable[[], Any]:
        student, teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        x, optimizer = torch.randn(64, WIDTH), torch.optim.SGD(student.parameters())

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    target = teacher(x)
                loss = (student(x) - target).float().square().mean()
            loss.backward()
            optimizer.step()
            if follow is not None:
                with torch.no_grad():
                    for mean, weight in zip(teacher.parameters(), student.parameters(), strict=True):
                        follow(mean, weight)

        return step

    return build


def test_a_moving_average_needs_float32_and_a_fixed_teacher_does_not() -> None:
    assert found(teaching(follow=lambda mean, weight: mean.lerp_(weight, 0.01))) == []
    assert found(teaching(follow=lambda mean, weight: mean.copy_(weight))) == []
    assert [finding.severity for finding in found(teaching(follow=None))] == ["warning"]


def test_an_inference_is_told_so_without_a_warning() -> None:
    def build() -> Callable[[], Any]:
        model, x = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]), torch.randn(64, WIDTH)

        def step() -> torch.Tensor:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return step

    assert [finding.severity for finding in found(build)] == ["info"]


def sharded_finetuning(dtype: torch.dtype) -> Build:
    """Frozen blocks that FSDP gathers in bfloat16, whatever their shards are stored in."""

    def build() -> Callable[[], Any]:
        dist.init_process_group("gloo")
        model = Transformer()
        model.blocks.requires_grad_(False).to(dtype)
        sharded(model, mesh=one_dimension(), mp_policy=LOWER)
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
        tokens = torch.zeros(4, 64, dtype=torch.int64)

        def step() -> None:
            model(tokens).float().logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_shards_of_frozen_weights_that_are_gathered_in_half_precision() -> None:
    wide, narrow = sharded_finetuning(torch.float32), sharded_finetuning(torch.bfloat16)
    (finding,) = (finding for finding in memplan.check(wide, world=2) if finding.id == ID)
    spared = measured_peak_of_rank(wide, 2) - measured_peak_of_rank(narrow, 2)
    assert finding.bytes == pytest.approx(spared, rel=0.05)
    assert ID not in {other.id for other in memplan.check(narrow, world=2)}
