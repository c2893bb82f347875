"""Who holds a tensor, in words."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn

from memplan import _torch
from memplan.integrations.watching.holding import NOBODY, Owners, tensors_on

KEPT: list[Any] = []


class Slotted:
    __slots__ = ("tensor",)


class Plain:
    shared: list[Any] = []  # noqa: RUF012  # a class that keeps things is what this is about

    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}


def in_global(tensor: torch.Tensor) -> Any:
    KEPT.append(tensor)


def in_slot(tensor: torch.Tensor) -> Any:
    holder = Slotted()
    holder.tensor = tensor
    return holder


def in_attribute(tensor: torch.Tensor) -> Any:
    holder = Plain()
    holder.cache[3] = [tensor]
    return holder


def in_class(tensor: torch.Tensor) -> Any:
    Plain.shared.append(tensor)


def in_module(tensor: torch.Tensor) -> Any:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].last = tensor
    return model


def in_default(tensor: torch.Tensor) -> Any:
    def later(kept: torch.Tensor = tensor) -> torch.Tensor:
        return kept

    return later


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        (in_attribute, "the attribute `cache` of a Plain (in a list)"),
        (in_module, "the attribute `last` of layer 0"),
        *slow(
            (in_global, "the list `KEPT`, a global"),
            (in_slot, "the attribute `tensor` of a Slotted"),
            (in_class, "the attribute `shared` of the class Plain"),
            (in_default, "the function later"),
        ),
    ],
)
def test_a_holder_is_named(keep: Callable[[torch.Tensor], Any], text: str) -> None:
    if keep in (in_global, in_class):  # which are older than the test, and not found while they are frozen
        gc.unfreeze()
    key, holder = made(keep)
    models = [holder] if isinstance(holder, nn.Module) else []
    tensors = tensors_on({key})[key]
    try:
        assert Owners(models).of(tensors).text == text
    finally:
        KEPT.clear()
        Plain.shared.clear()


def made(keep: Callable[[torch.Tensor], Any]) -> tuple[int, Any]:
    tensor = torch.ones(3)
    return _torch.storage_key(tensor.untyped_storage()), keep(tensor)


def test_a_tensor_that_only_a_graph_holds_has_no_holder() -> None:
    weight = torch.ones(3, requires_grad=True)

    def saved() -> tuple[int, torch.Tensor]:
        inner = weight.exp()
        return _torch.storage_key(inner.untyped_storage()), inner.sum()

    key, _graph = saved()
    assert Owners([]).of(tensors_on({key}).get(key, [])) is NOBODY


def test_looking_up_local_variables_holds_nothing_alive() -> None:
    import weakref

    def run() -> bool:
        tensor: torch.Tensor | None = torch.ones(3)
        box = [tensor]
        died = weakref.ref(box[0])
        Owners([])
        tensor = None
        box.clear()
        return died() is None and tensor is None

    assert run()
