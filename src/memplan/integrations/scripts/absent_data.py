"""Construct data sets whose files are missing on this machine, for runs with a described batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from memplan import _torch

SAMPLES = 100_000
"""Length of an absent data set."""


@contextmanager
def absent_data(on_failure: Callable[[str], None]) -> Iterator[None]:
    """Let data sets of classes defined in this context be constructed without their files. ``on_failure`` is called
    with the class name of each data set whose constructor failed."""

    def init_subclass(cls: Any, **arguments: Any) -> None:
        super(Dataset, cls).__init_subclass__(**arguments)
        constructor = vars(cls).get("__init__")
        if constructor is not None:
            cls.__init__ = _tolerant(constructor, on_failure)

    with _torch.patched(Dataset, __init_subclass__=classmethod(init_subclass)):
        yield


def _tolerant(constructor: Callable[..., None], on_failure: Callable[[str], None]) -> Callable[..., None]:
    """Return a data set's constructor that does not raise. Where it fails, the data set gets a length instead, and
    ``on_failure`` is called with the name of its class."""

    def initialize(dataset: Any, *args: Any, **kwargs: Any) -> None:
        try:
            constructor(dataset, *args, **kwargs)
        except Exception:  # missing files raise errors of any type
            kind = type(dataset)
            on_failure(kind.__name__)
            methods = {} if isinstance(dataset, IterableDataset) else {"__len__": lambda _: SAMPLES}
            setattr(dataset, "__class__", type(kind.__name__, (kind,), methods))  # noqa: B010  # a subclass

    return initialize
