"""Python code in a process of its own that finds torch and memplan imported, as nothing else of the tests has been run.

An interpreter that imports torch takes three seconds of the processor before the first line of a test. The first call
in a worker starts a server, which imports torch and memplan and calls nothing of them; each call forks it. Code that is
about imports, or about an environment variable that is read while torch is imported, needs an interpreter instead.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

RANKS = """
import os
others = []
for rank in range(1, {world}):
    if not (process := os.fork()):
        others = []
        break
    others.append(process)
else:
    rank = 0
os.environ.update({variables!r}, RANK=str(rank), LOCAL_RANK=str(rank))
try:
    exec(compile({code!r}, "<string>", "exec"), {{"__name__": "__main__"}})
finally:
    ends = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in others]
if any(ends):
    raise SystemExit(f"ranks 1 to {{len(ends)}} ended with {{ends}}")
"""
SERVER = "from truth.fresh_process import serve; import torch, memplan; serve()"


def run_fresh(code: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``code`` as a plain interpreter would: with its filters of warnings, and ``stdin`` as standard input."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stdin").write_text(stdin)
        returncode = _server()(json.dumps({"code": code, "folder": folder}))
        stdout, stderr = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(["python", "-c", code], returncode, stdout, stderr)


def run_ranks(code: str, world: int) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in ``world`` processes at once, with the variables of torchrun's ranks; what they print is one
    text."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    variables = sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return run_fresh(RANKS.format(world=world, variables=variables, code=code))


@functools.cache
def _server() -> Callable[[str], int]:
    """Start it, and return what sends it a request and waits for the exit status."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    atexit.register(server.communicate)
    assert server.stdin is not None
    assert server.stdout is not None
    to, of = server.stdin, server.stdout

    def ask(request: str) -> int:
        to.write(request + "\n")
        to.flush()
        return int(of.readline())

    return ask


def serve() -> None:
    """Fork for each request, and answer with the exit status, to the end of the standard input."""
    while request := sys.stdin.readline():
        process = os.fork()
        if not process:
            _run(**json.loads(request))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def _run(code: str, folder: str) -> None:
    """Run it in this process, and end the process without what the server would do at its own end."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_RDWR | os.O_CREAT), number)
    atexit._clear()
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
