"""Fields along a dimension against brute force: the sets of positions that are seen, op by op."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.checks.fields.spans import IDENTITY, Span

small = st.integers(1, 5)
STEP = st.one_of(
    st.tuples(st.just("window"), small, st.integers(1, 3), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("transposed"), small, st.integers(1, 3), st.integers(0, 3), st.integers(1, 2)),
    st.tuples(st.just("moved"), st.integers(-3, 3), st.sampled_from([1, 2, -1])),
)
Step = tuple[str, *tuple[int, ...]]


def seen_by(position: int, step: Step) -> set[int]:
    """The positions of what an op reads that one of its results sees, from its definition."""
    kind, *numbers = step
    if kind == "window":
        kernel, stride, padding, dilation = numbers
        return {position * stride - padding + k * dilation for k in range(kernel)}
    if kind == "transposed":
        kernel, stride, padding, dilation = numbers
        taps = {position + padding - k * dilation for k in range(kernel)}
        return {tap // stride for tap in taps if tap % stride == 0}
    offset, times = numbers
    return {position * times + offset}


def brute(position: int, steps: list[Step]) -> set[int]:
    seen = {position}
    for step in reversed(steps):
        seen = {below for place in seen for below in seen_by(place, step)}
    return seen


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=5))
def test_compositions_are_exact(steps: list[Step]) -> None:
    span: Span | None = IDENTITY
    for kind, *numbers in steps:
        assert span is not None
        span = getattr(span, kind)(*numbers)
    assert span is not None
    if any(
        not seen_by(position, step) for step in steps for position in range(12)
    ):  # outputs between the taps of a transposed convolution see nothing; they take their neighbour's field
        return
    for position in range(-7, 25):
        field = brute(position, steps)
        assert (span.low(position), span.high(position)) == (min(field), max(field))


@given(st.lists(STEP, max_size=3), st.lists(STEP, max_size=3))
def test_what_meets_sees_what_both_see(one: list[Step], other: list[Step]) -> None:
    spans: list[Span] = []
    for steps in (one, other):
        span: Span | None = IDENTITY
        for kind, *numbers in steps:
            assert span is not None
            span = getattr(span, kind)(*numbers)
        assert span is not None
        spans.append(span)
    a, b = spans
    if a.stride != b.stride:
        return
    both = a.union(b)
    assert both is not None
    for position in range(-5, 20):
        assert both.low(position) == min(a.low(position), b.low(position))
        assert both.high(position) == max(a.high(position), b.high(position))


def test_lines_go_through_the_middle_of_a_period() -> None:
    """Doubling a position: two outputs for each input, centred a quarter of a pixel to either side of it."""
    double = IDENTITY.transposed(2, 2, 0)
    assert double is not None
    assert double.stride == Fraction(1, 2)
    assert [double.low(o) for o in range(4)] == [0, 0, 1, 1]
    assert double.first_low == double.first_high == Fraction(-1, 4)


def test_too_long_a_period_is_given_up() -> None:
    assert IDENTITY.through(5000, 4999, lambda o: [o]) is None
