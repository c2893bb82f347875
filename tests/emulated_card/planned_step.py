"""A planned step in a process that sees an emulated card: the requests of its plan, and its own."""

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


class Layer(nn.Module):
    """Attention and an MLP with adapters of low rank, each with dropout and in a residual connection."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (N, T, C) -> (N, T, C)."""
        heads = self.queries(self.norm(x)).unflatten(-1, (-1, 64)).transpose(1, 2).chunk(3, 1)
        x = x + self.dropout(
            self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        )
        return x + self.dropout(F.leaky_relu(self.up(self.down(self.dropout(x)))))


class Text(nn.Module):
    """Embeddings of tokens and fixed ones of positions, and layers with dropout."""

    positions: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4096, width)
        self.register_buffer("positions", torch.randn(8, 256, width))
        self.layers = nn.Sequential(*(Layer(width, 16) for _ in range(3)))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Shapes: (N, T), (N, T, C) -> (), the loss."""
        rows, columns = (torch.arange(size, device=ids.device) for size in ids.shape)
        return (self.layers(self.tokens(ids) + self.positions[rows[:, None], columns]) * targets).sum()


def convolutional() -> tuple[nn.Module, StepOptions]:
    """The network of convolutions, its images and labels, and its loss."""
    images, labels = torch.randn(8, 3, 128, 128).cuda(), torch.randint(10, (8,)).cuda()
    return network(), StepOptions((images,), {}, (labels,), F.cross_entropy, None, None)


def text() -> tuple[nn.Module, StepOptions]:
    """Layers of attention in bfloat16, token ids and targets."""
    ids, targets = torch.randint(4096, (8, 256)).cuda(), torch.randn(8, 256, 256).bfloat16().cuda()
    return Text(256).bfloat16().train(), StepOptions((ids, targets), {}, (), None, None, None)


def scattered() -> tuple[nn.Module, StepOptions]:
    """Linear layers with 7 MiB of free memory between their weights, too few for the activations of 8 MiB."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024, bias=False), nn.GELU())]
    model, between = nn.Sequential(*layers).train(), list[Tensor]()
    for parameter in model.parameters():
        between.append(torch.empty(7 << 20, dtype=torch.uint8, device="cuda"))
        parameter.data = parameter.data.cuda()
    inputs, targets = torch.randn(2048, 1024).cuda(), torch.randn(2048, 1024).cuda()
    return model, StepOptions((inputs,), {}, (targets,), F.mse_loss, None, None)


STEPS = {"convolutional": convolutional, "text": text, "scattered": scattered}


def main(name: str, out: str) -> None:
    """Plan a step of `STEPS` for its lowest budget with all kernels that are offered, run it twice, and write what
    the plan predicts of the second run and what torch's caching allocator recorded: requests in order, negative for
    frees.

    Args:
        name: of the step.
        out: the JSON file to write.
    """
    torch.manual_seed(0)
    model, step = STEPS[name]()
    model.cuda()
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

    request_.step(*step.inputs, *step.targets).backward()  # libraries load, kernels are compiled
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    _torch.clear_cublas_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    gaps = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    _torch.record_history(stacks=False)
    request_.step(*step.inputs, *step.targets).backward()
    events = _torch.history()
    _torch.end_history()

    trace = trace_of(planned.schedule, planned.outside_memory)
    predicted = {storage.born: storage.bytes for storage in trace.storages}
    predicted |= {storage.died: -storage.bytes for storage in trace.storages if storage.died is not None}
    found = {
        "kernels": sorted({group.kernel for group in planned.plan.kernels}),
        "direct": sorted(
            {
                planned.schedule.graph.ops[action.op].target
                for action in planned.schedule.backward
                if action.encoding is not None and action.op is not None
            }
        ),
        "predicted": [size for tick, size in sorted(predicted.items()) if size and tick > trace.steps[0]],
        "actual": [_SIGNS[event.action] * event.bytes for event in events if event.action in _SIGNS],
        "gaps": gaps,
        "reserved": [planned.plan.predicted.peak_reserved, torch.cuda.max_memory_reserved()],
    }
    Path(out).write_text(json.dumps(found), encoding="utf-8")
