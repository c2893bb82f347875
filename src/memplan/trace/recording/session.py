"""The environment of a recorded or measured step: random state, garbage collection, process settings, errors."""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, ParamSpec, TypeVar

import numpy
import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, dataset

from memplan import _torch
from memplan._bytes import format_bytes
from memplan._interrupts import deferred, outside_of
from memplan.cudnn.cudnn_library import Cudnn, find_cudnn
from memplan.devices import Device, device_of_properties, find
from memplan.errors import DataDependentError, MemplanError, StepError, UsageError
from memplan.trace.own_streams import own_streams
from memplan.trace.recording.boundaries import Boundaries, Program, Runs, Step
from memplan.trace.recording.causes import module_names
from memplan.trace.recording.collectives import gloo_copies
from memplan.trace.recording.followed.line_watch import unwatched
from memplan.trace.recording.loading import LoaderWatch
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import format_frame, frame_of_error
from memplan.trace.recording.values.bounds import checked_shares
from memplan.trace.records import HOST
from memplan.trace.trace import Trace

RUNS = "a step that runs"
"""``expected`` of the StepError for an exception of the user's own code."""
# torch's errors where it has no CUDA, or the machine no GPU
_CUDA = re.compile(
    r"support for cuda devices|from the 'CUDA' backend|CUDA enabled|NVIDIA driver|CUDA GPUs|CUDA error|CUDA driver|"
    r"support create a new Stream",
    re.I,
)
SCRIPTED = "torch.jit was asked for and the step ran as if eager: fused kernels may keep less"
COMPILED = "torch.compile: the bytes are those of the compiled step"
COMPILED_FOR_CARD = (
    "torch.compile fuses here as for the CPU, from which a card's kernels can differ; the buffer as large as the L2 "
    "cache with which they are tuned in their first call is not counted"
)
AS_IF_EAGER = (
    "torch.compile was asked for and the step ran as if eager: fused kernels, or a backend's plan, may keep less"
)
CUDA_DIFFERS = "recorded for the CPU: on CUDA other kernels run and other tensors are saved; name a card (h100)"


def note_about_outside(size: int) -> tuple[str, ...]:
    """Return the note about ``size`` bytes of tensors created outside of ``build``; () for 0."""
    if not size:
        return ()
    return (f"{format_bytes(size)} of tensors that were made outside of build do not count: they were there before",)


@dataclass(frozen=True)
class Target:
    """The device and rank that a step is recorded for: the CPU, or a card of the catalogue or of this machine."""

    name: str
    card: Device | None = None
    notes: tuple[str, ...] = ()
    assumed: Mapping[str, float] = field(default_factory=dict[str, float])
    """``FILE:LINE`` of an op that selects by value -> assumed share of selected elements; by default all."""
    cudnn: Cudnn | None = None
    """The library to query for workspaces of convolutions; None: workspaces are intervals."""
    world: int | None = None
    """Number of ranks, in a fake process group without peers; None: the step creates process groups itself."""
    rank: int = 0


Environment = str | os.PathLike[str] | bool | None
"""Where to find cuDNN: folder or Python of an environment, or a version; None: this environment, else the version of
torch's CUDA build; True: this environment; False: none."""


def choose_target(
    device: str | torch.device | None,
    assumed: Mapping[str, float] | None = None,
    cudnn: Environment = None,
    world: int | None = None,
    rank: int = 0,
) -> Target:
    """Return the `Target` for a device and rank, with notes about the choice.

    Raises:
        DeviceError: no such device in the catalogue or on this machine; no cuDNN in the named environment.
        UsageError: invalid ``assumed`` (see `Target`); no such rank.
    """
    target = _target(device)
    library = None if target.card is None else find_cudnn(cudnn)
    check_rank(world, rank)
    return replace(target, assumed=checked_shares(assumed), cudnn=library, world=world, rank=rank)


def rank_note(world: int, rank: int, groups: int, trace: Trace) -> str:
    """Return the note on a rank that is recorded without peers, and is in ``groups`` process groups.

    Sources: NVIDIA/nccl#964 (544 MB for a communicator of two A100 with NVLink, 688 MB of four), NVIDIA/nccl#864
    (1.6 GB for one communicator, 6 GB for three and more); for gloo `gloo_copies`.
    """
    text = f"rank {rank} of {world}, alone in a fake process group"
    if not groups:
        return text
    if trace.device == HOST:
        copies = gloo_copies(trace.ops, trace.storages)
        return f"{text}; gloo's own copies can add up to {format_bytes(copies)} to the peak" if copies else text
    count = "one communicator" if groups == 1 else f"each of up to {groups} communicators"
    return f"{text}; NCCL's own memory is not counted: 0.5 to 1.6 GB for {count}, as users reported"


def check_rank(world: int | None, rank: int) -> None:
    """Raise UsageError unless ``rank`` is a rank of ``world``, and the process has no default process group yet."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise UsageError(f"rank {rank!r}", expected="a number", do="For all ranks call memplan.roles(build, world=8)")
    if world is None:
        if rank:
            raise UsageError(f"rank {rank} without a world", expected="the number of ranks, too", do="Give world")
        return
    if isinstance(world, bool) or world < 1 or not 0 <= rank < world:
        raise UsageError(
            f"rank {rank} of {world}", expected="a world of at least 1, and a rank from 0 to the last", do="Correct it"
        )
    if _torch.has_process_group():
        raise UsageError(
            "this process has a default process group of torch.distributed already",
            expected="none: the recorded rank gets one of its own",
            do="Initialize it in build, or record in another process",
        )


def _target(device: str | torch.device | None) -> Target:
    """Return the target for a device's name: "cpu", "cuda" or a card of the catalogue; for None, this machine's GPU if
    there is one, else the CPU."""
    if device is None:
        card_here = own_card()
        return Target(card_here.name, card_here) if card_here is not None else Target(HOST, notes=(CUDA_DIFFERS,))
    text = str(device).strip().lower()
    if text == HOST:
        return Target(HOST)
    if re.fullmatch(r"cuda(:\d+)?|gpu", text):
        card_here = own_card()
        if card_here is not None:
            return Target(card_here.name, card_here)
    card = find(text)
    return Target(card.name, card)


def own_card(place: torch.device | None = None) -> Device | None:
    """Return this machine's current GPU, or that of the device ``place``, as in the catalogue; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    number = torch.cuda.current_device() if place is None or place.index is None else place.index
    gpu = torch.cuda.get_device_properties(number)
    return device_of_properties(gpu.name, gpu.total_memory, gpu.major, gpu.minor, gpu.multi_processor_count)


def check_steps(steps: int) -> None:
    """Raise UsageError unless ``steps`` is a whole number of at least 1."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"steps={steps!r}", expected="a whole number of steps, at least 1", do="Leave it out for 2.")


_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def called(name: str, *, profiles: bool = False) -> Iterator[None]:
    """Context of a call of a public function, which delays signals (`memplan._interrupts`).

    ``profiles``: whether the function starts torch's profiler. Raises UsageError if the call is within a transform of
    torch.func, torch.compile or a meta device; or ``profiles`` and a profiler is active already.
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
    with alone():  # waits for other threads that record, measure or fit: the running profiler may be theirs
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
    """Decorate a public function: each call runs within `called`."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with called(f"memplan.{function.__name__}"):
            return function(*args, **kwargs)

    return call


_WARN_AFTER = 1.0
"""Seconds after which a recording that waits for another one warns."""
one_at_a_time = threading.RLock()
"""Acquired to patch functions of torch, and to plan: a single lock for both, so that threads cannot deadlock."""


@contextmanager
def alone() -> Iterator[None]:
    """Acquire the process-wide lock of recording and planning, which patch functions of torch.

    Signals wait until the patches are undone, or for a safe point (`memplan._interrupts`).
    """
    with deferred():
        if not one_at_a_time.acquire(timeout=_WARN_AFTER):
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
    """The running recording or measurement, for memplan's functions that the step itself calls."""

    target: Target
    suspended: Callable[[], AbstractContextManager[None]]
    """Returns a context whose ops are not recorded."""
    really: bool = False
    """Whether tensors have data."""
    thread: int = field(default_factory=threading.get_ident)
    notes: dict[str, None] = field(default_factory=dict[str, None])
    """Notes about such calls, for the trace."""
    loading: LoaderWatch | None = None
    """In a recording, the observer of data loaders."""


_running: list[Running | None] = []
"""Stack of recordings; None on top while the innermost is suspended."""


def running_recording() -> Running | None:
    """Return the recording or measurement that observes this thread's ops, or None."""
    running = _running[-1] if _running else None
    return running if running is not None and running.thread == threading.get_ident() else None


def is_suspended() -> bool:
    """Return whether the innermost recording or measurement is suspended."""
    return bool(_running) and _running[-1] is None


@contextmanager
def recording_runs(running: Running) -> Iterator[None]:
    """Context in which `running_recording` returns ``running``."""
    _running.append(running)
    try:
        yield
    finally:
        _running.pop()


@contextmanager
def recording_suspended() -> Iterator[None]:
    """Suspend the running recording, if any: recordings and plans made by a step do not belong to the step."""
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
    """Run a step reproducibly, and restore the process afterwards: random streams, defaults, garbage collector.

    Runs in one thread at a time, with gradients enabled even if the caller is within `torch.no_grad`.

    Cyclic garbage is collected between steps only: otherwise, when a cycle is freed would depend on what the process
    did before, and predictions would vary.

    Args:
        cuda: the step is recorded for a card; otherwise `torch.cuda.is_available()` returns False.
        real: tensors are real, and ops draw from torch's own random stream, which is restored afterwards.
    """
    with (
        alone(),
        outside_of(_torch.outside_of_modes),
        random_kept() if real else own_streams(),
        torch.inference_mode(False),
        torch.enable_grad(),
        _torch.without_anomaly_checks(),
        collector_held(),
        _settings_restored(),
        _accelerate_restored(),
        _loaded_in_order(),
        unwatched(),
        nullcontext() if cuda else _torch.patched(torch.cuda, is_available=lambda: False),
    ):
        yield


@contextmanager
def random_kept() -> Iterator[None]:
    """Restore the random states of torch, Python and numpy afterwards."""
    state, python_state, numpy_state = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        if not torch.equal(torch.default_generator.get_state(), state):
            torch.default_generator.set_state(state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


_MAX_COLLECTIONS = 32


def collect_cycles() -> None:
    """Run Python's collector until it frees nothing: of cycles linked by autograd nodes, a run frees only the first."""
    for _ in range(_MAX_COLLECTIONS):
        if not gc.collect():
            return


_collector_is_held = ContextVar("_collector_is_held", default=False)
"""Whether this is inside a `collector_held` that froze the older objects."""


@contextmanager
def collector_held() -> Iterator[None]:
    """Disable automatic garbage collection, and exclude objects that existed before from explicit collections.

    Tracing and compiling allocate so many objects that Python's collector takes a fifth of their time, and scanning the
    older objects at every step would cost a third of a second each time. Within a recording nothing is frozen, since
    its own garbage would stay to its end.
    """
    if _running:
        yield
        return
    enabled, inside = gc.isenabled(), _collector_is_held.get()
    is_outermost = not inside and not gc.get_freeze_count()  # unfreezing would also thaw what the user froze
    gc.disable()
    if inside:
        gc.collect()  # garbage that is frozen would stay to the end
    if is_outermost or inside:
        gc.freeze()
    token = _collector_is_held.set(is_outermost or inside)
    try:
        yield
    finally:
        _collector_is_held.reset(token)
        if is_outermost:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def _settings_restored() -> Iterator[None]:
    """Restore process-wide settings that a build may change: default device and dtype, cuDNN and matmul switches."""
    cudnn = torch.backends.cudnn
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    set_device, devices = torch.set_default_device, list[Any]()

    def set_and_note(new: Any) -> None:
        """Replace `torch.set_default_device`, and note that it was called."""
        devices.append(new)
        set_device(new)

    switches, tf32 = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic), _allowed_tf32()
    precision = torch.get_float32_matmul_precision()
    try:
        with _torch.patched(torch, set_default_device=set_and_note):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if devices:  # get_default_device would initialize CUDA now
            set_device(None if device.type == HOST else device)
        if (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) != switches:  # torch may refuse to set them
            cudnn.enabled, cudnn.benchmark, cudnn.deterministic = switches
        if tf32 is not None and _allowed_tf32() != tf32:
            cudnn.allow_tf32 = tf32
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)


@contextmanager
def _accelerate_restored() -> Iterator[None]:
    """Restore Accelerate's process-wide state, above all its device, which must not leak into a later recording for
    another device."""
    before = [dict(state) for state in _accelerate_states()]
    try:
        yield
    finally:
        # Accelerate may have been imported since: then its states were empty
        for state, saved in zip_longest(_accelerate_states(), before, fillvalue=dict[str, Any]()):
            state.clear()
            state.update(saved)


def _accelerate_states() -> list[dict[str, Any]]:
    """Return the dicts shared by all instances of each of Accelerate's state classes; [] if it is not imported."""
    module = sys.modules.get("accelerate.state")
    classes = () if module is None else (module.PartialState, module.AcceleratorState, module.GradientState)
    return [kind._shared_state for kind in classes]


def _allowed_tf32() -> bool | None:
    """Return whether cuDNN may compute in TF32; None if torch refuses to say, as after a mix of its two settings."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


class _InOrder(int):
    """Replaces the tensor that `torch.randperm(n)` returns: its `tolist` is 0, 1, ..., n - 1."""

    def tolist(self) -> list[int]:
        return list(range(self))


def _weighted_in_order(self: Any) -> Iterator[int]:
    """Replace `WeightedRandomSampler.__iter__`: the indices 0, 1, ..., with the allocation of torch's draw."""
    drawn = torch.multinomial(self.weights, self.num_samples, self.replacement, generator=self.generator)
    yield from (number % len(self.weights) for number in range(self.num_samples))
    del drawn  # alive until the end, as in torch's sampler


@contextmanager
def _loaded_in_order() -> Iterator[None]:
    """Load data in this process instead of workers, and in order where torch would shuffle, sample or split it.

    Hooks and fake tensors cannot be sent to workers. The order of samples depends on random values, which are unknown
    in a recording, and does not matter to memory.
    """
    iterate = DataLoader.__iter__

    def iterate_here(self: Any) -> Any:
        """Replace `DataLoader.__iter__`: iterate in this process, and note the iterator in a recording."""
        workers, timeout = self.num_workers, self.timeout
        self.num_workers = self.timeout = 0
        try:
            iterator = iterate(self)
        finally:
            self.num_workers, self.timeout = workers, timeout
        running = running_recording()
        if running is not None and running.loading is not None:
            running.loading.iterates(self, iterator)
        return iterator

    samplers = (  # (class, its `__iter__`, which yields indices of samples in order)
        (RandomSampler, lambda self: (number % len(self.data_source) for number in range(self.num_samples))),
        (WeightedRandomSampler, _weighted_in_order),
        (SubsetRandomSampler, lambda self: iter(self.indices)),
    )
    with ExitStack() as patches:
        # num_workers stays set otherwise: libraries that wrap a loader in another read it
        patches.enter_context(
            _torch.patched(DataLoader, __iter__=iterate_here, check_worker_number_rationality=lambda self: None)
        )
        in_order = lambda number, **_: _InOrder(number)  # noqa: E731
        patches.enter_context(_torch.patched(dataset, randperm=in_order))  # by which random_split shuffles
        for sampler, order in samplers:
            patches.enter_context(_torch.patched(sampler, __iter__=order))
        yield


class ObservedRun:
    """A run whose observer, at the end of `build` and of each step, registers modules, gradients and optimizer states,
    and collects garbage."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.ticks: list[int] = []
        """Ticks of the ledger after the garbage collection at the end of building and of each step."""
        self.collected: list[int] = []
        """Ticks at which these garbage collections began."""

    @property
    def tick(self) -> int:
        """Return the current tick of the ledger."""
        return self.observer.ledger.clock

    def built(self) -> None:
        """End building: register the modules that `build` constructed."""
        self.observer.place.building = False
        self.observer.ownership.mark_modules()
        self.end_part()

    def stepped(self) -> None:
        """End a step: register the gradients and optimizer states that exist now."""
        self.observer.end_step()
        self.end_part()

    def end_part(self) -> None:
        """Collect garbage, and begin the next step."""
        self.collected.append(self.tick)
        collect_cycles()
        self.ticks.append(self.tick)
        self.observer.place.step += 1


def run_steps(build: Runs, steps: int, observer: Observer, boundaries: Boundaries) -> None:
    """Build a step and run it ``steps`` times, or run a program for at most as many steps. Raises StepError if building
    or a step raised, or ``build`` did not return a step."""
    if isinstance(build, Program):
        with located(observer, build.title):
            build.run_steps(steps, boundaries)
        return
    step = _build(build, observer)
    boundaries.built()
    for number in range(steps):
        with located(observer, f"step {number + 1}"):
            step()
        boundaries.stepped()
    boundaries.ended()


def _build(build: Callable[[], Step], observer: Observer) -> Step:
    """Call ``build``, and return its step. Raises StepError if it returns none."""
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
    """Return what `build` returned, for a message."""
    if isinstance(value, torch.nn.Module):
        return f"the module {type(value).__name__}"
    return "None" if value is None else f"a {type(value).__name__}"


class located:
    """Context that turns exceptions of the user's code or torch into a MemplanError with layer and line.

    A class, since a `contextlib.contextmanager` would re-raise a StopIteration instead of the MemplanError.
    """

    def __init__(self, observer: Observer, what: str) -> None:
        """``what`` runs in this context, for messages: "build", or "step 1"."""
        self._observer = observer
        self._what = what

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise a MemplanError whose ``__cause__`` is the original exception."""
        if isinstance(error, Exception) and not isinstance(error, MemplanError):
            raise _located_error(self._observer, self._what, error) from error


def _located_error(observer: Observer, what: str, error: Exception) -> MemplanError:
    """Return the MemplanError to raise for an exception of the user's code or torch. ``what`` raised it: "step 1"."""
    where = format_frame(frame_of_error(error))
    layer = module_names(observer.place).get(observer.place.failed_in)
    if isinstance(error, _torch.DATA_DEPENDENT):
        func = getattr(error, "func", None)
        do = "Run memplan.measure(build) instead: it really runs the step."
        if observer.card is not None:
            do = "Give the step shapes that are known, or measure it for the CPU: memplan.measure(build)"
        return DataDependentError(
            f"{func or 'an op'} makes a tensor whose shape depends on values, and recording has no values",
            expected="shapes that follow from the shapes of the inputs", do=do, layer=layer, where=where,
        )  # fmt: skip
    text = str(error).strip().split("\n")[0] or "no message"
    problem = f"{what} raised {type(error).__name__}: {text.rstrip('.')[:300]}"
    expected = RUNS
    what_runs = "build()" if what == "build" else "the step"
    do = f"Run {what_runs} without memplan: mend it where it raises the same there; else use memplan.measure(build)"
    if _is_of_nested(error):
        problem = f"{what} uses nested tensors (torch.nested), which memplan neither records nor measures"
        expected = "tensors of one shape each"
        do = "Pad the sequences (torch.nn.utils.rnn.pad_sequence), or pack them (pack_padded_sequence)"
    elif _CUDA.search(text) and observer.card is not None:
        problem = f"{what} asks for a GPU in a way that a recording does not answer: {text.rstrip('.')[:200]}"
        expected = "of CUDA only what can be answered without a GPU: tensors, devices, streams, events, autocast"
        do = "Leave the call out of build and step while they are recorded"
    elif _CUDA.search(text):
        problem = f"{what} puts something on CUDA"
        expected = "the CPU, which the step is recorded for"
        do = "Name a card: --device h100, in Python device='h100' (memplan devices lists them)"
    return StepError(problem, expected=expected, do=do, layer=layer, where=where)


def _is_of_nested(error: Exception) -> bool:
    """Return whether an error comes from torch's nested tensors, or from an op on one."""
    if re.search(r"NestedTensorImpl|from the 'NestedTensor|nested_tensor", str(error)):  # errors list all backends
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("torch.nested") for frame, _ in frames)
