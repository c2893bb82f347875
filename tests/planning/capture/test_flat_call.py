"""Calls as flat tensors, and models as functions of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memplan.errors import UsageError
from memplan.planning.capture.flat_call import Flat, call_of


def test_a_call_is_rebuilt_with_other_tensors() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    call = call_of((x, [3, y]), {"k": {"a": x, "b": "text"}})
    assert [one is other for one, other in zip(call.tensors, (x, y, x), strict=True)] == [True] * 3
    assert call.constants == (3, "text")
    args, kwargs = call.rebuild([torch.tensor(n) for n in range(3)])
    assert (args[0], args[1][0], args[1][1], kwargs["k"]["a"], kwargs["k"]["b"]) == (0, 3, 1, 2, "text")


def test_tensors_that_share_memory_are_told() -> None:
    x, y = torch.ones(4), torch.ones(4)
    assert call_of((x, y, x, y[1:], torch.ones(0), torch.ones(0)), {}).aliases == (0, 1, 0, 1, 4, 5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(2, 2)
        self.register_buffer("n", torch.zeros(()))
        self.n: Tensor

    def forward(self, x: Tensor) -> Any:
        self.n = self.n + 1
        h = self.a(x)
        return h, {"again": h, "rows": h[0], "x": x}


def test_each_tensor_is_returned_once_and_replaced_buffers_after_them() -> None:
    model, x = Model(), torch.randn(3, 2)
    flat = Flat(model, call_of((x,), {}), contextlib.nullcontext)
    assert set(flat.paths.values()) == {"a.weight", "a.bias", "n"}
    outputs = flat(x)
    assert flat.replaced_buffers == ("n",)
    assert outputs[-1] == 1
    assert model.n == 0
    assert flat.returned is not None
    made = flat.returned.rebuild(outputs)
    assert made[0] is made[1]["again"]
    assert torch.equal(made[1]["rows"], model.a(x)[0])
    assert torch.equal(made[1]["x"], x)


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(loss=x.sum(), logits=x * 2)


def test_what_the_loss_does_not_read_is_cut_off() -> None:
    x = torch.randn(3, requires_grad=True)
    flat = Flat(Loss(), call_of((x,), {}), contextlib.nullcontext)
    outputs = flat(x)
    assert flat.returned is not None
    made = flat.returned.rebuild(outputs)
    assert made.loss.requires_grad
    assert not made.logits.requires_grad
    assert [outputs[at] is made.logits for at in flat.returned.detached_outputs] == [True]


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.cat([self.kept, x])
        return x


def test_a_buffer_that_grows_is_refused() -> None:
    model, x = Grows(), torch.ones(2)
    with pytest.raises(UsageError, match=r"in the place of the buffer kept, \(1,\) of float32"):
        Flat(model, call_of((x,), {}), contextlib.nullcontext)(x)
    assert model.kept.shape == (1,)
