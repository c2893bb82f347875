"""The 95 % band of expected workspaces, against all combinations of the sizes that they can have; saved traces; and
what keeps its interval."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import pytest
import torch
from environment import thinned
from torch import nn

import memplan
from memplan.cudnn.expected_workspace import ExpectedWorkspace
from memplan.cudnn.questions import Question
from memplan.errors import FormatError
from memplan.trace import workspaces
from memplan.trace.records import ExpectedSize, Storage
from memplan.trace.trace import Trace, band_end

CARD = "a100-80gb"
BLOCK = 512


def question(number: int) -> Question:
    """Return a convolution that differs from those of other numbers."""
    return Question(
        "forward", (number + 1, 8, 9, 9), (8, 8, 3, 3), (number + 1, 8, 9, 9), False, "float32", (1, 1), (1, 1),
        (1, 1), (32, 32, 32), True, False,
    )  # fmt: skip


def storage(number: int, size: int, born: int, died: int | None, cause: str = "activation") -> Storage:
    return Storage(number, size, born=born, died=died, device="cuda:0", cause=cause, op=None)  # pyright: ignore[reportArgumentType]


class Case:
    """A random step: tensors that live over some of its convolutions, whose workspaces live one after the other."""

    def __init__(self, seed: int) -> None:
        rnd = random.Random(seed)
        kinds, calls = rnd.randint(1, 4), rnd.randint(1, 6)
        self.expected: dict[Question, ExpectedWorkspace] = {}
        for number in range(kinds):
            sizes = sorted(rnd.sample(range(0, 40 * BLOCK, 100), rnd.randint(1, 4)))
            weights = [rnd.random() ** 3 + 0.001 for _ in sizes]
            probabilities = tuple(weight / sum(weights) for weight in weights)
            likely = sizes[probabilities.index(max(probabilities))]
            self.expected[question(number)] = ExpectedWorkspace(likely, tuple(sizes), probabilities)
        self.predicted: dict[int, Question] = {}
        storages: list[Storage] = []
        for call in range(calls):
            asked = question(rnd.randrange(kinds))
            self.predicted[len(storages)] = asked
            likely = self.expected[asked].bytes
            storages.append(storage(len(storages), likely, 10 * call + 4, 10 * call + 6, "workspace"))
        for _ in range(rnd.randint(0, 6)):
            born = 2 * rnd.randrange(5 * calls) + 1  # at no tick of a workspace
            died = rnd.choice((None, born + 2 * rnd.randint(1, 15)))
            storages.append(storage(len(storages), rnd.randint(1, 30 * BLOCK), born, died))
        self.trace = Trace(
            origin="recorded", device=CARD, torch="2.13", ops=(), storages=tuple(storages), layers=(), steps=(0,),
            end=10 * calls + 40,
        )  # fmt: skip

    def peak(self, sizes: Mapping[int, int]) -> int:
        """Return the allocated peak in blocks with these workspaces, tick by tick."""
        spans = [
            (s.born, self.trace.end + 1 if s.died is None else s.died, -(-sizes.get(s.id, s.bytes) // BLOCK) * BLOCK)
            for s in self.trace.storages
        ]
        return max(sum(size for a, b, size in spans if a <= tick < b) for tick in range(self.trace.end))

    def share_of(self, holds: Callable[[int], bool]) -> float:
        """Return the probability that a condition holds for the peak, over all combinations of workspaces."""
        asked = list(dict.fromkeys(self.predicted.values()))
        share = 0.0
        for choice in itertools.product(*(range(len(self.expected[q].sizes)) for q in asked)):
            chosen = {q: self.expected[q].sizes[i] for q, i in zip(asked, choice, strict=True)}
            if holds(self.peak({number: chosen[q] for number, q in self.predicted.items()})):
                share += prod(self.expected[q].probabilities[i] for q, i in zip(asked, choice, strict=True))
        return share


@pytest.mark.parametrize("seed", thinned(range(100), 4))
def test_the_peak_leaves_the_band_in_no_more_than_five_per_cent(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "_FORMULA", 0.0)  # here each size is exactly one of the distribution
    monkeypatch.setattr(workspaces, "_NOTHING", 0)
    case = Case(seed)
    band = workspaces._band(case.trace, case.predicted, {**case.expected})
    assert [size.storage for size in band] == list(case.predicted)
    assert all(size.low <= case.trace.storages[size.storage].bytes <= size.high for size in band)
    low = case.peak({size.storage: size.low for size in band})
    high = case.peak({size.storage: size.high for size in band})
    assert case.share_of(lambda peak: peak < low) <= 0.025 + 1e-9
    assert case.share_of(lambda peak: peak > high) <= 0.025 + 1e-9
    # no wider than it has to be: the expected peak lies in it, and each end that is another is needed
    likely = case.peak({})
    if low < likely:
        assert case.share_of(lambda peak: peak <= low) >= 0.025 - 1e-9
    if high > likely:
        assert case.share_of(lambda peak: peak >= high) >= 0.025 - 1e-9


def build() -> Callable[[], None]:
    """Convolutions of sizes of which nothing is stored."""
    model = nn.Sequential(nn.Conv3d(3, 23, 3, padding=1), nn.ReLU(), nn.Conv3d(23, 29, 3, padding=1))
    data = torch.ones(2, 3, 21, 22, 23)
    return lambda: model(data).sum().backward()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return memplan.record(build, device=CARD, cudnn="9.26.0")


def test_workspaces_of_unknown_convolutions_are_expected(trace: Trace) -> None:
    assert trace.engines == ()
    assert len(trace.expected) == 10, "forward, both gradients but that of the data, in both of two steps"
    assert all(s.low is None for s in trace.storages if s.cause == "workspace")
    (note,) = [note for note in trace.notes if "expected to choose" in note]
    assert "cuDNN 9.26.0" in note
    assert "pip install memplan[cudnn]" in note


def test_the_same_step_has_the_same_trace_byte_for_byte(trace: Trace) -> None:
    assert memplan.record(build, device=CARD, cudnn="9.26.0").to_json() == trace.to_json()


def test_simulate_takes_either_end_of_the_band(trace: Trace) -> None:
    peaks = [memplan.simulate(trace, workspace=end).peak_allocated for end in ("low", "expected", "high")]
    assert peaks == sorted(peaks)
    assert memplan.simulate(trace) == memplan.simulate(trace, workspace="expected")
    for end in ("low", "high"):
        assert memplan.simulate(trace, workspace=end) == memplan.simulate(band_end(trace, end))
    explained = memplan.explain(trace)
    assert explained.card is not None
    assert explained.card.allocated_band == (peaks[0], peaks[2])
    assert explained.timeline.peak_allocated == peaks[1]


def test_a_saved_trace_keeps_the_band(trace: Trace) -> None:
    assert Trace.from_json(trace.to_json()) == trace


@pytest.mark.parametrize(
    "damaged",
    [
        lambda size, bytes: ExpectedSize(10**6, size.low, size.high),
        lambda size, bytes: ExpectedSize(size.storage, bytes + 1, max(size.high, bytes + 1)),
        lambda size, bytes: ExpectedSize(size.storage, 0, bytes - 1),
        lambda size, bytes: ExpectedSize(size.storage, -1, size.high),
    ],
    ids=["no such storage", "above the bytes", "below the bytes", "negative"],
)
def test_a_damaged_band_is_refused(trace: Trace, damaged: Callable[[ExpectedSize, int], ExpectedSize]) -> None:
    size = next(size for size in trace.expected if trace.storages[size.storage].bytes)
    broken = damaged(size, trace.storages[size.storage].bytes)
    with pytest.raises(FormatError):
        Trace.from_json(replace(trace, expected=(broken,)).to_json())


def test_with_benchmark_the_interval_stays() -> None:
    """All algorithms are tried then, so the first choice of the heuristics says nothing."""

    def tried() -> Callable[[], None]:
        torch.backends.cudnn.benchmark = True
        return build()

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=True):
        trace = memplan.record(tried, device=CARD, cudnn="9.26.0")
    assert trace.expected == ()
    assert all(s.low == 0 for s in trace.storages if s.cause == "workspace")


def test_without_cudnn_the_interval_stays() -> None:
    trace = memplan.record(build, device=CARD, cudnn=False)
    assert trace.expected == ()
    assert all(s.low == 0 < s.bytes for s in trace.storages if s.cause == "workspace")


def test_a_card_without_a_model_keeps_the_interval_and_says_why() -> None:
    """Nothing older than compute capability 7.0 has a model."""
    trace = memplan.record(build, device="gtx1080ti")
    assert trace.expected == ()
    assert all(s.low == 0 < s.bytes for s in trace.storages if s.cause == "workspace")
    (note,) = (note for note in trace.notes if "stay intervals" in note)
    assert note.startswith("cuDNN 9.10.2 did not answer")
    assert "compute capability 6.1, for which the last cuDNN is 9.10 and the last builds of torch" in note


def test_a_volta_has_the_workspaces_of_the_last_version_with_its_kernels() -> None:
    trace = memplan.record(build, device="v100")
    assert trace.expected
    assert any(
        "that cuDNN 9.10.2, which builds of torch with CUDA 12.6 come with, is expected" in n for n in trace.notes
    )
