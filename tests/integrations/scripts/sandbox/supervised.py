"""Programs below a supervisor, on a kernel that allows everything, or that denies namespaces or Landlock, too."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import platform
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import memplan
from memplan.integrations.scripts.sandbox.messages import Job, Outcome, Protection

HOME = str(Path(memplan.__file__).parent.parent)
SUPERVISOR = (
    f"import sys; sys.path.insert(0, {HOME!r}); "
    "from memplan.integrations.scripts.sandbox.supervisor import main; main(sys.argv[1])"
)
HEAD = f"""
import json, os, sys
sys.path.insert(0, {HOME!r})
setting = json.loads(sys.argv[1])
if setting["protection"] == "landlock":
    from memplan.integrations.scripts.landlock import refuse_effects
    refuse_effects(setting["temporary"])
"""
UNSHARE = {"x86_64": 272, "aarch64": 97}
LANDLOCK_CREATE = 444


def denied(*numbers: int) -> Callable[[], None]:
    """Return what has the kernel deny system calls to this process and what it starts, as a container's rules do."""

    def deny() -> None:
        program = [(0x20, 0, 0, 0)]  # load the number
        for number in numbers:
            program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 1)]  # equal: EPERM
        program.append((0x06, 0, 0, 0x7FFF0000))
        code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
        kept = ctypes.create_string_buffer(code, len(code))
        given = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(kept))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0
        assert libc.prctl(22, ctypes.c_ulong(2), given, ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0

    return deny


NO_NAMESPACES = denied(UNSHARE.get(platform.machine(), 0))
NEITHER = denied(UNSHARE.get(platform.machine(), 0), LANDLOCK_CREATE)


@dataclasses.dataclass(frozen=True)
class Ended:
    """A program that has ended, below its supervisor."""

    outcome: Outcome
    out: str
    err: str


def run(
    code: str,
    folder: Path,
    *arguments: str,
    protections: tuple[Protection, ...] = ("namespaces", "landlock"),
    kernel: Callable[[], None] | None = None,
    seconds: float = 60.0,
    own_network: bool = True,
    commit: bool = False,
    environment: dict[str, str] | None = None,
    stop: Callable[[subprocess.Popen[str]], None] | None = None,
    python: str = sys.executable,
) -> Ended:
    """Run code in a folder, below a supervisor. ``stop``: called once it has printed something."""
    reports, report = os.pipe()
    job = Job(
        (python, "-c", HEAD + code, *arguments), protections, own_network, commit, seconds, report, os.devnull,
        os.getpid(),
    )  # fmt: skip
    process = subprocess.Popen(
        [python, "-I", "-c", SUPERVISOR, json.dumps(dataclasses.asdict(job))], cwd=folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(report,),
        preexec_fn=kernel, env={**os.environ, **(environment or {})}, start_new_session=True,
    )  # fmt: skip
    os.close(report)
    if stop is not None:
        assert process.stdout is not None
        process.stdout.readline()
        stop(process)
    try:
        out, err = process.communicate(timeout=seconds + 90)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    with open(reports, encoding="utf-8") as file:
        text = file.read()
    found = json.loads(text) if text else {"protection": None, "status": signal.SIGKILL}
    return Ended(Outcome(**found), out, err)


def has_namespaces() -> bool:
    """Return whether this machine lets a process have namespaces of its own."""
    done = run("", Path("/"), protections=("namespaces",))
    return done.outcome.protection == "namespaces"


def has_landlock() -> bool:
    """Ask the kernel for Landlock's version, in a system call that changes nothing."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1) > 0
