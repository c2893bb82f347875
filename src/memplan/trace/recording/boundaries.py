"""Protocols of runs: a ``build`` that returns its step, or a program, and the callbacks where its steps end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

Step = Callable[[], Any]
Build = Callable[[], Step]


class Boundaries(Protocol):
    """Callbacks at the boundaries of a run's parts: building and steps."""

    @property
    def tick(self) -> int:
        """Return the current tick of the recorded trace. In a measurement it is provisional."""
        ...

    def built(self) -> None:
        """Called when building has ended, before the first step."""
        ...

    def stepped(self) -> None:
        """Called after each step."""
        ...

    def ended(self) -> None:
        """Called after the last step, while model and optimizer are still alive."""
        ...


@runtime_checkable
class Program(Protocol):
    """A program in which steps begin and end somewhere inside, as in a training script."""

    @property
    def title(self) -> str:
        """Return the program's name in messages."""
        ...

    @property
    def has_time(self) -> bool:
        """Return whether there is time to run the program again."""
        ...

    def run_steps(self, steps: int, boundaries: Boundaries) -> None:
        """Run the program until it ends or has run ``steps`` steps, calling ``boundaries`` at each boundary.

        Each callback is called at least once, ``stepped`` at most ``steps`` times; any of them may raise.
        """
        ...


class Programs:
    """A family of programs, parameterized by the arguments of `program`, such as ``batch``."""

    def program(self, **arguments: Any) -> Program:
        """Return the program for these arguments."""
        raise NotImplementedError


Runs = Build | Program
"""Subject of a recording or a measurement."""
