"""Optimizers of torchao and bitsandbytes with the options of torch's: which options, how many bytes, and how far from
float32 moments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from truth.cpu_allocator import allocations, peak_of

from memplan.errors import InputError, UsageError
from memplan.planning.cost.optimizer_memory import update_of
from memplan.planning.ops import eight_bit_moments
from memplan.planning.ops.eight_bit_moments import EightBitMoments

pytest.importorskip("torchao.optim")


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """torchao compiles an update for each shape, which takes seconds and changes no state."""
    with torch.compiler.set_stance("force_eager"):
        yield


def parameters(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draws)) for shape in shapes]


def test_groups_and_options_are_those_of_the_optimizer() -> None:
    first, second = parameters((64, 64), (64,))

    def two_groups(given: Any) -> torch.optim.Optimizer:
        weight, bias = given
        groups: list[dict[str, Any]] = [
            {"params": [weight]}, {"params": [bias], "weight_decay": 0.0, "betas": (0.5, 0.6)},
        ]  # fmt: skip
        return torch.optim.AdamW(groups, lr=3e-4, weight_decay=0.2, eps=1e-5)

    optimizer = EightBitMoments(two_groups)([first, second])
    assert type(optimizer).__name__ == "AdamW8bit"
    of_weight, of_bias = optimizer.param_groups
    assert (of_weight["params"], of_bias["params"]) == ([first], [second])
    assert float(of_weight["lr"]) == pytest.approx(3e-4)
    assert (of_weight["weight_decay"], of_weight["betas"], of_weight["eps"]) == (0.2, (0.9, 0.999), 1e-5)
    assert (of_bias["weight_decay"], of_bias["betas"]) == (0.0, (0.5, 0.6))
    assert type(EightBitMoments(torch.optim.Adam)([first])).__name__ == "Adam8bit"


def test_its_state_has_the_bytes_of_codes_scales_and_tables() -> None:
    """By hand: a byte an element, 4 for each block of 256, a table of 256 numbers; small and odd tensors as they are,
    and a step count of 4 bytes for each parameter."""
    shapes = [(128, 64), (5000,), (64,)]
    by_hand = 2 * (8192 + 4 * 32 + 1024) + 2 * 4 * 5000 + 2 * 4 * 64 + 3 * 4
    given = parameters(*shapes)
    optimizer = EightBitMoments(torch.optim.AdamW)(given)
    for parameter in given:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    real = 0
    for state in optimizer.state.values():
        for tensor in state.values():
            parts = [getattr(tensor, name) for name in getattr(tensor, "tensor_attrs", ())] or [tensor]
            real += sum(part.untyped_storage().nbytes() for part in parts)
    layouts = [(shape, torch.empty(shape).stride(), "float32") for shape in shapes]
    recorded = update_of(EightBitMoments(torch.optim.AdamW), layouts).state_bytes
    assert real == by_hand
    assert recorded == by_hand + 4  # the learning rate is a tensor, too


def train(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[torch.Tensor, torch.Tensor]:
    """20 steps of a small classifier, from the same weights and batches: the weights before and after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    optimizer = make(model.parameters())
    for step in range(20):
        draws = torch.Generator().manual_seed(step)
        rows, labels = torch.randn(64, 64, generator=draws), torch.randint(64, (64,), generator=draws)
        optimizer.zero_grad()
        F.cross_entropy(model(rows), labels).backward()
        optimizer.step()
    return before, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_twenty_updates_are_near_those_with_float32_moments() -> None:
    """Not the same, as 8 bits round by up to 1/512 of the largest of a block, and near: a wrong option, or a moment
    that is dropped, is off by tens of percent."""
    before, exact = train(partial(torch.optim.AdamW, lr=1e-3))
    _, rounded = train(EightBitMoments(partial(torch.optim.AdamW, lr=1e-3)))
    _, without_decay = train(partial(torch.optim.AdamW, lr=1e-3, betas=(0.0, 0.999)))
    moved = (exact - before).norm()
    assert 0.001 < (rounded - exact).norm() / moved < 0.06
    assert (without_decay - exact).norm() / moved > 0.2


def test_further_keys_of_groups_are_kept() -> None:
    (weight,) = parameters((64, 64))

    def with_keys(given: Any) -> torch.optim.Optimizer:
        named = list(zip(["weight"], given, strict=True))
        groups: list[dict[str, Any]] = [{"params": named, "layer": 3, "initial_lr": 0.1, "fused": False}]
        return torch.optim.AdamW(groups, lr=0.01)

    optimizer = EightBitMoments(with_keys)([weight])
    (group,) = optimizer.param_groups
    assert (group["layer"], group["initial_lr"], group["param_names"]) == (3, 0.1, ["weight"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5, last_epoch=0)  # reads initial_lr
    assert scheduler.base_lrs == [0.1]


def test_parameters_in_float64_are_refused_by_name() -> None:
    first, second = parameters((4, 4), (64, 64))
    second.data = second.data.double()
    with pytest.raises(UsageError, match=r"of a parameter \(64x64\) in float64\. Expected parameters in float32"):
        EightBitMoments(torch.optim.AdamW)([first, second])

    def named(given: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(zip(["bias", "head.weight"], given, strict=True)))

    with pytest.raises(UsageError, match=r"of head\.weight \(64x64\) in float64"):
        EightBitMoments(named)([first, second])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.SGD, r"of SGD\. Expected torch\.optim's Adam or AdamW"),
        (partial(torch.optim.AdamW, maximize=True), "with maximize"),
        (partial(torch.optim.Adam, capturable=True), "with capturable"),
    ],
)
def test_what_torchao_lacks_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EightBitMoments(optimizer)(parameters((4, 4)))


def test_without_torchao_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit_moments, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"torchao is not installed.* pip install 'memplan\[quantize\]'"):
        EightBitMoments(torch.optim.AdamW)(parameters((4, 4)))
    with pytest.raises(InputError, match="torchao is not installed"):
        update_of(EightBitMoments(torch.optim.AdamW), [((4, 4), (4, 1), "float32")])
    assert "torchao" in sys.modules  # of the tests themselves


@pytest.fixture
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bitsandbytes, with torchao as if it were not installed."""
    library = pytest.importorskip("bitsandbytes")
    find_spec = eight_bit_moments.find_spec
    monkeypatch.setattr(eight_bit_moments, "find_spec", lambda name: None if name == "torchao" else find_spec(name))
    return library


def test_bitsandbytes_takes_torchaos_place(without_torchao: Any) -> None:
    """Bytes by hand: a byte an element and 4 for each block that is begun, two tables; small tensors in float32."""
    shapes = [(128, 64), (5000,), (64,)]
    given = parameters(*shapes)
    optimizer = EightBitMoments(partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.2))(given)
    assert type(optimizer) is without_torchao.optim.AdamW8bit
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (3e-4, 0.2)
    by_hand = 2 * (8192 + 4 * 32 + 5000 + 4 * 20 + 4 * 64 + 1024)
    layouts = [(shape, torch.empty(shape).stride(), "float32") for shape in shapes]

    def build() -> Callable[[], Any]:
        for parameter in given:
            parameter.grad = torch.ones_like(parameter)
        return optimizer.step

    update = update_of(EightBitMoments(torch.optim.AdamW), layouts)
    step = build()
    step()
    assert update.state_bytes == by_hand
    assert update.peak_bytes == peak_of(allocations(step))


def test_twenty_updates_of_bitsandbytes_are_near_those_with_float32_moments(without_torchao: Any) -> None:
    before, exact = train(partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1))
    _, rounded = train(EightBitMoments(partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)))
    assert 0.001 < (rounded - exact).norm() / (exact - before).norm() < 0.06


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (partial(torch.optim.AdamW, amsgrad=True), "with amsgrad"),
        (partial(torch.optim.Adam, weight_decay=0.1), "with weight_decay that is not decoupled"),
        (partial(torch.optim.AdamW, lr=torch.tensor(0.1)), "with a tensor as lr"),
    ],
)
def test_what_bitsandbytes_lacks_is_refused(without_torchao: Any, optimizer: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"{message}.*which bitsandbytes's optimizers lack"):
        EightBitMoments(optimizer)(parameters((4, 4)))
    weight = nn.Parameter(torch.randn(4, 4, 3, 3).to(memory_format=torch.channels_last))
    with pytest.raises(UsageError, match=r"a parameter \(4x4x3x3\), which is not contiguous"):
        EightBitMoments(torch.optim.AdamW)([weight])
    assert type(EightBitMoments(partial(torch.optim.Adam, weight_decay=0.0))(parameters((4, 4)))).__name__ == "Adam8bit"
