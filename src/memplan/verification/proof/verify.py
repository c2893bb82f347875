"""Run a candidate beside a reference, step by step, and compare everything that a training step leaves behind."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from memplan.verification.measurement.state_copies import RandomState, as_trained
from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.proof.differences import Compared, Difference, difference, named_outputs, output_differences
from memplan.verification.proof.proof import KINDS, Proof, nothing_compared
from memplan.verification.proof.rounding import (
    EXACT,
    Rounded,
    Tolerance,
    floating,
    is_truth,
    is_yardstick,
    rounded,
    serious,
    told_truth,
)


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
        pairs: how many times both are timed; 0: not at all.

    Raises:
        TargetError: neither modules nor callables.
        InputError: parameters of other names, or wrong inputs, as in `memplan.explain`.

    Example:
        >>> memplan.verify(model, model, images, targets=labels, loss=F.cross_entropy).ok
        True
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"steps={steps!r}", expected="a whole number of steps, at least 1")
    options = StepOptions(
        inputs, kwargs, tuple(targets) if isinstance(targets, (list, tuple)) else (targets,), loss, optimizer, autocast
    ).checked()
    assert options.autocast is None or isinstance(options.autocast, torch.dtype), "options were checked"
    work = Work(
        options.inputs, options.kwargs, options.targets, *options.callables, options.autocast, micro_batches
    )  # fmt: skip
    modules = _modules(reference, candidate)
    running = running_recording()
    if running is not None:  # which has no values to compare, or has the profiler
        running.notes["memplan.verify was skipped: in a recorded or measured script it compares nothing"] = None
        return nothing_compared()
    with called("memplan.verify", profiles=True), alone(), as_trained():
        sides = Sides(Trial("reference", reference, modules[0], work))
        other = Trial("candidate", candidate, modules[1], work)
        _check_names(sides.reference, other)
        proof = compare(sides, other, steps, budget=budget)
        return proof if pairs == 0 else with_times(proof, sides.reference, other, pairs)


@dataclass(frozen=True)
class Sides:
    """Steps that a candidate is held against."""

    reference: Trial
    """The step without a plan."""
    truth: Trial | None = None
    """The same in float64, where bits may differ."""
    yardstick: Trial | None = None
    """Another way to run the step whose errors are accepted: `torch.compile`, a second run, plain autocast."""


def compare(
    sides: Sides,
    candidate: Trial,
    steps: int,
    tolerance: Tolerance = EXACT,
    *,
    predicted: int | None = None,
    budget: int | None = None,
) -> Proof:
    """Run a candidate beside the step without a plan, step by step. Random streams move on: the caller restores them.

    Where bits may differ, errors are measured from the step in float64; where that does not run, or draws other random
    numbers, from the step without a plan. The yardstick says what is allowed; where it does not run, or is too far off
    (`rounding.is_yardstick`), the step without a plan does, and where errors are measured from that, the tolerance's
    few eps alone. A candidate that is as near to float64 as the step without a plan needs no yardstick, unless it is
    lossy.

    Args:
        sides, candidate: trials that have not run yet.
        steps: how many are compared.
        tolerance: `EXACT`, `ROUNDING` or `LOSSY`; ``predicted`` and ``budget`` are bytes, for the proof.
    """
    if tolerance.grade == "exact":
        return _compare_once(sides.reference, candidate, steps, None, predicted, budget)
    failures, started = list[Exception](), False

    def attempt(truth: Trial, *yardsticks: Trial) -> Proof | None:
        nonlocal started
        for side in dict.fromkeys((sides.reference, candidate, truth, *yardsticks)) if started else ():
            side.restart_as(sides.reference)
        started, scale = True, _Scale(truth, yardsticks, tolerance)
        try:
            return _compare_once(sides.reference, candidate, steps, scale, predicted, budget)
        except Exception as error:  # the model's own code runs, which may insist on a dtype
            traceback.clear_frames(error.__traceback__)  # what they hold would be freed in the next attempt's peak
            failures.append(error)
            return None

    try:
        for truth in filter(None, (sides.truth, sides.reference)):
            exact, own = truth is not sides.reference, None
            if exact and tolerance.grade == "reordered":
                own = attempt(truth)
                if own is None or not is_truth(own.rounded):
                    continue
                if own.same or own.random_streams:
                    return own
            beside = None if sides.yardstick is None else attempt(truth, sides.yardstick)
            if beside is not None:
                if exact and own is None and not is_truth(beside.rounded):
                    continue
                if is_yardstick(beside.rounded, tolerance, exact=exact):
                    return beside
            own = own or attempt(truth)
            if own is not None and (not exact or is_truth(own.rounded)):
                return own
        raise failures[-1]
    finally:
        failures.clear()  # they hold this frame


def _compare_once(
    reference: Trial, candidate: Trial, steps: int, scale: _Scale | None, predicted: int | None, budget: int | None
) -> Proof:
    """Compare bit for bit, or by a scale. With a scale each step begins where the reference's does, and parameters are
    not compared unless the backward pass updates them: they follow from the gradients."""
    found = _Differences(scale)
    found.start(reference, candidate)
    sides = tuple(dict.fromkeys((reference, candidate, *(() if scale is None else scale.sides))))
    resident = 0, 0
    with _rested(sides), Meter() as meter:
        for step in range(steps):
            before = RandomState.now()
            for side in sides:
                side.prepare()
                before.restore()
                side.gradients_of_step(meter)
                found.after[side.name] = RandomState.now()
            resident = candidate.resident, reference.resident
            found.step(step, reference, candidate)
            for side in sides if candidate.in_backward else (reference, candidate):
                side.update_step(meter)
            found.update(step, reference, candidate)
            found.after[reference.name].restore()
            for side in sides:
                side.rest()
    return Proof(
        steps=steps,
        micro_batches=reference.work.micro_batches,
        optimizer="no optimizer" if reference.update is None else type(reference.update).__name__,
        early=candidate.in_backward,
        outputs=found.compared("outputs"),
        gradients=found.compared("gradients"),
        parameters=found.compared("parameters"),
        buffers=found.compared("buffers"),
        random_streams=tuple(found.streams),
        resident=resident[0],
        peak=resident[0] + meter.measured(candidate.name).growth_peak,
        reference_peak=resident[1] + meter.measured(reference.name).growth_peak,
        predicted=predicted,
        budget=budget,
        torch=torch.__version__,
        grade="exact" if scale is None else scale.tolerance.grade,
        rounded=tuple(found.rounded),
        truth="" if scale is None else scale.truth.name,
    )


@contextmanager
def _rested(sides: Iterable[Trial]) -> Iterator[None]:
    """Let all sides rest where one fails: what another attempt would free counts against its peak."""
    try:
        yield
    finally:
        for side in sides:
            side.rest()


def with_times(proof: Proof, reference: Trial, candidate: Trial, pairs: int) -> Proof:
    """Add the seconds of both sides, which have run before and rest now."""
    return replace(proof, times=compare_times(reference.seconds, candidate.seconds, pairs))


@dataclass(frozen=True)
class _Scale:
    """How errors are judged."""

    truth: Trial
    """The step from which they are measured: in float64, or the reference."""
    yardsticks: tuple[Trial, ...]
    """Steps whose errors are accepted, beside the reference."""
    tolerance: Tolerance

    @property
    def sides(self) -> tuple[Trial, ...]:
        return (self.truth, *self.yardsticks)


@dataclass
class _Differences:
    """Differences up to now. After the first step with one nothing is compared: what comes later follows from it."""

    scale: _Scale | None
    tensors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    differences: dict[str, list[Difference]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    rounded: list[Rounded] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    after: dict[str, RandomState] = field(default_factory=dict)
    """By side, the random streams after its backward pass."""
    _stopped: bool = False
    _before: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters before the step, in float64, where their updates are compared."""
    _eps: dict[str, float] = field(default_factory=dict)
    """By parameter, the eps of its dtype."""

    def start(self, reference: Trial, candidate: Trial) -> None:
        """Check that both sides begin with the same values.

        Raises:
            InputError: a parameter or a buffer differs.
        """
        theirs = candidate.parameters | candidate.buffers
        for name, one in (reference.parameters | reference.buffers).items():
            if difference(name, 0, one, theirs.get(name)) is not None:
                raise InputError(
                    f"{name} is not the same in reference and candidate",
                    expected="modules with the same parameters and buffers",
                    do="Load the one's state_dict into the other",
                )
        self._note(reference, candidate)

    def _note(self, reference: Trial, candidate: Trial) -> None:
        if candidate.in_backward and self.scale is not None:
            named = floating(reference.parameters)
            self._before = {name: one.detach().to(torch.float64, copy=True) for name, one in named.items()}
            self._eps = {name: torch.finfo(one.dtype).eps for name, one in named.items()}

    def _judged(self, kind: str, named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors whose errors are judged; for parameters whose values before are known, their updates."""
        tensors = floating(named)
        if kind != "parameters" or not self._before:
            return tensors
        return {name: one.detach().to(torch.float64) - self._before[name] for name, one in tensors.items()}

    def _coarse(self, kind: str, named: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Allow an update one eps of its parameter: the sum of both cannot be nearer."""
        if kind != "parameters" or not self._before:
            return {}
        return {name: self._eps[name] * float(self._before[name].norm()) for name in named if name in self._eps}

    def step(self, step: int, reference: Trial, candidate: Trial) -> None:
        """Compare what the backward passes have left."""
        if self._stopped:
            return
        number, differences = output_differences(step, reference.output, candidate.output)
        self._add("outputs", step, (reference, candidate), lambda side: named_outputs(side.output), differences, number)
        if not candidate.in_backward:
            self._named("gradients", step, reference, candidate)
        self._named("buffers", step, reference, candidate)
        self.streams += self.after[reference.name].differing(self.after[candidate.name])

    def update(self, step: int, reference: Trial, candidate: Trial) -> None:
        """Compare what the updates have left."""
        if self._stopped:
            return
        if self.scale is None or candidate.in_backward:
            self._named("parameters", step, reference, candidate)
        if self.scale is not None:
            for side in (candidate, *self.scale.sides):
                side.begin_as(reference)
            self._note(reference, candidate)
        self._stopped = bool(self.streams or any(self.differences.values()))

    def compared(self, kind: str) -> Compared:
        """Return the comparison of a kind."""
        return Compared(self.tensors[kind], tuple(self.differences[kind]))

    def _named(self, kind: str, step: int, reference: Trial, candidate: Trial) -> None:
        ours, theirs = getattr(reference, kind), getattr(candidate, kind)
        names = ours.keys() | theirs.keys()
        all_of = [difference(name, step, ours.get(name), theirs.get(name)) for name in names]
        differences = [one for one in all_of if one is not None]
        self._add(kind, step, (reference, candidate), lambda side: getattr(side, kind), differences, len(names))

    def _add(
        self,
        kind: str,
        step: int,
        sides: tuple[Trial, Trial],
        named: Callable[[Trial], Mapping[str, Any]],
        differences: list[Difference],
        number: int,
    ) -> None:
        """Note differences; where rounding is allowed, only those that are more."""
        self.tensors[kind] += number
        if self.scale is not None:
            reference, candidate = sides
            others = [self._judged(kind, named(side)) for side in (reference, *self.scale.yardsticks)]
            truth, ours = self._judged(kind, named(self.scale.truth)), self._judged(kind, named(candidate))
            judged = rounded(kind, step, truth, others, ours, self.scale.tolerance, self._coarse(kind, ours))
            self.rounded += judged
            differences = serious(differences, judged, told_truth(self.scale.truth.name))
        self.differences[kind] = sorted(self.differences[kind] + differences, key=lambda one: one.name)


def _modules(reference: Any, candidate: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the modules whose state each runs on."""
    for what in (reference, candidate):
        if not callable(what):
            raise TargetError(f"{type(what).__name__} {what!r:.60}", expected="a module or a callable", do="Pass one")
    one = reference if isinstance(reference, nn.Module) else None
    other = candidate if isinstance(candidate, nn.Module) else None
    return (one or other, other or one)


def _check_names(reference: Trial, candidate: Trial) -> None:
    for what in ("parameters", "buffers"):
        ours, theirs = getattr(reference, what).keys(), getattr(candidate, what).keys()
        if ours != theirs:
            raise InputError(
                f"the candidate's {what} are not the reference's: {', '.join(sorted(ours ^ theirs)[:5])} in one only",
                expected="modules with the same names",
                do="Compare a model with a copy of itself",
            )
