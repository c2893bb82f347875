"""A saved sweep is read as it was; what no sweep can hold is refused in one line."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.errors import InputError
from memplan.studies.sweeps.sweep import Sweep


def convolutions(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2, 1))


@pytest.fixture(scope="module")
def swept() -> Sweep:
    axes = {"batch": [1, 2, 3, 4, 5], "0.kernel_size": [(3, 3), (1, 3), (40, 40)], "precision": "fp32,bf16"}
    return memplan.sweep(convolutions, axes, "2x3x16x16", optimizer=torch.optim.AdamW, device="t4", jobs=1)


def test_a_saved_sweep_is_read_as_it_was(swept: Sweep) -> None:
    assert {row["status"] for row in swept.rows} == {"ok", "failed"}
    assert any(fit.fixed < 0 or fit.lines["saved"].fixed < 0 for fit in swept.fits)
    again = Sweep.from_json(swept.to_json())
    assert again == swept
    assert str(again) == str(swept)
    assert again.to_json() == swept.to_json()


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), "memplan.plan", "it has the format 'memplan.plan', not memplan.sweep"),
        (("schema",), 99, "it has schema version 99; this memplan reads 1"),
        (("schema",), [1] * 99, "it has schema version [1, 1"),
        (("rows",), None, "it lacks 'rows'"),
        (("more",), 1, "it has an unknown 'more'"),
        (("points",), 1, "rows of 1 points"),
        (("points",), True, "it.points is True, not int"),
        (("rows", 0), [], "it.rows[0] is [], not a mapping"),
        (("rows", 0, "peak"), 1, "it.rows[0] has bytes that do not add up"),
        (("rows", 0, "peak"), "many", "it.rows[0].peak is 'many', not int"),
        (("rows", 0, "peak"), 1 << 80, "out of range"),
        (("rows", 0, "saved"), -1, "it.rows[0].saved is -1, which is out of range"),
        (("rows", 0, "batch"), None, "it.rows[0] lacks 'batch'"),
        (("rows", 0, "width"), 3, "it.rows[0] has an unknown 'width'"),
        (("rows", 0, "status"), "well", "it.rows[0].status is 'well', not ok or failed"),
        (("rows", 0, "status"), [], "it.rows[0].status is (), not str"),
        (("rows", 0, "reason"), 5, "it.rows[0].reason is 5, not str"),
        (("axes", "batch"), 3, "it.axes['batch'] is 3, not a list"),
        (("fits", 0, "lines", "peak"), None, "it.fits[0] has no line of the peak"),
        (("fits", 0, "values"), [], "it.fits[0] has no line of the peak, no values"),
        (("fits", 0, "power"), 10**9, "or a power above 3"),
        (("fits", 0, "residual"), "none", "it.fits[0].residual is 'none', not float"),
        (("fits", 0, "at"), None, "it.fits[0] lacks 'at'"),
        (("fits", 0, "square"), {"fixed": 1}, "it.fits[0].square lacks"),
        (("crossings",), [{}], "it.crossings[0] lacks"),
        (("notes",), [None], "it.notes[0] is None, not str"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(swept: Sweep, path: tuple[Any, ...], value: Any, words: str) -> None:
    data = changed(json.loads(swept.to_json()), path, value)
    with pytest.raises(InputError) as error:
        Sweep.from_json(json.dumps(data), "sweep.json")
    assert str(error.value).startswith("sweep.json is no sweep that can be used: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_other_value_anywhere_is_read_or_refused(swept: Sweep, data: st.DataObject) -> None:
    plain = json.loads(swept.to_json())
    place: Any = plain
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(ANY)
    try:
        found = Sweep.from_json(json.dumps(plain))
    except InputError:
        return
    texts = [str(found)]
    ok = next((number for number, row in enumerate(found.rows, 1) if row["status"] == "ok"), None)
    if ok is not None:
        texts.append(str(memplan.compare(found.point(ok), swept.point(2))))
    assert all(line.isprintable() for text in texts for line in text.split("\n"))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"format": NaN}', "[" * 100_000])
def test_what_is_no_sweep_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="The text is no sweep that can be used"):
        Sweep.from_json(text)


def test_points_are_found_by_number_and_by_value(swept: Sweep) -> None:
    again = Sweep.from_json(swept.to_json())
    third = swept.point(3)
    assert third.row == again.rows[2]
    one = swept.point(batch=2, precision="bf16", **{"0.kernel_size": (1, 3)})
    assert one == again.point(batch="2", precision="bf16", **{"0.kernel_size": "1x3"})
    assert one.title == "convolutions at batch 2, 0.kernel_size 1x3, precision bf16"
    for wrong, words in (
        ({"batch": 9}, "convolutions has no point with batch 9. Expected one of 1: batch 1, 0.kernel_size 3x3"),
        ({"batch": 2}, "convolutions has 6 points with batch 2. Expected"),
        ({}, "convolutions has 30 points. Expected one of 1: batch 1"),
        ({"size": 2}, "the axis 'size' of convolutions. Expected batch, 0.kernel_size, precision"),
    ):
        with pytest.raises(InputError) as error:
            swept.point(**wrong)
        assert words in str(error.value)
    with pytest.raises(InputError, match=r"no point with number 31\. Expected .*; and 24 more\. Name"):
        swept.point(31)
    with pytest.raises(InputError, match="failed: step 1 raised"):
        swept.point(5)
