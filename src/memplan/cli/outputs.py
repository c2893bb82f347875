"""The options for files that an explained step is written to, checked before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.files import OUTPUT, ResultFiles, write
from memplan.cli.options import result_options
from memplan.errors import InputError

if TYPE_CHECKING:
    from memplan.explanation.model import Explanation
    from memplan.trace.trace import Trace

_OPTIONS = (
    click.option(
        "--trace", "trace_file", type=OUTPUT, metavar="FILE", help="Write the step, too, to explain it again later."
    ),
    click.option(
        "--snapshot", "snapshot_file", type=OUTPUT, metavar="FILE",
        help="Write what the allocator does, too, as a snapshot that pytorch.org/memory_viz opens.",
    ),
    click.option(
        "--perfetto", "perfetto_file", type=OUTPUT, metavar="FILE",
        help="Write ops and memory, too, as a trace that ui.perfetto.dev and chrome://tracing open.",
    ),
)  # fmt: skip
contribute_option = click.option(
    "--contribute", type=OUTPUT, metavar="FILE",
    help="With --device cuda: write what the card's allocator did, with shapes and sizes, without names.",
)  # fmt: skip


def check_contribute(path: str | None, device: str | None) -> None:
    """Check the options of ``--contribute``. Raises InputError if the device is no GPU, or the file is stdout."""
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
    """Output paths of an explained step, or ``-``; None for options that were not used."""

    results: ResultFiles
    trace: str | None
    snapshot: str | None
    perfetto: str | None

    def checked(self) -> Outputs:
        """Check and return the paths. Raises InputError if two of them are stdout, or one is that needs a viewer."""
        if self.results.json == self.trace == "-":
            raise InputError(
                "--json - and --trace -", expected="stdout for one of them", do="Name a file for the other"
            )
        for option, path in (("--snapshot", self.snapshot), ("--perfetto", self.perfetto)):
            if path == "-":
                raise InputError(f"{option} -", expected="a file, which a viewer opens", do="Name one")
        return self

    @property
    def takes_stdout(self) -> bool:
        """Return whether a file goes to stdout, so that nothing else may be printed."""
        return "-" in (self.results.json, self.trace)

    def write(
        self, trace: Trace, explanation: Explanation, dumps: Callable[[], str], settings: str | None = None
    ) -> None:
        """Write the step to each file that was asked for. ``dumps()`` returns the JSON of the explanation; ``settings``
        are those of the caching allocator."""
        if self.trace is not None:
            write(self.trace, trace.to_json())
        self.results.write(dumps)
        if self.perfetto is not None:
            from memplan.reports import perfetto

            write(self.perfetto, perfetto.dumps(trace, explanation, settings))
        if self.snapshot is not None:
            from memplan.simulation.allocator.settings import parse_settings
            from memplan.simulation.snapshots.write import frames_of, write_snapshot

            causes = {storage.id: storage.cause for storage in trace.counted}
            used = parse_settings(settings or "")
            write_snapshot(
                self.snapshot, explanation.timeline, frames_of(trace), trace=trace, settings=used, causes=causes
            )


def output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``, ``--html``, ``--trace``, ``--snapshot`` and ``--perfetto``, passed as ``outputs``."""

    @functools.wraps(function)
    def with_outputs(
        *, results: ResultFiles, trace_file: str | None, perfetto_file: str | None, snapshot_file: str | None = None,
        **values: Any,
    ) -> Any:  # fmt: skip
        return function(outputs=Outputs(results, trace_file, snapshot_file, perfetto_file).checked(), **values)

    for option in reversed(_OPTIONS):
        with_outputs = option(with_outputs)
    return result_options("the explanation")(with_outputs)
