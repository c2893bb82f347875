"""The exceptions that memplan raises.

* MemplanError
  * UsageError (also a ValueError): what was asked for cannot be done as written
    - TargetError: the thing to look at (a path, a module, a callable) was not found or is of the wrong kind
    - InputError: an input, keyword or target does not describe a tensor, or does not suit the model

      + FormatError (earlier TraceFormatError and PlanFormatError): a saved result that is damaged, or of another format
        or schema version

    - DeviceError: no such device in the catalogue or on this machine
    - UnitError: not a number of bytes
    - SnapshotFormatError: a file that is no memory snapshot, or one that cannot be trusted
    - BaselineError: a baseline that is missing, or not of this step, device or torch
    - BudgetError: the step cannot be made to fit
  * RecordingError (also a RuntimeError): a step could not be recorded
    - DataDependentError: a shape depends on values, which a recording does not have
    - StepError: the user's own build or step raised; the original is its ``__cause__``
    - EndlessError: with a branch taken the other way, a loop did not end
  * VerificationError (also a RuntimeError): a planned step ran and was not the step that it was
  * CompileError (also a RuntimeError): no kernels could be made of a planned step
  * BackwardError (also a RuntimeError): a backward pass that a planned step cannot run
  * PeakError (also an AssertionError): a step takes more than it may
  * ScheduleError (also an AssertionError): a planned step that memplan's own validator refuses

Every message says what was found, what was expected and what to do, in one line.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

from memplan._text import one_line

_Error = TypeVar("_Error", bound="MemplanError")


class MemplanError(Exception):
    """The root of the tree: catches everything that memplan raises on purpose.

    Args:
        found: what was found.
        expected: what would have been right; the text puts "Expected" before it.
        do: what to do about it, a sentence.

    Each is given without its final full stop.

    Example:
        >>> str(MemplanError("The file is empty", expected="a trace", do="Write one with trace.save"))
        'The file is empty. Expected a trace. Write one with trace.save.'
    """

    def __init__(self, found: str, *, expected: str | None = None, do: str | None = None) -> None:
        # names, paths and texts of other people's errors stand in it: none may steer a terminal or end the line
        sentences = [found, expected and f"Expected {expected}", do]
        super().__init__(" ".join(_with_stop(sentence) for sentence in sentences if sentence))
        self.found = one_line(found)
        self.expected, self.do = (text and one_line(text) for text in (expected, do))

    def about(self, what: str) -> Self:
        """Return this error with a subject before its text: ``b.json: The file is empty. Expected ...``."""
        what = one_line(what)
        return _restore(type(self), (f"{what}: {self}",), self.__dict__ | {"found": f"{what}: {self.found}"})

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle calls the class with the composed text alone: that would be taken for `found`, and
        # a subclass that requires a keyword would fail, which a process pool answers by hanging.
        return _restore, (type(self), self.args, self.__dict__)


def _with_stop(sentence: str) -> str:
    """Return a sentence on one line with its full stop, or the question mark that it has: others stand for characters
    that are not shown."""
    line = one_line(sentence)
    return line if sentence.endswith("?") else f"{line.rstrip('.')}."


def _restore(kind: type[_Error], args: tuple[Any, ...], state: dict[str, Any]) -> _Error:
    """Return an error of a class with these ``args`` and attributes, without its ``__init__``."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(MemplanError, ValueError):
    """What was asked for cannot be done as it is written; the command line answers it with exit code 2."""


class TargetError(UsageError):
    """The thing to look at was not found, or is neither a module, a callable nor a Trace."""


class InputError(UsageError):
    """An input, keyword or target does not describe a tensor, or does not suit the model."""


class DeviceError(UsageError):
    """No such device in the catalogue, or none on this machine."""


class UnitError(UsageError):
    """Not a number of bytes."""


class FormatError(InputError):
    """A saved result that is damaged, or of another format or schema version than what was to be read."""


TraceFormatError = PlanFormatError = FormatError
"""Earlier names."""


class SnapshotFormatError(UsageError):
    """A file that is no snapshot of torch's CUDA memory, or one that is damaged or would run something."""


class BaselineError(UsageError):
    """A baseline that is missing, or that has no figures of this step on this device with this torch."""


class BudgetError(UsageError):
    """The step cannot be made to fit the budget.

    Args:
        found: as in MemplanError, and so are `expected` and `do`.
        smallest_budget: bytes of the smallest budget that the step fits.
        timeline: bytes over time of the step in that budget, None if it is unknown (a Timeline).
        held_by: storages live at its peak, the largest first (planning.plan.budget_error.PeakStorage).
        lower_by: changes that lower the smallest budget, with their results (planning.plan.budget_error.Way).
        precision: of the plan with the smallest budget, if lossy plans were allowed (planning.precision.Precision).

    Example:
        >>> BudgetError("The budget is 1.0 GiB", smallest_budget=2 << 30).smallest_budget
        2147483648
    """

    def __init__(
        self,
        found: str,
        *,
        expected: str | None = None,
        do: str | None = None,
        smallest_budget: int,
        timeline: Any = None,
        held_by: tuple[Any, ...] = (),
        lower_by: tuple[Any, ...] = (),
        precision: Any = None,
    ) -> None:
        super().__init__(found, expected=expected, do=do)
        self.smallest_budget = smallest_budget
        self.precision = precision
        self.timeline = timeline
        self.held_by = held_by
        self.lower_by = lower_by

    def but(self, **changes: Any) -> BudgetError:
        """Return a copy of this error in which ``changes`` replace arguments of the constructor."""
        names = "found", "expected", "do", "smallest_budget", "timeline", "held_by", "lower_by", "precision"
        return BudgetError(**{name: getattr(self, name) for name in names} | changes)


class RecordingError(MemplanError, RuntimeError):
    """A step could not be recorded.

    Args:
        found: as in MemplanError, and so are `expected` and `do`; the place is added to it.
        layer: the name of the layer that was running, where one was.
        where: the user's line that was running, as ``file:line``.

    Example:
        >>> str(RecordingError("nonzero() was called", layer="roi.head", where="model.py:12"))
        'nonzero() was called (in layer roi.head, at model.py:12).'
    """

    def __init__(
        self,
        found: str,
        *,
        expected: str | None = None,
        do: str | None = None,
        layer: str | None = None,
        where: str | None = None,
    ) -> None:
        place = ", ".join(part for part in (layer and f"in layer {layer}", where and f"at {where}") if part)
        super().__init__(f"{found.rstrip('.')} ({place})" if place else found, expected=expected, do=do)
        self.layer = layer
        self.where = where


class DataDependentError(RecordingError):
    """A shape depends on a tensor's values, which a recording does not have; `memplan.measure` has them."""


class StepError(RecordingError):
    """The user's own build or step raised an error: it is the ``__cause__`` of this one."""


class EndlessError(RecordingError):
    """A step ran far more ops with a branch taken the other way than before, as in a loop that only values end."""


class BackwardError(MemplanError, RuntimeError):
    """A backward pass that cannot be run as it was asked for; autograd refuses most of these, too."""


class CompileError(MemplanError, RuntimeError):
    """Inductor could not make kernels of a planned step. The model is as before."""


class PeakError(MemplanError, AssertionError):
    """A step takes more than it may.

    Args:
        found: as in MemplanError, and so are `expected` and `do`.
        details: lines that follow the message: causes, the largest layers.
        explanation: of the step (an Explanation).
    """

    def __init__(
        self,
        found: str,
        *,
        expected: str | None = None,
        do: str | None = None,
        details: tuple[str, ...] = (),
        explanation: Any = None,
    ) -> None:
        super().__init__(found, expected=expected, do=do)
        self.args = ("\n".join((*self.args, *(f"  {line}" for line in details))),)
        self.explanation = explanation


class ScheduleError(MemplanError, AssertionError):
    """A planned step would not compute what the model does, or not in its budget: a mistake of memplan's own."""


class VerificationError(MemplanError, RuntimeError):
    """A planned step ran, and was not the same as the step without a plan. It was taken away again.

    Args:
        found: as in MemplanError, and so are `expected` and `do`.
        proof: the Proof that says what differs.
    """

    def __init__(self, found: str, *, expected: str | None = None, do: str | None = None, proof: Any = None) -> None:
        super().__init__(found, expected=expected, do=do)
        self.proof = proof
