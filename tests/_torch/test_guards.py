"""The cheap checks of torch's see what they are there for, on this Python and this torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan import _torch


class Box:
    pass


class Counts(dict[str, Any]):
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


@pytest.mark.parametrize("asked", [1, 300], ids=["by Python", "by a tree"])
@pytest.mark.parametrize(
    "change",
    [
        lambda own: own.update(a=2.0),
        lambda own: own.update(a=1),  # equal, and another object
        lambda own: own.update(b=None),
        lambda own: own.pop("a"),
        lambda own: own.clear(),
    ],
)
def test_guards_of_dicts_see_each_change(change: Callable[[dict[str, Any]], Any], asked: int) -> None:
    for at in range(6):
        kinds = dict, dict, dict, dict, OrderedDict, Counts
        dicts = [kind(a=1.0) for kind in kinds]
        guards = _torch.DictGuards([*dicts, {}])
        assert all(guards.hold() for _ in range(asked))
        assert (guards._check is not None) == (asked == 300)
        change(dicts[at])
        assert not guards.hold()
        assert not guards.hold()
        now = guards.now()
        assert [one != then for one, then in zip(now, guards.versions, strict=True)] == [one == at for one in range(7)]
        guards.accept(now)
        assert all(guards.hold() for _ in range(asked))
        guards.dicts[6]["new"] = 1
        assert not guards.hold()


@seen
@pytest.mark.parametrize("asked", [1, 300], ids=["by Python", "by a tree"])
def test_guards_of_dicts_see_attributes(asked: int) -> None:
    module = nn.Dropout()
    guards = _torch.DictGuards([vars(module)])
    assert all(guards.hold() for _ in range(asked))
    module.p = 0.25
    assert not guards.hold()


def test_guards_of_dicts_need_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._dynamo.guards.RootGuardManager")
    own = {"a": 1}
    guards = _torch.DictGuards([own])
    assert all(guards.hold() for _ in range(300))
    assert guards._check is None
    own["a"] = 2
    assert not guards.hold()


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
