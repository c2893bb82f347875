"""Each integer that changes how large a result of torch is counts as a size: torch itself says which do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from memplan import _torch
from memplan.trace.recording.values.sizes import sizes_of

Place = int | str
Called = tuple[Any, tuple[Any, ...], dict[str, Any]]
SAMPLES = 12


class Seen(TorchFunctionMode):
    """Keeps the calls of torch's functions, as Python makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Called] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def calls() -> Iterator[Called]:
    """Calls of all functions in torch's corpus of samples."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    for op in filter(lambda one: one.dtypes, op_db):
        dtype = min(op.dtypes, key=lambda one: (one is not torch.float32, one is not torch.int64, str(one)))
        for sample in list(op.sample_inputs("cpu", dtype))[:SAMPLES]:
            with Seen() as seen:
                _result(op.op, (sample.input, *sample.args), sample.kwargs)
            yield from seen.calls


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Size] | None:
    """Return the shapes of a call's results, None where it raises."""
    try:
        result = func(*args, **kwargs)
    except Exception:
        return None
    return [one.shape for one in tree_leaves(result) if isinstance(one, torch.Tensor)]


def _changed(value: Any, by: int) -> Iterator[tuple[Any, int]]:
    """Yield an argument with each of its integers changed, and that integer."""
    if type(value) is int:
        yield value + by, value
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            for other, number in _changed(one, by):
                yield [*value[:place], other, *value[place + 1 :]], number


def _decides(call: Called, place: Place) -> bool:
    func, args, kwargs = call
    before = _result(func, args, kwargs)
    for by in (1, -1, 2):
        for other, _ in _changed(args[place] if isinstance(place, int) else kwargs[place], by):
            given = dict(enumerate(args)) | kwargs | {place: other}
            after = _result(func, tuple(given[one] for one in range(len(args))), {one: given[one] for one in kwargs})
            if None not in (before, after) and before != after:
                return True
    return False


@pytest.mark.slow
def test_an_integer_that_changes_a_shape_is_a_size() -> None:
    tried, deciding, silent = set[Any](), 0, set[tuple[str, Place]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls():
            func, args, kwargs = call
            name = _torch.function_name(func)
            for place, value in [*enumerate(args), *kwargs.items()]:
                key = (func, place, len(args), tuple(kwargs), str(numbers := [one for _, one in _changed(value, 1)]))
                if not numbers or key in tried or name.startswith("__"):
                    continue
                tried.add(key)
                if _decides(call, place):
                    deciding += 1
                    if sizes_of(func, len(args), len(kwargs)).get(place, "") is None:
                        silent.add((name, place))
    assert not silent
    assert deciding > 500


@pytest.mark.parametrize(
    ("func", "positions", "keywords", "sizes", "others"),
    [
        (torch.zeros, 2, 0, [0, 1], []),
        (torch.full, 2, 0, [0], [1]),
        (torch.Tensor.view, 3, 0, [1, 2], []),
        (torch.arange, 3, 0, [0, 1, 2], []),
        (torch.linspace, 3, 0, [2], [0, 1]),
        (torch.randint, 3, 0, [2], [0, 1]),
        (torch.nn.functional.pad, 4, 0, [1], [3]),
        (torch.nn.functional.interpolate, 1, 1, ["size", "scale_factor"], []),
        (torch.nn.functional.softplus, 1, 1, [], ["beta"]),
        (torch.nn.functional.dropout, 2, 0, [], [1]),
        (torch.addmm, 3, 1, [], ["alpha"]),
        (torch.Tensor.masked_fill, 3, 0, [], [2]),
        (torch.ops.aten.topk.default, 2, 0, [1], []),
    ],
)
def test_which_arguments_are_sizes(
    func: Any, positions: int, keywords: int, sizes: list[Place], others: list[Place]
) -> None:
    found = sizes_of(func, positions, keywords)
    assert all(found.get(one, "") is not None for one in sizes)
    assert all(found[one] is None for one in others)
