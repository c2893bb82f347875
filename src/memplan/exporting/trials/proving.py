"""Compile an export, run it under sanitizers, and compare every loss and weight with PyTorch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memplan._display import Printed
from memplan._interrupts import waiting
from memplan.errors import UsageError, VerificationError
from memplan.exporting.c_text import string_literal
from memplan.exporting.source.companion_files import Recorded
from memplan.exporting.source.step_layout import StepLayout

STRICT = ("-std=c99", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror")
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TIME_LIMIT = 300
"""Seconds that the test may take."""


@dataclass(frozen=True, slots=True)
class Verdict(Printed):
    """The result of verification."""

    words: str
    proven: bool = False
    """Whether the C test ran and passed."""
    losses: tuple[float, ...] = ()
    """Of the steps, as the C code computes them."""
    worst_loss: float = 0.0
    """Largest error of a loss relative to its bound; the next two likewise."""
    worst_weight: float = 0.0
    worst_output: float = 0.0

    def __str__(self) -> str:
        return self.words


NOT_VERIFIED = Verdict("not verified")
StepsCheck = Callable[[np.ndarray, np.ndarray], Any]
"""Compares what `get_weights` wrote after each step, and the losses, with PyTorch; its result says so."""


def c_compiler() -> str | None:
    """Return the path of the C compiler: $CC if set, else cc, gcc or clang. None if there is none."""
    variable = os.environ.get("CC")
    names = (variable,) if variable else ("cc", "gcc", "clang")
    return next((path for name in names if (path := shutil.which(name))), None)


def prove(
    folder: Path, layout: StepLayout, recorded: Recorded, *, needed: bool, check: StepsCheck | None = None
) -> Verdict:
    """Compile and run the test of an export under sanitizers, and compare all losses, weights and outputs.

    Args:
        folder: where the files are.
        layout: of the export.
        recorded: PyTorch's results.
        needed: raise UsageError where there is no C compiler; else the verdict says so.
        check: of each step, where weights are trained in eight bits.

    Raises:
        UsageError: there is no C compiler, and one is needed.
        VerificationError: the code does not compile, a sanitizer reports an error, or results differ.
    """
    cc = c_compiler()
    if cc is None:
        if needed:
            raise UsageError(
                "No C compiler", expected="cc, gcc or clang, or what CC names", do="Install one, or verify=False"
            )
        return Verdict("not verified: no C compiler was found")
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "test"
        weights_file, steps_file = Path(scratch) / "weights", Path(scratch) / "steps"  # which the test writes
        folder, name = folder.resolve(), layout.name  # absolute, so that no path looks like an option
        sources = [str(folder / f"test_{name}.c"), str(folder / f"{name}.c")]
        files = {"WEIGHTS_FILE": weights_file, "FLASH_FILE": folder / f"{name}.bin", "STEPS_FILE": steps_file}
        defines = [f"-D{macro}={string_literal(file)}" for macro, file in files.items()]
        _run([cc, *STRICT, *SANITIZED, *defines, *sources, "-lm", "-o", str(program)], "does not compile")
        output = _run([str(program)], "differs from PyTorch, or a sanitizer stopped it")
        written = np.fromfile(weights_file, dtype=np.float32).astype(np.float64)
        verdict = compare_results(output, written, recorded)
        if check is None:
            return verdict
        weights_by_step = np.fromfile(steps_file, dtype=np.float32).reshape(len(recorded.losses), -1)
        return replace(verdict, words=f"{verdict}; {check(weights_by_step, np.array(verdict.losses))}")


def compare_results(
    output: str, written: np.ndarray, recorded: Recorded, where: str = "no sanitizer report"
) -> Verdict:
    """Compare a test's printed losses and written weights and output with PyTorch's.

    Args:
        output: what the test printed.
        written: weights and statistics, then the output in evaluation mode.
        recorded: PyTorch's results.
        where: end of the verdict's words.

    Raises:
        VerificationError: an error exceeds its bound.
    """
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step ")]
    weights, model_output = written[: recorded.weights.size], written[recorded.weights.size :]
    worst = [
        _worst(np.array(losses), np.array(recorded.losses), np.array(recorded.loss_bounds)),
        _worst(weights, recorded.weights, recorded.weight_bounds),
        _worst(model_output, recorded.evaluation_output, np.array(recorded.evaluation_output_bound)),
    ]
    if len(losses) != len(recorded.losses) or not max(worst) <= 1:
        raise VerificationError(
            f"the C code's losses are off by {worst[0]:.2g}, its weights by {worst[1]:.2g} and its outputs by "
            f"{worst[2]:.2g} times what float64 allows",
            expected="results as near to float64 as PyTorch's in float32 are",
            do="Report it: the files are left for a look",
        )
    words = (
        f"{len(losses)} steps beside PyTorch: every loss within {worst[0]:.2g} of its bound, every weight within "
        f"{worst[1]:.2g}; {where}"
    )
    return Verdict(words, True, tuple(losses), *worst)


def _worst(actual: np.ndarray, expected: np.ndarray, bounds: np.ndarray) -> float:
    """Return the largest error relative to its bound; infinite where shapes differ or an element is not finite."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    return float(np.max(np.abs(actual - expected) / bounds, initial=0.0))


def _run(command: list[str], failure: str) -> str:
    """Return what a command prints. Raises VerificationError with its error lines if it fails."""
    with waiting():
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    if process.returncode:
        lines = [line for line in (process.stderr + process.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "expected" in line] or lines[-1:]
        raise VerificationError(
            f"the C code {failure}: {'; '.join(errors[:3]) or f'exit code {process.returncode}'}",
            expected="code that compiles without warnings and computes what PyTorch does",
            do="Report it: the files are left for a look",
        )
    return process.stdout
