"""IPython magics: memory of a cell or statement, predicted on fake tensors or measured, and functions line by line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from memplan.errors import InputError, MemplanError, RecordingError, StepError
from memplan.explanation.explain import explain_trace
from memplan.explanation.line_profile import LineProfile
from memplan.explanation.model import Explanation
from memplan.integrations.line_profiles.line_session import Measured, Session
from memplan.integrations.line_profiles.namespace import FakeNamespace
from memplan.trace.recording.followed.line_watch import code_of, following

_USAGE = "%%memplan [--device h100] [--measure], or %memplan [...] STATEMENT"
_LINES_USAGE = "%mprun -f FUNCTION [-f ANOTHER] [--device h100] [--measure] STATEMENT"


@dataclass(frozen=True)
class _MagicLine:
    """The options and the statement of a magic."""

    device: str | None
    measure: bool
    functions: tuple[str, ...]
    statement: str


class MemoryMagics:
    """The magics of an IPython shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def memplan(self, line: str, cell: str | None = None) -> Explanation | Measured:
        """Say what a cell or a statement takes: %%memplan [--device h100] [--measure]

        Predicted, it runs on stand-ins: tensors, modules and optimizers of the notebook that it names are copied
        without their values and count as there before; nothing is changed, what it prints is not shown. With --measure
        it runs as any cell does, and the allocator's own events are counted.
        """
        with _errors_as_text():
            typed = _parse(line, ("--device",), _USAGE)
            code = typed.statement if cell is None else cell
            if cell is not None and typed.statement:
                raise InputError(f"%%memplan {typed.statement}", expected=_USAGE, do="Put code into the lines below it")
            if not code.strip():
                raise InputError("no statement", expected=_USAGE, do="Write one behind the options")
            return self._measure(code) if typed.measure else self._predict(code, typed.device)

    def mprun(self, line: str) -> Lines:
        """Show functions line by line: %mprun -f FUNCTION [-f ANOTHER] [--device h100] [--measure] STATEMENT

        As %memplan: predicted on stand-ins, or with --measure as it really runs.
        """
        with _errors_as_text():
            typed = _parse(line, ("--device", "-f"), _LINES_USAGE)
            if not typed.functions or not typed.statement:
                missing = "a statement" if typed.functions else "-f"
                raise InputError(f"%mprun without {missing}", expected=_LINES_USAGE, do="Add it")
            with following((), [self._code(name) for name in typed.functions]):
                if typed.measure:
                    profiles = self._measure(typed.statement).profiles()
                else:
                    profiles = self._predict(typed.statement, typed.device).lines
            if not profiles:
                raise InputError(
                    f"no line of {', '.join(typed.functions)} ran",
                    expected="functions that the statement calls",
                    do="Name another",
                )
            return Lines(profiles)

    @property
    def _namespace(self) -> dict[str, Any]:
        return self._shell.user_ns

    def _code(self, name: str) -> CodeType:
        """Return the code of the function that option ``-f`` names by an expression, such as ``Model.forward``."""
        try:
            value = eval(name, self._namespace)
        except Exception as error:  # any expression may be typed
            raise InputError(
                f"-f {name}: {type(error).__name__}: {error}",
                expected="a function of the notebook, such as Model.forward",
                do="Check the name",
            ) from None
        return code_of(value, f"-f {name}")

    def _predict(self, source: str, device: str | None) -> Explanation:
        """Record a cell on fake copies of the variables that it uses, and explain the recording."""
        text = self._shell.transform_cell(source)
        try:
            name = self._shell.compile.cache(text, 0, source)  # so that linecache finds the cell's source
            code = compile(text, name, "exec")
        except SyntaxError as error:
            raise InputError(f"a cell that is not Python: {error}", expected="what runs without %%memplan") from None
        namespace = FakeNamespace(self._namespace, [code])
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                trace = namespace.record(lambda _: exec(code, self._namespace), device)
            except RecordingError as error:
                raise StepError(
                    error.found.replace("step 1", "the cell"),
                    expected="a cell that runs on tensors without values",
                    do="Run it without memplan first; where it needs values, --measure runs it for real",
                ) from error
        return explain_trace(trace, title="this cell")

    def _measure(self, source: str) -> Measured:
        """Run and measure a cell; IPython shows its output and errors as usual."""
        session = Session()
        session.begin()
        try:
            self._shell.run_cell(source)
        finally:
            measured = session.end()
        return measured


class Lines(tuple[LineProfile, ...]):
    """Profiles of several functions, shown below each other."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self))

    def _repr_html_(self) -> str:
        return "".join(profile._repr_html_() or "" for profile in self)


def _parse(line: str, options: tuple[str, ...], usage: str) -> _MagicLine:
    """Parse the options at the beginning of a line; the statement is what follows them, unchanged. ``options`` are
    those with a value; ``--measure`` is always allowed. Raises InputError for an unknown option, an option without a
    value, or both ``--device`` and ``--measure``."""
    values: dict[str, list[str]] = {name: [] for name in options}
    measure, statement = False, line.strip()
    while statement.startswith("-"):
        word, _, statement = statement.partition(" ")
        statement = statement.strip()
        if word == "--measure":
            measure = True
            continue
        name, equals, value = word.partition("=")
        if name not in values:
            raise InputError(f"the option {word}", expected=usage)
        if not equals:  # the value is the next word
            value, _, statement = statement.partition(" ")
            statement = statement.strip()
        if not value:
            raise InputError(f"{name} without a value", expected=usage)
        values[name].append(value)
    device = (values["--device"] or [None])[-1]
    if device and measure:
        raise InputError(
            "--device and --measure", expected="one of them: what is measured is this machine", do="Leave one out"
        )
    return _MagicLine(device, measure, tuple(values.get("-f", ())), statement)


@contextlib.contextmanager
def _errors_as_text() -> Iterator[None]:
    """Show memplan's errors as one line, without a traceback."""
    from IPython.core.error import UsageError  # pyright: ignore[reportMissingImports]

    try:
        yield
    except MemplanError as error:
        raise UsageError(str(error)) from None
