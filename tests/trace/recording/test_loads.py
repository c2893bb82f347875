"""`torch.load` within a build: its storages, beside those of the real run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.trace.recording.loads import loads_elsewhere

WIDTH = 256


def _file(tmp_path: Path, *, zipped: bool = True) -> Path:
    path = tmp_path / "state.pt"
    weight = torch.randn(WIDTH, WIDTH)
    state = {"weight": weight, "tied": weight[: WIDTH // 2], "count": torch.tensor(7), "bias": torch.randn(WIDTH)}
    torch.save({"model": state, "epoch": 3}, path, _use_new_zipfile_serialization=zipped)
    return path


def _build(load: Callable[[], Any]) -> Callable[[], Callable[[], None]]:
    """Return a build that loads a state, and a step that holds it."""

    def build() -> Callable[[], None]:
        state = load()["model"]
        assert int(state["count"]) in (1, 7)
        model = nn.Linear(WIDTH, WIDTH)

        def step() -> None:
            model(torch.ones(8, WIDTH)).sum().backward()
            assert state["weight"].shape == (WIDTH, WIDTH)

        return step

    return build


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights_only": True, "map_location": "cpu"},
        {"weights_only": False, "map_location": lambda storage, _: storage},
        {"mmap": True},
        {"map_location": {"cuda:0": "cpu"}},
        {"zipped": False},
    ],
    ids=["default", "weights only", "function", "mapped", "devices", "legacy"],
)
def test_loaded_storages_count_as_in_a_run(tmp_path: Path, options: dict[str, Any]) -> None:
    path = _file(tmp_path, zipped=options.pop("zipped", True))
    build = _build(lambda: torch.load(path, **options))
    recorded = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
    assert recorded == memplan.simulate(memplan.measure(build)).peak_allocated
    assert recorded > 4 * (3 * WIDTH * WIDTH)  # weights, gradients, and what was loaded


def test_an_early_name_of_the_function_and_an_open_file_load_the_same(tmp_path: Path) -> None:
    path = _file(tmp_path)

    def load() -> Any:
        with path.open("rb") as file:
            return torch.serialization.load(file)

    build = _build(load)
    recorded = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
    assert recorded == memplan.simulate(memplan.measure(build)).peak_allocated


@pytest.mark.parametrize(
    "place",
    ["cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda:0"}, lambda storage, _: storage.cuda(0)],
    ids=["name", "number", "device", "devices", "function"],
)
def test_what_is_loaded_to_a_card_lies_there(tmp_path: Path, place: Any) -> None:
    """Two storages of their own blocks: a matrix of which another tensor is a part, a vector; and a number."""
    path = _file(tmp_path)

    def build() -> Callable[[], Any]:
        state = torch.load(path, map_location=place)["model"]
        assert state["weight"].device.type == "cuda"
        return lambda: state

    recorded = memplan.simulate(memplan.record(build, device="h100")).peak_allocated
    assert recorded == 4 * WIDTH * WIDTH + 4 * WIDTH + 512


def test_without_a_place_each_tensor_goes_where_it_was_saved(tmp_path: Path) -> None:
    path = _file(tmp_path)

    def build() -> Callable[[], Any]:
        state, model = torch.load(path)["model"], nn.Linear(8, 8).cuda()
        assert state["weight"].device.type == "cpu"
        return lambda: (state, model)

    assert memplan.simulate(memplan.record(build, device="h100")).peak_allocated == 2 * 512


def test_the_outer_of_two_nested_lists_of_loads_goes_on(tmp_path: Path) -> None:
    """While both are empty they are equal: the end of the inner must not end the outer."""
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(WIDTH)}, path)

    def build() -> Callable[[], None]:
        torch.load(path, map_location="cuda:0")
        return lambda: None

    with loads_elsewhere() as outer:
        with loads_elsewhere() as inner:
            pass
        memplan.record(build, device="h100", world=2, rank=1)
    assert inner == []
    assert [call.bytes for call in outer] == [4 * WIDTH]
