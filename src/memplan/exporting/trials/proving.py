"""Compile an export, run it under sanitizers, and compare every loss and weight with PyTorch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memplan._display import Printed
from memplan._interrupts import waiting
from memplan.errors import UsageError, VerificationError
from memplan.exporting.c_text import string_literal
from memplan.exporting.source.companion_files import Recorded
from memplan.exporting.source.step_layout import StepLayout

STRICT = ("-std=c99", "-Wall", "-Wextra", "-Werror")
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LIMIT = 300
"""Seconds that the test may take."""


@dataclass(frozen=True, slots=True)
class Verdict(Printed):
    """What the proof found."""

    words: str
    proven: bool = False
    losses: tuple[float, ...] = ()
    worst_loss: float = 0.0
    """Largest error of a loss, in shares of its bound; so are the others."""
    worst_weight: float = 0.0
    worst_output: float = 0.0

    def __str__(self) -> str:
        return self.words


NOT_VERIFIED = Verdict("not verified")


def compiler() -> str | None:
    """Return the C compiler of this machine: what CC names, else cc, gcc or clang."""
    named = os.environ.get("CC")
    return next(
        (found for one in ((named,) if named else ("cc", "gcc", "clang")) if one and (found := shutil.which(one))), None
    )


def prove(folder: Path, layout: StepLayout, recorded: Recorded, *, needed: bool) -> Verdict:
    """Run the test of an export, and compare all weights.

    Raises:
        UsageError: there is no C compiler, and the proof was asked for.
        VerificationError: it does not compile, a sanitizer reports, or results differ.
    """
    cc = compiler()
    if cc is None:
        if needed:
            raise UsageError(
                "No C compiler", expected="cc, gcc or clang, or what CC names", do="Install one, or verify=False"
            )
        return Verdict("not verified: no C compiler was found")
    with tempfile.TemporaryDirectory() as scratch:
        program, results = Path(scratch) / "test", Path(scratch) / "weights"
        place, name = folder.resolve(), layout.name  # absolute: no path begins as an option does
        sources = [str(place / f"test_{name}.c"), str(place / f"{name}.c")]
        files = {"WEIGHTS_FILE": results, "FLASH_FILE": place / f"{name}.bin"}
        defines = [f"-D{macro}={string_literal(file)}" for macro, file in files.items()]
        _done([cc, *STRICT, *SANITIZED, *defines, *sources, "-lm", "-o", str(program)], "does not compile")
        output = _done([str(program)], "differs from PyTorch, or a sanitizer stopped it")
        written = np.fromfile(results, dtype=np.float32).astype(np.float64)
    return compared(output, written, recorded)


def compared(output: str, written: np.ndarray, recorded: Recorded, where: str = "no sanitizer report") -> Verdict:
    """Compare what a test printed and wrote with PyTorch. Raises VerificationError where a bound is exceeded."""
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step ")]
    count = recorded.weights.size
    worst = [
        _worst(np.array(losses), np.array(recorded.losses), np.array(recorded.loss_bounds)),
        _worst(written[:count], recorded.weights, recorded.weight_bounds),
        _worst(written[count:], recorded.output, np.array(recorded.output_bound)),
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


def _worst(found: np.ndarray, wanted: np.ndarray, bounds: np.ndarray) -> float:
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.max(np.abs(found - wanted) / bounds, initial=0.0))


def _done(command: list[str], what: str) -> str:
    with waiting():
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "expected" in line] or lines[-1:]
        raise VerificationError(
            f"the C code {what}: {'; '.join(telling[:3]) or f'exit code {done.returncode}'}",
            expected="code that compiles without warnings and computes what PyTorch does",
            do="Report it: the files are left for a look",
        )
    return done.stdout
