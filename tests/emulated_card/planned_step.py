"""A planned step with kernels in a process that sees an emulated card: the requests of its plan, and its own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memplan import _torch
from memplan.errors import BudgetError
from memplan.planning.kernel_search import offered
from memplan.planning.planner import Planner
from memplan.planning.request import request
from memplan.planning.schedule.to_trace import trace_of
from memplan.planning.settings import PlanOptions
from memplan.rewriting.install import install
from memplan.trace.step import StepOptions
from memplan.verification.fitting.plan_cache import Plans

_SIGNS = {"alloc": 1, "free_completed": -1}


class Residual(nn.Module):
    """Two convolutions, each with a norm, in a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (N, C, H, W) -> (N, C, H, W)."""
        y = F.relu(self.norms[0](self.convolutions[0](x)))
        return F.relu(self.norms[1](self.convolutions[1](y)) + x)


def network() -> nn.Module:
    """Images of 128 x 128 to 10 classes, with max pooling and what kernels replace: norms with a ReLU, the loss."""
    stem = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(*stem, *(Residual(32) for _ in range(3)), *head).train()


def main(out: str) -> None:
    """Plan the network's step for its lowest budget with all kernels that are offered, run it twice, and write what
    the plan predicts of the second run and what torch's caching allocator recorded: requests in order, negative for
    frees.

    Args:
        out: the JSON file to write.
    """
    torch.manual_seed(0)
    model = network().cuda()
    images, labels = torch.randn(8, 3, 128, 128, device="cuda"), torch.randint(10, (8,), device="cuda")

    step = StepOptions((images,), {}, (labels,), F.cross_entropy, None, None)
    options = PlanOptions(budget="1 TiB", allow="reordered", costs="roofline")
    request_ = request(model, step, options, fake=False)
    planner = Planner(request_.step)
    without = planner.study(request_.call, request_.settings, key=0)
    groups, _ = offered(without, request_.settings)
    study = planner._rewritten(without, request_.call, request_.settings, kernels=groups)
    budget = study.least_peak(request_.settings)
    try:
        planned = study.planned(request_.settings, budget)
    except BudgetError as error:  # the allocator reserves more than live bytes
        budget = error.smallest_budget
        planned = study.planned(request_.settings, budget)
    plans = Plans(request_.step, request_.settings, budget, lambda _: None)
    plans.expect(planned)
    install(request_.step, plans)

    request_.step(images, labels).backward()  # libraries load, kernels are compiled
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    _torch.clear_cublas_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _torch.record_history(stacks=False)
    request_.step(images, labels).backward()
    events = _torch.history()
    _torch.end_history()

    trace = trace_of(planned.schedule, planned.outside_memory)
    predicted = {storage.born: storage.bytes for storage in trace.storages}
    predicted |= {storage.died: -storage.bytes for storage in trace.storages if storage.died is not None}
    found = {
        "kernels": sorted({group.kernel for group in planned.plan.kernels}),
        "predicted": [size for tick, size in sorted(predicted.items()) if size and tick > trace.steps[0]],
        "actual": [_SIGNS[event.action] * event.bytes for event in events if event.action in _SIGNS],
        "reserved": [planned.plan.predicted.peak_reserved, torch.cuda.max_memory_reserved()],
    }
    Path(out).write_text(json.dumps(found), encoding="utf-8")
