"""What is written when memory ends, on the CPU, where a tensor of a petabyte ends it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn

import memplan
from memplan.integrations.watching.post_mortem import is_out_of_memory, requested_bytes

PETABYTE = 1 << 50
ON_CARD = (
    "CUDA out of memory. Tried to allocate 22.50 GiB. GPU 0 has a total capacity of 23.52 GiB of which 1.0 GiB is free."
)


def failed(folder: Path | None, after: int, **options: Any) -> Any:
    """Return a watch whose step after so many asks for a petabyte."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model[0].register_forward_hook(lambda *_: None)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = memplan.watch(model, optimizer, quiet=True, post_mortem=folder, **options)

    def run() -> None:
        with seen:
            for number in range(after + 1):
                loss = model(torch.randn(32, 64)).sum()
                if number == after:
                    torch.empty(PETABYTE, dtype=torch.uint8)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        run()
    assert not getattr(raised.value, "__notes__", None)
    assert raised.value.__cause__ is None
    return seen


WEIGHTS = 4 * (64 * 128 + 128 + 128 * 10 + 10)


@pytest.mark.parametrize("after", [*slow(1), 5], ids=["while observed", "later"])
def test_a_post_mortem_says_what_was_asked_for_and_who_held_the_rest(tmp_path: Path, after: int) -> None:
    seen = failed(tmp_path / "new", after)
    data = json.loads(seen.post_mortem.read_text())
    assert data["asked"] == PETABYTE
    assert data["step"] == after + 1
    assert data["held_now"] == {"weight": WEIGHTS, "parameter_gradient": WEIGHTS, "optimizer_state": 2 * WEIGHTS + 16}
    assert data["by_cause"]["weight"] == WEIGHTS
    assert 0 <= 2 * WEIGHTS + 16 - data["by_cause"]["optimizer_state"] <= 16  # no op makes the four counters
    layers = {row["layer"]: row["bytes"] for row in data["by_layer"] if row["cause"] == "weight"}
    assert layers == {"0": 4 * (64 * 128 + 128), "2": 4 * (128 * 10 + 10)}
    assert data["alive_of"].startswith("the failed step")
    assert data["levers"]["fits"] is True  # the model's own step does; the petabyte is nothing of it
    assert re.fullmatch(r"memplan fit TARGET --input 32x64 --optimizer adamw --budget \d+", data["command"])
    assert data["snapshot"] is None
    text = seen.post_mortem.with_suffix(".txt").read_text()
    assert "asked for 1024.0 TiB and there was no room" in text
    assert data["command"] in text


def test_the_rows_and_the_text_of_the_watch_name_it(tmp_path: Path) -> None:
    seen = failed(tmp_path, 1)
    assert len(seen.rows) == 1
    assert seen.to_dict()["post_mortem"] == str(seen.post_mortem)
    assert str(seen.post_mortem) in str(seen)


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    first = failed(tmp_path, 1).post_mortem
    content = first.read_bytes()
    first.with_name(first.name.replace("-1.json", "-2.txt")).write_text("the user's")
    second = failed(tmp_path, 1).post_mortem
    assert second.name == first.name.replace("-1.json", "-3.json")
    assert first.read_bytes() == content


def test_none_is_written_where_none_is_wanted_or_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert failed(None, 1).post_mortem is None
    file = tmp_path / "file"
    file.write_text("in the way")
    assert failed(file, 1).post_mortem is None
    assert file.read_text() == "in the way"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "is_it", "asked"),
    [
        (torch.OutOfMemoryError(ON_CARD), True, int(22.5 * (1 << 30))),
        (torch.OutOfMemoryError("CUDA error: out of memory"), True, None),
        (RuntimeError("can't allocate memory: you tried to allocate 123 bytes. Error code 12"), True, 123),
        (RuntimeError("Tried to allocate 22.50 GiB"), False, int(22.5 * (1 << 30))),
        (KeyboardInterrupt(), False, None),
        (None, False, None),
    ],
)
def test_errors_of_memory_are_told_from_others(error: BaseException | None, is_it: bool, asked: int | None) -> None:
    assert is_out_of_memory(error) is is_it
    assert error is None or requested_bytes(error) == asked


def test_inputs_that_cannot_be_described_are_said(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = Takes()
    seen = memplan.watch(model, quiet=True, post_mortem=tmp_path)

    def run() -> None:
        with seen:
            model("a", torch.randn(4, 4))
            torch.empty(PETABYTE, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run()
    assert seen.post_mortem is not None
    levers = json.loads(seen.post_mortem.read_text())["levers"]
    assert levers["fits"] is None
    assert levers["why_not"] == "Unknown: the model was not called yet"
