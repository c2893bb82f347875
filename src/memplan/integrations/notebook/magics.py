"""Magics: what a cell or a statement takes, predicted on stand-ins or measured, and functions line by line."""

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
from memplan.integrations.line_profiles.namespace import Surroundings
from memplan.trace.recording.followed.line_watch import code_of, following

_USAGE = "%%memplan [--device h100] [--measure], or %memplan [...] STATEMENT"
_LINES_USAGE = "%mprun -f FUNCTION [-f ANOTHER] [--device h100] [--measure] STATEMENT"


@dataclass(frozen=True)
class _Typed:
    """What was typed behind a magic."""

    device: str | None
    measure: bool
    functions: tuple[str, ...]
    statement: str


class MemoryMagics:
    """The magics of one IPython shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def memplan(self, line: str, cell: str | None = None) -> Explanation | Measured:
        """Say what a cell or a statement takes: %%memplan [--device h100] [--measure]

        Predicted, it runs on stand-ins: tensors, modules and optimizers of the notebook that it names are copied
        without their values and count as there before; nothing is changed, what it prints is not shown. With --measure
        it runs as any cell does, and the allocator's own events are counted.
        """
        with _told():
            typed = _typed(line, ("--device",), _USAGE)
            code = typed.statement if cell is None else cell
            if cell is not None and typed.statement:
                raise InputError(f"%%memplan {typed.statement}", expected=_USAGE, do="Put code into the lines below it")
            if not code.strip():
                raise InputError("no statement", expected=_USAGE, do="Write one behind the options")
            return self._measured(code) if typed.measure else self._predicted(code, typed.device)

    def mprun(self, line: str) -> Lines:
        """Show functions line by line: %mprun -f FUNCTION [-f ANOTHER] [--device h100] [--measure] STATEMENT

        As %memplan: predicted on stand-ins, or with --measure as it really runs.
        """
        with _told():
            typed = _typed(line, ("--device", "-f"), _LINES_USAGE)
            if not typed.functions or not typed.statement:
                missing = "a statement" if typed.functions else "-f"
                raise InputError(f"%mprun without {missing}", expected=_LINES_USAGE, do="Add it")
            with following((), [self._code(name) for name in typed.functions]):
                if typed.measure:
                    found = self._measured(typed.statement).profiles()
                else:
                    found = self._predicted(typed.statement, typed.device).lines
            if not found:
                raise InputError(
                    f"no line of {', '.join(typed.functions)} ran",
                    expected="functions that the statement calls",
                    do="Name another",
                )
            return Lines(found)

    @property
    def _namespace(self) -> dict[str, Any]:
        return self._shell.user_ns

    def _code(self, name: str) -> CodeType:
        try:
            value = eval(name, self._namespace)
        except Exception as error:  # the text is any expression of the user's
            raise InputError(
                f"-f {name}: {type(error).__name__}: {error}",
                expected="a function of the notebook, such as Model.forward",
                do="Check the name",
            ) from None
        return code_of(value, f"-f {name}")

    def _predicted(self, source: str, device: str | None) -> Explanation:
        text = self._shell.transform_cell(source)
        try:
            name = self._shell.compile.cache(text, 0, source)  # so that lines of the cell can be shown
            code = compile(text, name, "exec")
        except SyntaxError as error:
            raise InputError(f"a cell that is not Python: {error}", expected="what runs without %%memplan") from None
        around = Surroundings(self._namespace, [code])
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                trace = around.predicted(lambda given: exec(code, self._namespace), device)
            except RecordingError as error:
                raise _of_cell(error) from error
        return explain_trace(trace, title="this cell")

    def _measured(self, source: str) -> Measured:
        """Run a cell as any other, and return what it took; what it raises is shown as ever."""
        session = Session()
        session.begin()
        try:
            self._shell.run_cell(source)
        finally:
            measured = session.end()
        return measured


class Lines(tuple[LineProfile, ...]):
    """Profiles of several functions, which show themselves one below the other."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self))

    def _repr_html_(self) -> str:
        return "".join(one._repr_html_() or "" for one in self)


def _typed(line: str, options: tuple[str, ...], usage: str) -> _Typed:
    """Read the options at the beginning of a line; what follows is the statement, as it is."""
    given: dict[str, list[str]] = {name: [] for name in options}
    measure, left = False, line.strip()
    while left.startswith("-"):
        word, _, left = left.partition(" ")
        name, equals, value = word.partition("=")
        left = left.strip()
        if word == "--measure":
            measure = True
            continue
        if name in given and not equals:
            value, _, left = left.partition(" ")
            left = left.strip()
        if name not in given or not value:
            raise InputError(f"the option {word}" if name not in given else f"{name} without a value", expected=usage)
        given[name].append(value)
    device = (given["--device"] or [None])[-1]
    if device and measure:
        raise InputError(
            "--device and --measure", expected="one of them: what is measured is this machine", do="Leave one out"
        )
    return _Typed(device, measure, tuple(given.get("-f", ())), left)


def _of_cell(error: RecordingError) -> StepError:
    """Return the error of a step in the words of a cell."""
    return StepError(
        error.found.replace("step 1", "the cell"),
        expected="a cell that runs on tensors without values",
        do="Run it without memplan first; where it needs values, --measure runs it for real",
    )


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Show memplan's errors as one line, without a traceback."""
    from IPython.core.error import UsageError  # pyright: ignore[reportMissingImports]

    try:
        yield
    except MemplanError as error:
        raise UsageError(str(error)) from None
