"""Resolves ``package.module:callable`` or ``path/to/file.py:callable`` to the callable."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import operator
import os
import pkgutil
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from memplan.errors import MemplanError, StepError, TargetError
from memplan.trace.held_output import CapturedOutput
from memplan.trace.naming.parsing import offer

FORM = "package.module:callable or path/to/file.py:callable"
_STDLIB = os.path.dirname(os.__file__) + os.sep
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep


@dataclass(frozen=True)
class Target:
    """A callable that the user named by a text, such as ``train.py:make``."""

    text: str
    what: Callable[..., Any]
    printed_lines: int = 0
    """Number of lines that importing the callable's module printed, and that were not shown."""

    @property
    def name(self) -> str:
        """Return the part after the colon."""
        return self.text.rpartition(":")[2]

    @property
    def where(self) -> str | None:
        """``file:line`` of the callable's definition; None if it is not defined in Python."""
        code = getattr(self.what, "__code__", None)
        return f"{short(code.co_filename)}:{code.co_firstlineno}" if code else None


class ByName:
    """A target's callable that is pickled as the target's text: the receiving process resolves it again."""

    def __init__(self, text: str, argv: tuple[str, ...] = ()) -> None:
        """Resolve a target such as ``train.py:make``, whose import sees ``argv`` as ``sys.argv[1:]``, here and in a
        process that unpickles this."""
        self._text, self._argv = text, argv
        sys.argv = [text.rpartition(":")[0], *argv]
        self._target = resolve(text)
        self.__qualname__ = self.__name__ = self._target.name
        with suppress(TypeError, ValueError):  # not every callable has a signature
            self.__signature__ = inspect.signature(self._target.what)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target."""
        with contained(self._text):
            return self._target.what(*args, **kwargs)

    def __reduce__(self) -> tuple[type[ByName], tuple[str, tuple[str, ...]]]:
        return ByName, (self._text, self._argv)


def resolve(text: str) -> Target:
    """Import the module or file of a target, and return its callable.

    The file's folder (for a module, the working directory) is put on ``sys.path``, as when Python runs a file. Output
    of the import, such as warnings of libraries, is counted and not shown, except within `output_shown`.

    Args:
        text: ``package.module:callable`` or ``path/to/file.py:callable``; the callable may be dotted.

    Raises:
        TargetError: no such file, module or callable, with the nearest names; or the import raised.

    Example:
        >>> resolve("examples/resnet18.py:make").what().__class__.__name__
        'ResNet18'
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise _without_callable(text.rstrip(":"))
    output = CapturedOutput()
    with output.capturing():
        module = import_place(place)
        try:
            value: Any = operator.attrgetter(name)(module)
        except AttributeError:
            raise TargetError(
                f"{place} has no {name!r}",
                expected="the name of a callable in it",
                do=offer(name, callables(module)) or "Check the name",
            ) from None
        except Exception as error:  # a module that imports its parts lazily
            raise _import_failed(place, error) from error
    if not callable(value):
        raise TargetError(
            f"{text} is of type {type(value).__name__}",
            expected="a callable: one that makes a module, or a build that returns a step",
            do=offer(name, callables(module)) or "Name a callable",
        )
    return Target(text, value, output.lines)


def import_place(place: str) -> ModuleType:
    """Import the module or the file in the first part of a target's text. Raises TargetError if there is no such module
    or file, or its import raised; with file:line."""
    if place.endswith(".py") or "/" in place or os.sep in place:
        return _import_file(place)
    return _import_module(place)


def callables(module: ModuleType) -> list[str]:
    """Return the names of the public callables that a module defines; if it defines none, those that it imports."""
    public = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    own = [name for name, value in public.items() if getattr(value, "__module__", None) == module.__name__]
    return own or list(public)


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Raise StepError if the user's code in this context calls ``sys.exit``. ``what`` describes the code in the
    message."""
    try:
        yield
    except SystemExit as error:
        modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
        problem = f"{what} called sys.exit({'' if error.code is None else repr(error.code)})"
        expected, do = "code that returns", "Take the call out, or put it under if __name__ == '__main__'"
        if "argparse" in modules or "click.core" in modules:
            problem += f" as it read the arguments {shlex.join(sys.argv[1:])!r}"
            expected, do = "arguments that it takes", "Give those of its own last, behind --, as in -- --epochs 1"
        raise StepError(problem, expected=expected, do=do, where=location(error)) from error


def location(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost frame of the user's own code in a traceback; else of a library's; or None.

    For a syntax error, that of the error.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short(error.filename)}:{error.lineno}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(("<", _OURS))
    ]
    users = [frame for frame in frames if _STDLIB not in frame.filename and "site-packages" not in frame.filename]
    innermost = (users or frames or [None])[-1]
    return None if innermost is None else f"{short(innermost.filename)}:{innermost.lineno}"


def short(path: str) -> str:
    """Return a path relative to the working directory if it is inside, else unchanged."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _import_file(place: str) -> ModuleType:
    """Import a file as a module (as a module of its package, if it is in a package), with its folder on
    ``sys.path``."""
    path = Path(place)
    if not os.path.isfile(path) or path.suffix != ".py":
        raise _no_file(path)
    path = path.resolve()
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").is_file():  # a file of a package: its relative imports need the package
        folder, name = folder.parent, f"{folder.name}.{name}"
    _put_first(str(folder))
    if "." in name:
        return _import_by(place, lambda: importlib.import_module(name.removesuffix(".__init__")))
    return _import_by(place, lambda: _load(path))


def _load(path: Path) -> ModuleType:
    """Import a file as a module named by its stem, or a prefixed stem if another module has that name."""
    name = re.sub(r"\W", "_", path.stem)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None or name in sys.stdlib_module_names:
        name = f"memplan_target_{name}"
    return module_from_file(name, path)


def module_from_file(name: str, path: Path) -> ModuleType:
    """Import a Python file as a module of this name, and return the module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a spec"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import does: dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(place: str) -> ModuleType:
    """Import a module by its dotted name, with the working directory on ``sys.path``."""
    if not all(part.isidentifier() for part in place.split(".")):
        raise TargetError(f"{place!r} is no module's name", expected=FORM, do="Write it so")
    _put_first(os.getcwd())
    try:
        return _import_by(place, lambda: importlib.import_module(place))
    except TargetError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) and cause.name else ""
        if missing and f"{place}.".startswith(f"{missing}."):  # else a module that it imports is missing
            raise _no_module(place, missing) from None
        raise


def _import_by(place: str, load: Callable[[], ModuleType]) -> ModuleType:
    """Return ``load()``, which imports the module or file ``place``; what the user's code raises becomes a TargetError,
    except memplan's own errors."""
    try:
        with contained(f"importing {place}"):
            return load()
    except MemplanError:
        raise
    except Exception as error:  # the user's code can raise anything; the original stays as __cause__
        raise _import_failed(place, error) from error


def _import_failed(place: str, error: Exception) -> TargetError:
    """Return the error for a module whose import raised, with the user's line and what to install."""
    where = location(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error).strip().split("\n")[0]
    do = "Correct it there"
    if isinstance(error, ModuleNotFoundError) and error.name:
        do = f"Install {error.name.split('.')[0]} next to memplan, or run memplan where it is installed"
    return TargetError(
        f"importing {place} raised {type(error).__name__}: {text or 'no message'}" + (f" at {where}" if where else ""),
        expected="a module that Python can import",
        do=do,
    )


def _put_first(folder: str) -> None:
    """Move or add a folder to the front of ``sys.path``."""
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)


def _without_callable(text: str) -> TargetError:
    """Return the error for a target without a callable. Its file is parsed, not run: it may be a training script."""
    names = _functions(text) if os.path.isfile(text) and text.endswith(".py") else None
    if names is None:
        return TargetError(f"{text!r} names no callable", expected=FORM, do="Write it so")
    which = f"Say which: {', '.join(f'{text}:{name}' for name in names[:4])}; or" if names else "Of a script as it is,"
    return TargetError(
        f"{text!r} names no callable", expected=FORM,
        do=f"{which} memplan run {text} says what it needs, and check, largest and fit take --script {text}",
    )  # fmt: skip


def _functions(path: str) -> list[str]:
    """Return the names of the public functions and classes of a file."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def _no_file(path: Path) -> TargetError:
    """Return the error for a path that is no Python file, with similar names in its folder."""
    siblings = [file.name for file in path.parent.glob("*.py")] if os.path.isdir(path.parent) else []
    if os.path.isdir(path):
        problem = f"{path} is a folder"
    elif os.path.exists(path):
        problem = f"{path} is not a .py file"
    elif not os.path.isdir(path.parent):
        problem = f"there is no folder {path.parent} in {os.getcwd()}"
    else:
        problem = f"there is no file {path}"
    do = offer(path.name, siblings) or "Check the path"
    return TargetError(problem, expected="path/to/file.py:callable", do=do)


def _no_module(place: str, missing: str) -> TargetError:
    """Return the error for a module that does not exist, with similar names in the same package. ``missing``: the
    shortest prefix of the dotted name ``place`` that does not exist."""
    parent, _, name = missing.rpartition(".")
    paths = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else [os.getcwd()]
    siblings = [f"{parent}.{module.name}" if parent else module.name for module in pkgutil.iter_modules(paths)]
    return TargetError(
        f"there is no module {missing}" + (f" for {place}" if missing != place else ""),
        expected=FORM,
        do=offer(missing, siblings) if siblings and name else "Check the name, and that it is installed here",
    )
