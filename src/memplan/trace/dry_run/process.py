"""Starts the process with the emulated card, sends it the step, and runs it there."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memplan import errors
from memplan._interrupts import waiting
from memplan.devices import Device, find
from memplan.dry.card import CARD, DRIVER_LOG, description
from memplan.dry.cuda_torch import NEWEST, OLDEST, CudaTorch, find_torch
from memplan.dry.library import Library, library_for
from memplan.dry.progress import STALLED, Progress
from memplan.errors import DeviceError, MemplanError, StepError, UsageError
from memplan.trace.dry_run.builds import Packed, packed, unpacked
from memplan.trace.recording.boundaries import Runs
from memplan.trace.trace import Trace

_REQUEST, _STARTED, _TRACE, _ERROR, _LOG, _STDERR = "request", "started", "trace.json", "error", "log", "stderr"
_POLL_INTERVAL = 0.2
"""Seconds between checks whether the process has started."""
_BORROWED = ("attr", "attrs", "cattrs", "click", "cloudpickle", "rich", "markdown_it", "mdurl", "pygments",
             "sortedcontainers", "typing_extensions")  # fmt: skip
"""Pure Python packages that memplan needs: imported from here if the other environment lacks them."""
_START = """
import sys
from importlib.machinery import PathFinder

class Finder:
    def __init__(self, names, places):
        self.names, self.places = names, places

    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, self.places) if path is None and name in self.names else None

sys.meta_path.insert(0, Finder({{"memplan"}}, [{home!r}]))
sys.meta_path.append(Finder({borrowed!r}, {places!r}))
"""
_ANSWER = """
from memplan.trace.dry_run.process import answer
answer({folder!r})
"""
_REAL_CARD_VARIABLES = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
"""Environment variables that select real cards: not inherited."""


@dataclass(frozen=True)
class Request:
    """A step to run in the process."""

    build: Packed
    card: str
    steps: int
    snapshot: str | None
    path: tuple[str, ...]
    """Folders to add to the import path."""


def run_dry(
    build: Runs | Packed,
    *,
    device: str | None,
    steps: int,
    environment: str | os.PathLike[str] | None = None,
    snapshot: str | os.PathLike[str] | None = None,
) -> Trace:
    """Run a step on an emulated card, in its own process, and return the trace of torch's allocator.

    Args:
        device: a card whose clocks are in the catalogue.
        environment: the environment with the CUDA build of torch; by default the current environment.

    Raises:
        DeviceError: no card, an unknown card, no CUDA build of torch, or no compiler.
        StepError: ``build`` or the step raised, or ended the process.
        UsageError: ``build`` cannot be sent to the process.
    """
    if CARD in os.environ:
        raise UsageError(
            "a dry run within a dry run: the build's file was run again in the other process, and starts one there",
            expected="a file that starts nothing where it is imported",
            do='Put the call under if __name__ == "__main__":',
        )
    if device is None:
        raise DeviceError("a dry run of no card", expected="device, the card to emulate", do="Name one: device='h100'")
    card = find(str(device))
    description(card)  # raises here, before anything is built, for a card without clocks
    torch = find_torch(environment)
    library = library_for(torch)
    serialized = build if isinstance(build, Packed) else packed(build, _version(torch))
    file = None if snapshot is None else os.path.abspath(snapshot)
    request = Request(serialized, card.name, steps, file, _folders())
    with tempfile.TemporaryDirectory(prefix="memplan-dry-") as folder:
        Path(folder, _REQUEST).write_bytes(pickle.dumps(request))
        variables = process_variables(os.environ, card, library, Path(folder, _LOG))
        return _with_environment_notes(_run(torch, folder, variables), torch)


def process_variables(inherited: Mapping[str, str], card: Device, library: Library, log: Path) -> dict[str, str]:
    """Return the environment variables of a process with the emulated card, whose driver logs unknown calls to
    ``log``. ``inherited``: those of this process."""
    variables = {name: value for name, value in inherited.items() if name not in _REAL_CARD_VARIABLES}
    return variables | {CARD: description(card), DRIVER_LOG: str(log), **library.variables}


def process_command(torch: CudaTorch, code: str) -> list[str]:
    """Return the command that runs Python code in an environment, with this memplan and its dependencies."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(errors.__file__)))
    places = [entry for entry in sys.path if entry.endswith("-packages")]
    start = _START.format(home=home, borrowed=set(_BORROWED), places=places)
    return [str(torch.python), "-P", "-c", start + code]


def _run(torch: CudaTorch, folder: str, variables: dict[str, str]) -> Trace:
    """Start the process for the request in ``folder``, wait for it, and return its trace or raise its error."""
    command = process_command(torch, _ANSWER.format(folder=folder))
    with open(os.path.join(folder, _STDERR), "w+b") as stderr:
        process = subprocess.Popen(command, env=variables, stderr=stderr)
        try:
            with waiting():
                _wait_for_start(process, Path(folder, _STARTED), torch)
                status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        stderr.seek(0)
        text = stderr.read().decode("utf-8", "replace")
    trace, error = Path(folder, _TRACE), Path(folder, _ERROR)
    if trace.exists():
        sys.stderr.write(text)
        return Trace.from_json(trace.read_text(encoding="utf-8"))
    if error.exists():
        raise pickle.loads(error.read_bytes())
    raise _ended(status, text)


def _wait_for_start(process: subprocess.Popen[bytes], started: Path, torch: CudaTorch) -> None:
    """Wait until the process has loaded torch, or has ended. Raises DeviceError if the process hangs before."""
    progress = Progress(process.pid)
    while not started.exists():
        try:
            process.wait(_POLL_INTERVAL)
            return
        except subprocess.TimeoutExpired:
            pass
        if progress.hangs:
            raise DeviceError(
                f"torch {torch.version} on the emulated card hangs while it is loaded: nothing for {STALLED:.0f} s",
                expected="an environment whose torch loads",
                do=f"Try {torch.python} -c 'import torch', or predict the step: memplan.record(build, device=...)",
            )


def _ended(status: int, stderr: str) -> MemplanError:
    """Return the error for a process that ended without a trace or an error. ``stderr``: its output."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
    last = f": {lines[-1].strip()[:200]}" if lines else ""
    return StepError(
        f"the process of the dry run ended {how}{last}",
        expected="a step that runs on the emulated card",
        do="Predict the step instead: memplan.record(build, device=...)",
    )


def _with_environment_notes(trace: Trace, torch: CudaTorch) -> Trace:
    """Return the trace with notes about settings of the allocator in the environment, and an untested torch."""
    notes, settings = trace.notes, allocator_settings()
    if settings is not None:
        notes += (f"the allocator ran with {settings}: simulate takes it as settings",)
    if not torch.is_tested:
        seen = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        notes += (f"torch {torch.version} is none of the releases that dry runs were compared in ({seen})",)
    return dataclasses.replace(trace, notes=notes)


def _version(torch: CudaTorch) -> tuple[int, int]:
    """Return the Python version (major, minor) of the environment."""
    if str(torch.python) == sys.executable:
        return sys.version_info[:2]
    code = "import sys, json; print(json.dumps(sys.version_info[:2]))"
    result = subprocess.run([str(torch.python), "-P", "-c", code], capture_output=True, text=True, check=False)
    try:
        major, minor = json.loads(result.stdout)
    except ValueError:
        raise UsageError(f"{torch.python} does not run", expected="the Python of an environment") from None
    return major, minor


def allocator_settings() -> str | None:
    """Return the allocator settings that a child process inherits from the environment."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or None


def _folders() -> tuple[str, ...]:
    """Return the user's folders on the import path of this process: without memplan's, Python's own and packages."""
    libraries = tuple(os.path.join(root, "lib") + os.sep for root in (sys.prefix, sys.base_prefix))
    folders = [os.path.abspath(entry) for entry in sys.path]
    own = os.path.dirname(os.path.dirname(os.path.abspath(errors.__file__)))
    return tuple(
        folder for folder in folders
        if folder != own and os.path.isdir(folder)
        and not folder.endswith("-packages") and not folder.startswith(libraries)
    )  # fmt: skip


def _on_dry_card(error: StepError) -> StepError:
    """Return the error of a step with the advice for an emulated card."""
    if "OutOfMemoryError" in error.found:
        expected = "a step that fits on the card"
        do = "Take fewer samples or a larger card; memplan fit makes a step fit"
    else:
        expected = "a step that runs on the emulated card"
        do = "Check the inputs; docs/dry.md says what that card lacks, and memplan.record(build, device=...) needs none"
    return StepError(error.found, expected=expected, do=do)


def answer(folder: str) -> None:
    """Run the request in ``folder``, write its trace or error there, and exit at once.

    The exit skips cleanup: threads may hold Python objects.
    """
    try:
        request: Request = pickle.loads(Path(folder, _REQUEST).read_bytes())
        sys.path[:0] = request.path
        from memplan.trace.dry_run.observe import observe

        Path(folder, _STARTED).touch()
        trace = observe(unpacked(request.build), find(request.card), request.steps, request.snapshot)
        partial = Path(folder, f"{_TRACE}.partial")
        partial.write_text(trace.to_json(), encoding="utf-8")
        partial.rename(Path(folder, _TRACE))
    except MemplanError as error:
        error = _on_dry_card(error) if isinstance(error, StepError) else error
        Path(folder, _ERROR).write_bytes(pickle.dumps(error))
    except Exception as error:  # the user's module raised while it was imported
        text = str(error).strip().split("\n")[0]
        failure = StepError(f"loading the build raised {type(error).__name__}: {text}", expected="a build that loads")
        Path(folder, _ERROR).write_bytes(pickle.dumps(failure))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
