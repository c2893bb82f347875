"""The files that a command writes an explained step to: checked before anything runs, written after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.files import check_writable, write
from memplan.errors import InputError

if TYPE_CHECKING:
    from memplan.explanation.model import Explanation
    from memplan.trace.trace import Trace

trace_option = click.option(
    "--trace", "trace_file", metavar="FILE", help="Write the recorded step, to explain it again later."
)
snapshot_option = click.option(
    "--snapshot", "snapshot_file", metavar="FILE",
    help="Write what the allocator does, too, as a snapshot that pytorch.org/memory_viz opens.",
)  # fmt: skip
contribute_option = click.option(
    "--contribute", metavar="FILE",
    help="With --device cuda: write what the card's allocator did, with shapes and sizes, without names.",
)  # fmt: skip


def check_contribute(path: str | None, device: str | None) -> None:
    """Check the file of a contribution.

    Raises:
        InputError: it is of no GPU, or cannot be written.
    """
    if path is None:
        return
    if device is None or device.lower() == "cpu":
        raise InputError(
            "--contribute without --device cuda", expected="a step that really runs on a GPU", do="Add --device cuda"
        )
    if path == "-":
        raise InputError("--contribute -", expected="a file: it is packed, and no text", do="Name one: step.json.gz")
    check_writable(path, "--contribute")


@dataclass(frozen=True)
class Outputs:
    """Files as typed; None for those not asked for."""

    json: str | None
    trace: str | None
    snapshot: str | None

    def checked(self) -> Outputs:
        """Return the same.

        Raises:
            InputError: two of them are one, or one is not to be written to stdout, or cannot be written.
        """
        if self.json == self.trace == "-":
            raise InputError(
                "--json - and --trace -", expected="stdout for one of them", do="Name a file for the other"
            )
        if self.snapshot == "-":
            raise InputError("--snapshot -", expected="a file: a snapshot is no text", do="Name one")
        written = [path for path in (self.json, self.trace, self.snapshot) if path not in (None, "-")]
        if len(set(written)) < len(written):
            raise InputError("one file for several outputs", expected="a file for each", do="Name another")
        for option, path in (("--json", self.json), ("--trace", self.trace), ("--snapshot", self.snapshot)):
            check_writable(path, option)
        return self

    @property
    def takes_stdout(self) -> bool:
        """Return whether one of them is stdout, which then holds nothing else."""
        return "-" in (self.json, self.trace)

    def write(
        self, trace: Trace, explanation: Explanation, dumps: Callable[[Any], str], settings: str | None = None
    ) -> None:
        """Write the step to each file.

        Args:
            trace: the step.
            explanation: of it.
            dumps: writes an explanation as JSON.
            settings: of the caching allocator.
        """
        if self.trace is not None:
            write(self.trace, trace.to_json())
        if self.json is not None:
            write(self.json, dumps(explanation))
        if self.snapshot is not None:
            from memplan.simulation.allocator.settings import parse_settings
            from memplan.simulation.snapshots.write import frames_of, write_snapshot

            causes = {storage.id: storage.cause for storage in trace.counted}
            used = parse_settings(settings or "")
            write_snapshot(
                self.snapshot, explanation.timeline, frames_of(trace), trace=trace, settings=used, causes=causes
            )
