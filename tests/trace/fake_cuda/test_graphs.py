"""CUDA graphs: captured once, into private memory pools, as torch's own counters have it on the emulated card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import ENVIRONMENT, needs_cuda_torch
from torch import nn

import memplan
from memplan.simulation.simulate import simulate
from memplan.trace.records import PRIVATE_POOL

MIB = 1 << 20


def feedforward() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()


def whole_step() -> Callable[[], Any]:
    """Warmed up on a stream of its own and captured with its update, as torch's documentation shows."""
    model, x = feedforward(), torch.randn(256, 512, device="cuda")
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            update.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            update.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph: Any = torch.cuda.CUDAGraph()
    update.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
        update.step()

    def step() -> nn.Module:
        x.copy_(torch.randn(256, 512, device="cuda"))
        graph.replay()
        return model

    return step


def callables() -> Callable[[], Any]:
    model, x = feedforward(), torch.randn(256, 512, device="cuda")
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    graphed: Any = torch.cuda.make_graphed_callables(model, (x,))

    def step() -> None:
        update.zero_grad()
        graphed(x).square().mean().backward()
        update.step()

    return step


def captured(shared: bool) -> Callable[[], Callable[[], Any]]:
    """Two graphs, one after the other, that each need 40 MiB for a moment and keep 4 bytes."""

    def build() -> Callable[[], Any]:
        x = torch.zeros(10 * MIB, device="cuda")
        graphs, kept, pool = list[Any](), list[torch.Tensor](), None
        for _ in range(2):
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                kept.append((x + 1).sum())
            pool = graph.pool() if shared else None
            graphs.append(graph)

        def step() -> Any:
            for graph in graphs:
                graph.replay()
            return x, kept

        return step

    return build


@pytest.mark.parametrize(("shared", "pools"), [(True, 1), (False, 2)])
def test_graphs_share_a_pool_or_have_their_own(shared: bool, pools: int) -> None:
    """By hand: the input's 40 MiB, 40 MiB for each pool, 2 MiB of small blocks for each, and for the generator's state;
    `torch.cuda.empty_cache`, which a capture begins with, gives nothing of a pool back."""
    timeline = simulate(memplan.record(captured(shared), device="h100"))
    assert timeline.peak_reserved == 40 * MIB + pools * (40 + 2) * MIB + 2 * MIB
    assert timeline.steps[0].peak_allocated == 40 * MIB + 4 * 512


def test_a_replay_allocates_nothing() -> None:
    trace = memplan.record(captured(shared=True), device="h100")
    assert [storage for storage in trace.storages if storage.born > trace.steps[0]] == []
    assert {storage.stream // PRIVATE_POOL for storage in trace.storages} == {0, 1}


@needs_cuda_torch
@pytest.mark.slow
@pytest.mark.parametrize("build", [whole_step, callables])
def test_pools_are_those_of_torch(build: Callable[[], Callable[[], Any]]) -> None:
    """The installed torch may differ from that of the environment by 1 MiB of cuBLAS's workspaces."""
    real = memplan.measure(build, device="h100", dry=True, environment=ENVIRONMENT)
    predicted = simulate(memplan.record(build, device="h100"))
    for step, counted in zip(predicted.steps, real.counters[1:], strict=True):
        assert step.peak_allocated == pytest.approx(counted.allocated, abs=2 * MIB)
        assert step.peak_reserved == pytest.approx(counted.reserved, abs=4 * MIB)


def test_a_graphed_callable_keeps_its_memory_and_warns_of_nothing() -> None:
    """Its gradients and results stay in the pool: a step allocates what is outside of it alone."""
    trace = memplan.record(callables, device="h100")
    inside = [storage for storage in trace.storages if storage.stream >= PRIVATE_POOL]
    assert inside
    assert max(storage.born for storage in inside) < trace.steps[0]
    assert not any("printed" in note for note in trace.notes)
