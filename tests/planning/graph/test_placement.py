from __future__ import annotations

import pytest
import torch
from torch import nn

from memplan.devices import find
from memplan.errors import DeviceError
from memplan.planning.graph import placement
from memplan.planning.graph.placement import Home, home_of


def test_a_module_on_the_cpu_is_at_home_there() -> None:
    home = home_of(nn.Linear(2, 2), [torch.randn(1, 2)])
    assert home == Home()
    assert (home.type, home.target.name) == ("cpu", "cpu")
    assert home.allocated(3) == 3


def test_what_is_still_to_be_made_stands_for_the_cpu() -> None:
    assert home_of(nn.Linear(2, 2, device="meta"), [torch.randn(1, 2)]) == Home()


def test_a_device_that_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "named_parameters", lambda *_, **__: [("weight", _Elsewhere())])
        with pytest.raises(DeviceError, match="weight is on xpu:0"):
            home_of(model, [])


class _Elsewhere:
    device = torch.device("xpu:0")


class _OnCard:
    device = torch.device("cuda:0")


def test_a_card_has_the_allocator_settings_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    model, card = nn.Linear(2, 2), find("h100")
    monkeypatch.setattr(placement, "own_card", lambda device: card)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "named_parameters", lambda *_, **__: [("weight", _OnCard())])
        home = home_of(model, [])
    assert (home.card, home.allocator_conf) == (card, "expandable_segments:True")
    assert home_of(model, []).allocator_conf is None  # the CPU has no caching allocator
