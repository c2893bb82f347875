"""Lines, powers, squares and crossings of points whose law is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.studies.axes.axes import Argument, Axis, Batch, Length, Precision, Size
from memplan.studies.sweeps.fits import FITTED, Fit, crossings_of, fits_of


def row(peak: float, **values: Any) -> dict[str, Any]:
    """A point whose peak is saved bytes alone, unless it says other."""
    bytes_ = {**dict.fromkeys(FITTED, 0), "saved": round(peak), "peak": round(peak), "peak_high": round(peak)}
    return {"status": "ok", **bytes_, **values}


def fit(axis: Axis, law: Any, values: Any) -> Fit:
    (found,) = fits_of([axis], [row(law(value), **{axis.name: value}) for value in values])
    return found


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1 << 30), st.integers(0, 1 << 24), st.lists(st.integers(1, 999), min_size=3, unique=True))
def test_a_line_is_found_again(fixed: int, slope: int, values: list[int]) -> None:
    found = fit(Batch(), lambda batch: fixed + slope * batch, values)
    largest = fixed + slope * max(values)
    assert found.fixed == pytest.approx(fixed, abs=1e-6 * largest + 1)
    assert found.slope == pytest.approx(slope, abs=1e-6 * largest + 1)
    assert found.residual < 1e-6
    assert found.lines["saved"] == found.lines["peak"]
    assert found.holds


def test_bytes_of_a_size_grow_with_its_pixels() -> None:
    found = fit(Size("size", 3), lambda size: 1000 + 8 * size**3, (16, 32, 64))
    assert (found.unit, round(found.fixed), round(found.slope, 6)) == ("voxel", 1000, 8)


def test_a_build_with_an_argument_grows_with_its_power() -> None:
    found = fit(Argument("size"), lambda size: 10**6 + 8 * size**3, (32, 64, 96))
    assert (found.power, round(found.fixed), round(found.slope, 6)) == (3, 10**6, 8)
    assert str(found) == "size, 32 to 96: fixed 976.6 KiB, 8 B times size cubed, residual 0.0 %"


def test_a_sequence_with_attention_has_a_square() -> None:
    found = fit(Length(), lambda length: 5000 + 300 * length + 7 * length**2, (64, 128, 256, 512, 1024))
    assert found.square is not None
    assert found.square.square == pytest.approx(7)
    assert found.square.slope == pytest.approx(300)
    assert "a token squared, residual 0.0 %" in str(found)


def test_first_points_on_another_line_are_left_out() -> None:
    found = fit(Batch(), lambda batch: max(10_000, 2000 + 1000 * batch), (1, 2, 16, 32, 64))
    assert found.values == (16, 32, 64)
    assert (round(found.fixed), round(found.slope)) == (2000, 1000)


def test_what_is_no_line_says_so() -> None:
    found = fit(Batch(), lambda batch: 2**batch, (1, 4, 8))
    assert found.residual > 0.05
    assert not found.holds
    share = max(abs(found.fixed + found.slope * batch - 2**batch) / 2**batch for batch in (1, 4, 8))
    assert str(found) == f"batch, 1 to 8: no straight line: the best is up to {100 * share:.1f} % off the peaks"


def test_a_line_that_begins_below_0_has_no_fixed_part() -> None:
    found = fit(Batch(), lambda batch: 1000 * batch - 5000, (10, 20, 30))
    assert str(found) == "batch, 10 to 30: no fixed part (the line begins at -4.9 KiB), 1000 B a sample, residual 0.0 %"
    square = fit(Length(), lambda length: 7 * length**2 - 20_000, (64, 128, 256, 512, 1024))
    assert square.square is not None
    assert "no fixed part (the line begins at -19.5 KiB)" in str(square)
    near = fit(Batch(), lambda batch: 10**6 * batch - 5000, (1, 2, 3))
    assert str(near).startswith("batch, 1 to 3: fixed about 0 B, 976.6 KiB a sample")


def test_each_cause_says_how_far_its_points_are_off_its_line() -> None:
    saved = {1: 0, 2: 40, 3: 20}
    rows = [row(1000 * batch, batch=batch) | {"saved": saved[batch]} for batch in (1, 2, 3)]
    (found,) = fits_of([Batch()], rows)
    # by hand: slope 10, fixed 0; off by 10, 20 and 10, of 40 at most
    assert found.lines["saved"].residual == pytest.approx(20 / 40)
    assert found.lines["peak"].residual == pytest.approx(0, abs=1e-9)


def test_the_residual_is_the_largest_share_by_which_a_peak_is_off() -> None:
    found = fit(Batch(), {1: 100, 2: 230, 3: 300}.__getitem__, (1, 2, 3))
    # by hand: slope 100, fixed 10; off by 10 of 100, 20 of 230, 10 of 300
    assert (round(found.fixed), round(found.slope)) == (10, 100)
    assert found.residual == pytest.approx(0.1)


def test_each_choice_of_the_other_axes_has_a_fit() -> None:
    axes: list[Axis] = [Batch(), Precision()]
    rows = [
        row(batch * size, batch=batch, precision=name) for name, size in (("fp32", 4), ("bf16", 2)) for batch in (1, 2)
    ]
    assert [(one.axis, one.at, round(one.slope)) for one in fits_of(axes, rows)] == [
        ("batch", {"precision": "fp32"}, 4),
        ("batch", {"precision": "bf16"}, 2),
    ]


def test_failed_points_and_single_ones_are_no_line() -> None:
    rows = [row(1, batch=1), {"batch": 2, "status": "failed", "reason": "no"}]
    assert fits_of([Batch()], rows) == []


def test_where_another_part_becomes_the_largest() -> None:
    def at(size: int) -> dict[str, Any]:
        saved, workspace = 100 * size**2, 40_000
        return row(saved, size=size, workspace_high=workspace) | {"peak_high": saved + workspace}

    (found,) = crossings_of([Size()], [at(size) for size in (8, 16, 32)])
    assert (found.below, found.above, found.between) == ("workspace", "saved", (16, 32))
    assert found.value == pytest.approx(20)  # 100 * 20 ** 2 is 40,000
    assert str(found) == (
        "size: below about 20 workspaces are the largest part, above it saved activations (between 16 and 32)"
    )
    assert crossings_of([Size()], [at(8), at(16)]) == []


def test_parts_that_are_as_good_as_equal_do_not_cross() -> None:
    rows = [
        row(1010, batch=1, weight=1000) | {"peak_high": 2010},
        row(1000, batch=2, weight=1010) | {"peak_high": 2010},
    ]
    assert crossings_of([Batch()], rows) == []


@pytest.mark.parametrize("values", [(0, 3), (1, 3, 7)])
def test_a_flat_line_has_no_slope(values: tuple[int, ...]) -> None:
    assert "fixed 576 B, 0 B times width" in str(fit(Argument("width"), lambda width: 576, values))
