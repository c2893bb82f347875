"""Data loaders while a step is recorded: in one process, over samples in order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, dataset

from memplan import _torch


class _InOrder(int):
    """What stands for a permutation of as many numbers where it is read as a list."""

    def tolist(self) -> list[int]:
        return list(range(self))


def _count(self: Any) -> Iterator[int]:
    return (number % len(self.data_source) for number in range(self.num_samples))


def _weighted(self: Any) -> Iterator[int]:
    drawn = torch.multinomial(self.weights, self.num_samples, self.replacement, generator=self.generator)
    yield from (number % len(self.weights) for number in range(self.num_samples))
    del drawn  # torch's sampler holds it until then


def _subset(self: Any) -> Iterator[int]:
    return iter(self.indices)


def _split(number: int, **_: Any) -> _InOrder:
    return _InOrder(number)


@contextmanager
def loaded_in_order() -> Iterator[None]:
    """Loaders load in this process, and what torch shuffles, draws or splits stays in order.

    A worker process would have to take hooks and fake tensors along; what it holds is no part of the step anyway. Which
    sample comes when is drawn from values that a recording does not have, and does not matter to memory.
    """
    init = DataLoader.__init__

    def init_here(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(self, *args, **kwargs).arguments
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            given.pop(name, None)
        init(**given)

    samplers = ((RandomSampler, _count), (WeightedRandomSampler, _weighted), (SubsetRandomSampler, _subset))
    with ExitStack() as patches:
        patches.enter_context(_torch.patched(DataLoader, __init__=init_here))
        patches.enter_context(_torch.patched(dataset, randperm=_split))  # by which random_split shuffles
        for sampler, order in samplers:
            patches.enter_context(_torch.patched(sampler, __iter__=order))
        yield
