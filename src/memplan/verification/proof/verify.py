"""Run a candidate and a reference step by step, and compare everything that a training step computes and changes."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan.errors import InputError, TargetError, UsageError
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.recording.session import alone, called, running_recording
from memplan.trace.step import StepOptions
from memplan.verification.measurement.peak_and_time import Meter, compare_times
from memplan.verification.measurement.state_copies import RandomState, training_context
from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.proof.differences import Compared, Difference, difference, named_outputs, output_differences
from memplan.verification.proof.proof import KINDS, Proof, nothing_compared
from memplan.verification.proof.rounding import (
    EXACT,
    FACTOR,
    IN_FLOAT64,
    PROVEN,
    WITH_FLOAT32,
    Rounded,
    Tolerance,
    beyond_tolerance,
    describe,
    floating_point,
    is_truth,
    is_yardstick,
    rounding_errors,
    truth_label,
)

_log = logging.getLogger("memplan")
LONG_SECONDS = 1.0
"""Seconds of a step from which on its runs in the comparison count as timed."""
_COMPARED: tuple[tuple[str, Callable[[Trial], Mapping[str, Any]]], ...] = (
    ("outputs", lambda trial: named_outputs(trial.output)),
    ("gradients", lambda trial: trial.gradients),
    ("buffers", lambda trial: trial.buffers),
)
"""What is compared after a backward pass: how to get a trial's tensors by name, for each kind."""


def verify(
    reference: Any,
    candidate: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    autocast: torch.dtype | str | None = None,
    steps: int = 3,
    micro_batches: int = 1,
    budget: int | None = None,
    pairs: int = 5,
) -> Proof:
    """Run both for some steps from the same state, and compare outputs, gradients, buffers, random streams and updated
    parameters bit for bit; measure the peak and the time of each.

    Copies are used: parameters, buffers and ``.grad`` of both, the inputs and the random state do not change.

    Args:
        reference, candidate: modules with the same names of parameters and the same values, or callables. A callable
            beside a module runs on that module's parameters.
        inputs, kwargs, targets, loss, autocast: as for `memplan.explain`.
        optimizer: a callable of the parameters. Default: SGD with momentum, whose update is not part of the measured
            peak.
        steps: number of consecutive steps that are compared.
        micro_batches: number of backward passes before each update.
        budget: bytes that the candidate's measured peak may reach; None: any.
        pairs: how many times both are timed, runs of the comparison of a second or more included; 0: not at all.

    Raises:
        TargetError: neither modules nor callables.
        InputError: parameters of other names, or wrong inputs, as in `memplan.explain`.

    Example:
        >>> memplan.verify(model, model, images, targets=labels, loss=F.cross_entropy).ok
        True
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"steps={steps!r}", expected="a whole number of steps, at least 1")
    targets = tuple(targets) if isinstance(targets, (list, tuple)) else (targets,)
    options = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast).checked()
    assert options.autocast is None or isinstance(options.autocast, torch.dtype), "options were checked"
    work = Work(options.inputs, options.kwargs, options.targets, *options.callables, options.autocast, micro_batches)
    for function in (reference, candidate):
        if not callable(function):
            raise TargetError(
                f"{type(function).__name__} {function!r:.60}", expected="a module or a callable", do="Pass one"
            )
    own_modules = [function if isinstance(function, nn.Module) else None for function in (reference, candidate)]
    modules = own_modules[0] or own_modules[1], own_modules[1] or own_modules[0]
    running = running_recording()
    if running is not None:  # a recording has no values to compare, a measurement uses the profiler
        running.notes["memplan.verify was skipped: in a recorded or measured script it compares nothing"] = None
        return nothing_compared()
    with called("memplan.verify", profiles=True), alone(), training_context():
        reference_trial = Trial("reference", reference, modules[0], work)
        candidate_trial = Trial("candidate", candidate, modules[1], work)
        _check_names(reference_trial, candidate_trial)
        proof = compare(Baselines(reference_trial), candidate_trial, steps, budget=budget)
        return with_times(proof, reference_trial, candidate_trial, pairs) if pairs else proof


@dataclass(frozen=True)
class Baselines:
    """Trials that a candidate is compared with."""

    reference: Trial
    """The step without a plan."""
    truth: Trial | None = None
    """The same in float64, where bits may differ."""
    yardstick: Trial | None = None
    """Another execution of the step whose errors are accepted: `torch.compile`, a second run, plain autocast."""


@dataclass(frozen=True)
class InFloat64:
    """A candidate in float64, and what its comparison with the step in float64 needs."""

    candidate: Trial
    narrow: Collection[torch.dtype] = ()
    """Other floating-point dtypes that were seen in the step in float64, once that has run."""
    has_numbers: bool = False
    """Whether numbers of float32's in the candidate, such as its eps, became those of float64."""

    @property
    def may_be_other(self) -> bool:
        """Whether the step in float64 may not be the candidate's: one rounds to float32 where the other does not, or
        its code has a number of float32's for another reason."""
        return bool(self.narrow) or self.has_numbers

    def errors(self, step: int, truth: Trial) -> list[Rounded]:
        """Return the candidate's errors in a step that has run, from ``truth``, the step in float64."""
        tolerance, errors = WITH_FLOAT32 if self.narrow else IN_FLOAT64, list[Rounded]()
        for kind, tensors_of in _COMPARED:
            exact, candidate = floating_point(tensors_of(truth)), floating_point(tensors_of(self.candidate))
            errors += rounding_errors(kind, step, exact, [exact], candidate, tolerance)
        return errors


def compare(
    baselines: Baselines, candidate: Trial, steps: int, tolerance: Tolerance = EXACT, *,
    predicted: int | None = None, budget: int | None = None, in_float64: InFloat64 | None = None,
) -> Proof:  # fmt: skip
    """Compare a candidate with the step without a plan, step by step. Random streams advance: the caller restores them.

    Where bits may differ, errors are measured from the step in float64, or from the step without a plan where float64
    does not run or draws other random numbers. The errors of the yardstick are allowed. Where it does not run or is not
    accurate enough (`rounding.is_yardstick`), the errors of the step without a plan are allowed; where errors are
    measured from that step, only the tolerance's few eps are. For reordered sums the yardstick runs only in steps in
    which the candidate's error is not allowed without it; for lossy plans it always runs.

    With ``in_float64``, the candidate in float64, that is compared with the step in float64 in the first step. Rounding
    hardly matters there: what differs is an error, however many decisions rounding flips in float32. The candidate
    itself then has only to be near, and later steps run without float64.

    Trials have not run yet; ``predicted`` and ``budget`` are bytes, for the proof.
    """
    reference = baselines.reference
    if tolerance.grade == "exact":
        return _compare_once(reference, candidate, steps, criterion=None, predicted=predicted, budget=budget)
    failures, started, random_state = list[Exception](), False, RandomState.now()

    def attempt(
        truth: Trial, *yardsticks: Trial, spare: Trial | None = None, in_float64: InFloat64 | None = None
    ) -> Proof | None:
        """Compare by these trials; None if a trial raises. ``spare``, ``in_float64``: see `_compare_once`."""
        nonlocal started
        if started:
            for trial in dict.fromkeys((reference, candidate, truth, *yardsticks)):
                trial.restart_from(reference)
        started, criterion = True, _Criterion(truth, yardsticks, tolerance)
        try:
            return _compare_once(reference, candidate, steps, criterion, predicted, budget, spare, in_float64)
        except Exception as error:  # the model's code may not accept another dtype
            traceback.clear_frames(error.__traceback__)  # tensors freed in the next attempt would lower its peak
            failures.append(error)
            return None

    def has_truth(proof: Proof) -> bool:
        """Return whether float64 computed the same. The streams have advanced as the step without a plan advances."""
        return is_truth(proof.rounded, draws=bool(random_state.differences(RandomState.now())))

    try:
        for truth in filter(None, (baselines.truth, reference)):
            exact = truth is not reference
            if exact and tolerance.grade == "reordered":
                proof = None
                if in_float64 is not None:
                    proof = attempt(truth, spare=baselines.yardstick, in_float64=in_float64)
                    if proof is not None and in_float64.may_be_other and not all(e.within for e in proof.in_float64):
                        proof = None
                if proof is None:
                    proof = attempt(truth, spare=baselines.yardstick)
                if proof is not None and (has_truth(proof) or not all(e.within for e in proof.in_float64)):
                    return proof
                continue
            proof = None if baselines.yardstick is None else attempt(truth, baselines.yardstick)
            if proof is not None:
                if exact and not has_truth(proof):
                    continue
                if is_yardstick(proof.rounded, tolerance, exact=exact):
                    return proof
            without_yardstick = attempt(truth)
            if without_yardstick is not None and (not exact or has_truth(without_yardstick)):
                return without_yardstick
        raise failures[-1]
    finally:
        failures.clear()  # break the reference cycle: their tracebacks refer to this frame


def _compare_once(
    reference: Trial, candidate: Trial, steps: int, criterion: _Criterion | None, predicted: int | None,
    budget: int | None, spare: Trial | None = None, in_float64: InFloat64 | None = None,
) -> Proof:  # fmt: skip
    """Run all trials and compare candidate and reference, bit for bit (``criterion`` is None) or by a criterion.

    With a criterion each step begins with the reference's parameters. Early updates are compared bit for bit with those
    of the reference by the candidate's gradients. Other updates are compared only without a criterion: they follow from
    the gradients. ``predicted``, ``budget``: bytes, for the proof. ``spare``: a yardstick that runs only in steps in
    which the criterion does not allow an error. ``in_float64``: what is compared in float64, in the first step; later
    steps run in their own dtypes alone.
    """
    comparison = _Comparison(criterion)
    comparison.start(reference, candidate)
    trials = tuple(dict.fromkeys((reference, candidate, *(() if criterion is None else criterion.trials))))
    resident = reference_resident = 0
    all_trials = trials if in_float64 is None else (*trials, in_float64.candidate)
    with _releasing(all_trials), Meter() as meter:
        for step in range(steps):
            before = RandomState.now()
            if spare is not None:  # it may not have run in the step before
                spare.copy_numbers_from(reference)
            in_first = () if in_float64 is None or step else (in_float64.candidate,)
            for trial in (*trials, *in_first):
                trial.prepare()
                trial.record_gradients()
                before.restore()
                trial.gradients_of_step(meter)
                comparison.random_states[trial.name] = RandomState.now()
            resident, reference_resident = candidate.resident, reference.resident
            if in_first and in_float64 is not None:
                comparison.compare_in_float64(step, in_float64)
            so_far = comparison.copy()
            comparison.compare_backward(step, reference, candidate)
            if spare is not None and comparison.has_only_errors:
                before.restore()
                comparison = _with_yardstick(spare, so_far, step, reference, candidate) or comparison
            if candidate.in_backward:
                reference.set_gradients_from(candidate)
            for trial in (reference, candidate):
                trial.update_step(meter)
            comparison.compare_update(step, reference, candidate)
            comparison.random_states[reference.name].restore()
            for trial in (*trials, *in_first):
                trial.release()
            if spare is not None:
                spare.copy_state_from(reference)
            if in_first:
                comparison.measure_from(reference)
                trials, spare = (reference, candidate), None
    return Proof(
        steps=steps, micro_batches=reference.work.micro_batches,
        optimizer="no optimizer" if reference.update is None else type(reference.update).__name__,
        early=candidate.in_backward,
        outputs=comparison.compared("outputs"), gradients=comparison.compared("gradients"),
        parameters=comparison.compared("parameters"), buffers=comparison.compared("buffers"),
        state=comparison.compared("state"), random_streams=tuple(comparison.random_streams), resident=resident,
        peak=resident + candidate.initial_state_bytes + meter.measured(candidate.name).growth_peak,
        reference_peak=(
            reference_resident + reference.initial_state_bytes + meter.measured(reference.name).growth_peak
        ),
        predicted=predicted, budget=budget, torch=torch.__version__,
        grade="exact" if criterion is None else criterion.tolerance.grade,
        rounded=tuple(comparison.rounded), in_float64=tuple(comparison.in_float64),
        truth="" if criterion is None else criterion.truth.name,
    )  # fmt: skip


def _with_yardstick(
    yardstick: Trial, comparison: _Comparison, step: int, reference: Trial, candidate: Trial
) -> _Comparison | None:
    """Return the comparison with that of a step, in which the errors of a yardstick are allowed, too, after the other
    trials ran. None if the yardstick raises, or is not accurate enough."""
    criterion, known = comparison.criterion, len(comparison.rounded)
    assert criterion is not None, "only errors need a yardstick"
    try:
        yardstick.prepare()
        yardstick.gradients_of_step()
    except Exception:  # as in `compare`: its kernels may not accept the model
        _log.info("the yardstick of the proof does not run", exc_info=True)
        return None
    else:
        comparison.criterion = replace(criterion, yardsticks=(*criterion.yardsticks, yardstick))
        comparison.compare_backward(step, reference, candidate)
        comparison.criterion = criterion
        return comparison if is_yardstick(comparison.rounded[known:], criterion.tolerance) else None
    finally:
        yardstick.release()


@contextmanager
def _releasing(trials: Iterable[Trial]) -> Iterator[None]:
    """Release all trials at the end of this context, also after an error.

    Otherwise the next attempt would free their tensors while it is measured, which would distort its peak.
    """
    try:
        yield
    finally:
        for trial in trials:
            trial.release()


def with_times(proof: Proof, reference: Trial, candidate: Trial, pairs: int) -> Proof:
    """Return the proof with the times of both steps, which have run before.

    Long runs of the comparison are pairs, too, so that such steps run less often; one pair at least is timed here.
    """
    known = _long_runs(reference, candidate)[: max(0, pairs - 1)]
    return replace(proof, times=compare_times(reference.seconds, candidate.seconds, pairs, known))


def _long_runs(reference: Trial, candidate: Trial) -> list[tuple[float, float]]:
    """Return the seconds of the steps that both ran in a comparison on the CPU, if all took long.

    In short ones first runs, the profiler and the garbage collector weigh, and with early updates copies of gradients.
    """
    if candidate.in_backward or {reference.device, candidate.device} != {"cpu"}:
        return []
    pairs = list(zip(reference.run_seconds, candidate.run_seconds, strict=False))
    is_long = min((second for pair in pairs for second in pair), default=0.0) >= LONG_SECONDS
    return pairs[1:] if is_long else []  # the first run prepares kernels


@dataclass(frozen=True)
class _Criterion:
    """Which errors are allowed."""

    truth: Trial
    """The step from which errors are measured: in float64, or the reference."""
    yardsticks: tuple[Trial, ...]
    """Steps whose errors are allowed, in addition to the reference's."""
    tolerance: Tolerance
    known: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Errors that are allowed in addition, by kind and name."""

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials that it needs, in addition to the candidate."""
        return (self.truth, *self.yardsticks)


@dataclass
class _Comparison:
    """Differences so far. After the first step with a difference nothing is compared, as later ones follow from it."""

    criterion: _Criterion | None
    tensors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """Number of compared tensors by kind."""
    differences: dict[str, list[Difference]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    rounded: list[Rounded] = field(default_factory=list)
    in_float64: list[Rounded] = field(default_factory=list)
    """Errors of the candidate in float64."""
    random_streams: list[str] = field(default_factory=list)
    """Random streams that differ."""
    random_states: dict[str, RandomState] = field(default_factory=dict)
    """By trial, the random streams after its backward pass."""
    _stopped: bool = False
    """Whether a difference was found in an earlier step."""

    def start(self, reference: Trial, candidate: Trial) -> None:
        """Check that both begin with the same values. Raises InputError if a parameter or a buffer differs."""
        actual = candidate.parameters | candidate.buffers
        for name, tensor in (reference.parameters | reference.buffers).items():
            if difference(name, 0, tensor, actual.get(name)) is not None:
                raise InputError(
                    f"{name} is not the same in reference and candidate",
                    expected="modules with the same parameters and buffers",
                    do="Load the one's state_dict into the other",
                )

    def compare_backward(self, step: int, reference: Trial, candidate: Trial) -> None:
        """Compare outputs, gradients, buffers and random streams after the backward passes."""
        if self._stopped:
            return
        number, differences = output_differences(step, reference.output, candidate.output)
        self._record(
            "outputs", step, (reference, candidate), lambda trial: named_outputs(trial.output), differences, number
        )
        self._compare_named("gradients", step, reference, candidate)
        self._compare_named("buffers", step, reference, candidate)
        after = self.random_states
        self.random_streams += after[reference.name].differences(after[candidate.name])

    def compare_in_float64(self, step: int, trials: InFloat64) -> None:
        """Compare the candidate in float64 with the step in float64, after both ran. From then on, errors of the
        candidate itself may be larger.

        Raises:
            _OtherNumbersError: they drew other random numbers.
        """
        assert self.criterion is not None
        truth, after = self.criterion.truth, self.random_states
        if after[truth.name].differences(after[trials.candidate.name]):
            raise _OtherNumbersError
        self.in_float64 = errors = trials.errors(step, truth)
        for kind, _ in _COMPARED:
            self.differences[kind] += [
                Difference(error.name, step, f"in float64 {describe(error, 'the step without a plan')}")
                for error in errors
                if error.kind == kind and not error.within
            ]
        self.criterion = replace(self.criterion, tolerance=PROVEN)

    def measure_from(self, reference: Trial) -> None:
        """Measure the errors of later steps from the reference. Errors of the size of those in this step are allowed:
        rounding of both."""
        known = {(error.kind, error.name): FACTOR * (error.own + error.error) for error in self.rounded}
        self.criterion = _Criterion(reference, (), PROVEN, known)

    def compare_update(self, step: int, reference: Trial, candidate: Trial) -> None:
        """Compare the updated parameters, and the optimizer's state after early updates; with a criterion, let the next
        step begin with the reference's parameters."""
        if self._stopped:
            return
        if self.criterion is None or candidate.in_backward:
            self._compare_named("parameters", step, reference, candidate)
        if candidate.in_backward:
            self._compare_named("state", step, reference, candidate)
        if self.criterion is not None:
            for trial in (candidate, *self.criterion.trials):
                trial.copy_state_from(reference)
        self._stopped = bool(self.random_streams or any(self.differences.values()))

    def copy(self) -> _Comparison:
        """Return a copy to which further differences can be added."""
        return replace(
            self, tensors=dict(self.tensors), differences=dict(self.differences), rounded=[*self.rounded],
            random_streams=[*self.random_streams],
        )  # fmt: skip

    @property
    def has_only_errors(self) -> bool:
        """Whether tensors differ in the last compared step, but no random streams."""
        return not (self._stopped or self.random_streams) and any(self.differences.values())

    def compared(self, kind: str) -> Compared:
        """Return the comparison of a kind."""
        return Compared(self.tensors[kind], tuple(self.differences[kind]))

    def _compare_named(self, kind: str, step: int, reference: Trial, candidate: Trial) -> None:
        """Compare the gradients, parameters, buffers or optimizer's state of both trials by name."""
        expected, actual = getattr(reference, kind), getattr(candidate, kind)
        names = expected.keys() | actual.keys()
        results = [difference(name, step, expected.get(name), actual.get(name)) for name in names]
        differences = [result for result in results if result is not None]
        self._record(kind, step, (reference, candidate), lambda trial: getattr(trial, kind), differences, len(names))

    def _record(
        self, kind: str, step: int, trials: tuple[Trial, Trial], tensors_of: Callable[[Trial], Mapping[str, Any]],
        differences: list[Difference], number: int,
    ) -> None:  # fmt: skip
        """Add the differences of a kind of tensors to the comparison; with a criterion, only those that it does not
        allow, except for what an update changes: both updated by the same gradients. ``differences`` are tensors whose
        bits differ, of ``number`` that were compared; ``tensors_of`` returns a trial's tensors of this kind by name.
        """
        self.tensors[kind] += number
        if self.criterion is not None and kind not in ("parameters", "state"):
            reference, candidate = (floating_point(tensors_of(trial)) for trial in trials)
            yardsticks = [floating_point(tensors_of(trial)) for trial in self.criterion.yardsticks]
            truth = floating_point(tensors_of(self.criterion.truth))
            errors = rounding_errors(kind, step, truth, [reference, *yardsticks], candidate, self.criterion.tolerance)
            if self.criterion.known:
                known = self.criterion.known
                errors = [replace(e, allowed=e.allowed + known.get((kind, e.name), 0.0)) for e in errors]
            else:  # others are measured from another step
                self.rounded += errors
            differences = beyond_tolerance(differences, errors, truth_label(self.criterion.truth.name))
        self.differences[kind] = sorted(self.differences[kind] + differences, key=lambda item: item.name)


class _OtherNumbersError(Exception):
    """Two steps in float64 drew other random numbers."""


def _check_names(reference: Trial, candidate: Trial) -> None:
    """Raise InputError unless both trials have the same names of parameters and buffers."""
    for what in ("parameters", "buffers"):
        expected, actual = getattr(reference, what).keys(), getattr(candidate, what).keys()
        if expected != actual:
            names = ", ".join(sorted(expected ^ actual)[:5])
            raise InputError(
                f"the candidate's {what} are not the reference's: {names} in one only",
                expected="modules with the same names",
                do="Compare a model with a copy of itself",
            )
