"""Numbers that are read and become sizes: known, bounded, or said loudly."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from environment import thinned
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from truth.cpu_allocator import measured_peak

import memplan
from memplan.trace.records import loud

ROWS = 60
Body = Callable[[Any, Any, Any], Any]
SIZED: dict[str, Body] = {
    "zeros": lambda x, mask, n: torch.zeros(mask.sum().item(), 16),
    "until a tensor": lambda x, mask, n: x[: mask.sum()] * 2,
    "until a number": lambda x, mask, n: x[: mask.sum().item()] * 2,
    "until a whole number": lambda x, mask, n: x[: int(mask.sum())] * 2,
    "from a number": lambda x, mask, n: x[mask.sum().item() :] * 2,
    "columns": lambda x, mask, n: torch.zeros(ROWS, 100)[:, : n.max()] * 2,
    "narrow": lambda x, mask, n: x.narrow(0, 0, mask.sum().item()) * 2,
    "arange": lambda x, mask, n: torch.arange(mask.sum().item()) * 2,
    "arange of a tensor": lambda x, mask, n: torch.arange(n.max())[None] < n[:, None],
    "bincount": lambda x, mask, n: torch.bincount(n, minlength=mask.sum().item()) * 2,
    "repeats": lambda x, mask, n: x.repeat_interleave(n, 0) * 2,
    "split": lambda x, mask, n: [part * 2 for part in torch.split(torch.zeros(n.sum().item()), n.tolist())],
    "one_hot": lambda x, mask, n: F.one_hot(n) * 2,
    "a tensor of numbers": lambda x, mask, n: torch.zeros(ROWS, 100)[:, : torch.tensor(n.tolist()).max().item()] * 2,
    "new_zeros": lambda x, mask, n: x.new_zeros(n.max().item(), 16),
    "expand": lambda x, mask, n: x[:1].expand(n.max().item(), -1) * 2,
    "pad": lambda x, mask, n: F.pad(x, (0, n.max().item())),
    "loop": lambda x, mask, n: [x * row for row in range(n.max().item())],
    "list": lambda x, mask, n: torch.stack([x] * n.max().item()),
    "array": lambda x, mask, n: x[: n.numpy().max()] * 2,
    "view": lambda x, mask, n: x.flatten()[: n[0].item() * 16].view(n[0].item(), 16) * 2,
    "packed": lambda x, mask, n: pack_padded_sequence(torch.zeros(ROWS, 100, 4), n.tolist(), True, False).data * 2,
    "half of them": lambda x, mask, n: x[: mask.sum().item() // 2] * 2,
    "what is left": lambda x, mask, n: x.new_zeros(ROWS - mask.sum().item(), 9),
    "of indices": lambda x, mask, n: torch.zeros(x[:, 0].argmax().item() + 1, 9),
    "the most of several": lambda x, mask, n: torch.zeros(max(n[:3].tolist()), 9),
    "clamped": lambda x, mask, n: torch.zeros(n.clamp(3, 20).max().item(), 9),
    "summed by place": lambda x, mask, n: torch.zeros(
        int(torch.zeros(100, dtype=torch.long).index_add(0, n, torch.ones_like(n)).max()), 9
    ),
    "written by out=": lambda x, mask, n: torch.zeros(int(_offsets(n)[-1]), 100),
    "from a tensor": lambda x, mask, n: x[mask.sum() :] * 2,
    "from a whole number": lambda x, mask, n: x[int(mask.sum()) :] * 2,
    "what a whole number leaves": lambda x, mask, n: x.new_zeros(ROWS - int(mask.sum()), 1000),
    "what an array leaves": lambda x, mask, n: x.new_zeros(ROWS - int(mask.sum().numpy()), 1000),
    "the last": lambda x, mask, n: x[-n.max() :] * 2,
    "without the last": lambda x, mask, n: x[: -n.max()] * 2,
    "between offsets": lambda x, mask, n: torch.zeros(3000, 20)[_offsets(n)[3] : _offsets(n)[4]] * 2,
    "capped, left": lambda x, mask, n: torch.zeros(40 - min(mask.sum().item(), 40), 1000),
    "shifted": lambda x, mask, n: torch.zeros(mask.sum().item() << 3, 100),
    "bits": lambda x, mask, n: torch.zeros(64 - (mask.sum().item() & 63), 100),
    "or": lambda x, mask, n: torch.zeros(mask.sum().item() | 64, 100),
    "a part of divmod": lambda x, mask, n: torch.zeros(ROWS - divmod(mask.sum().item(), 3)[0], 100),
    "what a float leaves": lambda x, mask, n: torch.zeros(ROWS - int(float(mask.sum().item())), 100),
    "what -0.5 becomes": lambda x, mask, n: torch.zeros(
        3 + int((torch.rand(ROWS) * 2.5 - 3.0).to(torch.long).max()), 1000
    ),
    "read in another thread": lambda x, mask, n: (
        _in_thread(lambda: x.mean().item()),
        x[mask.sum().item() :] * 2,
        torch.zeros(mask.sum().item(), 99),
    ),
    "a fraction": lambda x, mask, n: x[: int(torch.rand(1).item() * ROWS)] * 2,
    "a list's entry": lambda x, mask, n: torch.zeros(WIDTHS[n[0].item()], 1000),
    "a root": lambda x, mask, n: torch.zeros(math.isqrt(n[0].item()), 9000),
    "what a root leaves": lambda x, mask, n: torch.zeros(64 - math.ceil(sqrt(mask.sum().item())), 9000),
    "what half leaves": lambda x, mask, n: torch.zeros(64 - round(mask.sum().item() * 0.5), 9000),
    "a loop elsewhere": lambda x, mask, n: _repeated(x, n.max().item()),
    "a loop from there": lambda x, mask, n: [x * row for row in range(n.max().item(), ROWS)],
    "a stride": lambda x, mask, n: F.avg_pool1d(torch.zeros(9, 4000), 4, n[0].item()) * 2,
    "steps of arange": lambda x, mask, n: torch.arange(0, 4000, n[0].item()) * 2,
    "scaled up": lambda x, mask, n: F.interpolate(torch.zeros(1, 9, 40), scale_factor=n[0].item()) * 2,
    "triangle": lambda x, mask, n: torch.tril_indices(n[0].item(), 50) * 2,
    "taken apart": lambda x, mask, n: torch.zeros(4, 2500).unfold(1, n[0].item(), 1).contiguous(),
}
QUIET: dict[str, Body] = {
    "a factor": lambda x, mask, n: x * mask.sum().item(),
    "an index": lambda x, mask, n: x[n[0]] * 2,
    "indices in a loop": lambda x, mask, n: [x[one] * 2 for one in n],
    "an index, read": lambda x, mask, n: x[n[0].item() % ROWS] * 2,
    "an index of a count": lambda x, mask, n: x[mask[:9].sum().item()] * 2,
    "a log": lambda x, mask, n: (x * 2, f"{mask.sum().item():5d}"),
    "an operand": lambda x, mask, n: torch.softmax(x, 1).mul(2).add(x, alpha=mask.sum().item()),
    "a value of full": lambda x, mask, n: torch.full((3, 1, 1), x.mean().item()),
    "an end of linspace": lambda x, mask, n: torch.linspace(0, x.mean().item(), 5),
    "of softplus": lambda x, mask, n: F.softplus(x, beta=x.mean().item()),
    "of addmm": lambda x, mask, n: torch.addmm(x, x.new_ones(60, 60), x, alpha=x.mean().item()),
    "of foreach": lambda x, mask, n: torch.ops.aten._foreach_mul([x, x], x.mean().item()),
    "data": lambda x, mask, n: torch.tensor(data=x.mean().item()),
    "a crop by a tensor": lambda x, mask, n: torch.stack([x[i : i + 8] for i in n[:3]]),
    "a crop by two tensors": lambda x, mask, n: x[n[3] : (n + 8)[3]] * 2,
    "a logged percentage": lambda x, mask, n: (x * 2, "%.1f" % (100.0 * mask.sum().item() / ROWS)),
    "a fill value": lambda x, mask, n: x.masked_fill(mask[:, None], n[0].item()),
}


def _offsets(n: torch.Tensor) -> torch.Tensor:
    offsets = torch.zeros(ROWS + 1, dtype=torch.long)
    torch.cumsum(n, 0, out=offsets[1:])
    return offsets


WIDTHS = tuple(range(100))


def _repeated(x: torch.Tensor, times: int) -> list[torch.Tensor]:
    return [x * row for row in range(times)]


def _in_thread(read: Callable[[], Any]) -> None:
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()


Ends = tuple[float, int, int]
"""Share of ones in the mask, and the ends of `randint`."""
ENDS: tuple[Ends, ...] = ((0.7, 1, 51), (2.0, 50, 51), (-1.0, 50, 51), (2.0, 1, 2), (-1.0, 1, 2))
LOOSE = {
    "between offsets": 10, "split": 1.1, "what -0.5 becomes": 1.5, "summed by place": 60, "or": 1.01, "view": 1.01,
    "clamped": 1.01, "bits": 1.01, "a fraction": 1.2, "packed": 1.01,
    "of indices": 1.05, "read in another thread": 1.2,
}  # fmt: skip
"""Factor by which a bound may lie above the largest measured; the others are exact."""


def step_of(body: Body, ends: Ends = ENDS[0]) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        torch.manual_seed(0)
        x, mask, n = torch.randn(ROWS, 16), torch.rand(ROWS) < ends[0], torch.randint(*ends[1:], (ROWS,))

        def step() -> None:
            body(x, mask, n)

        return step

    return build


@pytest.mark.parametrize("name", thinned(SIZED, 6))
def test_a_size_is_the_largest_that_it_can_be(name: str) -> None:
    trace = memplan.record(step_of(SIZED[name]))
    predicted = memplan.simulate(trace).peak_allocated
    largest = max(measured_peak(step_of(SIZED[name], ends)) for ends in ENDS)
    assert loud(trace.assumptions)
    assert largest <= predicted <= LOOSE.get(name, 1) * largest


@pytest.mark.parametrize("name", thinned(QUIET, 3))
def test_what_is_no_size_is_exact_and_quiet(name: str) -> None:
    build = step_of(QUIET[name])
    trace = memplan.record(build)
    assert memplan.simulate(trace).peak_allocated == measured_peak(build)
    assert not loud(trace.assumptions)


def test_a_size_of_which_nothing_is_known_is_said_loudly() -> None:
    trace = memplan.record(step_of(lambda x, mask, n: torch.zeros((x * 3).abs().long().sum().item(), 7)))
    assert any("ARE NOT BOUNDED" in one.text for one in loud(trace.assumptions))


def test_a_size_of_known_values_is_exact_and_quiet() -> None:
    def build() -> Callable[[], None]:
        lengths: Any = torch.tensor([3, 9, 4])
        return lambda: (torch.zeros(3, lengths.max().item(), 50) * 2, None)[1]

    trace = memplan.record(build)
    assert memplan.simulate(trace).peak_allocated == measured_peak(build)
    assert not trace.assumptions


def test_a_read_value_leaves_the_encoder_its_fast_path() -> None:
    def build() -> Callable[[], None]:
        x, layer = torch.randn(64, 64, 64), nn.TransformerEncoderLayer(64, 4, 512, batch_first=True).eval()

        def step() -> None:
            x.mean().item()
            with torch.no_grad():
                layer(x)

        return step

    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)


def test_experts_that_are_chosen_by_name_are_taken_in_turn() -> None:
    def build() -> Callable[[], None]:
        experts = nn.ModuleDict({f"expert_{at}": nn.Linear(64, 64) for at in range(4)})
        optimizer, x, hit = torch.optim.AdamW(experts.parameters()), torch.randn(8, 64), torch.randperm(4)

        def step() -> None:
            optimizer.zero_grad()
            torch.stack([experts[f"expert_{one}"](x).sum() for one in hit]).sum().backward()
            optimizer.step()

        return step

    assert memplan.simulate(memplan.record(build)).peak_allocated == pytest.approx(measured_peak(build), rel=0.01)


def test_a_share_of_a_size_is_assumed_for_its_line() -> None:
    def build(rows: int | None = None) -> Callable[[], None]:
        net, x = nn.Linear(16, 16), torch.randn(ROWS, 16)
        mask: Any = torch.rand(ROWS) < 0.7

        def step() -> None:
            taken = mask.sum().item() if rows is None else rows
            net(x[:taken]).sum().backward()

        return step

    line = memplan.record(build).assumptions[0].where
    assert line is not None
    trace = memplan.record(build, assume={line: 0.5})
    assert "taken as 30, as was assumed" in trace.assumptions[0].text
    assert memplan.simulate(trace).steps[1].peak_allocated == pytest.approx(measured_peak(lambda: build(30)), rel=0.02)
