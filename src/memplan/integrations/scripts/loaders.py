"""The data loaders of a script: what they give, how much of it is taken, another batch in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from memplan import _torch
from memplan.integrations.scripts.absent_data import absent_data
from memplan.integrations.scripts.lines import script_line
from memplan.integrations.scripts.loaded import as_recorded
from memplan.trace.program_facts import Batch
from memplan.trace.spec import realize


@dataclass(frozen=True)
class Rules:
    """How the batches of loaders are replaced."""

    inputs: tuple[Any, ...] = ()
    """Specs of the batch's tensors, in order; none for the loader's own."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Specs of the batch's tensors by name, if it is a dict."""
    batch: int | None = None
    """Leading dimension of the first loader's batches, and of all that have the same."""

    @property
    def given(self) -> bool:
        """Return whether the batch is described, so that no data is loaded."""
        return bool(self.inputs or self.kwargs)


class Loaders:
    """Follows the loaders of one run."""

    def __init__(self, rules: Rules, most: int, before_batch: Callable[[], None], folder: str, *, really: bool) -> None:
        self._rules = rules
        self._really = really
        self._folder = folder
        self._most = most
        """Limit of batches from a loader that trains nothing."""
        self._before_batch = before_batch
        self._seen: list[_Batches] = []
        self.absent = dict[str, None]()
        """Classes of missing data sets."""
        self._first: int | None = None
        """Leading dimension of the first batch that was loaded."""

    def batches(self) -> tuple[Batch, ...]:
        """Return the first batch of each loader, in the order in which the script iterated over them."""
        return tuple(dict.fromkeys(loader.fact() for loader in self._seen if loader.text))

    def called(self, *, trains: bool) -> None:
        """Note a call of a model, with ``trains`` if it trains on the batches."""
        for loader in self._seen:
            if trains:
                loader.idle = 0
            elif loader.fresh:
                loader.idle += 1
            loader.fresh = False

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow all loaders of torch's class."""
        iterate = DataLoader.__iter__

        def followed(loader: Any) -> Iterator[Any]:
            own = None if self._rules.given else iterate(loader)
            if not self._really:
                _torch.fetching(own, fetched)
            batches = _Batches(self, loader, own, script_line(self._folder))
            self._seen.append(batches)
            return batches

        forgiving = absent_data(lambda name: self.absent.setdefault(name)) if self._rules.given else nullcontext()
        with forgiving, _torch.patched(DataLoader, __iter__=followed):
            yield

    def next_of(self, loader: _Batches) -> Any:
        """Return a loader's next batch, as the rules say.

        Raises:
            StopIteration: the loader is exhausted, or trains nothing and has reached its limit.
        """
        self._before_batch()
        if loader.idle >= self._most:
            loader.cut = True
            raise StopIteration
        if loader.own is not None:
            batch = next(loader.own)
        elif self._rules.kwargs:
            batch = realize(dict(self._rules.kwargs))
        else:
            batch = realize(self._rules.inputs[0] if len(self._rules.inputs) == 1 else list(self._rules.inputs))
        loader.fresh = True
        size = leading(batch)
        if self._first is None:
            self._first = size
        if self._rules.batch is not None and size is not None and size == self._first:
            batch = resized(batch, size, self._rules.batch)
        return batch


def fetched(fetch: Callable[[Any], Any], indices: Any) -> Any:
    """Fetch a batch; outside of the recording if the data set needs values."""
    try:
        return fetch(indices)
    except StopIteration:
        raise
    except Exception as error:  # a data set can raise anything, and so can code of it that meets no values
        try:
            with _torch.no_modes():
                batch = fetch(indices)
        except Exception:  # missing values are not the cause
            raise error from None
    return as_recorded(_plain(batch))


class _Batches:
    """Iterator over a loader's batches; other attributes come from the loader's own iterator."""

    def __init__(self, loaders: Loaders, loader: Any, own: Any, where: str | None) -> None:
        self._loaders = loaders
        self._loader = loader
        self.own = own
        self.where = where
        self.taken = 0
        self.idle = 0
        """Batches used by a model since the last training call."""
        self.fresh = False
        """Whether no model was called since the last batch."""
        self.text = ""
        self.size: int | None = None
        self.cut = False

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self.own if self.own is not None else self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["own"], name)

    def __next__(self) -> Any:
        batch = self._loaders.next_of(self)
        self.taken += 1
        if self.taken == 1:
            self.text, self.size = described(batch), leading(batch)
        return batch

    def fact(self) -> Batch:
        """Return the record of the loader's first batch."""
        try:
            length = len(self._loader)
        except Exception:  # a data set can refuse its length in any way
            length = None
        return Batch(self.size, self.text, self.where, self.taken, length, self.cut, self.own is None)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _torch.tree_leaves(_plain(batch)) if isinstance(leaf, torch.Tensor)]


def _plain(batch: Any) -> Any:
    """Return a batch that behaves like a dict as one."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def leading(batch: Any) -> int | None:
    """Return the leading dimension that most tensors of a batch have; None where no tensor has any."""
    sizes = [tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()]
    return max(sizes, key=sizes.count) if sizes else None


def described(batch: Any) -> str:
    """Return the shapes of a batch's tensors as "32x3x224x224, 32 (int64)"."""
    rows = []
    for tensor in _tensors(batch):
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = "x".join(map(str, tensor.shape)) or "a number"
        rows.append(shape if dtype == "float32" else f"{shape} ({dtype})")
    return ", ".join(rows)


def resized(batch: Any, old: int, new: int) -> Any:
    """Return a batch whose tensors and lists have another leading dimension where they have the old one."""

    def larger(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != old:
            return leaf
        return leaf.new_zeros((new, *leaf.shape[1:]))

    return _torch.tree_map(larger, batch)
