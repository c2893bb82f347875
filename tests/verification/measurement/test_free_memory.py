from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.placement import Home
from memplan.verification.measurement import free_memory


def test_what_is_free_is_some_of_what_there_is() -> None:
    free = free_memory.available(Home())
    assert free is None or free > 0


def files(folder: Path, limit: str, used: int, cached: int) -> tuple[str, str, str, str]:
    for name, text in (("max", limit), ("current", str(used)), ("stat", f"anon 5\ninactive_file {cached}\nfile 9\n")):
        (folder / name).write_text(text + "\n")
    return str(folder / "max"), str(folder / "current"), str(folder / "stat"), "inactive_file"


def test_a_containers_limit_counts_less_what_is_in_use_and_cannot_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_memory, "_CGROUPS", (files(tmp_path, "1000000", 700_000, 200_000),))
    assert free_memory.available(Home()) == int(0.9 * 500_000)
    monkeypatch.setattr(free_memory, "_CGROUPS", (files(tmp_path, "max", 700_000, 200_000),))
    assert free_memory.available(Home()) != int(0.9 * 500_000)


def test_nothing_is_known_where_the_system_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: str) -> int:
        raise ValueError

    monkeypatch.setattr(free_memory, "_CGROUPS", ())
    monkeypatch.setattr(free_memory, "_read_number", lambda *_: None)
    monkeypatch.setattr(free_memory.os, "sysconf", silent)
    assert free_memory.available(Home()) is None


def test_smaller_calls_are_cut_where_the_samples_are() -> None:
    x, y, scale = torch.randn(12, 3, requires_grad=True), torch.arange(12), torch.ones(3)
    calls = list(free_memory.smaller_calls(call_of((x, y, 4), {"scale": scale})))
    assert [(samples, of) for samples, of, _ in calls] == [(6, 12), (3, 12), (1, 12)]
    _, _, call = calls[1]
    (a, b, number), keywords = call.rebuild(call.tensors)
    assert torch.equal(a, x[:3])
    assert a.is_leaf
    assert a.requires_grad
    assert torch.equal(b, y[:3])
    assert number == 4
    assert torch.equal(keywords["scale"], scale)
    assert list(free_memory.smaller_calls(call_of((torch.ones(()), "text"), {}))) == []
