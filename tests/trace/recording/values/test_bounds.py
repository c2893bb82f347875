"""Of what values select, a recording takes the most there can be: what really runs takes as much or less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from environment import slow, thinned
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from truth.cpu_allocator import measured_peak

import memplan
from memplan.errors import DataDependentError, StepError, UsageError
from memplan.trace.recording.values.bounds import Shares

Build = Callable[[], Callable[[], None]]
ROWS = 400

_KEPT: list[Tensor] = []


def _kept(selected: Tensor) -> Tensor:
    """What is selected stays, as a variable of the step would."""
    _KEPT[:] = [selected]
    return selected


SELECTING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda h, mask: h[mask],
    "elements": lambda h, mask: h[mask[:, None] & (h.detach() == h.detach())] * 2,
    "places": lambda h, mask: h[mask.nonzero().squeeze(1)] * 2,
    "where": lambda h, mask: h[torch.where(mask)[0]] * 2,
    "masked_select": lambda h, mask: h.masked_select(mask[:, None]),
    "masked_select, kept": lambda h, mask: _kept(h.masked_select((mask[:, None]) & (h.detach() == h.detach()))),
    "rows put back": lambda h, mask: torch.zeros_like(h).index_put((mask,), h[mask]) * 2,
    "distinct": lambda h, mask: h[torch.unique(torch.where(mask, torch.arange(ROWS), 0))] * 2,
    "in a row": lambda h, mask: h[torch.unique_consecutive(torch.where(mask, torch.arange(ROWS), 0))] * 2,
}


def selecting(name: str, mask: Callable[[], Tensor]) -> Build:
    def build() -> Callable[[], None]:
        layer, x, chosen = nn.Linear(16, 16), torch.randn(ROWS, 16), mask()

        def step() -> None:
            layer.zero_grad()
            SELECTING[name](layer(x), chosen).sum().backward()

        return step

    return build


def unknown(share: float) -> Callable[[], Tensor]:
    """A mask of random numbers, which no recording knows; of a share of ones when it really runs."""
    return lambda: torch.rand(ROWS) < share


@pytest.mark.parametrize("name", thinned(SELECTING, 2))
def test_where_all_is_selected_the_bound_is_the_peak(name: str) -> None:
    predicted = memplan.simulate(memplan.record(selecting(name, unknown(0.5)))).peak_allocated
    assert predicted == measured_peak(selecting(name, unknown(2.0)))


@pytest.mark.parametrize("name", thinned(SELECTING, 3))
def test_no_mask_takes_more(name: str) -> None:
    trace = memplan.record(selecting(name, unknown(0.5)))
    predicted = memplan.simulate(trace).peak_allocated
    assert "SELECTS BY VALUE" in trace.assumptions[0].text
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9):
        assert measured_peak(selecting(name, unknown(share))) <= predicted


@pytest.mark.slow
def test_fifty_masks_of_each_kind() -> None:
    for name in SELECTING:
        predicted = memplan.simulate(memplan.record(selecting(name, unknown(0.5)))).peak_allocated
        for number in range(50):
            assert measured_peak(selecting(name, unknown(number / 49))) <= predicted, (name, number)


def test_a_share_that_is_assumed() -> None:
    """Half of the rows: as a mask of which a recording knows that it selects half of them."""
    half = selecting("rows", lambda: torch.arange(ROWS) < ROWS // 2)
    source = SELECTING["rows"].__code__
    trace = memplan.record(selecting("rows", unknown(0.5)), assume={f"test_bounds.py:{source.co_firstlineno}": 0.5})
    # a mask that counts up is made of integers, and one of random numbers of floats
    assert (
        memplan.simulate(trace).steps[1].peak_allocated
        == memplan.simulate(memplan.record(half)).steps[1].peak_allocated
    )
    assert f"{ROWS // 2} of {ROWS}" in trace.assumptions[0].text


@pytest.mark.parametrize("assume", [{"file.py": 0.5}, {":3": 0.5}, {"file.py:3": 1.5}, {"file.py:3": True}])
def test_what_cannot_be_assumed_is_refused(assume: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"FILE:LINE and the share"):
        memplan.record(lambda: lambda: None, assume=assume)


def test_where_the_most_does_not_fit_a_share_is_asked_for() -> None:
    def build() -> Callable[[], None]:
        x, mask = torch.zeros(8), torch.rand(8).argsort() < 4
        return lambda: (x[mask].view(2, 2) * 2, None)[1]

    with pytest.raises(DataDependentError, match=r"--assume .*test_bounds.py:\d+=0.5") as caught:
        memplan.record(build)
    line = str(caught.value).split("assume={'")[1].split("'")[0]
    assert memplan.simulate(memplan.record(build, assume={line: 0.5})).peak_allocated == measured_peak(build)


def test_what_it_is_put_together_with_says_how_many_are_selected() -> None:
    def build() -> Callable[[], None]:
        x, mask, half = torch.zeros(8), torch.rand(8).argsort() < 4, torch.ones(4)

        def step() -> None:
            x[mask] += half

        return step

    trace = memplan.record(build)
    assert memplan.simulate(trace).peak_allocated == measured_peak(build)
    assert "4 of 8 are taken to be selected, as the shapes beside it say" in trace.assumptions[0].text


def test_how_many_are_selected_is_learned_for_each_execution() -> None:
    """One row is broadcast beside any number of rows: it says nothing of how many are selected."""

    def build() -> Callable[[], None]:
        x, four = torch.zeros(60, 1000), torch.rand(60).argsort() < 4
        every, beside = torch.rand(60) < 2, (torch.zeros(4, 1000), torch.zeros(1, 1000))

        def step() -> None:
            for mask, h in zip((four, every), beside, strict=True):
                x[mask].sub(h)

        return step

    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)


@pytest.mark.parametrize("times", [lambda: torch.randint(0, 9, (40,)), lambda: torch.arange(40) // 5])
def test_what_is_sized_by_numbers_takes_their_largest(times: Callable[[], Tensor]) -> None:
    def build() -> Callable[[], None]:
        x, given = torch.randn(40, 16), times()

        def step() -> None:
            x.repeat_interleave(given, 0)
            torch.bincount(given, minlength=5)

        return step

    assert measured_peak(build) <= memplan.simulate(memplan.record(build)).peak_allocated


def test_another_mistake_is_not_blamed_on_what_is_selected() -> None:
    def build() -> Callable[[], None]:
        layer, x = nn.Linear(16, 16), torch.randn(8, 16)

        def step() -> None:
            chosen = layer(x)[torch.rand(8) > 0.5]
            nn.Linear(3, 3)(chosen)

        return step

    with pytest.raises(StepError, match="same reduction dim"):
        memplan.record(build)


def test_a_share_for_a_line_at_which_nothing_selects_is_told() -> None:
    trace = memplan.record(selecting("rows", unknown(0.5)), assume={"test_bounds.py:1": 0.5})
    assert any("test_bounds.py:1, where nothing selects" in note for note in trace.notes)


def test_a_share_is_of_its_line_alone() -> None:
    def build() -> Callable[[], None]:
        x, mask = torch.randn(ROWS, 16), torch.rand(ROWS) > 0.5

        def step() -> None:
            first = x[mask]
            second = x[mask]
            torch.cat([first, second])

        return step

    trace = memplan.record(build)
    lines = [one.where for one in trace.assumptions]
    assert len(set(lines)) == 2
    kept = memplan.record(build, assume={str(lines[0]): 0.5})
    taken = [one.text.split(": ")[1].split(" ")[0] for one in kept.assumptions]
    assert taken == [str(ROWS // 2), str(ROWS)]


def test_at_most_two_booleans_are_distinct() -> None:
    def build() -> Callable[[], None]:
        x = torch.rand(1000) > 0.5
        return lambda: (torch.unique(x), None)[1]

    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)


LENGTHS = [12, 10, 10, 7, 6, 5, 4, 4, 3, 2]
LONGEST = LENGTHS[0]


@pytest.mark.slow
def test_sequences_of_a_share_are_padded_to_the_longest() -> None:
    lengths = torch.tensor([50, 7, 7, 6, 6, 6, 5, 5, 4, 4])
    build = packed(nn.GRU, lambda: lengths + torch.randint(0, 1, (10,)), False, longest=50)
    line = memplan.record(build).assumptions[0].where
    assert line is not None
    predicted = memplan.simulate(memplan.record(build, assume={line: 0.2})).peak_allocated
    assert predicted == pytest.approx(measured_peak(build), rel=0.1)


def packed(
    kind: Callable[..., nn.RNNBase], lengths: Callable[[], Any], in_order: bool, longest: int = LONGEST
) -> Build:
    def build() -> Callable[[], None]:
        net = kind(16, 8, batch_first=True, num_layers=2, bidirectional=True)
        x, known = torch.randn(10, longest, 16), lengths()

        def step() -> None:
            net.zero_grad()
            out, _ = net(pack_padded_sequence(x, known, batch_first=True, enforce_sorted=in_order))
            pad_packed_sequence(out, batch_first=True, total_length=longest + 3)[0].sum().backward()

        return step

    return build


@pytest.mark.parametrize(
    ("kind", "in_order"),
    [(nn.LSTM, False), *slow((nn.GRU, True), (nn.GRU, False), (nn.LSTM, True), (nn.RNN, False), (nn.RNN, True))],
)
def test_sequences_of_known_lengths_are_exact(kind: Callable[..., nn.RNNBase], in_order: bool) -> None:
    build = packed(kind, lambda: LENGTHS if in_order else LENGTHS[::-1], in_order)
    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)


def test_sequences_of_unknown_lengths_are_taken_as_long_as_the_longest() -> None:
    build = packed(nn.LSTM, lambda: torch.randint(1, LONGEST + 1, (10,)), False)
    predicted = memplan.simulate(memplan.record(build)).peak_allocated
    assert predicted == measured_peak(packed(nn.LSTM, lambda: torch.randint(LONGEST, LONGEST + 1, (10,)), False))
    assert predicted >= max(measured_peak(build) for _ in range(5))


def test_padding_gives_what_torch_gives() -> None:
    from memplan._torch import patches

    x = torch.randn(10, LONGEST, 3)
    given = pack_padded_sequence(x, LENGTHS, batch_first=True)
    for first in (True, False):
        for total in (None, LONGEST + 3):
            ours = patches._pad_packed_sequence(given.data, given.batch_sizes, first, -1.0, total)
            torchs = torch._VF._pad_packed_sequence(given.data, given.batch_sizes, first, -1.0, total or -1)  # pyright: ignore[reportAttributeAccessIssue]
            assert torch.equal(ours[0], torchs[0])
            assert torch.equal(ours[1], torchs[1])


def test_a_policy_with_masks_of_advantages() -> None:
    """Minibatches of random order, losses of what a mask selects."""

    def build() -> Callable[[], None]:
        net, states = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)), torch.randn(512, 8)
        advantages, actions = torch.randn(512), torch.randint(0, 4, (512,))

        def step() -> None:
            for part in torch.randperm(512).split(128):
                chosen = advantages[part] > 0
                logits = net(states[part])[chosen]
                loss = F.cross_entropy(logits, actions[part][chosen], reduction="none") * advantages[part][chosen]
                net.zero_grad()
                loss.mean().backward()

        return step

    predicted = memplan.simulate(memplan.record(build)).peak_allocated
    assert all(measured_peak(build) <= predicted for _ in range(10))


def test_a_file_is_known_by_the_end_of_its_path() -> None:
    shares = Shares({"b/c.py:3": 0.5})
    for frame, share in ((("/a/b/c.py", 3), 0.5), (("/a/b/c.py", 4), 1.0), (("/a/xb/c.py", 3), 1.0), (None, 1.0)):
        assert shares.of(frame) == share


@pytest.mark.parametrize("kind", [nn.LSTM, *slow(nn.GRU, nn.RNN)])
def test_on_a_card_cudnn_takes_the_steps_of_packed_sequences(kind: Callable[..., nn.RNNBase]) -> None:
    trace = memplan.record(packed(kind, lambda: LENGTHS, True), device="h100")
    assert "aten._cudnn_rnn.default" in {op.name for op in trace.ops}
    assert not trace.assumptions


@pytest.mark.parametrize(
    ("drawn", "most"),
    [
        (lambda: torch.rand(()) * 8, 7),
        (lambda: torch.empty(()).uniform_(0.0, 3.0), 2),
        (lambda: torch.rand(()) * 8 + 1000, 1008),  # rounds to 1008: 78 of 20 million draws did
        (lambda: torch.rand(()).half() * 8, 8),
    ],
)
def test_a_uniform_number_stays_below_its_end_as_far_as_rounding_lets_it(
    drawn: Callable[[], Tensor], most: int
) -> None:

    def build() -> Callable[[], None]:
        def step() -> None:
            torch.ones(int(drawn().item()), 100)

        return step

    peak = memplan.simulate(memplan.record(build, steps=1)).peak_allocated
    assert most * 400 <= peak <= most * 400 + 64, peak
