"""Projects for boards that learn: a small classifier of gestures goes on learning under Arduino or Zephyr.

    python examples/gestures/project.py                  # what a board will do, computed here
    python examples/gestures/project.py arduino FOLDER   # FOLDER/gestures: a sketch
    python examples/gestures/project.py zephyr FOLDER    # FOLDER/gestures: an application
    python examples/gestures/project.py zephyr FOLDER --renew    # the exported gestures*.c and .h there alone
    python examples/gestures/project.py stream PORT      # samples for the sketch, over a serial port

The data is made up: a gesture is a pattern of eight moments by three axes, in noise. The board's sensor is mounted in
another direction than the one here, so what was learned here is wrong there, until the board has learned on.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import memplan

MOMENTS, AXES, GESTURES = 8, 3, 3
READINGS = MOMENTS * AXES
STEPS, TESTED, RATE, SCALE = 60, 40, 0.05, 40.0
QUESTION = 255
BUDGET = 4 << 10
"""Bytes for the step. An ATmega2560 has 8 KiB, of which constants, which an AVR copies into SRAM, take 2 KiB, and stack
and Arduino's core as much."""
HERE = Path(__file__).parent
EXPORTED = ("gestures.c", "gestures.h", "gestures_weights.h")


def make() -> nn.Module:
    """A classifier of 451 weights: of an ATmega2560's SRAM it takes half."""
    return nn.Sequential(nn.Linear(READINGS, 16), nn.ReLU(), nn.Linear(16, GESTURES))


def moved(count: int, seed: int, turned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return readings of a sensor, in eight bits, and the gestures. A turned one has its axes in another order."""
    patterns = 40 * torch.randn(GESTURES, MOMENTS, AXES, generator=torch.Generator().manual_seed(0))
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(GESTURES, (count,), generator=drawn)
    readings = patterns[labels] + 20 * torch.randn(count, MOMENTS, AXES, generator=drawn)
    if turned:
        readings = readings[:, :, [2, 0, 1]] * torch.tensor([1.0, -1.0, -1.0])
    return readings.round().clamp(-127, 127).to(torch.int8).reshape(count, READINGS), labels


def trained() -> nn.Module:
    """Return a model that is trained on a sensor as it is mounted here."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(100):
        readings, labels = moved(16, seed=step + 10, turned=False)
        optimizer.zero_grad()
        F.cross_entropy(model(readings / SCALE), labels).backward()
        optimizer.step()
    return model


def export(model: nn.Module, folder: Path) -> memplan.Exported:
    """Write the model's training step as C: a sample of bytes, one update."""
    return memplan.export(
        model, f"1x{READINGS}:int8", targets=f"1:int64<{GESTURES}", loss="cross_entropy", optimizer=f"sgd:lr={RATE}",
        normalize=(0.0, SCALE), budget=BUDGET, folder=folder, name="gestures",
    )  # fmt: skip


def losses_of(model: nn.Module) -> list[float]:
    """Return the loss of each step that a board does, computed by PyTorch."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), list[float]()
    readings, labels = moved(STEPS, seed=1, turned=True)
    for sample, label in zip(readings.split(1), labels.split(1), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(sample / SCALE), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def write(kind: str, folder: Path, renew: bool = False) -> memplan.Exported:
    """Write a project of a kind into a folder: its own files from here, beside those of the export. With `renew`, write
    the latter alone, over older ones. Raises FileExistsError, before it writes, if a file there differs."""
    project, sources = folder / "gestures", Path("." if kind == "arduino" else "src")
    with tempfile.TemporaryDirectory() as scratch:
        exported = export(trained(), Path(scratch))
        # not its test, which has a main of its own
        made = {sources / name: (Path(scratch) / name).read_bytes() for name in EXPORTED}
    if not renew:
        own = (file for file in (HERE / kind).rglob("*") if file.is_file())
        made |= {file.relative_to(HERE / kind): file.read_bytes() for file in own}
        if kind == "zephyr":
            made[sources / "samples.h"] = samples_text().encode()
        differ = [str(name) for name, text in made.items() if _differs(project / name, text)]
        if differ:
            raise FileExistsError(
                f"{project} has other files: {', '.join(differ)}; --renew writes the exported ones alone"
            )
    for name, text in made.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_bytes(text)
    return exported


def _differs(file: Path, text: bytes) -> bool:
    return file.exists() and file.read_bytes() != text


def samples_text() -> str:
    """Return a header with the samples that a board learns from, and others that it has to recognize."""
    lines = ["#include <stdint.h>", "", f"#define TESTED {TESTED}", "", "struct sample {"]
    lines += [f"    signed char readings[{READINGS}];", "    int32_t label;", "};"]
    for name, count, seed in (("recorded", STEPS, 1), ("tested", TESTED, 2)):
        lines += ["", f"static const struct sample {name}[{count}] = {{"]
        for readings, label in zip(*moved(count, seed, turned=True), strict=True):
            lines.append(f"    {{{{{', '.join(map(str, readings.tolist()))}}}, {int(label)}}},")
        lines.append("};")
    return "\n".join(lines) + "\n"


def stream(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> tuple[int, list[float], int]:
    """Hand the samples to a sketch. Return how many it recognizes before training, its losses, and how many after."""

    def until(end: bytes) -> bytes:
        received = b""
        while not received.endswith(end):
            received += (byte := read(1))
            if not byte:
                raise EOFError(f"the board sent {received!r}, then nothing: expected {end!r}")
        return received

    def answers(seed: int, count: int, *, ask: bool) -> list[tuple[float, int]]:
        readings, labels = moved(count, seed, turned=True)
        found = list[tuple[float, int]]()
        for sample, label in zip(readings, labels.tolist(), strict=True):
            until(b"?")
            write(sample.numpy().tobytes() + bytes([QUESTION if ask else label]))
            found.append((float(until(b"\n").split()[-1]), label))
        return found

    before = sum(said == label for said, label in answers(2, TESTED, ask=True))
    losses = [loss for loss, _ in answers(1, STEPS, ask=False)]
    return before, losses, sum(said == label for said, label in answers(2, TESTED, ask=True))


def report(before: int, losses: list[float], after: int) -> None:
    """Print what a board did, beside what PyTorch computes for the same samples."""
    expected = losses_of(trained())
    apart = max(abs(found - wanted) for found, wanted in zip(losses, expected, strict=True))
    print(f"recognized before training: {before} of {TESTED}")
    print(f"loss of step 1: {losses[0]:.4f}, of step {STEPS}: {losses[-1]:.4f}; PyTorch's at most {apart:.1e} apart")
    print(f"recognized after training: {after} of {TESTED}")


def rehearse() -> None:
    """Print the files of both projects, and what a board will do, as PyTorch does it."""
    for kind in ("arduino", "zephyr"):
        with tempfile.TemporaryDirectory() as scratch:
            exported, root = write(kind, Path(scratch)), Path(scratch) / "gestures"
            files = sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
        print(f"{kind}: {', '.join(files)}")
    print(f"{exported.ram} bytes of RAM, {exported.flash} of weights at the start, proven: {exported.verdict.proven}")
    model, (readings, labels) = trained(), moved(TESTED, seed=2, turned=True)

    def right() -> int:
        return int((model(readings / SCALE).argmax(1) == labels).sum())

    before, losses = right(), losses_of(model)
    print(f"recognized before training: {before} of {TESTED}")
    print(f"loss of step 1: {losses[0]:.4f}, of step {STEPS}: {losses[-1]:.4f}")
    print(f"recognized after training: {right()} of {TESTED}")


def main(command: str, where: str, *options: str) -> None:
    """Write a project, or stream samples to a sketch."""
    if command != "stream":
        try:
            exported = write(command, Path(where), renew=bool(options))
        except FileExistsError as error:
            sys.exit(str(error))
        print(f"{Path(where) / 'gestures'}: {exported.ram} bytes of RAM, proven: {exported.verdict.proven}")
        return
    import termios  # not on Windows
    import tty

    with open(where, "r+b", buffering=0) as port:
        tty.setraw(port.fileno())
        attributes = termios.tcgetattr(port.fileno())
        attributes[4] = attributes[5] = termios.B115200
        termios.tcsetattr(port.fileno(), termios.TCSANOW, attributes)
        report(*stream(port.read, port.write))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        rehearse()
    elif sys.argv[1:2] + sys.argv[3:] in (
        ["arduino"],
        ["zephyr"],
        ["stream"],
        ["arduino", "--renew"],
        ["zephyr", "--renew"],
    ):
        main(*sys.argv[1:])
    else:
        sys.exit(f"usage: {sys.argv[0]} [arduino FOLDER [--renew] | zephyr FOLDER [--renew] | stream PORT]")
