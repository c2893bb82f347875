"""Where the steps of a run begin and end: of a ``build``, which returns its step, and of a program run as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

Step = Callable[[], Any]
Build = Callable[[], Step]


class Boundaries(Protocol):
    """Told where the parts of a run begin and end."""

    @property
    def tick(self) -> int:
        """Return the present tick of the trace that is made; that of a measurement is known at the end only."""
        ...

    def built(self) -> None:
        """Note that everything the first step needs is made."""
        ...

    def stepped(self) -> None:
        """Note that a step has ended."""
        ...

    def ended(self) -> None:
        """Note that the last step has ended, while what was made for it is still alive."""
        ...


@runtime_checkable
class Program(Protocol):
    """A program in which steps begin and end somewhere inside, as in a training script."""

    @property
    def title(self) -> str:
        """Return what to call it in a message."""
        ...

    def run_steps(self, steps: int, boundaries: Boundaries) -> None:
        """Run it until it has made ``steps`` steps or ends, calling ``boundaries`` at each boundary.

        Each of these is called at least once; ``stepped`` at most ``steps`` times, and any of them may raise.
        """
        ...


class Programs:
    """A program for each value of what its signature names, as of its ``batch``."""

    def program(self, **arguments: Any) -> Program:
        """Return the program with these values."""
        raise NotImplementedError


Runs = Build | Program
"""What a recording or a measurement runs."""
