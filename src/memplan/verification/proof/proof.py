"""The `Proof` dataclass: results of comparing a candidate step with the original one, and its measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._json import Saved
from memplan.planning.plan.plan import Grade
from memplan.verification.measurement.peak_and_time import Times
from memplan.verification.proof.differences import Compared
from memplan.verification.proof.moments import MomentsError
from memplan.verification.proof.rounding import LayerError, Rounded, by_layer, overall, truth_label

KINDS = ("outputs", "gradients", "parameters", "state", "buffers")
_SUBJECTS = {
    "outputs": "",
    "gradients": "the gradient of ",
    "parameters": "after the update ",
    "state": "after the update ",
    "buffers": "the buffer ",
}
"""By kind, the text before a `Difference`."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The step with fewer samples that was compared where memory does not suffice for two copies of the whole step."""

    samples: int
    """Length of the inputs' first dimension."""
    of: int
    """Its length in the whole step."""
    needed: int
    """Bytes that comparing the whole step needs."""
    available: int
    """Bytes that were available."""
    measured: bool
    """Whether the candidate by itself ran with all samples and was measured."""


@dataclass(frozen=True, slots=True, repr=False)
class Proof(Saved, Displayed):
    """Comparison of a candidate step with a reference, both on copies of the same parameters, buffers and inputs and
    from the same random state. Bytes are counted from the allocator's own events."""

    FORMAT: ClassVar[str] = "memplan.proof"
    AGAIN: ClassVar[str] = "Verify the step again"
    DERIVED: ClassVar[tuple[str, ...]] = ("ok", "failures")

    steps: int
    """Number of consecutive steps, each with an update."""
    micro_batches: int
    """Number of backward passes in each step; from the second on, gradients are held."""
    optimizer: str
    """Class of the optimizer."""
    early: bool
    """Whether the candidate's updates happened in its backward pass. Its gradients are those by which it updated, and
    parameters and the optimizer's state are compared bit for bit with an update by the same gradients in ``step()``.
    """
    outputs: Compared
    gradients: Compared
    parameters: Compared
    """After each update."""
    buffers: Compared
    random_streams: tuple[str, ...]
    """Random streams whose state after the candidate differs from that after the reference."""
    resident: int
    """Bytes of parameters, buffers and inputs."""
    peak: int
    """Bytes at the candidate's measured peak, ``resident`` included; predicted unless `measured`."""
    reference_peak: int
    """The same of the reference; predicted where there is a cut."""
    predicted: int | None = None
    """Bytes at the plan's predicted peak."""
    budget: int | None = None
    times: Times | None = None
    """Times of reference and candidate; None where they were not measured."""
    torch: str = ""
    grade: Grade = "exact"
    """Required agreement: the same bits (``exact``), the same except for rounding (``reordered``), or errors no larger
    than those of lower precision (``lossy``). That of `moments` is apart: the comparison has the optimizer's own."""
    rounded: tuple[Rounded, ...] = ()
    """Where bits may differ: error of every tensor, measured from `truth`; with `in_float64`, of the first step."""
    in_float64: tuple[Rounded, ...] = ()
    """Error of every tensor where the candidate itself runs in float64, too, in the first step: 1e-15 to 1e-13 of the
    largest. () where that was not compared."""
    truth: str = ""
    """``float64``: the same step in float64; where that does not run, ``reference``: the step without a plan."""
    cut: Cut | None = None
    """None where the whole step was compared. Else the smaller step was compared and timed, and bytes are those of the
    whole one."""
    torch_kernels: bool = False
    """Whether, for the comparison, the step without a plan had torch's own norms and recurrent layers, as every plan on
    a CUDA card has: by default these are cuDNN's, which round differently."""
    moments: MomentsError | None = None
    """Where the plan has moments in 8 bits: their error over many updates."""
    full_float32: bool = False
    """Whether both were compared with TF32 off, whose errors hid whether they are the same."""
    state: Compared = field(default_factory=Compared)
    """The optimizer's tensors after early updates."""

    @property
    def measured(self) -> bool:
        """Return whether the peak was measured."""
        return self.cut is None or self.cut.measured

    @property
    def above_resident(self) -> int:
        """Bytes at the peak beyond parameters, buffers and inputs."""
        return self.peak - self.resident

    @property
    def same(self) -> bool:
        """Return whether nothing differed, or nothing by more than the grade allows."""
        near = self.moments is None or self.moments.ok
        return near and all(getattr(self, kind).equal for kind in KINDS) and not self.random_streams

    @property
    def layers(self) -> tuple[LayerError, ...]:
        """Errors of each output and of each layer's gradients, where bits may differ."""
        return by_layer([error for error in self.rounded if error.kind != "buffers"])

    @property
    def exact(self) -> bool:
        """Return whether everything was compared bit for bit and is the same; not with moments in 8 bits."""
        return self.same and self.grade == "exact" and self.moments is None

    @property
    def within_budget(self) -> bool:
        """Return whether the measured peak is within the budget, if any."""
        return self.budget is None or self.peak <= self.budget

    @property
    def ok(self) -> bool:
        """Return whether nothing differs and the budget is kept."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """Sentences that say what is wrong."""
        failures = self._all_differences
        if not self.within_budget:
            assert self.budget is not None
            over = format_bytes(self.peak - self.budget)
            which = "measured" if self.measured else "predicted"
            failures.append(f"the {which} peak is {over} over the budget of {format_bytes(self.budget)}")
        return tuple(failures)

    @property
    def _all_differences(self) -> list[str]:
        """Sentences that say what differs by more than the grade allows."""
        differences = [
            f"{_SUBJECTS[kind]}{difference}" for kind in KINDS for difference in getattr(self, kind).differences
        ]
        differences += [f"the random stream of {name} is elsewhere after the step" for name in self.random_streams]
        if self.moments is not None and not self.moments.ok:
            differences.append(str(self.moments))
        return differences

    def __str__(self) -> str:
        if not self.steps:
            return "not proven: this is a recording or a measurement, in which nothing is compared"
        moments = "" if self.moments is None else str(self.moments)
        lines = self._verdict(), self._rounding(), moments, self._compared(), self._bytes(), self._seconds()
        return "\n".join(filter(None, lines))

    def _verdict(self) -> str:
        """Return whether the steps are the same and what was compared; or the first four differences."""
        if not self.same:
            differences = self._all_differences
            more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
            return f"NOT the same: {'; '.join(differences[:4])}{more}"
        each = f" of {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        head = {
            "exact": "the same bit for bit",
            "reordered": "the same but for rounding",
            "lossy": "lossy, and no farther off than allowed",
        }[self.grade]
        is_exact = self.grade == "exact"
        if is_exact and self.torch_kernels:
            head += ", where the step without a plan has torch's own norms and recurrent layers in place of cuDNN's,"
        head += ", compared with TF32 off," if self.full_float32 else ""
        head += ", with the optimizer's own moments," if self.moments is not None else ""
        updated = [_several(self.parameters.tensors, "updated parameter")]
        updated += [f"{_several(self.state.tensors, 'tensor')} of the optimizer's state"] if self.state.tensors else []
        compared = [_several(self.outputs.tensors, "output"), _several(self.gradients.tensors, "gradient")]
        compared += updated if is_exact else []
        compared += [_several(self.buffers.tensors, "buffer"), "the random streams"]
        optimizer = f"{self.optimizer}, applied early" if self.early else self.optimizer
        text = f"{head} over {_several(self.steps, 'step')}{each} with {optimizer}: {', '.join(compared)}"
        if is_exact or not self.early:
            return text
        return f"{text}; bit for bit what step() makes of these gradients: {', '.join(updated)}"

    def _rounding(self) -> str:
        """Describe the worst gradient, where rounding was allowed; "" where bits were compared."""
        errors = [error for error in self.rounded if error.kind == "gradients"] or list(self.rounded)
        if not errors:
            return ""
        if self.grade == "lossy":
            return self._lossy_errors()
        exact = [error for error in self.in_float64 if error.kind == "gradients"]
        if exact:
            worst = max(exact, key=lambda error: error.error / error.allowed if error.allowed else error.error)
            return (
                f"with both in float64 the farthest gradient is that of {worst.name}: by {worst.error:.2g} (L2 norm "
                f"{worst.norm:.2g}), where {worst.allowed:.2g} is allowed"
            )
        worst = max(errors, key=lambda error: error.error / error.allowed if error.allowed else error.error)
        own = worst.own or worst.reference  # files of older versions have the latter alone
        truth, whose = truth_label(self.truth), "the gradient of " if worst.kind == "gradients" else ""
        text = (
            f"nearest to its limit: {whose}{worst.name}, {worst.error:.2g} from {truth} in L2 (its norm is "
            f"{worst.norm:.2g}); {worst.allowed:.2g} is allowed"
        )
        if self.truth == "float64":
            text += f", and the step without a plan is {own:.2g} from it"
        return f"{text}, and another run of that step {worst.reference:.2g}" if worst.reference > own else text

    def _lossy_errors(self) -> str:
        """Describe the errors of all outputs and gradients, and the layer with the largest relative error."""
        totals = [(kind, overall(self.rounded, kind)) for kind in ("outputs", "gradients")]
        totals = [(kind, total) for kind, total in totals if total.norm or total.error]
        candidate = ", ".join(f"{kind} {total.relative:.2%}" for kind, total in totals)
        unplanned = ", ".join(f"{total.relative_reference:.2%}" for _, total in totals)
        gradients = [layer for layer in self.layers if layer.kind == "gradients"]
        largest_norm = max((layer.norm for layer in gradients), default=0.0)
        # of a layer whose gradients are almost zero, the ratio says nothing
        not_near_zero = [layer for layer in gradients if layer.norm > 1e-3 * largest_norm]
        worst = max(not_near_zero, key=lambda layer: layer.relative, default=None)
        text = f"off from {truth_label(self.truth)} by (relative, in L2): {candidate}"
        if any(error.reference != error.own for error in self.rounded):
            text += f"; the step without a plan under autocast by {unplanned}"
        elif self.truth == "float64":  # autocast did not run
            text += f"; the step without a plan by {unplanned}"
        if worst is None:
            return text
        return f"{text}; the farthest layer is {worst.layer or 'the model'}, {worst.relative:.2%}"

    def _compared(self) -> str:
        """Say why only some of the samples were compared; "" if all were."""
        cut = self.cut
        if cut is None:
            return ""
        measured = "; the planned step was measured with all"
        not_measured = ". Not even the planned step was run with all: its peak is as predicted"
        return (
            f"compared with {cut.samples} of the {cut.of} samples: with all of them that takes "
            f"{format_bytes(cut.needed)}, and {format_bytes(cut.available)} are available"
            + (measured if cut.measured else not_measured)
        )

    def _bytes(self) -> str:
        """Return the measured peak, and what it compares with."""
        parts = [f"peak {format_bytes(self.peak)} measured"] if self.measured else ["peak not measured"]
        if self.predicted is not None:
            parts.append(f"{format_bytes(self.predicted)} predicted")
        if self.budget is not None:
            parts.append(f"{format_bytes(self.budget)} budget{'' if self.within_budget else ': EXCEEDED'}")
        before = "before" if self.cut is None else "predicted before"
        parts.append(f"{format_bytes(self.reference_peak)} {before}")
        return f"{', '.join(parts)} ({format_bytes(self.resident)} of each are weights, buffers and inputs)"

    def _seconds(self) -> str:
        """Return the time, with the plan and without; "" if it was not measured."""
        if self.times is None:
            return ""
        low, high = self.times.quartiles
        samples = "" if self.cut is None else f" of {self.cut.samples} of the {self.cut.of} samples"
        return (
            f"{self.times.ratio:.2f} times the time{samples} ({low:.2f} to {high:.2f}, the middle half of "
            f"{self.times.pairs} pairs): {self.times.before:.3g} s before, {self.times.after:.3g} s now"
        )


def nothing_compared() -> Proof:
    """Return the proof of a step that did not run, as within a recording: it has no steps."""
    empty = Compared()
    return Proof(
        steps=0, micro_batches=1, optimizer="", early=False, outputs=empty, gradients=empty, parameters=empty,
        buffers=empty, random_streams=(), resident=0, peak=0, reference_peak=0,
    )  # fmt: skip


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
