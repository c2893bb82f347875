"""`memplan fit --no-train`: make inference run within a budget of bytes, on parts of its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memplan.cli.files import ResultFiles
from memplan.cli.options import Described, StepArguments
from memplan.cli.progress import progress
from memplan.errors import BudgetError, InputError, VerificationError
from memplan.trace.naming.targets import contained

if TYPE_CHECKING:
    from torch import nn

_ALLOWED = ("--arg", "--input", "--dtype", "--no-train")


def fit_inference(
    arguments: StepArguments, described: Described, model_of: Callable[[], nn.Module], budget: str, results: ResultFiles
) -> int:
    """Run the model that ``model_of()`` returns, whole and in parts, show what it takes, and return the exit code: 0 if
    it fits."""
    import memplan
    from memplan.reports.fit import inference_report
    from memplan.verification.fitting.outcome import InferenceOutcome

    with progress(f"fitting {arguments.target}"), contained(arguments.target):
        try:
            fitted = memplan.fit(model_of().eval(), *described.options.inputs, budget=budget, train=False)
        except BudgetError as error:
            outcome = InferenceOutcome(
                arguments.target, figures=None, reason=str(error), smallest_budget=error.smallest_budget
            )
        except VerificationError as error:
            outcome = InferenceOutcome(arguments.target, figures=None, reason=str(error))
        else:
            outcome = fitted.outcome(arguments.target)
    results.write_and_show(outcome.to_json, lambda: inference_report(outcome))
    return 0 if outcome.fits else 1


def check_options(arguments: StepArguments, budget: str | None, used: dict[str, object]) -> str:
    """Return the budget. Raise InputError where there is none, or for options that inference does not have. ``used``
    has each other option of `memplan fit` by its name; false where it was left out."""
    wrong = [option for option in arguments.changed_options() if option not in _ALLOWED]
    wrong += [option for option, value in used.items() if value and option not in (*wrong, "--budget")]
    if wrong:
        raise InputError(
            f"{', '.join(wrong)} with --no-train",
            expected="TARGET, --arg, --input, --dtype, --budget and --json alone: inference runs here, in parts, "
            "to the same result",
            do="Leave out the others",
        )
    if budget is None:
        raise InputError("no budget", expected="one: --budget 400MiB, or a share (50%)", do="Give it")
    return budget
