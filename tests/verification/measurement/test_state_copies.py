from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from truth.module_state import everything

from memplan.verification.measurement.state_copies import (
    ModuleCopy,
    RandomState,
    attributes_restored,
    copy_tensors,
    drawing_random_numbers,
    random_state_restored,
)


class Many(nn.Module):
    """Tied weights, a recurrent net that holds its weights in a list, buffers, plain tensors, counters, None."""

    kept: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", None)
        self.plain = torch.zeros(3)
        self.calls, self.seen = 0, []

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(tokens))
        hidden = self.norm(hidden.flatten(0, 1))
        self.calls += 1
        self.seen.append(tokens.shape)
        self.plain += 1
        self.kept = hidden.detach()
        return self.head(hidden)


@pytest.fixture
def many() -> Many:
    torch.manual_seed(0)
    return Many()


TOKENS = torch.arange(12).reshape(3, 4) % 11


def train(model: nn.Module, steps: int = 2) -> list[Tensor]:
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        update.zero_grad()
        losses.append(model(TOKENS).square().mean())
        losses[-1].backward()
        update.step()
    return [loss.detach() for loss in losses]


def test_training_the_copy_is_training_the_module_and_leaves_it_alone(many: Many) -> None:
    twin = copy.deepcopy(many)
    list(many.parameters())[1].grad = torch.ones_like(list(many.parameters())[1])
    before = everything(many)
    made = ModuleCopy(many)
    with made.in_place():
        losses = train(many)
    assert everything(many) == before
    assert [torch.equal(*pair) for pair in zip(losses, train(twin), strict=True)] == [True, True]
    ours, theirs = made.parameters, dict(twin.named_parameters())
    assert ours.keys() == theirs.keys()
    assert [name for name, p in theirs.items() if not torch.equal(p, ours[name])] == []
    assert [n for n, b in twin.named_buffers() if not torch.equal(b, made.buffers[n])] == []


def test_what_the_copy_became_is_there_the_next_time(many: Many) -> None:
    twin = copy.deepcopy(many)
    made = ModuleCopy(many)
    for _ in range(2):
        with made.in_place():
            many(TOKENS)
            assert many.calls == _ + 1
        twin(TOKENS)
    assert many.calls == 0
    assert torch.equal(made.buffers["norm.running_mean"], twin.get_buffer("norm.running_mean"))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_and_interrupts_restore(many: Many, error: type[BaseException]) -> None:
    before = everything(many)

    def interrupted() -> None:
        train(many)
        many.norm.weight.data.zero_()
        many.norm.register_buffer("late", torch.ones(1))
        raise error

    made = ModuleCopy(many)
    with pytest.raises(error), made.in_place():
        interrupted()
    assert everything(many) == before


def test_parameters_in_one_storage_stay_so_and_keep_their_strides() -> None:
    model = nn.Module()
    whole = torch.arange(24.0)
    model.a = nn.Parameter(whole[:12].reshape(3, 4).t())
    model.b = nn.Parameter(whole[8:20])
    model.c = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), requires_grad=False)
    made = ModuleCopy(model).parameters
    assert [made[n].stride() for n in "abc"] == [p.stride() for p in model.parameters()]
    assert not made["c"].requires_grad
    with torch.no_grad():
        made["b"].fill_(-7)
    assert (made["a"] == -7).sum() == 4
    assert not (whole == -7).any()


def test_hooks_of_the_users_parameters_do_not_fire(many: Many) -> None:
    fired = []
    many.norm.weight.register_hook(lambda g: fired.append(1))
    many.norm.bias.register_post_accumulate_grad_hook(lambda p: fired.append(2))
    with ModuleCopy(many).in_place():
        train(many)
    assert fired == []
    many(TOKENS).sum().backward()
    assert sorted(fired) == [1, 2]


@pytest.mark.parametrize(
    ("draw", "name"),
    [(lambda: torch.rand(1), "torch"), (random.random, "python"), (numpy.random.rand, "numpy")],
    ids=["torch", "python", "numpy"],
)
def test_random_streams(draw: Any, name: str) -> None:
    before = RandomState.now()
    drawn = []

    def interrupted() -> None:
        with drawing_random_numbers():
            drawn.append(draw())
        assert before.differences(RandomState.now()) == (name,)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), random_state_restored():
        interrupted()
    assert before.differences(RandomState.now()) == ()
    assert [draw()] == drawn
    before.restore()


def test_copies_of_a_call_share_what_the_call_shares() -> None:
    memory = torch.arange(100.0)
    x, y, alone = memory[10:40].view(5, 6), memory[13:43].view(5, 6).t(), torch.ones(2, requires_grad=True)
    made = copy_tensors([x, y, alone, x])
    assert [torch.equal(*pair) for pair in zip(made, (x, y, alone, x), strict=True)] == [True] * 4
    assert [one.stride() for one in made] == [one.stride() for one in (x, y, alone, x)]
    assert made[0] is made[3]
    made[0][0, 3] = -1.0
    assert made[1][0, 0] == -1.0
    assert memory[13] == 13.0
    assert made[0].untyped_storage().nbytes() == (43 - 10) * 4
    assert made[2].requires_grad
    assert made[2].is_leaf


def test_shared_parameters_take_no_memory_and_have_gradients_of_their_own() -> None:
    linear, norm, x = nn.Linear(3, 4), nn.BatchNorm1d(4), torch.randn(5, 3)
    model = nn.Sequential(linear, norm)
    before = everything(model)
    copied = ModuleCopy(model, shared=True)
    with copied.in_place():
        model(x).pow(2).sum().backward()
        assert linear.weight.grad is not None
        assert norm.num_batches_tracked == 1
    weight = copied.parameters["0.weight"]
    assert weight is not linear.weight
    assert weight.data_ptr() == linear.weight.data_ptr()
    assert everything(model) == before


def test_hooks_that_come_meanwhile_go_again_and_handles_still_remove_theirs() -> None:
    module = nn.Linear(2, 2)
    calls = list[str]()
    handle = module.register_forward_hook(lambda *_: calls.append("own"))
    kept = ModuleCopy(module)
    with attributes_restored(module):
        module.register_forward_hook(lambda *_: calls.append("other"))
    with kept.in_place():
        module.register_forward_pre_hook(lambda *_: calls.append("in the copy"))
        module(torch.ones(2))
    assert calls == ["in the copy", "own"]
    module(torch.ones(2))
    assert calls == ["in the copy", "own", "own"]
    with kept.in_place():
        module(torch.ones(2))
    assert calls[3:] == ["in the copy", "own"]
    handle.remove()
    module(torch.ones(2))
    assert len(calls) == 5


def test_a_state_that_is_set_by_itself_watches_nothing() -> None:
    before = RandomState.now()
    torch.rand(1)
    before.restore()
    torch.rand(1)
    with drawing_random_numbers():  # nobody else is said to have drawn
        torch.rand(1)
