"""A process that works or reads gets on, and one that waits for nothing hangs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from memplan.dry import progress
from memplan.dry.progress import Progress

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="dry runs are on Linux")


@pytest.mark.parametrize(
    ("code", "hangs"), [("while True: pass", False), ("import time; time.sleep(60)", True)], ids=["works", "waits"]
)
def test_a_process_hangs_where_it_neither_computes_nor_reads(
    code: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "STALLED", 1.0)
    process = subprocess.Popen([sys.executable, "-c", f"print(1, flush=True)\n{code}"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        found = Progress(process.pid)
        until = time.monotonic() + (30 if hangs else 3)
        while not found.hangs and time.monotonic() < until:
            time.sleep(0.05)
        assert found.hangs is hangs
    finally:
        process.kill()
        process.communicate()
