"""Replacements for functions of torch that would break a recording, applied while it runs.

Everything here was seen in torch 2.11 and 2.13, unless a comment says otherwise.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import dropwhile
from statistics import NormalDist
from types import FrameType
from typing import Any

import torch
import torch.nn.modules.module as _modules
import torch.optim.optimizer as _optimizers
import torch.utils.data.dataloader as _dataloader
from torch.overrides import _pop_mode, _push_mode
from torch.utils import checkpoint as torch_checkpoint

from memplan._frames import callers
from memplan._patched import original_of, patched


def only_in_this_thread(instead: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the replacement ``instead`` in this thread and ``function`` in all others: the
    user's other threads go on running while a function of torch is patched."""
    here = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (instead if threading.get_ident() == here else function)(*args, **kwargs)

    return call


@contextlib.contextmanager
def around_started_threads(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[list[str]]:
    """Run each thread started in this context, and threads that those start, inside ``around()``. Yields the names of
    the threads started so far."""
    watched, started = {threading.get_ident()}, list[str]()
    start = threading.Thread.start

    def start_watched(self: threading.Thread) -> None:
        """Start a thread whose ``run`` is within the context, if a watched thread starts it."""
        if threading.get_ident() not in watched:  # a thread that none of the watched ones started
            return start(self)
        before = self.run

        def run_watched() -> None:
            """Run the thread inside of ``around()``."""
            self.run = before
            watched.add(threading.get_ident())
            with around():
                before()

        self.run = run_watched
        try:
            start(self)
        except BaseException:
            self.run = before
            raise
        started.append(self.name)

    with patched(threading.Thread, start=start_watched):
        yield started


def fetching(batches: Any, around: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Make ``batches``, a data loader's iterator, call ``around(fetch, indices)`` for each batch, where
    ``fetch(indices)`` loads it. Iterators that load in worker processes are left as they are."""
    fetcher = getattr(batches, "_dataset_fetcher", None)
    if fetcher is not None:
        batches._dataset_fetcher = _Fetcher(fetcher, around)


class _Fetcher:
    """A loader's fetcher with another `fetch`; other attributes are the fetcher's. A replaced method of the fetcher
    itself would refer to it: then data sets would live on until garbage is collected."""

    def __init__(self, fetcher: Any, around: Callable[[Callable[[Any], Any], Any], Any]) -> None:
        self._fetcher, self._around = fetcher, around

    def fetch(self, indices: Any) -> Any:
        return self._around(self._fetcher.fetch, indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_fetcher"], name)


@contextlib.contextmanager
def around_batches(load: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Make iterators of data loaders return ``load(iterator, fetch)`` as their next batch, where ``fetch()`` loads
    it."""
    iterator_class = _dataloader._BaseDataLoaderIter
    next_batch = iterator_class.__next__
    with patched(iterator_class, __next__=lambda iterator: load(iterator, lambda: next_batch(iterator))):
        yield


@contextlib.contextmanager
def eager_instead_of_compiled(
    notify: Callable[[], None], around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
) -> Iterator[None]:
    """Run functions and modules that `torch.compile` compiles as the original Python code. ``notify`` is called when
    something is compiled, and when something compiled before runs. ``around``: as for `compiled_modules_seen`."""
    with torch.compiler.set_stance("force_eager"), compiled_modules_seen(notify, around):
        yield


@contextlib.contextmanager
def scripted_as_python(notify: Callable[[], None]) -> Iterator[None]:
    """Run scripted and traced modules and functions as the original Python code. ``notify`` is called for each."""

    def uncompiled(compiles: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `torch.jit.script` and the like (``compiles``) that returns its argument."""

        def return_function(function: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the function as it is, unless torch itself compiles it."""
            # torch._dynamo, once imported, calls torch.jit.trace from a wrapper
            callers_of_compiler = dropwhile(lambda frame: _module_of(frame) == "torch._dynamo.eval_frame", callers())
            if _module_of(next(callers_of_compiler)).partition(".")[0] == "torch":
                if compiles is script:  # which looks up a class's globals in its caller's frame, here one further up
                    kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
                return compiles(function, *args, **kwargs)  # torch's own code needs its scripted functions
            notify()
            return function

        return return_function

    script: Callable[..., Any] = torch.jit.script
    jit = ("script", "trace", "freeze", "optimize_for_inference")
    with (
        _originals_scripted(),
        patched(torch.jit, **{name: uncompiled(getattr(torch.jit, name)) for name in jit}),
    ):
        yield


@contextlib.contextmanager
def _originals_scripted() -> Iterator[None]:
    """Let TorchScript compile the originals of patched functions of torch: it knows operators by identity, and cannot
    compile a replacement in Python.

    Seen in torch 2.13: its compiler looks up globals by ``torch.jit._builtins._find_builtin``, and passes functions
    that are no operators to ``torch.jit._recursive.try_compile_fn``.
    """
    from torch.jit import _builtins, _recursive

    find_builtin, compile_function = _builtins._find_builtin, _recursive.try_compile_fn
    find = lambda function: find_builtin(original_of(function))  # noqa: E731
    with (
        patched(_builtins, _find_builtin=find),
        patched(
            _recursive,
            _find_builtin=find,
            try_compile_fn=lambda function, location: compile_function(original_of(function), location),
        ),
    ):
        yield


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module, or one below it, runs as compiled code."""
    return any(
        vars(submodule).get("_compiled_call_impl") is not None or "_orig_mod" in submodule._modules
        for submodule in module.modules()
    )


@contextlib.contextmanager
def compiled_modules_seen(
    notify: Callable[[], None], around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
) -> Iterator[None]:
    """Call ``notify`` when something is compiled by `torch.compile`, and before a module compiled by it runs.
    ``around``: returns the context of `torch.compile`, in which Dynamo notes torch's functions for good."""
    from torch._dynamo import eval_frame  # every optimizer has imported it, and a fake mode

    compile_, call = torch.compile, eval_frame.OptimizedModule.__call__

    def notify_and_compile(*args: Any, **kwargs: Any) -> Any:
        notify()
        with around():
            return compile_(*args, **kwargs)

    def notify_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        notify()
        with warnings.catch_warnings():
            # the call warns about global hooks on modules, which are those of the recording
            warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
            return call(self, *args, **kwargs)

    with (
        patched(torch, compile=notify_and_compile),
        patched(eval_frame.OptimizedModule, __call__=notify_and_call),
    ):
        yield


@contextlib.contextmanager
def linear_calls_reported(called: Callable[[bool], None]) -> Iterator[None]:
    """Call ``called(True)`` when `torch.nn.functional.linear` begins and ``called(False)`` when it ends.

    The recorder needs it to count the bias as in a run: for a non-contiguous input, linear adds the bias in place, but
    under a dispatch mode, such as the recorder's, out of place (ATen/native/Linear.cpp, `isTensorSubclassLike`).
    """
    linear = torch.nn.functional.linear

    def reported_linear(*args: Any, **kwargs: Any) -> torch.Tensor:
        called(True)
        try:
            return linear(*args, **kwargs)
        finally:
            called(False)

    with patched(torch.nn.functional, linear=only_in_this_thread(reported_linear, linear)):
        yield


@contextlib.contextmanager
def lengths_as_tensors() -> Iterator[None]:
    """Convert lists of lengths to tensors before `torch.ctc_loss` sees them. It would itself create a tensor in C++
    and write the lengths into it, which fails on a fake tensor."""
    loss: Any = torch.ctc_loss

    def lengths_tensor(value: Any) -> Any:
        """Return a list of lengths as a tensor; other values unchanged."""
        if not isinstance(value, (list, tuple)):
            return value
        try:
            import numpy
        except ImportError:
            return torch.tensor(value)
        return torch.from_numpy(numpy.array(value, dtype=numpy.int64))  # numpy's memory is not recorded

    def loss_with_tensors(*args: Any, **kwargs: Any) -> torch.Tensor:
        return loss(*map(lengths_tensor, args), **{name: lengths_tensor(value) for name, value in kwargs.items()})

    with patched(torch, ctc_loss=only_in_this_thread(loss_with_tensors, loss)):
        yield


@contextlib.contextmanager
def sequences_padded_in_python() -> Iterator[None]:
    """Pad packed sequences in Python: torch's C++ writes lengths into a tensor, which fails on fake tensors."""
    pad: Any = torch._VF._pad_packed_sequence  # pyright: ignore[reportAttributeAccessIssue]

    with patched(torch._VF, _pad_packed_sequence=only_in_this_thread(_pad_packed_sequence, pad)):
        yield


def _pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, total_length: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences padded by ``value`` to equal length, and their lengths.

    Source: aten/src/ATen/native/PackedSequence.cpp, `_pad_packed_sequence`: consecutive time steps with the same
    number of sequences are copied at once.
    """
    sizes: list[int] = batch_sizes.tolist()  # sequences that reach each time step
    output = data.new_full((max(total_length or 0, len(sizes)), sizes[0], *data.shape[1:]), value)
    lengths: list[int] = []
    first_step, offset = 0, 0
    for end_step in range(1, len(sizes) + 1):
        size, next_size = sizes[end_step - 1], sizes[end_step] if end_step < len(sizes) else 0
        if size == next_size:
            continue
        steps = end_step - first_step
        part = data[offset : offset + size * steps]
        output[first_step:end_step][:, :size].copy_(part.view(steps, size, *data.shape[1:]))
        offset += size * steps
        first_step = end_step
        lengths = [end_step] * (size - next_size) + lengths
    return output.transpose(0, 1) if batch_first else output, torch.tensor(lengths)


@contextlib.contextmanager
def random_states_reported(report: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within this context, call ``report`` with each tensor that `torch.get_rng_state` returns.

    No dispatch mode sees that allocation, which activation checkpoints make and keep until the backward pass.
    """
    read = torch.random.get_rng_state

    def read_and_report() -> torch.Tensor:
        state = read()
        report(state)
        return state

    here = only_in_this_thread(read_and_report, read)
    with patched(torch, get_rng_state=here), patched(torch.random, get_rng_state=here):
        yield


@contextlib.contextmanager
def without_checkpoints(
    around: Callable[[Callable[..., Any], bool], contextlib.AbstractContextManager[None]],
    kept: Callable[[Callable[..., Any]], bool] = lambda function: False,
) -> Iterator[None]:
    """Run functions under `torch.utils.checkpoint` without the checkpoint: their tensors are saved, not recomputed.

    Seen in torch 2.13: ``_checkpoint_without_reentrant_generator``, which `checkpoint` runs around the function.

    Args:
        around: ``(function, is_reentrant) ->`` context in which the function runs.
        kept: whether a function's (non-reentrant) checkpoint stays.
    """
    original_generator = torch_checkpoint._checkpoint_without_reentrant_generator

    def run_in_context(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        """Replace the generator that `checkpoint` advances before and after it calls the function."""
        if kept(function):
            yield from original_generator(function, *args, **kwargs)
            return
        with around(function, False):
            yield

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Replace the reentrant kind of checkpoint: call the function in the context."""
        with around(function, True):
            return function(*args)

    with (
        patched(torch_checkpoint, _checkpoint_without_reentrant_generator=run_in_context),
        patched(torch_checkpoint.CheckpointFunction, apply=apply),
    ):
        yield


def _generator(state_of: torch.Generator, method: Callable[[str], Any]) -> torch.Generator:
    """Return a generator whose attribute ``name`` is ``method(name)``, with a copy of the state of ``state_of``. An op
    that gets the generator as an argument, as in MONAI's `DataLoader`, draws from the copy."""

    class Replaced(torch.Generator):
        def __getattribute__(self, name: str) -> Any:
            return object.__getattribute__(self, name) if name.startswith("__") else method(name)

    replaced = Replaced()
    torch.Generator.set_state(replaced, state_of.get_state())
    return replaced


@contextlib.contextmanager
def seeding_seen(seen: Callable[[], None]) -> Iterator[None]:
    """Call ``seen`` before this thread changes torch's default random state, by `torch.manual_seed`,
    `torch.random.fork_rng` and the like: all use ``torch.random.default_generator`` (seen in torch 2.11 to 2.15)."""
    generator: Any = torch.random.default_generator  # pyright: ignore[reportPrivateImportUsage]
    here = threading.get_ident()

    def method(name: str) -> Any:
        """Return an attribute of the default generator, and report it if it is a method that sets the state."""
        if name in ("manual_seed", "seed", "set_state") and threading.get_ident() == here:
            seen()
        return getattr(generator, name)

    with patched(torch.random, default_generator=_generator(generator, method)):
        yield


@contextlib.contextmanager
def generator_replaced(ours: Callable[[], bool]) -> Iterator[None]:
    """Make the functions of `torch.random` (`torch.manual_seed`, `torch.get_rng_state` and the like) use a copy of the
    default generator in threads where ``ours()`` is true, so that these leave the process's random state alone."""
    generator: Any = torch.random.default_generator  # pyright: ignore[reportPrivateImportUsage]
    own = torch.Generator()
    own.set_state(generator.get_state())
    method = lambda name: getattr(own if ours() else generator, name)  # noqa: E731
    with patched(torch.random, default_generator=_generator(generator, method)):
        yield


@contextlib.contextmanager
def redraws_estimated(redrawing: Callable[[int], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Run each call of `torch.nn.init.trunc_normal_` within ``redrawing(rounds)``, in this context.

    ``rounds`` is the expected number of redraws: values outside of [a, b], a share of a normal distribution, are drawn
    again until there are none. The estimate ends at less than one such value, or at 100 rounds. Seen in torch 2.13 and
    2.15; 2.11 draws once.
    """
    draw = torch.nn.init._no_grad_trunc_normal_

    def estimated(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, *rest: Any, **more: Any) -> Any:
        """Draw, within the context for the expected number of redraws."""
        normal = NormalDist(mean, std)
        share_outside = 1.0 - (normal.cdf(b) - normal.cdf(a))
        rounds, values_outside = 0, share_outside * tensor.numel()
        while values_outside >= 1 and rounds < 100:
            rounds, values_outside = rounds + 1, values_outside * share_outside
        with redrawing(rounds):
            return draw(tensor, mean, std, a, b, *rest, **more)

    with patched(torch.nn.init, _no_grad_trunc_normal_=estimated):
        yield


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Run without the thread's `TorchFunctionMode`s; they are entered again at the end."""
    entered = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]  # outermost first
    try:
        yield
    finally:
        for mode in entered:
            _push_mode(mode)


_GLOBAL_HOOKS = (
    (_modules, "_global_buffer_registration_hooks"),
    (_modules, "_global_module_registration_hooks"),
    (_modules, "_global_parameter_registration_hooks"),
    (_modules, "_global_backward_pre_hooks"),
    (_modules, "_global_backward_hooks"),
    (_modules, "_global_forward_pre_hooks"),
    (_modules, "_global_forward_hooks"),
    (_optimizers, "_global_optimizer_pre_hooks"),
    (_optimizers, "_global_optimizer_post_hooks"),
)
"""Seen in torch 2.11 and 2.13, each a dict by the number of a hook."""


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Within this context, the hooks on all modules and on all optimizers are unregistered."""
    tables = [getattr(module, name) for module, name in _GLOBAL_HOOKS]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)
