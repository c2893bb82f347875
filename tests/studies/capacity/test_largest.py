"""The largest value that fits is the one that trying them all finds, in fewer than ten recordings."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow, thinned
from torch import nn

import memplan
from memplan.errors import BudgetError, StepError, UsageError
from memplan.explanation.card import context_of
from memplan.reports.html.page import page_of
from memplan.reports.html.saved_results import result_of
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.on_card import fits as fits_in
from memplan.studies.axes.axes import Axis, axis_of
from memplan.studies.axes.sliding_window import Window
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.largest import Largest, Tried, find_largest
from memplan.studies.capacity.limit import Room, room_of
from memplan.studies.sweeps.points import KNOWN, Bytes, record_point
from memplan.trace.step import StepOptions, build_of


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))


def perceptron(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


def subject(what: Any, given: str, **options: Any) -> Subject:
    return Subject(what, StepOptions((given,), **options).checked())


def fits(of: Subject, axis: Axis, value: int, room: Room) -> bool:
    found = record_point(axis.at(of, value), room.target).bytes
    assert found is not None
    return room.fits(found)


CASES: list[Any] = [
    (convolutions, "4x3x16x16", "batch", 3 << 20, {}),
    (perceptron, "8x64", "batch", 200_000, {"optimizer": torch.optim.AdamW}),
    (perceptron, "8x64", "width", 500_000, {"optimizer": torch.optim.SGD}),
    (encoder, "2x8x32", "sequence", 500_000, {}),
    *slow((convolutions, "2x3x16x16", "size", 2 << 20, {})),
]


@pytest.mark.parametrize(("make", "given", "name", "budget", "options"), thinned(CASES, 2))
def test_it_is_what_trying_them_all_finds(
    make: Callable[..., nn.Module], given: str, name: str, budget: int, options: dict[str, Any]
) -> None:
    of, room = subject(make, given, **options), room_of("cpu", budget)
    found = find_largest(of, name, room)
    assert len(found.tried) < 10
    axis = axis_of(name, of)
    around = range(max(1, found.value - 1), found.value + 3)
    assert [value for value in around if fits(of, axis, value, room)] == list(range(around[0], found.value + 1))


def test_the_answer_really_fits_and_the_next_one_does_not() -> None:
    budget = 3 << 20
    found = memplan.largest(convolutions, "batch", "4x3x16x16", device="cpu", budget=budget)
    peaks = [
        memplan.simulate(
            memplan.measure(build_of(convolutions, StepOptions((f"{batch}x3x16x16",)).checked()), device="cpu")
        ).peak_allocated
        for batch in (found, found + 1)
    ]
    assert peaks[0] <= budget < peaks[1]


@pytest.mark.parametrize("cudnn", [False, "9.26.0"])
def test_on_a_card_the_next_one_does_not_fit_with_all_that_the_allocator_does(cudnn: Any) -> None:
    """Intervals are held against what the largest context leaves, expected workspaces against the expected one."""
    of, room = subject(convolutions, "4x3x64x64"), room_of("a100-80gb", "14 GiB", cudnn=cudnn)
    found = find_largest(of, "batch", room)
    assert len(found.tried) < 10
    for value, right in ((found.value, True), (found.value + 1, False)):
        build = build_of(convolutions, StepOptions((f"{value}x3x64x64",)).checked())
        trace = memplan.record(build, device="a100-80gb", cudnn=cudnn)
        card = room.target.card
        assert card is not None
        usable = card.usable("high") if cudnn is False else card.capacity - context_of(trace, card)
        assert fits_in(trace, usable, AllocatorSettings(), low=False) == right


def test_divisible_and_aspect() -> None:
    of, room = subject(convolutions, "2x3x16x16"), room_of("cpu", 3 << 20)
    found = find_largest(of, "size", room, divisible=8, aspect=(1, 0.5))
    assert found.value % 8 == 0
    assert found.sizes == (found.value, max(8, found.value // 2 // 8 * 8))
    following = found.following
    assert following is not None
    assert (following.value, following.fits) == (found.value + 8, False)


def test_a_margin_is_left_free() -> None:
    whole = memplan.largest(perceptron, "batch", "8x64", device="cpu", budget=400_000, margin="25%")
    assert whole == memplan.largest(perceptron, "batch", "8x64", device="cpu", budget=300_000)
    assert whole == memplan.largest(perceptron, "batch", "8x64", device="cpu", budget=400_000, margin=0.25)


def test_the_most_to_be_looked_at() -> None:
    found = find_largest(subject(perceptron, "8x64"), "batch", room_of("cpu", 1 << 40), most=12)
    assert (found.value, found.following) == (12, None)


def test_a_table_of_positions_ends_the_sequence() -> None:
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(50, 8), nn.Embedding(48, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))

    asked = subject(Positioned, "2x16:int64<50")
    found = find_largest(asked, "sequence", room_of("cpu", "1GiB"))
    assert (found.value, found.most) == (48, 48)
    assert any("a table of 48 positions" in note for note in found.notes)
    less = find_largest(asked, "sequence", room_of("cpu", 9_000))
    assert 0 < less.value < 48
    assert less.following is not None
    Positioned()(torch.zeros(2, 48, dtype=torch.int64))
    with pytest.raises(IndexError):
        Positioned()(torch.zeros(2, 49, dtype=torch.int64))


def test_a_budget_on_a_card_counts_the_context() -> None:
    card = room_of("t4", None)
    room = room_of("t4", "4 GiB")
    assert room.target.card is not None
    assert card.target.card is not None
    assert room.target.card.capacity == room.limit == 4 << 30
    assert room.target.card.usable() == (4 << 30) - card.target.card.context[1]
    assert room_of(None, "t4") == card
    assert room_of("t4", "1 TiB") == card


def test_planned_more_fits() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())])

    of, room = subject(deep, "64x64"), room_of("cpu", 600_000)
    found = find_largest(of, "batch", room, fit=True)
    assert found.planned is not None
    assert found.planned.value > found.value
    assert len(found.planned.tried) < 10
    best = found.planned.value
    assert memplan.plan(deep, f"{best}x64", budget=600_000, costs="roofline").peak <= 600_000
    with pytest.raises(BudgetError):
        memplan.plan(deep, f"{best + 1}x64", budget=600_000, costs="roofline")
    answer = found.planned.answer
    assert answer is not None
    assert answer.plan is not None
    assert answer.plan.seconds is not None
    assert answer.plan.seconds > 0


def test_a_patch_counts_the_aggregation_of_the_volume() -> None:
    def segmenter() -> nn.Module:
        return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 5, 1))

    window = Window((64, 64, 64), 0.25, 1)
    of = Subject(segmenter, StepOptions(("1x1x8x8x8",)).checked(), window=window)
    found = find_largest(of, "patch", room_of("cpu", 12 << 20), divisible=4)
    answer = found.answer
    assert answer is not None
    assert answer.bytes is not None
    assert answer.bytes.aggregation == 4 * 6 * 64**3
    none = find_largest(of, "patch", room_of("cpu", 5 << 20), divisible=4)
    assert none.value == 0
    assert none.largest_parts(none.least).startswith("6.0 MiB aggregation of the volume, 1.0 MiB inputs")


def test_where_not_even_one_fits_it_says_what_holds_it_up() -> None:
    with pytest.raises(BudgetError) as error:
        memplan.largest(perceptron, "batch", "8x64", device="cpu", budget="10 KiB")
    least = memplan.explain(perceptron, "1x64", device="cpu").timeline.peak_allocated
    assert error.value.smallest_budget == least
    assert "perceptron does not fit at batch 1" in str(error.value)
    assert "16.4 KiB weights" in str(error.value)


def test_memory_that_does_not_grow_steadily_is_told_of() -> None:
    class Odd(nn.Module):
        """Takes more at a batch below 12."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.repeat(9, 1) if len(x) < 12 else x
            return self.linear(torch.relu(self.linear(wide)))

    found = find_largest(subject(Odd, "8x64"), "batch", room_of("cpu", 200_000))
    assert found.unsteady == (8, 16)
    following = found.following
    assert following is not None
    assert not following.fits


@pytest.mark.parametrize(
    ("axis", "options", "words"),
    [
        ("batch", {}, "neither a card nor a budget"),
        ("batch", {"budget": "rtx4090"}, "the budget rtx4090 for the CPU. Expected a size such as 20 GiB"),
        ("batch", {"budget": "many"}, "'many' is not a number of bytes"),
        ("batch", {"budget": 1 << 20, "margin": "120%"}, "margin 120%. Expected a share of the budget"),
        ("batch", {"budget": 1 << 20, "margin": "x"}, "margin x. Expected a share of the budget"),
        ("batch", {"budget": 1 << 20, "divisible": 0}, "divisible=0"),
        ("batch", {"budget": 1 << 20, "aspect": (1, 2)}, "aspect 1,2 for batch. Expected none"),
        ("batch", {"budget": 1 << 20, "most": 0}, "most=0"),
        ("batch", {"budget": 1 << 20, "workspace": "mid"}, "workspace='mid'"),
        ("sequence", {"budget": 1 << 20}, "perceptron has no sequence to vary"),
        ("precision", {"budget": 1 << 20}, "the axis precision. Expected one of numbers"),
        ("depth", {"budget": 1 << 20}, "perceptron has no argument 'depth'"),
        ("0.bias", {"budget": 1 << 30}, "needs"),
        ("batch", {"budget": 1 << 20, "fit": True, "train": False}, "a plan of inference"),
    ],
)
def test_what_cannot_be_is_one_message(axis: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as error:
        memplan.largest(perceptron, axis, "8x64", device="cpu", **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


class Skips(nn.Module):
    """Halves an image three times and joins it with what it was: takes multiples of 8 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(2, 2, 2, stride=2) for _ in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 if n == 0 else 4, 2, 2, stride=2) for n in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before: list[torch.Tensor] = []
        for down in self.down:
            before.append(x)
            x = down(x)
        for up in self.up:
            x = torch.cat([up(x), before.pop()], 1)
        return x


def runs(what: Callable[[], nn.Module], *shape: int) -> bool:
    try:
        what()(torch.zeros(shape))
    except (RuntimeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("budget", [70_000, *slow(30 << 20, 600_000)])
def test_where_only_some_sizes_work_the_answer_is_the_largest_of_them(budget: int) -> None:
    of, room = subject(Skips, "2x2x24x24"), room_of("cpu", budget)
    axis, found = axis_of("size", of), find_largest(of, "size", room)
    assert [runs(Skips, 2, 2, size, size) for size in (found.value, found.value + 1, found.value + 4)] == [1, 0, 0]
    assert fits(of, axis, found.value, room)
    assert not fits(of, axis, found.value + 8, room)
    assert (found.step, found.end) == (8, found.value + 8)
    assert found.failed
    assert not any(runs(Skips, 2, 2, one.value, one.value) for one in found.failed)
    assert all("Sizes of tensors must match" in one.reason for one in found.failed)


def test_an_input_of_a_size_that_does_not_work_is_no_end() -> None:
    found = find_largest(subject(Skips, "2x2x25x25"), "size", room_of("cpu", 600_000))
    assert found.tried[0].reason
    assert found.value == find_largest(subject(Skips, "2x2x24x24"), "size", room_of("cpu", 600_000)).value


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


def test_a_batch_of_one_that_fails_is_passed_over() -> None:
    assert not runs(normed, 1, 8)
    of = subject(normed, "1x8")
    found = find_largest(of, "batch", room_of("cpu", 50_000))
    assert [one.value for one in found.failed] == [1]
    assert "Expected more than 1 value per channel" in found.failed[0].reason
    assert found.value == find_largest(subject(normed, "8x8"), "batch", room_of("cpu", 50_000)).value
    none = find_largest(of, "batch", room_of("cpu", 800))
    assert (none.value, none.least.value, none.end) == (0, 2, 2)
    with pytest.raises(BudgetError, match=r"does not fit at batch 2: .* \(1 cannot be recorded\)"):
        memplan.largest(normed, "batch", "1x8", device="cpu", budget=800)


def test_a_value_from_which_on_the_model_fails_ends_the_search() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.linear = nn.Parameter(torch.zeros(1, 96, 4)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x + self.places[:, : x.shape[1]])

    found = find_largest(subject(Short, "2x16x4"), "sequence", room_of("cpu", "1GiB"))
    assert (found.value, found.end, found.step) == (96, 97, 1)
    following = found.following
    assert following is not None
    assert "expected shape should be broadcastable to [2, 97, 4]" in following.reason
    assert [runs(Short, 2, length, 4) for length in (96, 97)] == [True, False]


def test_where_no_value_works_one_message_names_all_that_were_tried() -> None:
    def wrong() -> nn.Module:
        return nn.Linear(9, 4)

    with pytest.raises(StepError) as error:
        memplan.largest(wrong, "batch", "8x8", device="cpu", budget=50_000)
    assert "so batch 8 cannot be recorded, nor can 16, 4, 32, 2, 64, 1, 128. Expected" in str(error.value)
    assert "\n" not in str(error.value)


def test_plans_pass_over_what_fails_too() -> None:
    found = find_largest(subject(Skips, "2x2x24x24"), "size", room_of("cpu", 300_000), fit=True)
    assert found.planned is not None
    assert found.planned.value % 8 == 0
    answer, following = found.planned.answer, found.planned.following
    assert answer is not None
    assert following is not None
    assert answer.need <= 300_000 < following.need


class Windows(nn.Module):
    """Pads a sequence to whole windows, as attention in windows does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.embedding, self.linear, self.last = (
            size,
            nn.Embedding(64, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        count = x.shape[1]
        x = nn.functional.pad(x, (0, 0, 0, -count % self.size)).unflatten(1, (-1, self.size))
        return self.last(torch.relu(self.linear(x)).flatten(1, 2)[:, :count])


@pytest.mark.parametrize("size", [512, *slow(1, 1000)])
@pytest.mark.parametrize(("card", "budget"), [("t4", "2 GiB"), *slow(("cpu", "1 GiB"), ("t4", None), ("h100", None))])
def test_millions_of_tokens_take_few_recordings(size: int, card: str, budget: str | None) -> None:
    of, room = subject(Windows, "1x1024:int64<64", optimizer=torch.optim.SGD), room_of(card, budget)
    of = of.with_arguments(size=size)
    found = find_largest(of, "sequence", room)
    axis = axis_of("sequence", of)
    assert found.value > 100_000
    assert (fits(of, axis, found.value, room), fits(of, axis, found.value + 1, room)) == (True, False)
    assert len(found.tried) < 15


def test_sizes_that_aspect_makes_alike_do_not_end_the_search() -> None:
    found = find_largest(
        subject(convolutions, "2x3x16x16"), "size", room_of("cpu", 3 << 20), divisible=8, aspect=(0.5, 0.5)
    )
    answer, following = found.answer, found.following
    assert answer is not None
    assert following is not None
    assert answer.need <= 3 << 20 < following.need


def test_what_is_found_knows_its_recordings() -> None:
    found = find_largest(subject(perceptron, "8x64"), "batch", room_of("cpu", 400_000))
    assert isinstance(found, Largest)
    assert found.answer is not None
    assert found.following is not None
    assert found.answer.need <= 400_000 < found.following.need


def in_band(*ends: tuple[int, int], value: int, step: int = 1) -> Largest:
    """Return a search on a card of 1000 bytes with (value, upper end of the band) of what it recorded."""
    none = dict.fromkeys((*KNOWN, "rounding"), 0)

    def tried(at: int, most: int) -> Tried:
        size = Bytes(most // 2, most // 2, 0, 0, most // 2, most // 2, 0, 0, none, "fits", 0, (most // 4, most))
        return Tried(at, at <= value, most // 2, size)

    room = Room(room_of("h100", None).target, 1000)
    return Largest("it", "batch", "", room, value, (), tuple(tried(*end) for end in ends), step)


@pytest.mark.parametrize(
    ("ends", "value", "step", "likely"),
    [
        (((4, 900), (8, 1000), (9, 1100)), 8, 1, 8),
        (((4, 600), (8, 1100)), 8, 1, 7),  # 600 + 125 for each more: 7 is 975
        (((4, 600), (6, 950), (8, 1100)), 8, 1, 6),  # 950 + 75
        (((4, 600), (8, 1100)), 8, 2, 6),
        (((4, 2000),), 4, 1, 2),  # 500 for each
        (((1, 2000),), 1, 1, 0),
    ],
)
def test_what_fits_at_the_bands_upper_end(
    ends: tuple[tuple[int, int], ...], value: int, step: int, likely: int
) -> None:
    assert in_band(*ends, value=value, step=step).likely == likely


def test_an_answer_that_fits_as_cached_segments_are_given_back_says_where_its_band_ends() -> None:
    search = in_band((4, 2400), value=4)  # it needs 1200 of 1000 bytes
    assert search.likely is None
    assert "it fits with the expected bytes. Not recorded: the upper end of its 95 % band, 2.3 KiB." in " ".join(
        str(search).split()
    )


@pytest.mark.parametrize("search", [in_band((4, 600), (8, 1100), value=8), in_band((4, 2400), value=4)])
def test_the_page_says_of_the_band_what_the_text_says(search: Largest) -> None:
    page = " ".join(html.unescape(re.sub("<[^>]+>", "", page_of([result_of(search.to_json(), "a.json")]))).split())
    text = " ".join(str(search).split())
    assert "upper end of its 95 % band, " in text
    before, _, after = text.partition("upper end of its 95 % band, ")
    assert f"{before[-9:]}upper end of its 95 % band, {after[:9]}" in page


def test_without_a_band_nothing_is_said_of_it() -> None:
    of = find_largest(subject(convolutions, "4x3x16x16"), "batch", room_of("cpu", 3 << 20))
    assert of.likely is None
    assert "95 %" not in str(of)


def test_the_answer_is_by_the_expected_number_and_the_bands_end_is_a_line() -> None:
    def volume() -> nn.Module:
        return nn.Sequential(nn.Conv3d(3, 23, 3, padding=1), nn.Conv3d(23, 29, 3, padding=1))

    of = subject(volume, "2x3x21x22x23")
    room = room_of("a100-80gb", "4 GiB", cudnn="9.26.0")
    search = find_largest(of, "batch", room)
    assert search.answer is not None
    assert search.answer.bytes is not None
    assert search.answer.bytes.needs == search.answer.bytes.needs_high
    assert search.answer.bytes.needs_band is not None
    assert search.answer.bytes.needs_band[0] < search.answer.need < search.answer.bytes.needs_band[1]
    assert search.likely is not None
    assert search.likely <= search.value
    assert str(search).count("the upper end of its 95 % band") == 1
    assert "with workspaces" not in str(search), "there is one number"
