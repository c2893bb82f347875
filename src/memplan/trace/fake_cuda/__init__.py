"""An emulated CUDA device for recordings without a GPU: which storages lie on it, and `torch.cuda` functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memplan import _torch
from memplan.devices import Device, catalogue
from memplan.trace.fake_cuda import functions, tensors, triton_kernels
from memplan.trace.fake_cuda.residence import Card
from memplan.trace.records import HOST
from memplan.trace.semantics.cuda import autocast, composites


@dataclass(frozen=True, slots=True)
class Composites:
    """The composite ops that a dispatch mode must decompose itself, in inference mode, where they reach it whole."""

    instead: Mapping[Any, Callable[..., Any]]
    """Op -> its decomposition; other ops are decomposed by torch."""
    whole: frozenset[Any]
    """Ops that are not decomposed."""
    taking_apart: Callable[[], AbstractContextManager[None]]
    """Returns the context of a decomposition."""
    differing: set[tuple[int, int]]
    """Compute capabilities on which an op runs another kernel; filled while the step runs."""


@contextmanager
def installed(
    card: Card,
    device: Device,
    chosen: Callable[[str, str], None],
    differing: set[str],
    launched: triton_kernels.Launched,
) -> Iterator[Composites]:
    """Within this context, a step that was written for CUDA runs on fake CPU tensors: `torch.cuda` answers for
    ``device``, tensors say where they would be, and ops are cast and decomposed as on the card.

    ``chosen(op, reason)`` is called with the kernel choice of an op that could run several. ``differing`` gets the
    names of the catalogue's cards for which a function of `torch.cuda` that was called answers otherwise.
    ``launched`` is called with each launch of a Triton kernel.
    """
    others = frozenset(other.architecture for other in catalogue()) - {device.architecture}
    with ExitStack() as stack:
        stack.enter_context(functions.installed(card, device, differing))
        stack.enter_context(tensors.installed(card))
        stack.enter_context(triton_kernels.installed(launched))
        stack.enter_context(_torch.managed_memory(partial(_managed_zeros, card, chosen)))
        cast = stack.enter_context(autocast.installed(card.holds))
        replaced = stack.enter_context(composites.installed(card.holds, device.architecture, chosen, others))
        yield Composites(replaced.instead, replaced.whole, cast.taking_apart, replaced.differing)


def _managed_zeros(
    card: Card, chosen: Callable[[str, str], None], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return zeros of this shape in CUDA's managed memory, which is outside of torch's allocator: the recording counts
    them on the host, and reports that by ``chosen(op, reason)``."""
    chosen(
        "bitsandbytes",
        "paged states are in CUDA's managed memory, which torch's allocator does not count: they are counted on the "
        "host, though the driver keeps them on the card while there is room",
    )
    tensor = torch.zeros(shape, dtype=dtype)
    card.ledger.entry(tensor, op=None).device = HOST
    return tensor
