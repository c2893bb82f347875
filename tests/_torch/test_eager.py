"""Modes and profiles that are guests in somebody else's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memplan import _torch


def test_a_guest_mode_sees_ops_and_knows_whether_it_can_be_left() -> None:
    seen = list[str]()

    def note(func: Any, args: Any, kwargs: Any, run: _torch.Run) -> Any:
        seen.append(str(func))
        return run(func)

    mode, other = _torch.GuestMode(note), _torch.GuestMode(note)
    with mode:
        _ = torch.ones(2) + 1
        assert mode.is_innermost
        with other:
            assert not mode.is_innermost
    assert not mode.is_innermost
    assert "aten.add.Tensor" in seen


def test_a_yielding_profile_ends_where_another_one_begins() -> None:
    ours = _torch.YieldingProfile()
    ours.start()
    assert ours.whole
    with torch.autograd.profiler.profile() as theirs:
        torch.ones(2)
    assert ours.stop() is None
    assert theirs is not None
    assert any(event.key == "aten::ones" for event in theirs.key_averages())
    alone = _torch.YieldingProfile()
    alone.start()
    kept = torch.ones(1000)
    profile = alone.stop()
    assert profile is not None
    assert [event.bytes for event in profile.events] == [kept.nbytes]
    with torch.autograd.profiler.profile():  # another one is at work: ours does not start
        ours.start()
        assert ours.stop() is None


def test_hooks_are_listed_and_removed() -> None:
    layer, calls = torch.nn.Linear(2, 2), list[int]()

    def hook(*_: Any) -> None:
        calls.append(1)

    layer.register_forward_hook(hook, always_call=True)
    layer.register_forward_pre_hook(hook, with_kwargs=True)
    assert _torch.hooks_of(layer) == [hook, hook]
    _torch.remove_hooks(layer)
    layer(torch.ones(2))
    assert calls == []


def test_a_compiled_module_is_told_from_others() -> None:
    layer = torch.nn.Linear(2, 2)
    assert not _torch.is_compiled(layer)
    assert _torch.is_compiled(torch.compile(layer, backend="eager"))  # pyright: ignore[reportArgumentType]
    layer.compile(backend="eager")
    assert _torch.is_compiled(torch.nn.Sequential(layer))


class _Asks(torch.autograd.Function):
    """Notes whether cuDNN is on, as seen by what is made of ops, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _seen_above.append(torch.backends.cudnn.enabled)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> torch.Tensor:
        _seen_above.append(torch.backends.cudnn.enabled)
        return grad_outputs[0].clone()


_seen_above = list[bool]()


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_is_off_above_single_ops_alone(enabled: bool) -> None:
    seen_by_ops = set[bool]()

    def note(func: Any, args: Any, kwargs: Any, run: _torch.Run) -> Any:
        seen_by_ops.add(torch.backends.cudnn.enabled)
        return run(func)

    before = torch.backends.cudnn.enabled
    _seen_above.clear()
    x = torch.ones(3, requires_grad=True)
    try:
        torch.backends.cudnn.enabled = enabled
        with _torch.EagerMode(note), _torch.capturable_kernels():
            _Asks.apply(x * 2).sum().backward()
        assert torch.backends.cudnn.enabled == enabled
    finally:
        torch.backends.cudnn.enabled = before
    assert _seen_above == [False, False]
    assert seen_by_ops == {enabled}


def test_results_are_replaced_in_order_where_an_op_computes_them() -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    pairs = [(x * 2, torch.zeros(3)), (torch.ones(3), torch.tensor([4.0, 5.0, 6.0]))]
    with _torch.ResultsReplaced(pairs) as mode:
        y = (x.exp() * 0 + x) * 2
        z = y + 1  # reads what was written in the place of y
    assert y.tolist() == [0, 0, 0]
    assert z.tolist() == [4, 5, 6]
    assert not mode.left
    with _torch.ResultsReplaced([(torch.full((3,), 9.0), x)]) as mode:
        assert (x + 1).tolist() == [2, -1, 4]
    assert len(mode.left) == 1, "nothing computes it"
