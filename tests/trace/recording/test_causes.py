"""Causes of storages and the ops behind what is saved, in steps of which each is known by its construction."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import memplan
from memplan.trace.records import Storage
from memplan.trace.trace import Trace

Step = Callable[[], Any]


def found(trace: Trace, cause: str) -> list[Storage]:
    return [storage for storage in trace.counted if storage.cause == cause]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))


def test_a_batch_that_is_moved_to_the_card_is_input() -> None:
    def build() -> Step:
        model = network().cuda()
        data = TensorDataset(torch.randn(64, 64), torch.randint(0, 4, (64,)))
        loader = DataLoader(data, batch_size=32)

        def step() -> None:
            for x, y in loader:
                F.cross_entropy(model(x.to("cuda", non_blocking=True)), y.cuda()).backward()

        return step

    trace = memplan.record(build, device="h100", steps=1)
    assert sorted(s.bytes for s in found(trace, "input")) == sorted(2 * [32 * 64 * 4, 32 * 8])


def test_a_buffer_that_results_are_written_into_is_no_input() -> None:
    """As a sliding window's output, which is stitched from tiles. Noise that is scaled in place stays an input."""

    def build() -> Any:
        model, volume = nn.Conv1d(1, 4, 3, padding=1), torch.randn(1, 1, 64)

        def step() -> None:
            with torch.no_grad():
                output, counts = torch.zeros(1, 4, 64), torch.zeros(1, 2, 64)
                for start in (0, 32):
                    output[:, :, start : start + 32] += model(volume[:, :, start : start + 32])
                    counts[:, :, start : start + 32] += 1

        return step

    causes = {storage.shape: storage.cause for storage in memplan.record(build, device="h100").counted}
    assert (causes[1, 4, 64], causes[1, 2, 64], causes[1, 1, 64]) == ("activation", "input", "input")


def test_activations_that_come_back_to_the_card_are_none() -> None:
    """What the card made and the host kept is no input when it returns."""

    def build() -> Step:
        model, x = network().cuda(), torch.randn(32, 64, device="cuda")

        def step() -> None:
            kept = model[0](x).cpu()
            model[2](kept.to("cuda")).sum().backward()

        return step

    inputs = found(memplan.record(build, device="h100", steps=1), "input")
    assert [s.shape for s in inputs] == [(32, 64)]


def test_copies_of_a_model_are_weights_of_their_own_name() -> None:
    def build() -> Step:
        model, x = network(), torch.randn(32, 64)
        teacher, kept = copy.deepcopy(model).requires_grad_(False), copy.deepcopy(model)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step() -> None:
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(x)
            (model(x) - wanted).pow(2).mean().backward()
            optimizer.step()
            averaged.update_parameters(model)
            with torch.no_grad():
                for mean, new in zip(kept.parameters(), model.parameters(), strict=True):
                    mean.lerp_(new, 0.1)

        return step

    weights = found(memplan.record(build, device="cpu"), "weight")
    assert sum(s.bytes for s in weights) == 4 * 4 * (64 * 128 + 128 + 128 * 4 + 4)
    first = [s.name for s in weights if s.shape == (128, 64)]
    assert sorted(first) == [
        "AveragedModel.module.0.weight", "Sequential#2.0.weight", "Sequential#3.0.weight", "Sequential.0.weight",
    ]  # fmt: skip


def test_an_op_in_place_on_a_view_is_behind_what_it_saves() -> None:
    """Instance norm gives a view; leaky_relu in place on it makes a node of autograd after it is over."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.01, inplace=True), nn.Conv2d(8, 2, 3)
        )

    saved = memplan.explain(make, "1x1x32x32", device="cpu").saved
    (row,) = (row for row in saved if row.layer == "2")
    assert (row.op, row.role) == ("leaky_relu", "its result")
    assert row.why.startswith("leaky_relu saves its result for the input's gradient (leaky_relu_backward)")
    assert not any(row.op == "view" for row in saved)
