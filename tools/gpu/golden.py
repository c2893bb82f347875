"""Record golden files: what torch's CUDA allocator really does in the steps that memplan predicts.

    python tools/gpu/golden.py                       # all steps; writes goldens/<gpu>/<torch>/<step>.json.gz
    python tools/gpu/golden.py --only gpt2 --check   # one step, and the predictions beside it
    python tools/gpu/golden.py --list
    python tools/gpu/golden.py --dry h100 --torch ~/cuda-env    # on an emulated card; writes goldens/dry/

Needs a CUDA GPU, or with --dry a CUDA build of torch and a C compiler; README.md beside this file says how long it
takes and what is written. Every step has a process of its own, so that its first tensor is the first on the card. A
step that fails is an entry of the index, not the end.
Exit code: 0 all steps measured; 3 some are missing; 1 nothing was measured, or (--check) a prediction is outside its
limits; 2 bad usage, or neither.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]
sys.path.append(str(ROOT / "src"))  # where memplan is not installed
import golden_steps  # noqa: E402  # found by the lines above, wherever the script is started
from golden_steps import Subject  # noqa: E402

from memplan.trace.card_run import golden_format  # noqa: E402

if TYPE_CHECKING:
    from golden_dry import DryCard

INDEX = "index.json"
LONGEST_STEP = 200
"""Seconds after which a process is taken to hang."""
LAST_START = 40
"""Seconds before the end of the budget from which on no process is started."""
PROCESSES = 6
OVER = "the budget of seconds was over"
"""Why a step is missing that a later run can measure."""
INHERITED = dict(os.environ)
"""Environment of the steps: as before MONAI is imported here, which sets CUBLAS_WORKSPACE_CONFIG."""
THREADS = "2"
SOME_MISSING = 3
"""Exit code. An exception is exit code 1, so that is no sign that anything was measured."""
Row = dict[str, Any]


@dataclass
class Job:
    """One process on the card, or on an emulated one."""

    name: str
    arguments: list[str]
    dry: DryCard | None = None
    process: subprocess.Popen[str] | None = None
    started: float = 0.0
    files: list[IO[str]] = field(default_factory=list)

    def start(self) -> None:
        """Start the process; what it prints goes to files, which no full pipe can stop."""
        for _ in range(2):
            self.files.append(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))  # noqa: SIM115
        environment = INHERITED if self.dry is None else self.dry.variables(INHERITED, self.name)
        environment = environment | {"OMP_NUM_THREADS": THREADS, "MKL_NUM_THREADS": THREADS, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), *self.arguments]
        if self.dry is not None:
            command = self.dry.command("golden", self.arguments)
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self.files[0], stderr=self.files[1], text=True
        )
        self.started = time.monotonic()

    def result(self, stop: float) -> Row | None:
        """What the process said, None while it runs. It is ended at ``stop``, or after `LONGEST_STEP` seconds."""
        assert self.process is not None
        code, now = self.process.poll(), time.monotonic()
        if code is None and now < min(stop, self.started + LONGEST_STEP):
            return None
        if code is None:
            self.process.kill()
            self.process.wait()
        said, complained = (self._text(file) for file in self.files)
        seconds = round(now - self.started, 1)
        if code is None:
            reason = OVER if now >= stop else f"no answer within {LONGEST_STEP} s"
            return {"error": f"ended after {seconds} s: {reason}", "seconds": seconds}
        return _last_object(said, complained, code) | {"seconds": seconds}

    @staticmethod
    def _text(file: IO[str]) -> str:
        file.seek(0)
        text = file.read()
        file.close()
        return text


def _last_object(said: str, complained: str, code: int) -> Row:
    """The object on the last line that holds one; else an error made of what else was printed."""
    for line in reversed(said.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                break
    lines = [line for line in complained.strip().splitlines() if line.strip()]
    return {"error": (lines[-1] if lines else f"exit code {code}")[:300]}


def run_all(jobs: Iterable[Job], processes: int, stop: float) -> Iterable[tuple[str, Row]]:
    """Run the jobs, some at a time; yields each one's name and result as it ends."""
    waiting, running = list(jobs), list[Job]()
    while waiting or running:
        while waiting and len(running) < processes and time.monotonic() < stop - LAST_START:
            job = waiting.pop(0)
            job.start()
            running.append(job)
        if waiting and not running:
            for job in waiting:
                yield job.name, {"error": f"not started: {OVER}"}
            return
        for job in list(running):
            result = job.result(stop)
            if result is not None:
                running.remove(job)
                yield job.name, result
        time.sleep(0.05)


def child(name: str, module: str, output: Path, alone: bool, dry: str | None = None) -> Row:
    """Measure one step in this process, which may see an emulated card, and write its golden file."""
    found, broken = golden_steps.subjects(module)
    if name not in found:
        return {"error": broken.get(module, f"{module} has no step {name}")}
    import golden_measure

    try:
        if dry is None:
            content = golden_measure.golden(found[name], alone=alone)
        else:
            import golden_dry

            content = golden_dry.golden(found[name], dry)
    except Exception as error:  # out of memory, a kernel that this card lacks: an entry of the index
        return {"error": golden_measure.told(error)}
    folder = folder_of(output, content["gpu"]["name"], content["versions"]["torch"])
    size = golden_format.write(folder / f"{name}.json.gz", content)
    peaks = [content["build"], *content["peaks"]]
    return {
        "format": content["format"], "set": content["set"], "bytes": size,
        "folder": str(folder.relative_to(output)), "gpu": content["gpu"],
        "versions": content["versions"], "environment": content["environment"], "notes": content["notes"],
        "allocated": max(pair[0] for pair in peaks), "reserved": max(pair[1] for pair in peaks),
        "events": len(content["events"]["actions"]) if content["events"] else 0,
    }  # fmt: skip


def folder_of(output: Path, gpu: str, torch_version: str) -> Path:
    """Where the golden files of a card and a version of torch go."""
    return output / golden_format.slug(gpu) / golden_format.slug(torch_version)


def write_index(folder: Path, rows: dict[str, Row], contexts: Any, lost: Sequence[str]) -> None:
    """Write what was measured with what, and what failed. Entries of earlier runs stay where nothing new is known."""
    path = folder / INDEX
    steps: dict[str, Row] = {}
    before: Row = {}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        steps = before.get("steps", {})
    kept = ("set", "bytes", "allocated", "reserved", "events", "notes", "seconds", "error")
    for name, row in rows.items():
        if "error" in row and (folder / f"{name}.json.gz").exists():
            continue
        steps[name] = {key: row[key] for key in kept if key in row}
        if f"{name}.json.gz" in lost:
            steps[name]["bytes"] = (folder / f"{name}.json.gz").stat().st_size
            steps[name]["events"] = 0
    good = next((row for row in rows.values() if "gpu" in row), {})
    content = {
        "format": good.get("format", before.get("format")), "version": golden_format.VERSION,
        "gpu": good.get("gpu", before.get("gpu")), "versions": good.get("versions", before.get("versions")),
        "environment": good.get("environment", before.get("environment")),
        "contexts": contexts if contexts is not None else before.get("contexts"), "steps": dict(sorted(steps.items())),
    }  # fmt: skip
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def no_gpu() -> str | None:
    """Why nothing can be measured here, None if it can. Makes no CUDA context: it would count as one more process."""
    try:
        import torch
    except ImportError:
        return "torch is not installed. Expected a Python with torch and a CUDA GPU. Install torch built for CUDA."
    if torch.version.cuda is None:
        found = f"torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        found = f"torch {torch.__version__} finds no CUDA GPU"
    else:
        return None
    return f"{found}. Expected a machine with an NVIDIA GPU. Run this script there (see tools/gpu/README.md)."


def choose(names: Sequence[str] | None, which: str | None) -> tuple[list[Subject], dict[str, str]]:
    """The steps to record, the slow ones first, and the modules that cannot be imported.

    Raises:
        SystemExit: a name that no step has (exit code 2).
    """
    found, broken = golden_steps.subjects(more=bool(names))
    chosen = [found[name] for name in names or found if name in found]
    for name in names or ():
        if name not in found:
            near = difflib.get_close_matches(name, found, n=3)
            reasons = "".join(f" {module} cannot be imported ({why})." for module, why in broken.items())
            refuse(
                f"there is no step {name!r}. Expected one of those that --list names."
                + (f" Did you mean {' or '.join(near)}?" if near else "")
                + reasons
            )
    slow_imports = ("volumes", "language")
    return sorted(
        (subject for subject in chosen if which in (None, subject.set)),
        key=lambda subject: (subject.name != "cross_entropy_131072", subject.module not in slow_imports),
    ), broken


def refuse(message: str) -> NoReturn:
    """One line and exit code 2."""
    print(f"golden.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def record(options: argparse.Namespace) -> int:
    """Measure the chosen steps and write what is found. Returns the exit code."""
    dry = dry_card(options)
    begun = time.monotonic()
    stop = begun + (options.budget_seconds or 1e9)
    subjects, broken = choose(options.only, options.set)
    contexts = None
    if not options.only and dry is None:
        contexts = dict(run_all([Job("contexts", ["--contexts"])], 1, stop)).get("contexts", {})
        print(f"contexts: {contexts.get('error') or json.dumps(contexts.get('contexts'))}", flush=True)
    rest = ["--output", str(options.output), *(["--alone"] if options.jobs == 1 else [])]
    rest += ["--dry", dry.name] if dry is not None else []
    jobs = [Job(s.name, ["--child", s.name, "--module", s.module, *rest], dry) for s in subjects]
    rows: dict[str, Row] = {}
    for name, row in run_all(jobs, options.jobs, stop):
        rows[name] = row
        print(line_of(name, row), flush=True)
    folders = finish(options.output, rows, contexts and (contexts.get("contexts") or contexts))
    missing = [name for name, row in rows.items() if "error" in row]
    print(f"{len(rows) - len(missing)} of {len(rows)} steps measured in {time.monotonic() - begun:.0f} s")
    for module, why in broken.items() if not options.only else ():
        print(f"missing: all steps of {module}, which cannot be imported: {why}")
    for name in missing:
        print(f"missing: {name}: {rows[name]['error']}")
    code = SOME_MISSING if missing or (broken and not options.only) else 0
    if options.check and folders:
        outside = check(folders, [name for name in rows if name not in missing], options.jobs)
        code = code or outside
    return code if folders else 1


def dry_card(options: argparse.Namespace) -> DryCard | None:
    """The emulated card that is asked for; None where the steps are to run on a real one.

    Raises:
        SystemExit: there is neither (exit code 2).
    """
    if options.dry is None:
        reason = no_gpu()
        if reason is not None:
            refuse(reason)
        return None
    from memplan.errors import MemplanError

    try:
        from golden_dry import DryCard

        return DryCard(options.dry, options.torch)
    except MemplanError as error:
        refuse(str(error))


def line_of(name: str, row: Row) -> str:
    """One line of the run's report."""
    if "error" in row:
        return f"{name:32} FAILED  {row['error']}"
    notes = f"  ({'; '.join(row['notes'])})" if row["notes"] else ""
    return (
        f"{name:32} {row['allocated']:>15,d} allocated {row['reserved']:>15,d} reserved "
        f"{row['events']:>6d} events {row['bytes']:>7d} B {row['seconds']:>5.1f} s{notes}"
    )


def finish(output: Path, rows: dict[str, Row], contexts: Any) -> list[Path]:
    """Bound the size of what was written and write the index; returns the folders."""
    folders = sorted({output / row["folder"] for row in rows.values() if "folder" in row})
    lost = golden_format.shrink(output) if folders else []
    for name in lost:
        print(f"{name}: its events are left out, since all golden files together would be over 10 MB")
    for folder in folders:
        write_index(folder, rows, contexts, lost)
    return folders


def check(folders: Iterable[Path], names: Sequence[str], jobs: int) -> int:
    """Predict what was just measured, without the GPU, and print both. Returns 1 where a limit is passed."""
    command = [sys.executable, str(ROOT / "benchmarks" / "cuda_accuracy.py"), "--check", "--jobs", str(jobs)]
    command += [part for folder in folders for part in ("--root", str(folder))]
    command += [part for name in names for part in ("--only", name)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=False).returncode


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--list", action="store_true", help="name the steps and stop (needs no GPU)")
    made.add_argument("--only", action="append", metavar="NAME", help="this step only; may be repeated")
    made.add_argument("--set", choices=("zoo", "layers"), help="the zoo's steps or the single layers alone")
    made.add_argument("--dry", metavar="CARD", help="on this card, emulated: no GPU is needed")
    made.add_argument("--torch", metavar="PATH", help="with --dry: environment with the CUDA build of torch")
    made.add_argument("--output", type=Path, metavar="DIR", help="default: goldens/, with --dry goldens/dry/")
    made.add_argument("--jobs", type=int, default=PROCESSES, help=f"processes at once (default {PROCESSES})")
    made.add_argument("--budget-seconds", type=float, metavar="S", help="stop after so long, and say what is missing")
    made.add_argument("--check", action="store_true", help="print the predictions beside what was measured")
    for hidden in ("--child", "--module"):
        made.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--contexts", "--alone"):
        made.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    options = parser().parse_args(arguments)
    default = ROOT / "goldens" if options.dry is None else ROOT / "goldens" / "dry"
    options.output = (options.output or default).resolve()
    if options.child:
        print(json.dumps(child(options.child, options.module, options.output, options.alone, options.dry)))
        return 0
    if options.contexts:
        import golden_measure

        print(json.dumps({"contexts": golden_measure.contexts()}))
        return 0
    if options.jobs < 1:
        refuse(f"--jobs {options.jobs}. Expected at least 1.")
    if options.list:
        found, broken = golden_steps.subjects(more=True)
        for subject in found.values():
            print(f"{subject.set:8} {subject.name}")
        for module, why in broken.items():
            print(f"cannot be imported: {module}: {why}")
        return 0
    return record(options)


if __name__ == "__main__":
    sys.exit(main())
