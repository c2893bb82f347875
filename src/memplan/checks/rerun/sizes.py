"""Size arguments of ops whose inputs have grown: views, crops, pads and upsampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from memplan.checks.fields.walk import shown
from memplan.checks.mended.changed_step import ChangeError
from memplan.checks.op_names import base_name
from memplan.trace.records import Form, Option, View
from memplan.trace.trace import Trace

_MERGING = ("cat", "stack", "add", "sub", "mul")
_CROPPING = ("slice", "narrow", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
             "replication_pad1d", "replication_pad2d", "replication_pad3d")  # fmt: skip


def resized(
    trace: Trace,
    form: Form,
    tensors: Sequence[torch.Tensor],
    given: Mapping[str, Option],
    made: Mapping[View, torch.Tensor],
) -> dict[str, Option]:
    """Return the arguments that have to change since what an op reads has another size; none where it has not.

    Raises:
        ChangeError: the new arguments of the op are unknown.
    """
    if not form.reads or not form.writes:
        return {}
    old, new = form.reads[0][1].shape, tuple(tensors[0].shape)
    name = base_name(trace.ops[form.op].name)
    if name in _CROPPING:
        return _cropped(trace, form, name, old, new, given, made)
    if old == new:
        return {}
    if name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        return {"size": viewed_size(old, form.writes[0].shape, new)}
    if name == "expand":
        return {"size": _expanded(old, form.writes[0].shape, new)}
    if name.startswith(("upsample", "_upsample")):
        return {"output_size": _upsampled(trace, form, old, new, given, made)}
    return {}


def viewed_size(old: Sequence[int], wanted: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of a view of a tensor that has grown: whole dimensions stay together, the outer part of a split
    one grows.

    Example:
        >>> viewed_size((2, 3, 4, 5), (2, 3, 20), (2, 3, 6, 7))
        (2, 3, 42)
    """
    found: list[int] = []
    here = there = 0
    while here < len(old) or there < len(wanted):
        first, second = here, there
        here, there = min(here + 1, len(old)), min(there + 1, len(wanted))
        while math.prod(old[first:here]) != math.prod(wanted[second:there]):
            if math.prod(old[first:here]) < math.prod(wanted[second:there]):
                here += 1
            else:
                there += 1
        grown, inner = math.prod(new[first:here]), math.prod(wanted[second + 1 : there])
        if grown % inner:
            raise ChangeError("a view splits a size that grows")
        if second < there:
            found += [grown // inner, *wanted[second + 1 : there]]
        elif grown != 1:
            raise ChangeError("a view leaves a size out that grows")
    return tuple(found)


def _expanded(old: Sequence[int], wanted: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    extra = len(wanted) - len(old)
    kept = [now if before == after else after for before, after, now in zip(old, wanted[extra:], new, strict=True)]
    return (*wanted[:extra], *kept)


def _cropped(
    trace: Trace,
    form: Form,
    name: str,
    old: Sequence[int],
    new: Sequence[int],
    given: Mapping[str, Option],
    made: Mapping[View, torch.Tensor],
) -> dict[str, Option]:
    """Return a crop or a pad before another path is met gives that path's size; any other takes as much as it did."""
    partner = _partner(trace, form, made)
    wanted = form.writes[0].shape
    if name in ("slice", "narrow"):
        place = int(given.get("dim") or 0) % len(old)  # pyright: ignore[reportArgumentType]  # a number
        step = int(given.get("step") or 1)  # pyright: ignore[reportArgumentType]  # a number
        if (old[place] == new[place] and partner is None) or old[place] == wanted[place]:
            return {"start": 0, "end": new[place]} if old[place] == wanted[place] else {}
        start = _start(given, old[place])
        size = wanted[place] + new[place] - old[place] if partner is None else partner[place]
        if step != 1 or size > new[place]:
            raise ChangeError("a crop that would have nothing to crop")
        if partner is not None:  # in the middle, or at an end, as before
            spare = old[place] - wanted[place]
            start = start * (new[place] - size) // spare
        return {"start": start, "end": start + size}
    amounts = list(given.get("pad", given.get("padding")) or ())  # pyright: ignore[reportArgumentType]  # a list
    if partner is not None:
        for number in range(len(amounts) // 2):
            place = len(new) - 1 - number
            missing = partner[place] - new[place]
            amounts[2 * number : 2 * number + 2] = [missing // 2, missing - missing // 2]
    return {"pad" if "pad" in given else "padding": tuple(amounts)}


def _start(given: Mapping[str, Option], size: int) -> int:
    start = int(given.get("start") or 0)  # pyright: ignore[reportArgumentType]  # a number
    return max(0, start + size) if start < 0 else min(start, size)


def _upsampled(
    trace: Trace,
    form: Form,
    old: Sequence[int],
    new: Sequence[int],
    given: Mapping[str, Option],
    made: Mapping[View, torch.Tensor],
) -> tuple[int, ...]:
    count = len(given["output_size"])  # pyright: ignore[reportArgumentType]  # a list
    partner = _partner(trace, form, made)
    if partner is not None and not any(name.startswith("scale") and value for name, value in given.items()):
        return partner[-count:]
    sizes: list[int] = []
    for before, after, now in zip(old[-count:], form.writes[0].shape[-count:], new[-count:], strict=True):
        if now * after % before:
            raise ChangeError("an upsampling by no whole number, to an unknown size")
        sizes.append(now * after // before)
    return tuple(sizes)


def _partner(trace: Trace, form: Form, made: Mapping[View, torch.Tensor]) -> tuple[int, ...] | None:
    """Return the new size of the tensor that the result meets, maybe further crops later; None where it meets none
    yet."""
    result = shown(form.writes[0])
    for later in trace.forms:
        views = [shown(view) for _, view in later.reads]
        if later.op <= form.op or result not in views:
            continue
        name = base_name(trace.ops[later.op].name)
        if name in _CROPPING and later.writes:
            result = shown(later.writes[0])
        elif name in _MERGING:
            others = [made[view] for view in views if view != result and view in made]
            same = [tuple(other.shape) for other in others if other.dim() == len(result.shape)]
            return same[0] if same else None
        else:
            return None
    return None
