"""Run a candidate beside a reference, step by step, and compare everything that a training step leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan.errors import InputError, TargetError, UsageError
from memplan.trace.step import StepOptions
from memplan.verification.differences import Compared, Difference, difference, output_differences
from memplan.verification.measured import Meter, compare_times
from memplan.verification.proof import KINDS, Proof
from memplan.verification.states import RandomState, random_state_kept
from memplan.verification.trial import Trial, Work


def verify(
    reference: Any,
    candidate: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    autocast: torch.dtype | str | None = None,
    steps: int = 3,
    micro_batches: int = 1,
    budget: int | None = None,
    pairs: int = 5,
) -> Proof:
    """Run both for some steps from the same state, and compare outputs, gradients, buffers, random streams and updated
    parameters bit for bit; measure the peak of each and the time.

    Parameters, buffers and ``.grad`` of both, the inputs and the random state stay as they are: copies are used.

    Args:
        reference, candidate: modules with the same names of parameters and the same values, or callables. A callable
            beside a module runs on that module's parameters.
        inputs, kwargs, targets, loss, autocast: as for `memplan.explain`.
        optimizer: a callable of the parameters. SGD with momentum where none is given; then no update is part of the
            measured peak.
        steps: how many are compared, one after the other.
        micro_batches: backward passes before each update.
        budget: bytes that the candidate's measured peak may reach; None: any.
        pairs: how many times both are timed; 0: not at all.

    Raises:
        TargetError: neither modules nor callables.
        InputError: parameters of other names, or what `memplan.explain` raises it for.

    Example:
        >>> memplan.verify(model, checkpointed, "8x3x32x32").ok
        True
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"steps={steps!r}", expected="a whole number of steps, at least 1")
    options = StepOptions(
        inputs, kwargs, tuple(targets) if isinstance(targets, (list, tuple)) else (targets,), loss, optimizer, autocast
    ).checked()
    assert options.autocast is None or isinstance(options.autocast, torch.dtype), "options were checked"
    work = Work(
        options.inputs, options.kwargs, options.targets, loss, optimizer, options.autocast, micro_batches
    )  # fmt: skip
    modules = _modules(reference, candidate)
    with random_state_kept():
        one = Trial("reference", reference, modules[0], work)
        other = Trial("candidate", candidate, modules[1], work)
        _check_names(one, other)
        proof = compare(one, other, steps, budget=budget)
        return proof if pairs == 0 else with_times(proof, one, other, pairs)


def compare(
    reference: Trial, candidate: Trial, steps: int, *, predicted: int | None = None, budget: int | None = None
) -> Proof:
    """Run both sides step by step. Random streams move on: the caller puts them back.

    Args:
        reference, candidate: sides that have not run yet.
        steps: how many.
        predicted, budget: bytes, for the proof.
    """
    found = _Found()
    found.start(reference, candidate)
    resident = 0, 0
    with Meter() as meter:
        for step in range(steps):
            before = RandomState.now()
            for side in (reference, candidate):
                side.prepare()
                before.restore()
                side.gradients_of_step(meter)
                found.after[side.name] = RandomState.now()
            resident = candidate.resident, reference.resident
            found.step(step, reference, candidate)
            for side in (reference, candidate):
                side.update_step(meter)
            found.update(step, reference, candidate)
            found.after[reference.name].restore()
            for side in (reference, candidate):
                side.rest()
    return Proof(
        steps=steps,
        micro_batches=reference.work.micro_batches,
        optimizer="no optimizer" if reference.update is None else type(reference.update).__name__,
        early=candidate.early,
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
    )


def with_times(proof: Proof, reference: Trial, candidate: Trial, pairs: int) -> Proof:
    """The proof with the seconds of both, which have run before and rest now."""
    return replace(proof, times=compare_times(reference.seconds, candidate.seconds, pairs))


@dataclass
class _Found:
    """What differs so far. After the first step that differs nothing is compared: what comes later follows from it."""

    tensors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    differences: dict[str, list[Difference]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    streams: list[str] = field(default_factory=list)
    after: dict[str, RandomState] = field(default_factory=dict)
    """By side: where the random streams are when its backward pass has ended."""
    _stopped: bool = False

    def start(self, reference: Trial, candidate: Trial) -> None:
        """Before the first step: the same values."""
        for name, one in (reference.parameters | reference.buffers).items():
            other = (candidate.parameters | candidate.buffers).get(name)
            if difference(name, 0, one, other) is not None:
                raise InputError(
                    f"{name} is not the same in reference and candidate",
                    expected="modules with the same parameters and buffers",
                    do="Load the one's state_dict into the other",
                )

    def step(self, step: int, reference: Trial, candidate: Trial) -> None:
        """After both backward passes."""
        if self._stopped:
            return
        number, differences = output_differences(step, reference.output, candidate.output)
        self.tensors["outputs"] += number
        self.differences["outputs"] += differences
        if not candidate.early:
            self._named("gradients", step, reference.gradients, candidate.gradients)
        self._named("buffers", step, reference.buffers, candidate.buffers)
        self.streams += self.after[reference.name].differing(self.after[candidate.name])

    def update(self, step: int, reference: Trial, candidate: Trial) -> None:
        """After both updates."""
        if self._stopped:
            return
        self._named("parameters", step, reference.parameters, candidate.parameters)
        self._stopped = bool(self.streams or any(self.differences.values()))

    def compared(self, kind: str) -> Compared:
        """All of one kind."""
        return Compared(self.tensors[kind], tuple(self.differences[kind]))

    def _named(self, kind: str, step: int, reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> None:
        for name in reference.keys() | candidate.keys():
            one = difference(name, step, reference.get(name), candidate.get(name))
            self.tensors[kind] += 1
            self.differences[kind] += [] if one is None else [one]
        self.differences[kind].sort(key=lambda one: one.name)


def _modules(reference: Any, candidate: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Whose state each runs on."""
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
