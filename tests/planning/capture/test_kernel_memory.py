"""The requests of a kernel that a plan can choose, beside those that torch's profiler sees when its code runs."""

from __future__ import annotations

import pytest
import torch

from memplan import _torch
from memplan._bytes import round_to_blocks
from memplan.kernels.launch import without_data
from memplan.planning.capture import kernel_memory
from memplan.planning.capture.kernel_memory import kernel_scratch


def test_a_norm_makes_the_requests_that_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_memory, "programs", lambda _: 4)
    options = 0, "relu", 0.0, 1e-5
    x, weight = torch.randn(4, 256, 8, 8), torch.randn(256)  # sums of 1 KiB a sample: numbers are smaller
    with torch._subclasses.FakeTensorMode():  # a card without data
        on_card = torch.empty(4, 256, 8, 8, device="cuda"), None, *(torch.empty(256, device="cuda") for _ in range(2))
        found = kernel_scratch("memplan.channel_norm.default", (*on_card, *options), {})
    assert found is not None
    profile = _torch.memory_profile()
    with profile, without_data("cuda"):
        results = torch.ops.memplan.channel_norm(x, None, weight, weight, *options)
    events = [(size, address) for address, size, *_ in _torch.Profile.of(profile).events if abs(size) >= 1024]
    del results
    signs = [round_to_blocks(size) if size > 0 else -round_to_blocks(-size) for size, _ in events][3:]  # after results
    sizes = [one for one in found[1] if one > 0]
    said = [one if one > 0 else -sizes[-one - 1] for one in found[1]]
    assert [one for one in said if abs(one) >= 1024] == signs
