"""The same steps on an emulated card: processes of the CUDA build of torch that see it, on a machine without a GPU.

What a process measures is `golden_measure.golden`, as on a real card, and the file has the same fields. Its format has
another name, `golden_format.DRY_FORMAT`, and it says what the step was told that a real card would have computed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from golden_steps import Subject

from memplan.devices import find
from memplan.dry.cuda_torch import find_torch
from memplan.dry.library import library_for
from memplan.trace.card_run import golden_format
from memplan.trace.dry_run.process import process_command, process_variables

if TYPE_CHECKING:
    from memplan.trace.dry_run.reads import Reads

_CHILD = """
import os, traceback
sys.path.insert(0, {tools!r})
code = 1
try:
    import {module}
    code = {module}.main({arguments!r})
except SystemExit as error:
    code = error.code if isinstance(error.code, int) else 1
except BaseException:
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # its threads may hold objects of Python
"""


class DryCard:
    """An emulated card, and the environment whose torch runs on it."""

    def __init__(self, name: str, environment: str | None) -> None:
        """Find both, and build the emulated driver.

        Args:
            name: a card whose clocks are in the catalogue.
            environment: with the CUDA build of torch; this one where None.

        Raises:
            memplan.DeviceError: no such card, no such torch, or no compiler.
        """
        self._card = find(name)
        self._torch = find_torch(environment)
        self._library = library_for(self._torch)
        self._logs = tempfile.TemporaryDirectory(prefix="memplan-dry-")
        self.variables({}, "")  # refuses a card that cannot be described

    @property
    def name(self) -> str:
        """The card's name in the catalogue."""
        return self._card.name

    @property
    def environment(self) -> str:
        """The Python of the environment with the CUDA build of torch."""
        return str(self._torch.python)

    def command(self, module: str, arguments: list[str]) -> list[str]:
        """The command of a process that sees the card and runs a script of this folder, by its module's name, with
        these arguments."""
        tools = str(Path(__file__).resolve().parent)
        return process_command(self._torch, _CHILD.format(tools=tools, module=module, arguments=arguments))

    def variables(self, inherited: Mapping[str, str], step: str) -> dict[str, str]:
        """The environment of the process of a step."""
        return process_variables(inherited, self._card, self._library, Path(self._logs.name, step))


@contextmanager
def emulated(card: str) -> Iterator[Reads]:
    """In a process that sees this card: the host reads back what it wrote, and each other value that it reads is noted.
    Yields these reads."""
    from memplan import _torch
    from memplan.trace.dry_run.observe import check_card
    from memplan.trace.dry_run.reads import Reads

    check_card(find(card))
    reads = Reads()
    with _torch.HostValues(), reads.noted():
        yield reads


def golden(subject: Subject, card: str) -> dict[str, Any]:
    """As `golden_measure.golden`, in a process that sees the emulated card."""
    import golden_measure

    from memplan.trace.dry_run.observe import driver_assumptions

    with emulated(card) as reads:
        content = golden_measure.golden(subject, alone=False)
    assumed = [f"{row.kind}: {row.text}" for row in (*reads.assumptions(), *driver_assumptions())]
    return content | {"format": golden_format.DRY_FORMAT, "context": None, "assumed": list(dict.fromkeys(assumed))}
