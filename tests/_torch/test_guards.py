"""The cheap checks of torch's see what they are there for, on this Python and this torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan import _torch


class Box:
    pass


seen = pytest.mark.skipif(not _torch.VERSIONS_SEE_ATTRIBUTES, reason="attributes are compared one by one")


@pytest.mark.parametrize("attributes", [False, pytest.param(True, marks=seen)])
def test_a_dicts_version_changes_with_each_change_alone(attributes: bool) -> None:
    box: Any = Box()
    box.a, box.b = 1.0, object()
    own: dict[str, Any] = vars(box) if attributes else {"a": 1.0}
    value: Any
    for value in (2.0, 2, True, None):
        version = _torch.dict_version(own)
        assert _torch.dict_version(own) == version
        if attributes:
            box.a = value
        else:
            own["a"] = value
        assert _torch.dict_version(own) != version
    version = _torch.dict_version(own)
    del own["a"]
    assert _torch.dict_version(own) != version


@seen
def test_attributes_set_in_a_loop_change_the_version_each_time() -> None:
    module = nn.Dropout()
    own, seen = vars(module), set[int]()
    for at in range(100):
        module.p = at / 100 + 0.001
        seen.add(_torch.dict_version(own))
    assert len(seen) == 100


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.requires_grad_(False),
        lambda p: setattr(p, "data", torch.ones(2, 4)),
        lambda p: setattr(p, "data", torch.ones(3, 2).t()),
        lambda p: setattr(p, "data", torch.ones(2, 3, dtype=torch.float64)),
    ],
)
def test_tensor_guards_see_changes_of_the_same_tensor(change: Callable[[nn.Parameter], Any]) -> None:
    tensors = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))]
    guards = _torch.TensorGuards(tensors)
    assert guards.hold(tensors)
    with torch.no_grad():
        tensors[1].mul_(2)
    assert guards.hold(tensors)
    change(tensors[1])
    assert not guards.hold(tensors)


def test_no_tensors_always_hold() -> None:
    assert _torch.TensorGuards([]).hold([])


def test_default_device_is_a_flag_and_no_mode_that_calls_run_unplanned_in() -> None:
    before = _torch.flags()
    with torch.device("meta"):
        assert _torch.flags() != before
        assert _torch.surroundings() is None
    assert _torch.flags() == before
