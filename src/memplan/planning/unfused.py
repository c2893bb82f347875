"""Ops that Inductor has no code for: each runs as a kernel of its own, and what is around it is not fused across it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from memplan import _torch
from memplan.planning import forms
from memplan.planning.fusion import COPY, Fusion, Group

_LAYERS = 3
"""That are named, of those in which an op is called."""


def unfused(fusion: Fusion) -> tuple[str, ...]:
    """What a plan has to say of them: a note for each op, those of libraries first, then those that move the most.

    Not of products, convolutions and attention, which are torch's kernels in any compiled step; nor of ops that draw
    random numbers, copies into buffers and packed bits, which are so because memplan asked for it.
    """
    calls = defaultdict[tuple[str, ...], list[Group]](list)
    for group in fusion.groups:
        if not group.fused and _is_fallback(group.kernel):
            calls[_names(group)].append(group)
    order = sorted(calls, key=lambda names: (names[0].startswith("aten::"), -sum(one.bytes for one in calls[names])))
    return tuple(_told(names, calls[names]) for names in order)


def _is_fallback(kernel: str) -> bool:
    """Whether a kernel of torch's, or of a library's, stands where Inductor could have written one."""
    if kernel == COPY or kernel.startswith("memplan.") or _torch.flop_formula(kernel) is not None:
        return False
    try:
        op = forms.overload(kernel)
    except (AttributeError, ValueError, RuntimeError):  # what Inductor names otherwise is its own
        return False
    return not op.is_view and torch.Tag.nondeterministic_seeded not in op.tags


def _names(group: Group) -> tuple[str, ...]:
    """What is called, and the ops of the plan that it was put in place of."""
    called = _short(group.kernel)
    return called, *dict.fromkeys(name for op in group.ops if (name := _short(op)) != called)


def _short(op: str) -> str:
    return "::".join(op.split(".")[:2])


def _told(names: tuple[str, ...], calls: Sequence[Group]) -> str:
    of = f" (of {', '.join(names[1:])})" if names[1:] else ""
    layers = list(dict.fromkeys(layer for one in calls for layer in one.layers))
    more = f" and {len(layers) - _LAYERS} more" if len(layers) > _LAYERS else ""
    places = f", in layer{'s' if len(layers) > 1 else ''} {', '.join(layers[:_LAYERS])}{more}" if layers else ""
    times = f"{len(calls)} call{'s' if len(calls) > 1 else ''}"
    return f"runs as its own kernel, not fused: {names[0]}{of}, {times}{places}"
