"""Cards on which a recording is the same: each is compared with a recording for that very card."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from environment import slow
from torch import nn
from torch.nn import functional

import memplan
from memplan.devices import catalogue

Step = Callable[[], object]
OWN = "a100-40gb"


def products() -> Step:
    """cuBLAS's workspace is larger from sm_90 on."""
    model, x = nn.Linear(64, 64, device="cuda"), torch.zeros(8, 64, device="cuda")
    return lambda: model(x).sum().backward()


def attention() -> Step:
    """In bfloat16 flash attention begins with sm_80."""
    q = torch.zeros(1, 4, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def reduction() -> Step:
    """The staging buffer of a sum over one long row depends on the multiprocessors."""
    x = torch.zeros(1 << 26, device="cuda")
    return lambda: x.sum()


def convolution() -> Step:
    """Without cuDNN, its workspaces are intervals that depend on the card."""
    model, x = nn.Conv2d(8, 8, 3, device="cuda"), torch.zeros(4, 8, 64, 64, device="cuda")
    return lambda: model(x).sum().backward()


def recurrent() -> Step:
    """cuDNN takes bfloat16 from sm_80 on."""
    model = nn.LSTM(64, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(8, 4, 64, device="cuda", dtype=torch.bfloat16)
    return lambda: model(x)[0].sum().backward()


def by_memory() -> Step:
    """The step's own size is what the card has."""
    x = torch.zeros(torch.cuda.mem_get_info()[1] // 8, device="cuda")
    return lambda: x.add_(1)


def by_capability() -> Step:
    size = 1 << 20 if torch.cuda.get_device_capability() >= (8, 0) else 1 << 10
    x = torch.zeros(size, device="cuda")
    return lambda: x.add_(1)


def sizes(build: Callable[[], Step], card: str) -> list[tuple[int, int | None, int, int | None, str]]:
    storages = memplan.record(build, device=card, cudnn=False).storages
    return [(s.bytes, s.low, s.born, s.died, s.device) for s in storages]


def cards_with_the_same(build: Callable[[], Step]) -> set[str]:
    """Names of the other cards of the catalogue on which the step has the same storages as on `OWN`."""
    own = sizes(build, OWN)
    return {card.name for card in catalogue() if sizes(build, card.name) == own} - {OWN}


@pytest.mark.parametrize("build", [recurrent, by_memory, *slow(convolution, attention, products, reduction)])
def test_cards_are_alike_exactly_where_their_recordings_have_the_same_storages(build: Callable[[], Step]) -> None:
    assert set(memplan.record(build, device=OWN, cudnn=False).alike) == cards_with_the_same(build)


def test_cards_that_answer_otherwise_to_what_a_step_asks_are_not_alike() -> None:
    alike = set(memplan.record(by_capability, device=OWN, cudnn=False).alike)
    assert alike == {"a100-80gb", "a100-pcie"}
    assert alike < cards_with_the_same(by_capability)
