"""Modules that a script imports, imported again by its next run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memplan.trace.recording.place import is_users


@contextmanager
def imported_again() -> Iterator[None]:
    """Forget at the end which modules of the user's were imported in here, and which hold tensors.

    Their code runs again in the next run, and the tensors of this one are of no use there.
    """
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name not in before and _is_of_run(name)]:
            del sys.modules[name]


def _is_of_run(name: str) -> bool:
    module = sys.modules[name]
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    if "-packages" not in file and is_users(file):
        return True
    return any(isinstance(value, torch.Tensor) for value in list(vars(module).values()))
