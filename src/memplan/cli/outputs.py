"""The options for files that an explained step is written to, checked before anything runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.files import OUTPUT, ResultFiles, write
from memplan.errors import InputError

if TYPE_CHECKING:
    from memplan.explanation.model import Explanation
    from memplan.trace.trace import Trace

trace_option = click.option(
    "--trace", "trace_file", type=OUTPUT, metavar="FILE", help="Write the recorded step, to explain it again later."
)
snapshot_option = click.option(
    "--snapshot", "snapshot_file", type=OUTPUT, metavar="FILE",
    help="Write what the allocator does, too, as a snapshot that pytorch.org/memory_viz opens.",
)  # fmt: skip
contribute_option = click.option(
    "--contribute", type=OUTPUT, metavar="FILE",
    help="With --device cuda: write what the card's allocator did, with shapes and sizes, without names.",
)  # fmt: skip


@dataclass(frozen=True)
class ViewerFiles:
    """Paths of files for viewers such as TensorBoard; None for options that were not used."""

    perfetto: str | None = None
    csv: str | None = None
    tensorboard: str | None = None

    def checked(self) -> ViewerFiles:
        """Check and return the paths.

        Raises:
            InputError: stdout, or a file where a folder is needed.
            UsageError: tensorboard is not installed.
        """
        for option, path in (("--perfetto", self.perfetto), ("--csv", self.csv), ("--tensorboard", self.tensorboard)):
            if path == "-":
                raise InputError(f"{option} -", expected="a file or a folder for a viewer", do="Name one")
        if self.tensorboard is not None:
            from memplan.reports.viewers.tensorboard import check_installed

            check_installed("--tensorboard")
            if os.path.exists(self.tensorboard) and not os.path.isdir(self.tensorboard):
                raise InputError(
                    f"--tensorboard {self.tensorboard} is a file",
                    expected="a folder, as TensorBoard's --logdir",
                    do="Name another",
                )
        return self

    def write(self, trace: Trace, explanation: Explanation, settings: str | None = None) -> None:
        """Write the step's memory timeline for each viewer."""
        from memplan.reports.viewers import over_time_csv, perfetto, tensorboard

        if self.perfetto is not None:
            write(self.perfetto, perfetto.dumps(trace, explanation, settings))
        if self.csv is not None:
            write(self.csv, over_time_csv.dumps(trace, explanation, settings))
        if self.tensorboard is not None:
            tensorboard.write_scalars(self.tensorboard, explanation)


def viewer_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--perfetto``, ``--csv`` and ``--tensorboard``, passed to the command as ``viewers``."""

    @functools.wraps(function)
    def with_files(*, perfetto: str | None, csv: str | None, tensorboard: str | None, **values: Any) -> Any:
        return function(viewers=ViewerFiles(perfetto, csv, tensorboard).checked(), **values)

    for name, kind, metavar, what in (
        ("--tensorboard", click.STRING, "FOLDER", "Write memory over time as scalars for TensorBoard."),
        ("--csv", OUTPUT, "FILE", "Write memory over time as a table, a row for each allocation or free."),
        (
            "--perfetto",
            OUTPUT,
            "FILE",
            "Write ops and memory as a trace that ui.perfetto.dev and chrome://tracing open.",
        ),
    ):
        with_files = click.option(name, type=kind, metavar=metavar, help=what)(with_files)
    return with_files


def check_contribute(path: str | None, device: str | None) -> None:
    """Check the options of ``--contribute``.

    Raises:
        InputError: the device is no GPU, or the file is stdout.
    """
    if path is None:
        return
    if device is None or device.lower() == "cpu":
        raise InputError(
            "--contribute without --device cuda", expected="a step that really runs on a GPU", do="Add --device cuda"
        )
    if path == "-":
        raise InputError("--contribute -", expected="a file: it is packed, and no text", do="Name one: step.json.gz")


@dataclass(frozen=True)
class Outputs:
    """Output paths, or ``-``; None for options that were not used."""

    results: ResultFiles
    trace: str | None
    snapshot: str | None
    viewers: ViewerFiles = ViewerFiles()

    def checked(self) -> Outputs:
        """Check and return the paths.

        Raises:
            InputError: two of them are stdout, or a snapshot is, which is no text.
        """
        if self.results.json == self.trace == "-":
            raise InputError(
                "--json - and --trace -", expected="stdout for one of them", do="Name a file for the other"
            )
        if self.snapshot == "-":
            raise InputError("--snapshot -", expected="a file: a snapshot is no text", do="Name one")
        return self

    @property
    def takes_stdout(self) -> bool:
        """Return whether a file goes to stdout, so that nothing else may be printed."""
        return "-" in (self.results.json, self.trace)

    def write(
        self, trace: Trace, explanation: Explanation, dumps: Callable[[], str], settings: str | None = None
    ) -> None:
        """Write the step to each file.

        Args:
            trace: the step.
            explanation: the explanation of the step.
            dumps: returns the explanation as JSON text.
            settings: settings of the caching allocator.
        """
        if self.trace is not None:
            write(self.trace, trace.to_json())
        self.results.write(dumps)
        self.viewers.write(trace, explanation, settings)
        if self.snapshot is not None:
            from memplan.simulation.allocator.settings import parse_settings
            from memplan.simulation.snapshots.write import frames_of, write_snapshot

            causes = {storage.id: storage.cause for storage in trace.counted}
            used = parse_settings(settings or "")
            write_snapshot(
                self.snapshot, explanation.timeline, frames_of(trace), trace=trace, settings=used, causes=causes
            )
