"""How near expected workspaces bring the peak of a step to the one with cuDNN's own answers.

    python benchmarks/expected_workspaces.py --cudnn ENV ENV2 --networks tools/workspace_model/accuracy.json

Writes benchmarks/results/expected_workspaces.json and .md. Each environment has a cuDNN. Random convolutional networks
that the models have not seen (in one, two and three dimensions, float32 or autocast, residual or U-shaped) are recorded
for four cards; the peak with the workspaces that this cuDNN answers is compared with the expected one, without any
stored answer, and without what only real cards take (`with_cublas`). The accuracy on single convolutions is that of
`fit.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from memplan import record, simulate
from memplan.cudnn import ask as asking
from memplan.cudnn import expected_workspace
from memplan.cudnn.cudnn_library import Cudnn, find_cudnn
from memplan.devices import find
from memplan.trace import record as recording
from memplan.trace.workspaces import with_workspaces

RESULTS = Path(__file__).with_name("results")
CARDS = ("a100", "h100", "rtx4090", "t4")
NETWORKS = 16
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SIZES = {1: (512, 2048, 8000), 2: (64, 96, 128, 160, 224, 256), 3: (24, 32, 48, 64, 80)}


@dataclass(frozen=True)
class Row:
    """A network on a card: peaks in bytes."""

    network: str
    card: str
    cudnn: str
    answered: int
    expected: int
    low: int
    high: int
    interval: int
    """The peak with the largest workspaces of all algorithms, which was the answer before there were models."""


class Block(nn.Module):
    """Two convolutions with batch norm, around which the input goes where it has the same size."""

    def __init__(self, ranks: int, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[ranks]
        make = CONVOLUTIONS[ranks]
        self.first = make(inputs, outputs, kernel, stride=stride, padding=kernel // 2)
        self.second = make(outputs, outputs, kernel, padding=kernel // 2)
        self.norms = nn.ModuleList(norm(outputs) for _ in range(2))
        self.skip = make(inputs, outputs, 1, stride=stride) if (inputs, stride) != (outputs, 1) else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(inner)) + self.skip(x))


class Network(nn.Module):
    """Blocks that halve the resolution, and for a U-shaped network transposed convolutions back up."""

    def __init__(self, ranks: int, widths: list[int], kernel: int, shaped_u: bool) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(Block(ranks, a, b, kernel, 1 if i == 0 else 2) for i, (a, b) in enumerate(pairs))
        up = list(reversed(pairs[1:])) if shaped_u else []
        self.up = nn.ModuleList(TRANSPOSED[ranks](b, a, 2, stride=2) for a, b in up)
        self.join = nn.ModuleList(Block(ranks, 2 * a, a, kernel, 1) for a, _ in up)
        self.head = CONVOLUTIONS[ranks](widths[1] if shaped_u else widths[-1], 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = list[torch.Tensor]()
        for block in self.down:
            x = block(x)
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips[:-1]), strict=False):
            x = join(torch.cat((up(x), skip), 1))
        return self.head(x)


def networks(count: int) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return random training steps by name."""
    rnd = random.Random(2026)
    builds = dict[str, Callable[[], Callable[[], Any]]]()
    while len(builds) < count:
        ranks = rnd.choice((1, 2, 2, 3, 3))
        depth = rnd.choice((2, 3, 4))
        width = rnd.choice((16, 24, 32, 48, 64)) // (1 if ranks < 3 else 2)
        widths = [rnd.choice((1, 3, 4)), *(width * 2**level for level in range(depth))]
        kernel, shaped_u, autocast = rnd.choice((3, 3, 3, 5)), rnd.random() < 0.6, rnd.random() < 0.5
        size, batch = rnd.choice(SIZES[ranks]), rnd.choice((1, 2, 4, 8, 16)) // (1 if ranks < 3 else 2) or 1
        name = f"{'U' if shaped_u else 'residual'} {ranks}D {widths} kernel {kernel} size {size} batch {batch}" + (
            " autocast" if autocast else ""
        )
        builds[name] = _build(ranks, widths, kernel, shaped_u, size, batch, autocast)
    return builds


def _build(
    ranks: int, widths: list[int], kernel: int, shaped_u: bool, size: int, batch: int, autocast: bool
) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        model = Network(ranks, widths, kernel, shaped_u).cuda()
        x = torch.randn(batch, widths[0], *[size] * ranks, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16, enabled=autocast):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()

        return step

    return build


def rows_of(name: str, build: Callable[[], Any], card: str, libraries: list[Cudnn]) -> list[Row]:
    """Return a row for each library: the step is recorded once, and its convolutions are asked for each."""
    captured = list[tuple[Any, Any]]()

    def keep(trace: Any, queries: Any, *_: Any) -> Any:
        captured.append((trace, queries))
        return trace

    with patch.object(recording, "with_workspaces", keep):
        record(build, device=card, cudnn="9.26.0")
    trace, queries = captured[-1]
    rows = list[Row]()
    for library in libraries:
        answered = simulate(with_workspaces(trace, queries, library, find(card)))
        with (
            patch.object(asking, "shipped", lambda *_, **__: {}),
            patch.object(asking, "measured", lambda *_, **__: {}),
            patch.object(expected_workspace, "with_cublas", lambda _: None),
        ):
            expected = with_workspaces(trace, queries, Cudnn(None, library.version), find(card))
        cases: Mapping[str, int] = {
            case: simulate(expected, workspace=case).peak_allocated for case in ("expected", "low", "high")
        }
        interval = simulate(trace).peak_allocated
        rows.append(Row(name, card, library.title, answered.peak_allocated, **cases, interval=interval))
    return rows


def summary(rows: list[Row]) -> dict[str, float]:
    """Return shares of the rows: within 2 and 5 %, inside the band; and the median widths of band and interval."""
    off = [abs(row.expected - row.answered) / row.answered for row in rows]
    inside = [min(row.low, row.expected) <= row.answered <= max(row.high, row.expected) for row in rows]
    widths = sorted(row.high / row.low for row in rows)
    return {
        "steps": len(rows),
        "within 2 %": sum(each <= 0.02 for each in off) / len(rows),
        "within 5 %": sum(each <= 0.05 for each in off) / len(rows),
        "inside the band": sum(inside) / len(rows),
        "median width of the band": widths[len(rows) // 2],
        "largest error": max(off),
    }


def table(rows: list[Row], networks_report: Mapping[str, Any]) -> str:
    """Return Markdown: the steps by card, then single convolutions by network."""
    lines = ["| steps | | within 2 % | within 5 % | inside the 95 % band | median width of the band |",
             "|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    for card in (*CARDS, "all"):
        part = summary([row for row in rows if card in (row.card, "all")])
        shares = [f"{part[name]:.0%}" for name in ("within 2 %", "within 5 %", "inside the band")]
        lines.append(f"| {card} | {part['steps']} | {' | '.join(shares)} | {part['median width of the band']:.2f} |")
    lines += ["", "| compute capability, cuDNN | convolutions | right to 1 % | with their tensors within 5 % |",
              "|---|--:|--:|--:|"]  # fmt: skip
    for name, report in sorted(networks_report.items()):
        lines.append(
            f"| {name.replace('/', ', from ')} | {report['convolutions']} | {report['right to 1 %']:.0%} | "
            f"{report['with tensors, 5 %']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cudnn", nargs="+", required=True)
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--count", type=int, default=NETWORKS)
    options = parser.parse_args()
    libraries = [library for name in options.cudnn if (library := find_cudnn(name)) is not None]
    rows = list[Row]()
    for card in CARDS:
        for name, build in networks(options.count).items():
            rows += rows_of(name, build, card, libraries)
            last = rows[-1]
            print(card, name, f"{last.expected / last.answered - 1:+.2%}", flush=True)
    report = json.loads(options.networks.read_text())
    content = {"summary": summary(rows), "rows": [asdict(row) for row in rows], "convolutions": report}
    (RESULTS / "expected_workspaces.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / "expected_workspaces.md").write_text(table(rows, report))
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main()
