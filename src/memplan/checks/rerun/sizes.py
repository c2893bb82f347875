"""New size arguments of views, crops, pads and upsampling whose inputs have grown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from memplan.checks.fields.walk import canonical
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
    options: Mapping[str, Option],
    replayed: Mapping[View, torch.Tensor],
) -> dict[str, Option]:
    """Return the size arguments that an op needs for its new inputs; {} if its recorded arguments still fit.

    Args:
        trace: the recorded step.
        form: how the op was called there.
        tensors: its new operands.
        options: its recorded arguments.
        replayed: tensors of the step that are computed already, by the view that they had when it was recorded.

    Raises:
        ChangeError: the new arguments of the op are unknown.
    """
    if not form.reads or not form.writes:
        return {}
    old, new = form.reads[0][1].shape, tuple(tensors[0].shape)
    name = base_name(trace.ops[form.op].name)
    if name in _CROPPING:
        return _crop_arguments(form, name, new, options, _partner_shape(trace, form, replayed))
    if old == new:
        return {}
    if name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        return {"size": viewed_size(old, form.writes[0].shape, new)}
    if name == "expand":
        shape = form.writes[0].shape
        added = len(shape) - len(old)
        dims = zip(old, shape[added:], new, strict=True)
        return {"size": (*shape[:added], *(now if before == after else after for before, after, now in dims))}
    if name.startswith(("upsample", "_upsample")):
        return {"output_size": _upsampled_size(form, new, options, _partner_shape(trace, form, replayed))}
    return {}


def viewed_size(old: Sequence[int], wanted: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Return the size argument that views a tensor of shape ``new`` as shape ``old`` was viewed as ``wanted``.

    Dimensions that were merged stay merged; if a dimension was split, its outermost part grows.

    Raises:
        ChangeError: a size that grew cannot be split or dropped so.

    Example:
        >>> viewed_size((2, 3, 4, 5), (2, 3, 20), (2, 3, 6, 7))
        (2, 3, 42)
    """
    size: list[int] = []
    old_end = wanted_end = 0
    while old_end < len(old) or wanted_end < len(wanted):
        # extend both groups of dimensions until they have the same number of elements
        old_start, wanted_start = old_end, wanted_end
        old_end, wanted_end = min(old_end + 1, len(old)), min(wanted_end + 1, len(wanted))
        while math.prod(old[old_start:old_end]) != math.prod(wanted[wanted_start:wanted_end]):
            if math.prod(old[old_start:old_end]) < math.prod(wanted[wanted_start:wanted_end]):
                old_end += 1
            else:
                wanted_end += 1
        elements, inner = math.prod(new[old_start:old_end]), math.prod(wanted[wanted_start + 1 : wanted_end])
        if elements % inner:
            raise ChangeError("a view splits a size that grows")
        if wanted_start < wanted_end:
            size += [elements // inner, *wanted[wanted_start + 1 : wanted_end]]
        elif elements != 1:
            raise ChangeError("a view leaves a size out that grows")
    return tuple(size)


def _crop_arguments(
    form: Form, name: str, new: Sequence[int], options: Mapping[str, Option], partner: Sequence[int] | None
) -> dict[str, Option]:
    """Return the arguments of a crop or pad of an input of shape ``new``. If the result meets another path, it gets
    that path's shape (``partner``); otherwise it cuts off or adds as much as it did."""
    old, wanted = form.reads[0][1].shape, form.writes[0].shape
    if name in ("slice", "narrow"):
        dim = int(options.get("dim") or 0) % len(old)  # pyright: ignore[reportArgumentType]  # a number
        step = int(options.get("step") or 1)  # pyright: ignore[reportArgumentType]  # a number
        if (old[dim] == new[dim] and partner is None) or old[dim] == wanted[dim]:
            return {"start": 0, "end": new[dim]} if old[dim] == wanted[dim] else {}
        start = int(options.get("start") or 0)  # pyright: ignore[reportArgumentType]  # a number
        start = max(0, start + old[dim]) if start < 0 else min(start, old[dim])
        size = wanted[dim] + new[dim] - old[dim] if partner is None else partner[dim]
        if step != 1 or size > new[dim]:
            raise ChangeError("a crop that would have nothing to crop")
        if partner is not None:  # in the middle, or at an end, as before
            spare = old[dim] - wanted[dim]
            start = start * (new[dim] - size) // spare
        return {"start": start, "end": start + size}
    amounts = list(options.get("pad", options.get("padding")) or ())  # pyright: ignore[reportArgumentType]  # a list
    if partner is not None:
        for number in range(len(amounts) // 2):
            dim = len(new) - 1 - number
            missing = partner[dim] - new[dim]
            amounts[2 * number : 2 * number + 2] = [missing // 2, missing - missing // 2]
    return {"pad" if "pad" in options else "padding": tuple(amounts)}


def _upsampled_size(
    form: Form, new: Sequence[int], options: Mapping[str, Option], partner: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the size to upsample an input of shape ``new`` to: that of the path it is merged with, else the old
    factor."""
    old, count = form.reads[0][1].shape, len(options["output_size"])  # pyright: ignore[reportArgumentType]  # a list
    if partner is not None and not any(name.startswith("scale") and value for name, value in options.items()):
        return partner[-count:]
    sizes: list[int] = []
    for before, after, now in zip(old[-count:], form.writes[0].shape[-count:], new[-count:], strict=True):
        if now * after % before:
            raise ChangeError("an upsampling by no whole number, to an unknown size")
        sizes.append(now * after // before)
    return tuple(sizes)


def _partner_shape(trace: Trace, form: Form, replayed: Mapping[View, torch.Tensor]) -> tuple[int, ...] | None:
    """Return the new shape of the tensor that the result is merged with, directly or after further crops; None if it is
    not merged, or if that tensor is not computed yet."""
    result = canonical(form.writes[0])
    for later in trace.forms:
        views = [canonical(view) for _, view in later.reads]
        if later.op <= form.op or result not in views:
            continue
        name = base_name(trace.ops[later.op].name)
        if name in _CROPPING and later.writes:
            result = canonical(later.writes[0])
        elif name in _MERGING:
            partners = [replayed[view] for view in views if view != result and view in replayed]
            shapes = [tuple(tensor.shape) for tensor in partners if tensor.dim() == len(result.shape)]
            return shapes[0] if shapes else None
        else:
            return None
    return None
