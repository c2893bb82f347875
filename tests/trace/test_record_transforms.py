"""Lazy layers, function transforms, meta tensors and generators: predicted beside what torch's profiler saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from environment import slow, thinned
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from truth.cpu_allocator import measured_peak

import memplan

Step = Callable[[], Any]


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def lazy_made_by_the_step() -> Step:
    model, x = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4)), torch.randn(16, 64)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return step


def lazy_called_before() -> Step:
    model, x = nn.Sequential(nn.LazyLinear(32, bias=False), nn.ReLU(), nn.LazyLinear(4)), torch.randn(16, 64)
    model(x)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def gradient_of_a_function() -> Step:
    model, x = nn.Linear(64, 64), torch.randn(32, 64)

    def step() -> Any:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        gradients = grad(lambda w: functional_call(model, w, (x,)).pow(2).mean())(weights)
        return {name: weights[name] - 0.1 * gradients[name] for name in weights}

    return step


def gradients_of_each_sample() -> Step:
    model, x, y = _network(), torch.randn(32, 64), torch.randint(0, 4, (32,))

    def loss(weights: Any, sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, weights, (sample[None],)), label[None])

    def step() -> Any:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        gradients = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
        return sum(g.pow(2).sum() for g in gradients.values())

    return step


def a_mapped_loss() -> Step:
    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(32, 64)
    return lambda: vmap(lambda row: torch.tanh(weight @ row))(x).sum().backward()


def called_with_other_weights() -> Step:
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    return lambda: functional_call(model, dict(model.named_parameters()), (x,)).sum().backward()


def a_jacobian() -> Step:
    model, x = _network(), torch.randn(64)
    return lambda: jacrev(model)(x).sum()


def made_on_meta() -> Step:
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    model = model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    x = torch.randn(32, 64)
    return lambda: model(x).sum().backward()


def sizes_from_meta() -> Step:
    wide = torch.empty(1000, 1000, device="meta")
    model, x = nn.Linear((wide @ wide).shape[0] // 100, 10), torch.randn(32, 10)

    def step() -> None:
        torch.zeros(1000, 1000, device="meta").sum(0)
        model(x).sum().backward()

    return step


def loaded_into_meta() -> Step:
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    model.load_state_dict({"weight": torch.randn(64, 64), "bias": torch.zeros(64)}, assign=True)
    x = torch.randn(32, 64)
    return lambda: model(x).sum().backward()


def a_generator() -> Step:
    own = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64, generator=own))

    def step() -> None:
        own.manual_seed(1)
        x = torch.randn(64, 64, generator=own)[torch.randperm(64, generator=own)]
        mask = torch.empty(64, 64).bernoulli_(0.5, generator=own)
        (x @ weight * mask + torch.normal(0.0, 1.0, (64, 64), generator=own)).sum().backward()

    return step


def a_loader_with_a_generator() -> Step:
    own, model = torch.Generator().manual_seed(0), nn.Linear(64, 8)
    data = TensorDataset(torch.randn(64, 64), torch.randint(0, 8, (64,)))
    part, _ = random_split(data, [48, 16], generator=own)
    loader = DataLoader(part, batch_size=16, shuffle=True, generator=own)

    def step() -> None:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()

    return step


def loaders_that_draw() -> Step:
    """Samples that read their own number, which is an index and no size."""
    data, model = Numbered(), nn.Linear(64, 8)
    part, rest = random_split(data, [48, 16])
    loaders = [
        DataLoader(part, 16, shuffle=True),
        DataLoader(rest, 16, num_workers=2),
        DataLoader(data, 16, sampler=WeightedRandomSampler([1.0] * 64, 96)),
        DataLoader(data, 16, sampler=SubsetRandomSampler(range(32, 64))),
    ]

    def step() -> None:
        for loader in loaders:
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()

    return step


class Numbered(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.random.default_rng(index).standard_normal(64, "float32")), index % 8


def test_what_torch_draws_of_a_data_set_is_no_size() -> None:
    found = memplan.record(loaders_that_draw, device="cpu").assumptions
    assert [one.kind for one in found if one.kind == "bound"] == []


@pytest.mark.parametrize(
    "build",
    thinned([
        lazy_made_by_the_step, lazy_called_before, gradient_of_a_function, gradients_of_each_sample, a_mapped_loss,
        called_with_other_weights, a_jacobian, made_on_meta, sizes_from_meta, loaded_into_meta, a_generator,
        a_loader_with_a_generator, loaders_that_draw,
    ], 3),
    ids=lambda build: build.__name__,
)  # fmt: skip
def test_a_step_takes_what_the_allocator_saw(build: Callable[[], Step]) -> None:
    expected = measured_peak(build)
    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == expected
    assert memplan.simulate(memplan.measure(build, device="cpu")).peak_allocated == expected
    assert memplan.record(build, device="h100").ops


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_zeros_of_forward_derivatives_have_no_memory() -> None:
    """A Hessian's tangents that are known to be zero: `torch._efficientzerotensor`."""
    weight = torch.randn(16, 16)

    def build() -> Step:
        return lambda: hessian(lambda x: torch.tanh(weight @ x).sum())(torch.ones(16)).sum()

    zeros = {op.writes[0] for op in memplan.record(build, device="cpu").ops if "_efficientzerotensor" in op.name}
    assert zeros
    assert all(memplan.record(build, device="cpu").storages[storage].bytes == 0 for storage in zeros)


@pytest.mark.parametrize("device", ["h100", *slow("cpu")])
def test_a_lazy_module_is_explained_whole_or_made(device: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))

    def known() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))

    expected = memplan.explain(known, "2x3x16x16", device=device)
    for what in (make, make()):
        found = memplan.explain(what, "2x3x16x16", device=device)
        assert found.timeline.peak_allocated == expected.timeline.peak_allocated
        assert [row.weight_bytes for row in found.layers] == [row.weight_bytes for row in expected.layers]


def test_a_lazy_module_moves_to_the_card_before_its_first_call() -> None:
    def build() -> Step:
        model, x = nn.LazyLinear(32).cuda().half(), torch.randn(16, 64, device="cuda", dtype=torch.float16)
        return lambda: model(x).sum().backward()

    weights = [s for s in memplan.record(build, device="h100").counted if s.cause == "weight"]
    assert sorted(s.bytes for s in weights) == [2 * 32, 2 * 32 * 64]


class DrawsByItself(nn.Module):
    """A layer with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.rand(8, generator=self.own)


def test_a_module_with_a_generator_is_copied_and_keeps_its_state() -> None:
    model = DrawsByItself()
    before = model.own.get_state()
    assert memplan.explain(model, torch.randn(4, 8), device="cpu").timeline.peak_allocated > 0
    assert torch.equal(model.own.get_state(), before)
