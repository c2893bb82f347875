"""Control the data loaders of a script: watch, shorten or replace their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from memplan import _torch
from memplan.integrations.scripts.absent_data import absent_data
from memplan.integrations.scripts.lines import script_line
from memplan.integrations.scripts.loaded import new_tensors, shapes_of
from memplan.integrations.scripts.trainer_schedule import TrainerSchedule
from memplan.trace.program_facts import Batch
from memplan.trace.recording.loading import ObjectNumbers
from memplan.trace.recording.loads import as_recorded
from memplan.trace.recording.session import running_recording
from memplan.trace.records import HOST
from memplan.trace.spec import realize


@dataclass(frozen=True)
class Rules:
    """Which batches replace those of the loaders."""

    inputs: tuple[Any, ...] = ()
    """Specs of a batch's tensors, in order; () for the loader's own batches."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Specs of a batch's tensors by name, if it is a dict."""
    batch: int | None = None
    """New batch size, of the first loader and of all loaders with the same batch size; None: unchanged."""

    @property
    def replaces_data(self) -> bool:
        """Whether specs describe the batch, so that no data is loaded."""
        return bool(self.inputs or self.kwargs)


class LoaderWatcher(Protocol):
    """Callbacks for the batches that a script requests."""

    def before_batch(self, batches: Batches) -> None:
        """Called at each request of a batch, also of an exhausted loader."""
        ...

    def after_last_batch(self, batches: Batches) -> None:
        """Called at the request of a batch from an exhausted loader."""
        ...


class Loaders:
    """The loaders of a run of a script.

    Args:
        rules: which batches to replace.
        idle_limit: most batches from a loader on which no model is trained; None: no limit.
        watcher: callbacks for the batches.
        folder: folder of the script's own code.
        really: whether tensors have values.
        most: length to which loaders are shortened; None: not at all. ``len`` of a shortened loader is the number of
            batches that it yields, on which schedules, progress bars and trainers rely.
        multiple: the number of batches left out of a loader is a multiple of this.
        repeats: whether later batches of a loader are tensors with the shapes of its second batch, without loading
            data: a data set allocates in host memory alone.
    """

    def __init__(
        self, rules: Rules, idle_limit: int | None, watcher: LoaderWatcher, folder: str, *, really: bool,
        most: int | None = None, multiple: int = 1, repeats: bool = False,
    ) -> None:  # fmt: skip
        self._rules = rules
        """Which batches to replace, and their size."""
        self._has_values = really
        """Whether tensors have values."""
        self._folder = folder
        """Folder of the script's code."""
        self._idle_limit = idle_limit
        """Most batches from a loader on which no model is trained; None: no limit."""
        self._watcher = watcher
        self._most, self._multiple = most, multiple
        """Length to which loaders are shortened (None: not at all), and what divides the number of omitted batches."""
        self._repeats = repeats
        """Whether later batches of a loader only have the shapes of its second batch, without loading data."""
        self._loader_numbers = ObjectNumbers()
        """Numbers of the loaders."""
        self._seen_shapes: dict[int, Any] = {}
        """Number of a loader -> shapes of its second batch."""
        self._original_length = DataLoader.__len__
        """torch's own method, which `hooked` replaces."""
        self._seen: list[_Progress] = []
        """Of all iterators over loaders, in order."""
        self.absent = dict[str, None]()
        """Classes of missing data sets."""
        self._first_size: int | None = None
        """Leading dimension of the first batch that was loaded."""

    def batches(self) -> tuple[Batch, ...]:
        """Return the first batch of each loader, in the order of the script's iterations."""
        return tuple(dict.fromkeys(progress.summary() for progress in self._seen if progress.text))

    def model_called(self, *, trains: bool) -> None:
        """Note a call of a model: each loader that yielded a batch since the last call has another idle batch. If the
        model ``trains``, idle batches are counted anew."""
        for progress in self._seen:
            if trains:
                progress.idle = 0
            elif progress.fresh:
                progress.idle += 1
            progress.fresh = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Within this context every `DataLoader` of the script yields the batches of `next_batch`."""
        iterate = DataLoader.__iter__

        def iterate_hooked(loader: Any) -> Iterator[Any]:
            iterator = None if self._rules.replaces_data else iterate(loader)
            if not self._has_values:
                _torch.fetching(iterator, fetch_for_recording)
            batches = Batches(self, loader, iterator, script_line(self._folder))
            self._seen.append(batches.progress)
            return batches

        def shortened_length(loader: Any) -> int:
            length = self._original_length(loader)
            if self._most is None:
                return length
            schedule.bring_forward()
            return self._shortened(length, self._most)

        replaced = self._rules.replaces_data
        tolerance = absent_data(lambda name: self.absent.setdefault(name)) if replaced else nullcontext()
        with ExitStack() as stack:
            schedule = TrainerSchedule(stack)
            stack.enter_context(tolerance)
            stack.enter_context(_torch.patched(DataLoader, __iter__=iterate_hooked, __len__=shortened_length))
            yield

    def _shortened(self, length: int | None, most: int) -> int:
        """Return the number of batches to which a loader is shortened: ``most``, or a few more, so that the number of
        batches left out is a multiple of ``_multiple``. ``length`` is None if it is unknown."""
        return most if length is None else min(length, most + (length - most) % self._multiple)

    def length(self, loader: Any) -> int | None:
        """Return the number of batches of a loader before it is shortened; None if its length raises any error."""
        try:
            return self._original_length(loader) if isinstance(loader, DataLoader) else len(loader)
        except Exception:
            return None

    def exhausted(self, loader: Batches) -> None:
        """Tell the watcher that a loader has no further batch."""
        self._watcher.after_last_batch(loader)

    def next_batch(self, loader: Batches) -> Any:
        """Return a loader's next batch: its own, or tensors of the described shapes; in the requested batch size.
        Raises StopIteration if the loader is exhausted, or has yielded as many batches as it may."""
        self._watcher.before_batch(loader)
        progress = loader.progress
        is_idle = self._idle_limit is not None and progress.idle >= self._idle_limit
        most = None if self._most is None else self._shortened(loader.length, self._most)
        if is_idle or (most is not None and progress.loaded >= most):
            progress.ended_early = True
            raise StopIteration
        batch = self._unresized_batch(loader)
        progress.fresh = True
        size = batch_size(batch)
        if self._first_size is None:
            self._first_size = size
        if self._rules.batch is not None and size is not None and size == self._first_size:
            batch = resized(batch, size, self._rules.batch)
        return batch

    def _unresized_batch(self, loader: Batches) -> Any:
        """Return a batch in the shapes of the loader's second batch if these repeat, else the loader's own, else
        tensors of the described shapes. Raises StopIteration if the loader is exhausted."""
        number = self._loader_numbers.number_of(loader.loader)
        shapes = self._seen_shapes.get(number)
        if shapes is not None:
            if loader.progress.loaded >= (self.length(loader.loader) or self._most or 0):
                raise StopIteration
            return new_tensors(shapes)
        if loader.iterator is None:
            inputs = self._rules.inputs
            return realize(dict(self._rules.kwargs) or (inputs[0] if len(inputs) == 1 else list(inputs)))
        batch = next(loader.iterator)
        if self._repeats and loader.progress.loaded == 1 and _is_plain(batch):
            self._seen_shapes[number] = shapes_of(batch)
        return batch


def fetch_for_recording(fetch: Callable[[Any], Any], indices: Any) -> Any:
    """Return ``fetch(indices)``, a batch of a data set; if it fails on tensors without values, fetch it again outside
    of the recording."""
    try:
        return fetch(indices)
    except StopIteration:
        raise
    except Exception as error:  # tensors without values can cause any error
        try:
            with _torch.no_modes():
                batch = fetch(indices)
        except Exception:  # missing values were not the cause
            raise error from None
    return as_recorded(_plain(batch))


@dataclass(slots=True)
class _Progress:
    """What is known of an iterator over a loader. It does not keep the loader and its data set alive."""

    where: str | None
    """``file:line`` that iterates."""
    described: bool
    """Whether described batches replace the loader's own."""
    loaded: int = 0
    """Number of batches so far."""
    idle: int = 0
    """Batches on which a model was called since the last training call."""
    fresh: bool = False
    """Whether no model was called since the last batch."""
    text: str = ""
    """Shapes of the first batch's tensors."""
    size: int | None = None
    """Leading dimension of the first batch."""
    length: int | None = None
    """Number of batches of the whole loader at the first batch; None if unknown."""
    ended_early: bool = False
    """Whether it was ended before the loader was exhausted."""

    def summary(self) -> Batch:
        """Return the record of the loader's first batch."""
        return Batch(
            self.size, self.text, self.where, taken=self.loaded, length=self.length, cut=self.ended_early,
            given=self.described,
        )  # fmt: skip


class Batches:
    """Iterator over a loader's batches; other attributes come from the loader's own iterator.

    ``iterator`` is that iterator, None if described batches replace it; ``where`` is the ``file:line`` that iterates.
    """

    def __init__(self, loaders: Loaders, loader: Any, iterator: Any, where: str | None) -> None:
        """``iterator``: the loader's own, None if described batches replace it. ``where``: the line that iterates."""
        self._loaders = loaders
        self.loader = loader
        self.iterator = iterator
        self.where = where
        self.progress = _Progress(where, described=iterator is None)
        """How many batches it has yielded, and what they were."""

    def __iter__(self) -> Batches:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["iterator"], name)

    def __next__(self) -> Any:
        running = running_recording()
        watch = None if running is None else running.loading
        try:
            if watch is None:
                batch = self._loaders.next_batch(self)
            else:
                batch = watch.load(self.loader, lambda: self._loaders.next_batch(self), self, self.length)
        except StopIteration:
            self._loaders.exhausted(self)
            raise
        progress = self.progress
        progress.loaded += 1
        if progress.loaded == 1:
            progress.text, progress.size, progress.length = text_of_shapes(batch), batch_size(batch), self.length
        return batch

    @property
    def length(self) -> int | None:
        """Number of batches of the whole loader; None if unknown."""
        return self._loaders.length(self.loader)

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Number of samples in a batch, and in the last batch; None if unknown."""
        try:
            sampler = self.loader.batch_sampler  # loader.batch_size is None with a batch sampler of the user's
            size, samples, drops_last = sampler.batch_size, len(sampler.sampler), sampler.drop_last
            whole_batches, remainder = divmod(samples, size)
        except Exception:  # a stream has no length, a user's batch sampler no batch_size
            return self.progress.size, None
        has_smaller_last = remainder > 0 and not drops_last
        if self.length != whole_batches + has_smaller_last:  # a sampler with another arithmetic
            return self.progress.size, None
        return size, remainder if has_smaller_last else size


def _tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors in a batch, in order."""
    return [leaf for leaf in _torch.tree_leaves(_plain(batch)) if isinstance(leaf, torch.Tensor)]


def _plain(batch: Any) -> Any:
    """Return a mapping of any class, such as a tokenizer's batch, as a dict, which torch's pytrees support."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def _is_plain(batch: Any) -> bool:
    """Return whether a batch consists only of dicts, lists, tuples, plain tensors on the host, numbers and texts."""
    return all(
        leaf.device.type == HOST if type(leaf) in (torch.Tensor, _torch.FakeTensor)
        else isinstance(leaf, (int, float, str, type(None)))
        for leaf in _torch.tree_leaves(batch)
    )  # fmt: skip


def batch_size(batch: Any) -> int | None:
    """Return the batch size: the leading dimension that most tensors have; None if no tensor has a dimension."""
    sizes = [tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()]
    return max(sizes, key=sizes.count) if sizes else None


def text_of_shapes(batch: Any) -> str:
    """Return the shapes of a batch's tensors as "32x3x224x224, 32 (int64)"."""
    rows = []
    for tensor in _tensors(batch):
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = "x".join(map(str, tensor.shape)) or "a number"
        rows.append(shape if dtype == "float32" else f"{shape} ({dtype})")
    return ", ".join(rows)


def resized(batch: Any, old: int, new: int) -> Any:
    """Return a batch in which tensors with leading dimension ``old`` are zeros with leading dimension ``new``."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != old:
            return leaf
        return leaf.new_zeros((new, *leaf.shape[1:]))

    return _torch.tree_map(resize, batch)
