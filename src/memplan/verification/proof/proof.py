"""Proof: what was compared with the original step, and what was measured."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from memplan import _json
from memplan._bytes import format_bytes
from memplan._display import Displayed
from memplan._json import Unreadable
from memplan.errors import UsageError
from memplan.planning.plan.plan import Grade
from memplan.verification.measurement.peak_and_time import Times
from memplan.verification.proof.differences import Compared, Difference
from memplan.verification.proof.rounding import LayerError, Rounded, by_layer, overall, told_truth

FORMAT = "memplan.proof"
SCHEMA = 1
KINDS = ("outputs", "gradients", "parameters", "buffers")


@dataclass(frozen=True, slots=True)
class Cut:
    """The smaller step that was compared where there is too little memory for two copies of the whole."""

    samples: int
    """Length of the inputs' first dimension."""
    of: int
    """Its length in the whole step."""
    needed: int
    """Bytes that comparing the whole step needs."""
    available: int
    """Bytes that were available."""
    measured: bool
    """Whether at least the candidate ran whole and was measured."""


@dataclass(frozen=True, slots=True, repr=False)
class Proof(Displayed):
    """Comparison of a candidate step with a reference, both on copies of the same parameters, buffers and inputs and
    from the same random state. Bytes are counted from the allocator's own events."""

    steps: int
    """Number of consecutive steps, each with an update."""
    micro_batches: int
    """Number of backward passes in each step; from the second on, gradients are held."""
    optimizer: str
    """Class of the optimizer."""
    early: bool
    """Whether the candidate's updates happened in its backward pass; then its gradients are freed in it, and the
    parameters after each step are compared instead."""
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
    than those of lower precision (``lossy``)."""
    rounded: tuple[Rounded, ...] = ()
    """Where bits may differ: error of every tensor, measured from `truth`."""
    truth: str = ""
    """``float64``: the same step in float64; where that does not run, ``reference``: the step without a plan."""
    cut: Cut | None = None
    """None where the whole step was compared. Else the smaller step was compared and timed, and bytes are those of the
    whole one."""
    torch_kernels: bool = False
    """Whether, for the comparison, the step without a plan had torch's own norms and recurrent layers, as every plan on
    a CUDA card has: by default these are cuDNN's, which round differently."""
    full_float32: bool = False
    """Whether both were compared with TF32 off, whose errors hid whether they are the same."""

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
        return all(getattr(self, kind).equal for kind in KINDS) and not self.random_streams

    @property
    def layers(self) -> tuple[LayerError, ...]:
        """Errors of each output and of each layer's gradients (where updates are early, of its updates), where bits may
        differ."""
        return by_layer([one for one in self.rounded if one.kind != "buffers"])

    @property
    def exact(self) -> bool:
        """Return whether everything was compared bit for bit and is the same."""
        return self.same and self.grade == "exact"

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
        found: list[str] = []
        for kind in KINDS:
            found += [_said(kind, one) for one in getattr(self, kind).differences]
        found += [f"the random stream of {name} is elsewhere after the step" for name in self.random_streams]
        if not self.within_budget:
            assert self.budget is not None
            over = format_bytes(self.peak - self.budget)
            which = "measured" if self.measured else "predicted"
            found.append(f"the {which} peak is {over} over the budget of {format_bytes(self.budget)}")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as plain values, for JSON."""
        fields = _json.finite(dataclasses.asdict(self))
        return {"format": FORMAT, "schema": SCHEMA, "ok": self.ok, "failures": self.failures} | fields

    def __str__(self) -> str:
        if not self.steps:
            return "not proven: this is a recording or a measurement, in which nothing is compared"
        lines = self._verdict(), self._rounding(), self._compared(), self._bytes(), self._seconds()
        return "\n".join(filter(None, lines))

    def _verdict(self) -> str:
        if not self.same:
            wrong = [text for text in self.failures if "the budget" not in text]
            more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            return f"NOT the same: {'; '.join(wrong[:4])}{more}"
        gradients = "" if self.early else f"{_several(self.gradients.tensors, 'gradient')}, "
        each = f" of {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        rounding = self.grade != "exact"
        lossy = self.grade == "lossy"
        head = "lossy, and no farther off than allowed" if lossy else "the same but for rounding"
        head = head if rounding else f"the same bit for bit{self._apart_from_norms()}"
        head += ", compared with TF32 off," if self.full_float32 else ""
        updated = "" if rounding and not self.early else f"{_several(self.parameters.tensors, 'updated parameter')}, "
        return (
            f"{head} over {_several(self.steps, 'step')}{each} with {self.optimizer}"
            f"{', applied early' if self.early else ''}: {_several(self.outputs.tensors, 'output')}, {gradients}"
            f"{updated}{_several(self.buffers.tensors, 'buffer')}, the random streams"
        )

    def _apart_from_norms(self) -> str:
        own = ", where the step without a plan has torch's own norms and recurrent layers in place of cuDNN's,"
        return own if self.torch_kernels else ""

    def _rounding(self) -> str:
        """Describe the worst gradient, where rounding was allowed."""
        judged = [one for one in self.rounded if one.kind == "gradients"] or list(self.rounded)
        if not judged:
            return ""
        if self.grade == "lossy":
            return self._errors()
        worst = max(judged, key=lambda one: one.error / one.allowed if one.allowed else one.error)
        return (
            f"farthest from {told_truth(self.truth)}, of what is allowed: "
            f"{worst.name}, by {worst.error:.2g} (L2 norm {worst.norm:.2g}) where the step without a plan is by "
            f"{worst.reference:.2g} and {worst.allowed:.2g} is allowed"
        )

    def _errors(self) -> str:
        """Describe the errors of all outputs and gradients, and the layer with the largest one."""
        kinds = {"outputs": "outputs", "gradients": "gradients", "parameters": "updates"}
        rows = self.layers
        totals = [(name, overall(self.rounded, kind)) for kind, name in kinds.items()]
        told = ", ".join(f"{name} {one.relative:.2%}" for name, one in totals if one.norm or one.error)
        others = ", ".join(f"{one.relative_reference:.2%}" for _, one in totals if one.norm or one.error)
        kind = "gradients" if any(one.kind == "gradients" for one in rows) else "parameters"
        norm = max((one.norm for one in rows if one.kind == kind), default=0.0)
        large = [one for one in rows if one.kind == kind and one.norm > 1e-3 * norm]
        worst = max(large, key=lambda one: one.relative, default=None)
        text = f"off from {told_truth(self.truth)} by (relative, in L2): {told}"
        if any(one.reference != one.own for one in self.rounded):
            text += f"; the step without a plan under autocast by {others}"
        elif self.truth == "float64":  # autocast did not run
            text += f"; the step without a plan by {others}"
        if worst is None:
            return text
        return f"{text}; the farthest layer is {worst.layer or 'the model'}, {worst.relative:.2%}"

    def _compared(self) -> str:
        cut = self.cut
        if cut is None:
            return ""
        return (
            f"compared with {cut.samples} of the {cut.of} samples: with all of them that takes "
            f"{format_bytes(cut.needed)}, and {format_bytes(cut.available)} are available"
            + (
                "; the planned step was measured with all"
                if cut.measured
                else ". Not even the planned step was run with all: its peak is as predicted"
            )
        )

    def _bytes(self) -> str:
        parts = [f"peak {format_bytes(self.peak)} measured"] if self.measured else ["peak not measured"]
        if self.predicted is not None:
            parts.append(f"{format_bytes(self.predicted)} predicted")
        if self.budget is not None:
            parts.append(f"{format_bytes(self.budget)} budget{'' if self.within_budget else ': EXCEEDED'}")
        parts.append(f"{format_bytes(self.reference_peak)} {'' if self.cut is None else 'predicted '}before")
        return f"{', '.join(parts)} ({format_bytes(self.resident)} of each are weights, buffers and inputs)"

    def _seconds(self) -> str:
        if self.times is None:
            return ""
        low, high = self.times.quartiles
        samples = "" if self.cut is None else f" of {self.cut.samples} of the {self.cut.of} samples"
        return (
            f"{self.times.ratio:.2f} times the time{samples} ({low:.2f} to {high:.2f}, the middle half of "
            f"{self.times.pairs} pairs): {self.times.before:.3g} s before, {self.times.after:.3g} s now"
        )


def dumps(proof: Proof) -> str:
    """Write a proof as JSON."""
    return json.dumps(proof.to_dict(), indent=1, allow_nan=False) + "\n"


def loads(text: str, source: str = "the text") -> Proof:
    """Read the proof that `dumps` wrote. Raises UsageError for anything else."""
    try:
        data = _json.parse(text)
        _json.check_format(data, FORMAT, SCHEMA)
        fields = {key: value for key, value in data.items() if key not in ("format", "schema", "ok", "failures")}
        return _json.from_plain(Proof, fields, "it")
    except Unreadable as error:
        raise UsageError(
            f"{source} is no proof that can be used: {error}",
            expected=f"what memplan wrote, of schema version {SCHEMA}",
            do="Verify the step again",
        ) from None


def _said(kind: str, one: Difference) -> str:
    head = {"outputs": "", "gradients": "the gradient of ", "parameters": "after the update ", "buffers": "the buffer "}
    return f"{head[kind]}{one}"


def nothing_compared() -> Proof:
    """Return the proof of a step that did not run, as within a recording: it is of no steps."""
    none = Compared()
    return Proof(
        steps=0, micro_batches=1, optimizer="", early=False, outputs=none, gradients=none, parameters=none,
        buffers=none, random_streams=(), resident=0, peak=0, reference_peak=0,
    )  # fmt: skip


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
