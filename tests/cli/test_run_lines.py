"""`memplan run` line by line: decorated functions, and those that --lines names."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memplan.cli import main

SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memplan


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(784, 512)
        self.b = nn.Linear(512, 10)

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.b(h)


@memplan.profile
def train_step(net, opt, x, y):
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def main():
    net = Net()
    opt = torch.optim.Adam(net.parameters())
    data = TensorDataset(torch.randn(256, 784), torch.randint(0, 10, (256,)))
    for x, y in DataLoader(data, batch_size=64):
        train_step(net, opt, x, y)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments: str) -> Result:
    with contextlib.chdir(folder):
        return CliRunner().invoke(main, ["run", *arguments])


def lines(folder: Path, *arguments: str) -> dict[str, list[tuple[int, ...]]]:
    done = run(folder, *arguments, "--json", "out.json", "train.py")
    assert done.exit_code == 0, done.stderr
    found = json.loads((folder / "out.json").read_text(encoding="utf-8"))["lines"]
    names = ("line", "hits", "held", "added", "freed", "peak")
    return {one["function"]: [tuple(row[name] for name in names) for row in one["rows"]] for one in found}


TABLE = """\
train_step (train.py), line by line, predicted on cpu
line hits    held     added     freed     peak code
────────────────────────────────────────────────────────────────────────────────
  19                                           @memplan.profile
  20                                           def train_step(net, opt, x, y):
  21    2 5.7 MiB 130.5 KiB         -  5.9 MiB     loss = nn.functional.cross_e…
  22    2 7.2 MiB   1.6 MiB 130.5 KiB  7.3 MiB     loss.backward()
  23    2 7.2 MiB   3.1 MiB         - 10.2 MiB     opt.step()
  24    2 5.6 MiB         -   1.6 MiB  7.2 MiB     opt.zero_grad()
  25    2 5.6 MiB         -         -  5.6 MiB     return loss

held: allocated after the line. added, freed: what it leaves, and what it ends,
of that. peak: the most while it ran. Of several hits, the most of any.
"""


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_here")
def test_decorated_functions_are_shown_without_being_asked_for(folder: Path) -> None:
    done = run(folder, "--device", "cpu", "train.py")
    assert (done.exit_code, done.stderr) == (0, "")
    assert TABLE in done.stdout


@pytest.mark.usefixtures("scripts_here")
def test_lines_of_a_file_are_as_measured(folder: Path) -> None:
    predicted = lines(folder, "--device", "cpu", "--lines", "train.py")
    assert set(predicted) == {"<module>", "Net.__init__", "Net.forward", "main", "train_step"}
    measured = lines(folder, "--measure", "--lines", "train.py")
    assert {name: [row[:2] for row in rows] for name, rows in predicted.items()} == {
        name: [row[:2] for row in rows] for name, rows in measured.items()
    }
    # the batches are views of the data under python, and stacked either way; the step is the same to the byte
    for name in ("train_step", "Net.forward"):
        assert predicted[name] == measured[name]


@pytest.mark.slow
def test_one_function_of_a_file_on_a_card(folder: Path) -> None:
    found = lines(folder, "--device", "h100", "--lines", "train.py:Net.forward")
    assert list(found) == ["train_step", "Net.forward"]
    assert all(size % 512 == 0 for row in found["Net.forward"] for size in row[2:])


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nosuch.py", "memplan: --lines nosuch.py: there is no file nosuch.py. Expected FILE.py or FILE.py:FUNCTION"),
        ("train.py:train", "memplan: --lines train.py:train: train.py has no function train. Expected one that it has"),
    ],
)
def test_a_place_that_is_not_there_is_told_before_anything_runs(folder: Path, place: str, said: str) -> None:
    done = run(folder, "--lines", place, "train.py")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("scripts_here")
def test_a_place_of_which_nothing_ran_is_told(folder: Path) -> None:
    (folder / "other.py").write_text("def never(): ...\n", encoding="utf-8")
    done = run(folder, "--device", "cpu", "--lines", "other.py", "train.py")
    assert done.exit_code == 0
    assert done.stderr.startswith("memplan: --lines other.py: no line of it ran. Expected what the script calls")
