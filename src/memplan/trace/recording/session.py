"""What predicting and measuring do around a step: random state kept, garbage collected at set times, errors located."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import random
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, dataset

from memplan import _torch
from memplan._bytes import format_bytes
from memplan._interrupts import deferred, outside_of
from memplan.cudnn.cudnn_library import Cudnn, find_cudnn
from memplan.devices import Device, find, of_properties
from memplan.errors import DataDependentError, MemplanError, StepError, UsageError
from memplan.trace.own_streams import own_streams
from memplan.trace.recording.boundaries import Boundaries, Program, Runs, Step
from memplan.trace.recording.causes import module_names
from memplan.trace.recording.followed.line_watch import unwatched
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import format_frame, frame_of_error
from memplan.trace.recording.values.bounds import checked_shares
from memplan.trace.records import HOST

# what torch says where a build without CUDA is asked for it, or a machine without a GPU
RUNS = "a step that runs"
"""What is expected where the user's own code raised."""
_CUDA = re.compile(
    r"support for cuda devices|from the 'CUDA' backend|CUDA enabled|NVIDIA driver|CUDA GPUs|CUDA error|CUDA driver|"
    r"support create a new Stream",
    re.I,
)
COMPILED = (
    "torch.compile or torch.jit was asked for and the step ran as if eager: fused kernels, or a backend's plan, may "
    "keep less"
)
CUDA_DIFFERS = "recorded for the CPU: on CUDA other kernels run and other tensors are saved; name a card (h100)"


def of_outside(size: int) -> tuple[str, ...]:
    """Return what has to be said of the bytes of tensors from outside of ``build``, if there are any."""
    if not size:
        return ()
    return (f"{format_bytes(size)} of tensors that were made outside of build do not count: they were there before",)


@dataclass(frozen=True)
class Target:
    """What a step is recorded for: the CPU, or a card of the catalogue or of this machine."""

    name: str
    card: Device | None = None
    notes: tuple[str, ...] = ()
    assumed: Mapping[str, float] = field(default_factory=dict[str, float])
    """``FILE:LINE`` of an op that selects by value -> the share that is taken to be selected, instead of all."""
    cudnn: Cudnn | None = None
    """The library that is asked for the workspaces of convolutions; intervals where there is none."""


Environment = str | os.PathLike[str] | bool | None
"""Of the cuDNN to ask: the folder of an environment, its Python, or a version; None: this one, if it has cuDNN; False:
none."""


def choose_target(
    device: str | torch.device | None, assumed: Mapping[str, float] | None = None, cudnn: Environment = None
) -> Target:
    """Return the device to plan for, and what has to be said about the choice.

    Raises:
        DeviceError: no such device in the catalogue, or none on this machine; no cuDNN in the environment named.
        UsageError: ``assumed`` is not as `Target` says it.
    """
    chosen = _chosen(device)
    library = None if chosen.card is None else find_cudnn(cudnn)
    return replace(chosen, assumed=checked_shares(assumed), cudnn=library)


def _chosen(device: str | torch.device | None) -> Target:
    if device is None:
        own = own_card()
        return Target(own.name, own) if own is not None else Target(HOST, notes=(CUDA_DIFFERS,))
    text = str(device).strip().lower()
    if text == HOST:
        return Target(HOST)
    if re.fullmatch(r"cuda(:\d+)?|gpu", text):
        own = own_card()
        if own is not None:
            return Target(own.name, own)
    card = find(text)
    return Target(card.name, card)


def own_card(place: torch.device | None = None) -> Device | None:
    """Return this machine's GPU, the current one or the one of that name; None where there is none."""
    if not torch.cuda.is_available():
        return None
    number = torch.cuda.current_device() if place is None or place.index is None else place.index
    found = torch.cuda.get_device_properties(number)
    return of_properties(found.name, found.total_memory, found.major, found.minor, found.multi_processor_count)


def check_steps(steps: int) -> None:
    """Raise UsageError unless ``steps`` is a whole number of at least 1."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"steps={steps!r}", expected="a whole number of steps, at least 1", do="Leave it out for 2.")


_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def called(name: str, *, profiles: bool = False) -> Iterator[None]:
    """Run a public function's call in here, during which signals wait (`memplan._interrupts`).

    Args:
        name: of the function.
        profiles: whether it starts torch's profiler.

    Raises:
        UsageError: it is called within what changes ops (a transform of torch.func, torch.compile, a meta device), or
            within a profiler where it starts one.
    """
    within = _torch.transform_of_caller()
    if within is not None:
        raise UsageError(
            f"{name} is called within {within}",
            expected="a call outside of it: memplan runs the step as it is",
            do="Call it before or afterwards",
        )
    if not profiles:
        with deferred():
            yield
        return
    with alone():  # another thread that records, measures or fits is waited for: the profiler may be its own
        if not _torch.profiler_turn.take():
            raise UsageError(
                f"{name} starts torch's profiler, and one is at work",
                expected="none, neither around the call nor in another thread: torch has one at a time",
                do="Call it before the other one begins, or after its end",
            )
        try:
            yield
        finally:
            _torch.profiler_turn.give()


def public(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run each call of a public function as `called` does."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with called(f"memplan.{function.__name__}"):
            return function(*args, **kwargs)

    return call


_WAITING = 1.0
"""Seconds after which a recording that waits for another one says so."""
one_at_a_time = threading.RLock()
"""Around what replaces functions of torch, or plans: one lock for both, so that no two threads wait for one another."""


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other thread records or plans: for its time, that replaces functions of torch for the process.

    Signals wait until what is replaced is as before, or for a safe point (`memplan._interrupts`).
    """
    with deferred():
        if not one_at_a_time.acquire(timeout=_WAITING):
            warnings.warn(
                "memplan waits: another thread of this process is recording or planning, and one runs at a time",
                stacklevel=2,
            )
            one_at_a_time.acquire()
        try:
            yield
        finally:
            one_at_a_time.release()


@dataclass
class Running:
    """A recording, or a measurement, that runs, as what the program in it calls of memplan sees it."""

    target: Target
    suspended: Callable[[], AbstractContextManager[None]]
    """Returns a context that is no part of the recording."""
    really: bool = False
    """Whether tensors have data."""
    thread: int = field(default_factory=threading.get_ident)
    notes: dict[str, None] = field(default_factory=dict[str, None])
    """What the trace is to say of these calls."""


_running: list[Running | None] = []
"""Recordings from the outermost on; None where the innermost is suspended."""


def running_recording() -> Running | None:
    """Return the recording that sees what this thread does now; None where none does."""
    found = _running[-1] if _running else None
    return found if found is not None and found.thread == threading.get_ident() else None


def is_suspended() -> bool:
    """Return whether what runs now is no part of the recording or measurement around it."""
    return bool(_running) and _running[-1] is None


@contextmanager
def recording_runs(running: Running) -> Iterator[None]:
    """Make it known while a recording runs."""
    _running.append(running)
    try:
        yield
    finally:
        _running.pop()


@contextmanager
def recording_suspended() -> Iterator[None]:
    """Compute without being seen by the recording that runs, if any: planning is no part of a recorded step."""
    running = running_recording()
    if running is None:
        yield
        return
    _running.append(None)
    try:
        with running.suspended():
            yield
    finally:
        _running.pop()


@contextmanager
def undisturbed(*, cuda: bool = False, real: bool = False) -> Iterator[None]:
    """Record without a trace: random streams are left alone, cyclic garbage collected between steps only.

    One thread at a time, and with gradients: a step makes its own modes, whatever `torch.no_grad` the caller is within.

    When Python's collector would free a cycle inside a step depends on everything else that the process did before,
    so a prediction could not be the same twice.

    Args:
        cuda: a card is recorded for; for the CPU, `torch.cuda.is_available()` answers no.
        real: tensors are real, and ops draw from torch's own stream, which is restored afterwards.
    """
    with (
        alone(),
        outside_of(_torch.outside_of_modes),
        random_kept() if real else own_streams(),
        torch.inference_mode(False),
        torch.enable_grad(),
        _torch.without_anomaly_checks(),
        collector_held(),
        _defaults_kept(),
        _loaded_in_order(),
        unwatched(),
        nullcontext() if cuda else _torch.patched(torch.cuda, is_available=lambda: False),
    ):
        yield


@contextmanager
def random_kept() -> Iterator[None]:
    """Leave the random states of torch, Python and numpy as they were, where real ops draw."""
    state, python_state, numpy_state = torch.default_generator.get_state(), random.getstate(), _numpy_state()
    try:
        yield
    finally:
        if not torch.equal(torch.default_generator.get_state(), state):
            torch.default_generator.set_state(state)
        random.setstate(python_state)
        if numpy_state is not None:
            import numpy

            numpy.random.set_state(numpy_state)


_ROUNDS = 32


def collect_cycles() -> None:
    """Run Python's collector until it finds nothing: of cycles that autograd's nodes link, it sees one a round."""
    for _ in range(_ROUNDS):
        if not gc.collect():
            return


_holding = ContextVar("_holding", default=False)
"""Whether this is inside `collector_held`, and what is frozen is its."""


@contextmanager
def collector_held() -> Iterator[None]:
    """Collect cyclic garbage only where that is asked for alone, and only of what was made in here.

    Tracing and compiling make and hold so many objects that Python's collector takes a fifth of their time. What was
    there before is none of our business, and walking it at every step would cost a third of a second each time. Within
    a recording nothing is frozen: its own garbage would stay to its end.
    """
    if _running:
        yield
        return
    enabled, inside = gc.isenabled(), _holding.get()
    frees = not inside and not gc.get_freeze_count()  # what the user froze stays so, and nothing joins it
    gc.disable()
    if inside:
        gc.collect()  # what others in here have left would stay to the end
    if frees or inside:
        gc.freeze()
    token = _holding.set(frees or inside)
    try:
        yield
    finally:
        _holding.reset(token)
        if frees:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def _defaults_kept() -> Iterator[None]:
    """What a build sets for the whole process is as before: default device and dtype, cuDNN's switches."""
    cudnn = torch.backends.cudnn
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    set_device, changed = torch.set_default_device, list[Any]()

    def set_and_note(new: Any) -> None:
        changed.append(new)
        set_device(new)

    switches, tf32 = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic), _allowed_tf32()
    precision = torch.get_float32_matmul_precision()
    try:
        with _torch.patched(torch, set_default_device=set_and_note):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if changed:  # asking torch now would ask for a GPU
            set_device(None if device.type == HOST else device)
        if (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) != switches:  # torch may refuse to set them
            cudnn.enabled, cudnn.benchmark, cudnn.deterministic = switches
        if tf32 is not None and _allowed_tf32() != tf32:
            cudnn.allow_tf32 = tf32
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)


def _allowed_tf32() -> bool | None:
    """Return whether cuDNN may round to TF32; None where that is set for convolutions and recurrent ops apart."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


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
def _loaded_in_order() -> Iterator[None]:
    """Load data in this process, and leave in order what torch shuffles, draws or splits.

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


def _numpy_state() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy.random.get_state()


def run_steps(build: Runs, steps: int, observer: Observer, boundaries: Boundaries) -> None:
    """Build a step and run it ``steps`` times, or run a program with as many steps at most.

    Args:
        build: as for `record`.
        steps: how often the step runs.
        observer: knows where a step failed.
        boundaries: called where the parts begin and end.

    Raises:
        StepError: building or a step raised, or ``build`` did not return a step.
    """
    if isinstance(build, Program):
        with located(observer, build.title):
            build.run_steps(steps, boundaries)
        return
    step = _built(build, observer)
    boundaries.built()
    for number in range(steps):
        with located(observer, f"step {number + 1}"):
            step()
        boundaries.stepped()
    boundaries.ended()


def _built(build: Callable[[], Step], observer: Observer) -> Step:
    """Call ``build`` and see that it returns a step.

    Raises:
        StepError: it raised, or it returned something else.
    """
    if not callable(build):
        raise StepError(
            f"{build!r} is not callable",
            expected="build(), a callable that returns the step",
            do="Pass the function itself.",
        )
    with located(observer, "build"):
        step = build()
    if not callable(step) or isinstance(step, torch.nn.Module):
        raise StepError(
            f"build returned {_describe(step)}",
            expected="a step: a callable without arguments that runs one training step",
            do="Return the inner function; to look at a module alone, use memplan.explain(module, *inputs).",
        )
    return step


def _describe(value: object) -> str:
    if isinstance(value, torch.nn.Module):
        return f"the module {type(value).__name__}"
    return "None" if value is None else f"a {type(value).__name__}"


class located:
    """Turn whatever the user's code or torch raises into one message with the layer and the line.

    A class: `contextlib.contextmanager` lets a StopIteration out as it is, where an error has it as its cause.
    """

    def __init__(self, observer: Observer, what: str) -> None:
        self._observer = observer
        self._what = what

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise memplan's error in the place of one that is not; the original stays as its ``__cause__``."""
        if isinstance(error, Exception) and not isinstance(error, MemplanError):
            raise _told(self._observer, self._what, error) from error


def _told(observer: Observer, what: str, error: Exception) -> MemplanError:
    """Return what is raised in the place of an error of the user's code, or of torch's."""
    layer, where = _locate(observer, error)
    if isinstance(error, _torch.DATA_DEPENDENT):
        func = getattr(error, "func", None)
        return DataDependentError(
            f"{func or 'an op'} makes a tensor whose shape depends on values, and recording has no values",
            expected="shapes that follow from the shapes of the inputs",
            do="Run memplan.measure(build) instead: it really runs the step."
            if observer.card is None
            else "Give the step shapes that are known, or measure it for the CPU: memplan.measure(build)",
            layer=layer,
            where=where,
        )
    text = str(error).strip().split("\n")[0] or "no message"
    found = f"{what} raised {type(error).__name__}: {text.rstrip('.')[:300]}"
    expected = RUNS
    what_runs = "build()" if what == "build" else "the step"
    do = f"Run {what_runs} without memplan: mend it where it raises the same there; else use memplan.measure(build)"
    if _of_nested(error):
        found = f"{what} uses nested tensors (torch.nested), which memplan neither records nor measures"
        expected = "tensors of one shape each"
        do = "Pad the sequences (torch.nn.utils.rnn.pad_sequence), or pack them (pack_padded_sequence)"
    elif _CUDA.search(text) and observer.card is not None:
        found = f"{what} asks for a GPU in a way that a recording does not answer: {text.rstrip('.')[:200]}"
        expected = "of CUDA only what can be answered without a GPU: tensors, devices, streams, events, autocast"
        do = "Leave the call out of build and step while they are recorded"
    elif _CUDA.search(text):
        found = f"{what} puts something on CUDA"
        expected = "the CPU, which the step is recorded for"
        do = "Name a card: --device h100, in Python device='h100' (memplan devices lists them)"
    return StepError(found, expected=expected, do=do, layer=layer, where=where)


def _of_nested(error: Exception) -> bool:
    """Return whether an error comes from torch's nested tensors, or from an op that was given one."""
    if re.search(r"NestedTensorImpl|from the 'NestedTensor|nested_tensor", str(error)):  # errors list all backends
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("torch.nested") for frame, _ in frames)


def _locate(observer: Observer, error: BaseException) -> tuple[str | None, str | None]:
    where = format_frame(frame_of_error(error))
    return module_names(observer.place).get(observer.place.failed_in), where
