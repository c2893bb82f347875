"""Predicts the memory of a step: runs it on fake tensors and records what it would allocate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from memplan import _torch
from memplan._patched import Patch, repatched, tracked, unpatched
from memplan.devices import catalogue
from memplan.errors import DataDependentError, RecordingError, StepError
from memplan.trace import fake_cuda
from memplan.trace.branch_exploration import Recorded, explore_branches
from memplan.trace.fake_cuda.residence import Card, OnCard
from memplan.trace.held_output import CapturedOutput, output_shown
from memplan.trace.own_streams import recording_thread
from memplan.trace.recording.boundaries import Program, Runs
from memplan.trace.recording.causes import StepParts, finish, trace_of
from memplan.trace.recording.followed.line_watch import LineWatch, watching
from memplan.trace.recording.loading import LoaderWatch
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Line, Place, format_frame, frame_of_error, raised_by_statement, user_frame
from memplan.trace.recording.session import (
    AS_IF_EAGER,
    COMPILED,
    COMPILED_FOR_CARD,
    Environment,
    ObservedRun,
    Running,
    Target,
    check_steps,
    choose_target,
    note_about_outside,
    public,
    rank_note,
    recording_runs,
    recording_suspended,
    run_steps,
    undisturbed,
)
from memplan.trace.recording.symbolic_scalars import Choice, Overrides, ScalarPolicy, may_hold_symbolic
from memplan.trace.recording.values.bounds import Bounds, Execution, Shares
from memplan.trace.recording.values.selected_counts import count_from_shape_error
from memplan.trace.records import HOST, ON_CARD, RankGroup
from memplan.trace.semantics.cpu import table as cpu
from memplan.trace.semantics.cuda import table as cuda
from memplan.trace.semantics.kinds import Semantics
from memplan.trace.trace import Trace
from memplan.trace.workspaces import with_workspaces

Known = Callable[[Semantics], Semantics]
"""Extends a device's semantics by further known sizes and temporaries of its kernels."""


@public
def record(
    build: Runs,
    *,
    device: str | None = None,
    steps: int = 2,
    assume: Mapping[str, float] | None = None,
    cudnn: Environment = None,
    world: int | None = None,
    rank: int = 0,
    show_output: bool = False,
) -> Trace:
    """Run a step on fake tensors and return the trace of its allocations. Nothing is allocated, no GPU is needed.

    ``build`` and the step run again with each branch that a value decides in its other direction, and where the first
    direction ends in an exception.

    Args:
        build: constructs model, data and optimizer, and returns ``step``, a callable without arguments that runs a
            step. The same ``build`` works for `measure`.
        device: the device to predict for: ``"cpu"``, a card (``"h100"``, ``"rtx4090"``), or None for this machine's
            GPU, else the CPU. For a card, ``build`` may name CUDA; then tensors that stay on the CPU do not count. If
            it names CUDA nowhere, everything counts as on the card. ``build`` is called twice if only its first run
            shows which of the two holds.
        steps: how often the step runs. Two by default, since an optimizer creates its state in the first.
        assume: for ops that select by value (``x[mask]``, `nonzero`, `unique`): ``"train.py:31"`` -> share of the
            elements that is selected there, from 0 to 1. By default all, which the trace's assumptions report.
        cudnn: for a card, the cuDNN to query for workspaces of convolutions: the folder or the Python of an environment
            with a CUDA build of torch or with ``memplan[cudnn]``; or a version, such as ``"9.19.0"``, for which memplan
            has stored the workspaces of its examples and zoo, and others are expected sizes (``Trace.expected``). None:
            that of this environment, or else the version that the CUDA build of this torch uses. False: workspaces are
            intervals. Sizes measured on a real card of that name with that version take precedence.
        world, rank: record rank ``rank`` of ``world``. ``build`` is the same as for `torchrun`: `init_process_group`,
            `init_device_mesh`, `fully_shard`, `parallelize_module` and `DistributedDataParallel` get a fake process
            group, in which collectives do nothing, and torchrun's environment variables.
        show_output: whether to show the output of ``build`` and step. By default it is captured and counted, as values
            are placeholders; an error has the last lines as a note.

    Raises:
        StepError: ``build`` or the step raised, or ``build`` did not return a step; with layer and file:line.
        DataDependentError: the shape of a tensor depends on values, and its largest possible size is unknown.
        UsageError: invalid ``steps``, ``assume``, ``world`` or ``rank``.
        DeviceError: a device that memplan has no model of, or no cuDNN 9.8 or later in the named environment.

    Example:
        >>> def build():
        ...     model = torch.nn.Linear(512, 512)
        ...     data = torch.randn(64, 512)
        ...     return lambda: model(data).sum().backward()
        >>> print(memplan.record(build))
        recorded on cpu: 2 steps, 29 ops, 15 storages ...
    """
    check_steps(steps)
    with output_shown() if show_output else nullcontext():
        return record_for(build, choose_target(device, assume, cudnn, world, rank), steps)


def record_for(build: Runs, target: Target, steps: int = 2, known: Known = lambda semantics: semantics) -> Trace:
    """Record a step as `record` does, for a `Target`.

    Where an unknown value decides a branch, the step is recorded in both directions. ``known`` extends the semantics of
    the device's kernels, such as by workspaces that were measured.
    """
    as_rank = nullcontext()
    if target.world is not None and not isinstance(build, Program):  # a program creates its process groups itself
        as_rank = _torch.one_rank_of(target.world, target.rank)
    with recording_suspended(), as_rank:  # the step itself may record something
        trace = _record_compiled(target, known, build, steps)
        if target.world is None:
            return trace
        groups = tuple(RankGroup(*group) for group in _torch.rank_groups())
        notes = (*trace.notes, rank_note(target.world, target.rank, len(groups), trace))
        return replace(trace, notes=notes, groups=groups)


_Constructed = TypeVar("_Constructed")


def construct(make: Callable[[], _Constructed], target: Target) -> _Constructed:
    """Return what ``make`` constructs, on fake tensors, as `record` runs a ``build``: it may read values of tensors,
    create device meshes, and move tensors to the target's device. Raises StepError if ``make`` raised."""
    constructed: list[_Constructed] = []

    def build() -> Callable[[], None]:
        constructed.append(make())
        return lambda: None

    record_for(build, target, steps=1)
    return constructed[0]  # later ones are of further recordings, with branches in their other direction


def _record_compiled(target: Target, known: Known, build: Runs, steps: int) -> Trace:
    """Record a step that may use `torch.compile`; if the compiled code cannot be recorded, as if eager."""
    compiled = _Compiled()
    try:
        return _record_branches(target, known, build, steps, compiled)
    except RecordingError as error:
        if not compiled.seen:
            raise
        return _record_branches(target, known, build, steps, _Compiled(refused=_reason(error)))


@dataclass
class _Compiled:
    """How recordings of a step treat compiled functions."""

    refused: str = ""
    """Why compiled functions run as if eager; empty if their compiled code is recorded."""
    seen: bool = False
    """Whether the step has called a compiled function."""


def _reason(error: RecordingError) -> str:
    """Return the first line of the exception that ended the recording of a compiled step."""
    cause = getattr(error.__cause__, "inner_exception", error.__cause__)  # of torch's BackendCompilerFailed
    return f"{type(cause).__name__}: {cause}".strip().partition("\n")[0][:200]


def _record_branches(target: Target, known: Known, build: Runs, steps: int, compiled: _Compiled) -> Trace:
    """Record a step, and again with other branches and values where unknown values decide; return the trace with the
    largest peak."""
    recording, trace = _record_on_device(target, known, build, steps, compiled)
    most_ops = _OPS_FACTOR * len(trace.ops) + _EXTRA_OPS

    def record_again(overrides: Overrides) -> Recorded:
        other, outcome = _record(
            target, recording.on_card, known, build, steps, compiled, overrides, recording.counts, most_ops=most_ops
        )
        return Recorded(outcome, overrides, other.scalars.decisions)

    def has_time() -> bool:
        return not isinstance(build, Program) or build.has_time

    return explore_branches(Recorded(trace, recording.overrides, recording.scalars.decisions), record_again, has_time)


def _record_on_device(
    target: Target, known: Known, build: Runs, steps: int, compiled: _Compiled
) -> tuple[_Recording, Trace]:
    """Record a step, and a second time if only the first recording shows which storages are on the card.

    If ``build`` names no CUDA device, either the step does so later, and other tensors are on the host, or everything
    counts as on the card.
    """
    first, outcome = _record(target, "unknown", known, build, steps, compiled)
    if not first.names_cuda_late:
        if isinstance(outcome, RecordingError):
            raise outcome
        if outcome is not None:
            return first, outcome
    # otherwise an error may be due to the recording's claim that all tensors are on the card: record again
    on_card = "named" if first.names_cuda_late else "everything"
    second, second_outcome = _record(target, on_card, known, build, steps, compiled)
    if isinstance(second_outcome, RecordingError):
        raise second_outcome
    assert second_outcome is not None, "devices of the storages of build are settled"
    weights = [storage for storage in second_outcome.storages if storage.cause == "weight"]
    if isinstance(outcome, Trace) and weights and all(storage.device == HOST for storage in weights):
        return first, outcome  # the step took "cuda" from a tensor's device, which the recording had reported
    return second, second_outcome


_MAX_COUNTS = 32
"""Most selections whose size is inferred from other shapes: each takes another recording."""
_MAX_GUARDS = 8
"""Most branches that are overridden because the first direction raises an exception."""
_OPS_FACTOR, _EXTRA_OPS = 3, 20_000
"""A further recording is given up after three times the ops of the first recording plus 20,000: a loop that ends by a
value, as in generation, may be endless there."""


def _record(
    target: Target,
    on_card: OnCard,
    known: Known,
    build: Runs,
    steps: int,
    compiled: _Compiled,
    overrides: Overrides = frozenset(),
    counts: Mapping[Execution, int] | None = None,
    *,
    most_ops: int | None = None,
) -> tuple[_Recording, Trace | RecordingError | None]:
    """Record a step. If an assumption about an unknown value led to an exception, change the assumption and record
    again.

    Assumptions change in this order: a selection by values gets the number of elements that the other shapes in the
    error imply; scalar reads return their smallest possible value, as the largest may not fit; a branch that ends in a
    ``raise`` or ``assert`` goes in its other direction.

    Returns:
        The last recording, with its trace, the error that ended it, or None (see `_Recording.run`).

    Args:
        compiled: how compiled functions run; notes whether the step has any.
        overrides: branches that go in their other direction, and scalar reads that return another value.
        counts: executions of lines -> number of elements that values select there.
        most_ops: for further recordings, the number of ops after which to give up; scalar reads then follow
            ``overrides`` alone.
    """
    counts = dict(counts or {})
    first_error: StepError | None = None  # of the first direction of an overridden branch
    first_misfit: StepError | None = None  # of an op that refused the largest values
    while True:
        recording = _Recording(target, on_card, known, overrides, counts, compiled)
        recording.observer.most_ops = most_ops
        try:
            return recording, recording.run(build, steps)
        except StepError as error:
            cause = error.__cause__
            if not raised_by_statement(cause):  # an op refused its arguments
                selected = recording.scalars.last_bound
                if selected is not None and cause is not None and selected == frame_of_error(cause):
                    execution = selected, recording.bounds.last_execution
                    count = count_from_shape_error(cause, recording.scalars.last_selected)
                    if count is None or execution in counts or len(counts) == _MAX_COUNTS:
                        return recording, _wrong_count(error, selected, counted=execution in counts)
                    counts[execution] = count
                    continue
                smallest = recording.smallest_values - overrides
                if most_ops is None and smallest:
                    first_misfit, overrides = first_misfit or error, overrides | smallest
                    continue
                error = first_misfit or error
                if may_hold_symbolic(error.__cause__):
                    return recording, _unknown_argument(error)
                return recording, _both_directions(first_error, error, overrides)
            decision = recording.last_decision
            if decision is None or decision in overrides or len(overrides) == _MAX_GUARDS:
                return recording, _both_directions(first_error, error, overrides)
            first_error, overrides = first_error or error, overrides | {decision}
        except RecordingError as error:
            return recording, _both_directions(first_error, error, overrides)


def _unknown_argument(error: StepError) -> DataDependentError:
    """Return the error to raise where an op refused the placeholder of an unknown value."""
    unknown = DataDependentError(
        f"a value that was read is a size or an argument here, and recording has no values: {error.found}",
        expected="sizes and arguments that follow from the shapes of the inputs",
        do="Run memplan.measure(build) instead: it really runs the step",
    )
    unknown.layer, unknown.where, unknown.__cause__ = error.layer, error.where, error.__cause__
    return unknown


def _wrong_count(error: StepError, selected: Line, *, counted: bool) -> DataDependentError:
    """Return the error to raise where an op refuses the number of elements that values were assumed to select at the
    line ``selected``.

    ``counted``: the number was inferred from other shapes; else it is the largest possible.
    """
    line = format_frame(selected)
    size = "as large as the shapes beside it say" if counted else "at its largest"
    mismatch = DataDependentError(
        f"what values select at {line} is taken {size}, and then {error.found}",
        expected="sizes that fit whatever is selected, or the share that is selected when it really runs",
        do=f"Give the share, as in --assume {line}=0.5 (assume={{'{line}': 0.5}}); or run memplan.measure(build)",
    )
    mismatch.layer, mismatch.where, mismatch.__cause__ = error.layer, error.where, error.__cause__
    return mismatch


def _both_directions(first: StepError | None, later: RecordingError, overrides: Overrides) -> RecordingError:
    """Return the error of the first direction of the overridden branches, with what happened in the other (``later``);
    ``later`` itself if no branch is overridden (``first`` is None)."""
    if first is None:
        return later
    places = ", ".join(sorted(str(format_frame(line)) for line, kind in overrides if kind == "branch"))
    then = "it ends so, too" if later.found == first.found else later.found
    joined = StepError(
        f"{first.found}; a value decides at {places} that a recording does not know, and the other way {then}",
        expected=first.expected, do=first.do,
    )  # fmt: skip
    joined.layer, joined.where, joined.__cause__ = first.layer, first.where, first.__cause__
    return joined


_BENCHMARK = "torch.backends.cudnn.benchmark = True: a convolution's first call with a shape tries all algorithms"


class _Recording(ObservedRun):
    """A single recording of a step on fake tensors, under overrides of branches and scalar reads."""

    def __init__(
        self,
        target: Target,
        on_card: OnCard,
        known: Known,
        overrides: Overrides,
        counts: Mapping[Execution, int],
        compiled: _Compiled,
    ) -> None:
        """Connect the parts of a recording: fake tensors, their observer, answers to scalar reads and, for a card, the
        devices of tensors.

        Args:
            target: what the step is recorded for.
            on_card: whether the step names CUDA, as far as known ("unknown", "named", "everything").
            known: extends the semantics of the device's kernels.
            overrides: branches that go in their other direction, and scalar reads that return another value.
            counts: executions of lines -> number of elements that values select there.
            compiled: how compiled functions run; notes whether the step has any.
        """
        self.on_card: OnCard = on_card
        self._compiled = compiled
        self.counts = counts
        self.overrides = overrides
        self._target = target
        place = Place()
        self._printed = CapturedOutput()
        self._shares = Shares(target.assumed)
        self.scalars = ScalarPolicy(self._shares, overrides)
        super().__init__(Observer(place, real=False, semantics=known(cpu.SEMANTICS), events=self.scalars))
        self.bounds = Bounds(self._shares, self.scalars.bounded, self.observer.ranges.of, counts)
        """Results of ops whose size depends on values."""
        self._mode = _torch.FakeMode(
            self.observer.dispatch, lambda func, args, kwargs: self.bounds.result(func, args, kwargs, user_frame())
        )
        """Fake tensors, which the observer sees."""
        self.observer.fake_of = self._mode.fake_of
        self.observer.needs_of_wrapped = self._mode.needs_of_wrapped
        self._mode.on_launch = self.observer.launched
        self._card: Card | None = None
        """None in a recording for the CPU."""
        self._other_kernels: set[tuple[int, int]] = set()
        """Architectures on which composite ops decompose to other kernels."""
        self._differing: set[str] = set()
        """Cards of the catalogue on which the step runs the same kernels, but allocates differently."""
        self._parts: StepParts | None = None
        """What was recorded, once the run has ended."""
        self._lines: LineWatch | None = None
        """Which lines run, while it is watched."""
        self._loading = LoaderWatch(self.observer.ledger, pins=target.card is not None)
        self._running = Running(target, self._suspended, loading=self._loading)
        if target.card is not None:
            # functions, as their values change while the step runs
            inside = lambda: self._mode.inside  # noqa: E731
            self._card = Card(self.observer.ledger, inside, self._mode.owns, on_card)
            self.observer.card = self._card
            self._mode.placing = self._card.placing_as_named
            stream = lambda: self.observer.ledger.stream  # noqa: E731
            self.observer.semantics = known(
                cuda.semantics(target.card, stream, self._card.holds, target.cudnn is not None, self._differing)
            )

    @property
    def names_cuda_late(self) -> bool:
        """Return whether the step named a CUDA device although `build` had not."""
        return self._card is not None and self._card.names_cuda_late

    @property
    def last_decision(self) -> Choice | None:
        """Return the last branch that an unknown value decided."""
        line = self.scalars.last_decision
        return None if line is None else Choice(line, "branch")

    @property
    def smallest_values(self) -> Overrides:
        """Return the overrides by which all scalar reads of known range return the smallest possible value."""
        reads = self.scalars.decisions.reads
        return frozenset(Choice(line, "other value") for line, read in reads.items() if read.bounded)

    @contextmanager
    def _in_thread(self) -> Iterator[None]:
        """Record in a thread that the step starts, since modes are thread-local."""
        with recording_thread(), self._mode.in_thread(), self._printed.in_thread():
            yield

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        """Suspend the recording, while the step itself calls functions of memplan."""
        with (
            self.observer.place.suspending(), _torch.without_global_hooks(), _torch.without_function_modes(),
            self._mode.suspending(),
        ):  # fmt: skip
            yield

    def run(self, build: Runs, steps: int) -> Trace | None:
        """Build and run the step.

        Returns:
            The trace; None if `build` did not name CUDA and ran CPU kernels, which have to be recorded as CUDA's.
        """
        place, observer = self.observer.place, self.observer
        with undisturbed(cuda=self._card is not None), ExitStack() as stack:
            if not isinstance(build, Program):  # a script's process captures its own output
                stack.enter_context(self._printed.capturing())
            patches = stack.enter_context(tracked())
            resize = torch.UntypedStorage.resize_
            resized = lambda storage, size: observer.ledger.resize(storage, size, resize)  # noqa: E731
            stack.enter_context(_torch.patched(torch.UntypedStorage, resize_=resized))
            stack.enter_context(self.scalars.installed(observer, self._mode))
            stack.enter_context(self._compiling(patches))
            if self._card is not None and self._target.card is not None:
                chosen = self.scalars.assumed.kernel_chosen
                composites = stack.enter_context(
                    fake_cuda.installed(self._card, self._target.card, chosen, self._differing, self.observer.launched)
                )
                self._mode.replacements, self._other_kernels = composites, composites.differing
            stack.enter_context(self.scalars.making_tensors(observer))
            stack.enter_context(_torch.around_cache_clearing(observer.ledger.freed_in_order))
            stack.enter_context(self._mode.recording())
            stack.enter_context(_torch.around_started_threads(self._in_thread))
            observer.calibrate()
            stack.enter_context(place.following())
            self._lines = stack.enter_context(watching(lambda: observer.ledger.clock))
            stack.enter_context(recording_runs(self._running))
            stack.enter_context(self._loading.watching())
            try:
                run_steps(build, steps, observer, self)
            except _Unsettled:
                return None
            is_benchmarking = torch.backends.cudnn.benchmark
        return self._recorded_trace(self._notes(is_benchmarking))

    def _notes(self, is_benchmarking: bool) -> tuple[str, ...]:
        """Return the notes of the trace."""
        notes = self._target.notes + note_about_outside(self.observer.ledger.outside_bytes)
        notes += self._shares.unused + self._printed.note()
        if self._card is not None:
            notes += _environment()
            notes += (_BENCHMARK,) if is_benchmarking else ()
        if self._compiled.seen and not self._compiled.refused:
            notes += (COMPILED,) if self._card is None else (COMPILED, COMPILED_FOR_CARD)
        return (*notes, *self._running.notes)

    def _recorded_trace(self, notes: tuple[str, ...]) -> Trace:
        """Return the trace of the run, with the workspaces that the target's cuDNN chooses."""
        assert self._parts is not None, "the run has ended"
        other_kernels = tuple(other.name for other in catalogue() if other.architecture in self._other_kernels)
        queries = {entry.id: entry.query for entry in self.observer.ledger.entries if entry.query is not None}
        # events after the last step (a trainer empties the cache when it ends) are not recorded
        calls = () if self._card is None else (call for call in self._card.calls if call.tick <= self._parts.end)
        trace = trace_of(
            self._parts, origin="recorded", device=self._target.name, notes=notes,
            assumptions=self.scalars.assumed.rows(), calls=tuple(calls),
            other_kernels=other_kernels, alike=() if queries else self._alike(other_kernels),
            collected=tuple(self.collected), loaders=self._loading.rows(), host=self._loading.host(),
        )  # fmt: skip
        if not queries or self._target.cudnn is None or self._target.card is None:
            return trace
        return with_workspaces(trace, queries, self._target.cudnn, self._target.card)

    def _alike(self, other_kernels: Sequence[str]) -> tuple[str, ...]:
        """Return the cards of the catalogue on which the step allocates the same as on the recorded one."""
        if self._target.card is None:
            return ()
        unlike = {*other_kernels, *self._differing, self._target.card.name}
        return tuple(other.name for other in catalogue() if other.name not in unlike)

    @contextmanager
    def _compiling(self, patches: list[Patch]) -> Iterator[None]:
        """Within this context, record the compiled code of compiled functions, or run them as if eager.

        ``patches``: the recording's patches of torch, which Dynamo cannot trace. They are undone while it compiles and
        while compiled code runs, and back in functions that `torch.compiler.disable` excludes.
        """

        def note_call() -> None:
            """Note that the step calls a compiled function; if that runs as if eager, as an assumption."""
            self._compiled.seen = True
            if self._compiled.refused:
                self.scalars.assumed.add("compiled", f"{AS_IF_EAGER} (not followed: {self._compiled.refused})")

        if self._compiled.refused:
            with _torch.eager_instead_of_compiled(note_call, lambda: unpatched(patches)):
                yield
            return

        undone: list[Patch] = []

        @contextmanager
        def around_call() -> Iterator[None]:
            """Context of a call of a compiled function: without patches of torch and global hooks."""
            note_call()
            in_compiled = nullcontext() if self._card is None else self._card.in_compiled()
            with unpatched(patches) as undone[:], _torch.without_global_hooks(), in_compiled:
                yield

        @contextmanager
        def around_disabled() -> Iterator[None]:
            """Context of a function that `torch.compiler.disable` excludes: recorded as usual, with the patches."""
            as_usual = nullcontext() if self._card is None else self._card.in_compiled(within=False)
            with repatched(patches, undone), as_usual:
                yield

        @contextmanager
        def around_compiling() -> Iterator[None]:
            """Context of the compilation itself: without patches of torch and dispatch modes."""
            in_compiled = nullcontext() if self._card is None else self._card.in_compiled()
            with unpatched(patches), _torch.no_modes(), in_compiled:
                yield

        with (
            # without a warning about the recording's hooks
            _torch.compiled_modules_seen(lambda: None, lambda: unpatched(patches)),
            _torch.compiled_without_kernels(
                around_call, around_disabled, around_compiling, self.observer.launched, self._device_for
            ),
        ):
            yield

    def _device_for(self, arguments: Sequence[Any]) -> str:
        """Return the device on which a compiled function with these arguments allocates."""
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        on_card = self._card is not None and (self._card.everything or any(map(self._card.holds, tensors)))
        return ON_CARD if on_card else HOST

    def built(self) -> None:
        """Register the modules that `build` constructed, and the devices of its storages. Raises _Unsettled if `build`
        has to be recorded again, on the card."""
        if self._card is not None:
            # CPU kernels ran before it was known that everything is on the card
            if not self._card.fixed_precision and any(cuda.is_own(note.name) for note in self.observer.notes):
                raise _Unsettled
            self._card.end_build()
        super().built()

    def ended(self) -> None:
        """Assemble the trace's parts now, since layers get their names from modules that are still alive."""
        if self._lines is not None:
            self._lines.stop()
        self.observer.ledger.close()
        self._parts = finish(self.observer, self.ticks, self._lines.rows() if self._lines else ())


class _Unsettled(BaseException):
    """Ends a recording in which `build` did not name CUDA and ran ops, which have to be recorded as on the card.

    A BaseException, to pass through the user's ``except Exception``.
    """


def _environment() -> tuple[str, ...]:
    """Return notes about environment variables that change the memory of a step on a card."""
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if not config:
        return ()
    return (f"CUBLAS_WORKSPACE_CONFIG={config} is set here (importing MONAI does so) and sizes cuBLAS's workspaces",)
