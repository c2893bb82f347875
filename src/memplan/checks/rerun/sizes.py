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
    old, new = form.reads[0][1].shape, tuple(tensors[0].shape)  # of the input: recorded, and now
    name = base_name(trace.ops[form.op].name)
    if name in _CROPPING:
        return _crop_arguments(form, name, new, options, _partner_shape(trace, form, replayed))
    if old == new:
        return {}
    if name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        return {"size": viewed_size(old, form.writes[0].shape, new)}
    if name == "expand":
        result = form.writes[0].shape
        added = len(result) - len(old)
        size = list(result)
        for dim in range(len(old)):
            if old[dim] == result[added + dim]:  # not expanded
                size[added + dim] = new[dim]
        return {"size": tuple(size)}
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
    """Return the arguments of a crop or pad of an input of shape ``new``.

    Args:
        form: how the op was called when it was recorded.
        name: of the op.
        new: shape of its input now.
        options: its recorded arguments.
        partner: shape that the result needs, since it is merged with another tensor; None: the op cuts off or adds as
            much as when it was recorded.

    Raises:
        ChangeError: the crop would have nothing to crop.
    """
    if name in ("slice", "narrow"):
        return _slice_arguments(form, new, options, partner)
    amounts = list(options.get("pad", options.get("padding")) or ())  # pyright: ignore[reportArgumentType]  # a list
    if partner is not None:
        for number in range(len(amounts) // 2):  # before and after the last dimension, then the one before it
            dim = len(new) - 1 - number
            missing = partner[dim] - new[dim]
            amounts[2 * number : 2 * number + 2] = [missing // 2, missing - missing // 2]
    return {"pad" if "pad" in options else "padding": tuple(amounts)}


def _slice_arguments(
    form: Form, new: Sequence[int], options: Mapping[str, Option], partner: Sequence[int] | None
) -> dict[str, Option]:
    """Return ``start`` and ``end`` of a slice; arguments as for `_crop_arguments`."""
    dim = int(options.get("dim") or 0) % len(new)  # pyright: ignore[reportArgumentType]  # a number
    old, result = form.reads[0][1].shape[dim], form.writes[0].shape[dim]
    if old == result:  # a slice of everything
        return {"start": 0, "end": new[dim]}
    if old == new[dim] and partner is None:
        return {}
    start = int(options.get("start") or 0)  # pyright: ignore[reportArgumentType]  # a number
    start = max(0, start + old) if start < 0 else min(start, old)
    size = result + new[dim] - old if partner is None else partner[dim]
    if options.get("step") not in (None, 1) or size > new[dim]:
        raise ChangeError("a crop that would have nothing to crop")
    if partner is not None:  # in the middle, or at an end, as when it was recorded
        start = start * (new[dim] - size) // (old - result)
    return {"start": start, "end": start + size}


def _upsampled_size(
    form: Form, new: Sequence[int], options: Mapping[str, Option], partner: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the size to upsample an input of shape ``new`` to.

    It is that of ``partner``, the tensor that the result is merged with. Without such a tensor, or if the recorded op
    has a scale factor, it is the recorded multiple of the input's size. Raises ChangeError if that is no whole
    number."""
    old, count = form.reads[0][1].shape, len(options["output_size"])  # pyright: ignore[reportArgumentType]  # a list
    has_factor = any(name.startswith("scale") and value for name, value in options.items())
    if partner is not None and not has_factor:
        return partner[-count:]
    sizes: list[int] = []
    for before, after, now in zip(old[-count:], form.writes[0].shape[-count:], new[-count:], strict=True):
        if now * after % before:
            raise ChangeError("an upsampling by no whole number, to an unknown size")
        sizes.append(now * after // before)
    return tuple(sizes)


def _partner_shape(trace: Trace, form: Form, replayed: Mapping[View, torch.Tensor]) -> tuple[int, ...] | None:
    """Return the new shape of the tensor that an op's result is merged with by the op that reads it first.

    Further crops in between are passed over. None if it is not merged, or if that tensor is not computed yet.
    ``replayed`` has the tensors that are computed already, by the view that they had when the step was recorded.
    """
    result = canonical(form.writes[0])
    for reader in trace.forms:
        views = [canonical(view) for _, view in reader.reads]
        if reader.op <= form.op or result not in views:
            continue
        name = base_name(trace.ops[reader.op].name)
        if name in _CROPPING and reader.writes:
            result = canonical(reader.writes[0])
            continue
        if name not in _MERGING:
            return None
        partners = [replayed[view] for view in views if view != result and view in replayed]
        shapes = [tuple(tensor.shape) for tensor in partners if tensor.dim() == len(result.shape)]
        return shapes[0] if shapes else None
    return None
