"""Kinds of models and calls for which a planned step must do what eager PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memplan import _torch
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import Call
from memplan.planning.graph.joint_graph import JointGraph, recomputable_values
from memplan.planning.levers.lever import GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.rewriting.install import Installed, install

BATCH = 32


class Twice(nn.Module):
    """Two of a kind, one after the other: what the first one saves need not be there while the second one runs."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.first(*inputs, **kwargs), self.second(*inputs, **kwargs)


class Dropouts(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8), nn.Dropout(0.1))


class Norms(nn.Sequential):
    def __init__(self, in_place: bool = False, dropout: float = 0.0) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(in_place), nn.MaxPool2d(2), nn.Dropout(dropout),
            nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(in_place), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 8),
        )  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 32)
        self.norm, self.attend = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, dropout=0.2, batch_first=True)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.norm(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 * self.training).transpose(1, 2).reshape(x.shape)
        return self.out(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        self[0].requires_grad_(False)
        self[2].weight.requires_grad_(False)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(24, 32), nn.Linear(32, 8), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = F.silu(self.first(x))
        return {"left": self.left(h), "right": (self.right(h), h.detach().mean()), "name": "two"}


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, *, scale: Tensor, flip: bool = False) -> Tensor:
        h = torch.sigmoid(self.first(x)) * scale
        return self.second(-h if flip else h)


@dataclass(frozen=True)
class Cell:
    make: Callable[[], nn.Module]
    arguments: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    """Batch size -> what the model is called with."""
    batch: int = 4


def _vector(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, 24),), {}


def _image(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, 16, 16),), {}


CELLS = {
    "dropout": Cell(Dropouts, _vector),
    "batch norm": Cell(Norms, _image),
    "batch norm and dropout": Cell(lambda: Norms(dropout=0.2), _image),
    "attention dropout": Cell(Attention, lambda batch: ((torch.randn(batch, 6, 24),), {})),
    "in-place relu": Cell(lambda: Norms(in_place=True), _image),
    "weight tying": Cell(Tied, lambda batch: ((torch.randint(0, 20, (batch, 5)),), {})),
    "frozen layers": Cell(Frozen, _vector),
    "two outputs": Cell(TwoOutputs, _vector),
    "keyword inputs": Cell(
        Keywords, lambda batch: ((torch.randn(batch, 24),), {"scale": torch.rand(32), "flip": True})
    ),
    "channels last": Cell(
        lambda: Norms().to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
        lambda batch: ((torch.randn(batch, 3, 16, 16).to(memory_format=torch.channels_last),), {}),
    ),
}


def nothing(_: JointGraph) -> frozenset[int]:
    return frozenset()


def half(graph: JointGraph) -> frozenset[int]:
    return frozenset(sorted(recomputable_values(graph))[::2])


CHOICES: dict[str, Callable[[JointGraph], Choices]] = {
    "all kept": lambda _: Choices(),
    "half dropped": lambda graph: Choices(recompute=half(graph)),
    "all dropped": lambda graph: Choices(recompute=recomputable_values(graph)),
    "encoded": lambda graph: Choices(saved_forms=frozenset((form.lever, form.value) for form in graph.forms)),
}


@dataclass(frozen=True)
class Planned:
    captured: Any
    schedule: Schedule
    fused: None = None


def planner_of(model: nn.Module, choose: Callable[[JointGraph], Choices]) -> Callable[[Call, bool], Planned]:
    def planned(call: Call, held: bool) -> Planned:
        captured = capture(model, call)
        return Planned(
            captured, schedule(captured.graph, replace(choose(captured.graph), gradients=GradientUse(accumulates=held)))
        )

    return planned


def installed(model: nn.Module, choose: Callable[[JointGraph], Choices] = CHOICES["half dropped"]) -> Installed:
    return install(model, planner_of(model, choose))


def total(output: Any) -> Tensor:
    """A loss of any output: weighted, so that gradients differ from element to element."""
    parts = [one for one in _torch.tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]
    return torch.stack(
        [(one * torch.linspace(-1, 1, one.numel()).reshape(one.shape)).sum() + one.pow(2).mean() for one in parts]
    ).sum()


def same(a: Any, b: Any) -> None:
    """Two outputs are equal bit for bit."""
    left, right = (_torch.tree_leaves(one) for one in (a, b))
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        if isinstance(one, Tensor):
            assert one.requires_grad == other.requires_grad
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        else:
            assert one == other


def same_state(reference: nn.Module, model: nn.Module) -> None:
    """Parameters, buffers and gradients are equal bit for bit."""
    for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, msg=name)
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert other.grad is not None
            torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0, msg=f"gradient of {name}")
            assert other.grad.stride() == one.grad.stride(), name
    for (name, one), other in zip(reference.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, msg=name)
