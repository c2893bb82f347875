"""The report of an out-of-memory message, in whole."""

from __future__ import annotations

import json

from memplan.explanation.why import why
from memplan.reports.terminal import text_of
from memplan.reports.why import report

TEXT = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 1 has a total capacity of 8.00 GiB of which 256.00 MiB is "
    "free. Process 77 has 1.00 GiB memory in use. Including non-PyTorch memory, this process has 6.50 GiB memory in "
    "use. Of the allocated memory 5.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., "
    "CUDA Graphs), and 1.00 GiB is reserved by PyTorch but unallocated."
)


def test_the_whole_report() -> None:
    assert (
        text_of(report(why(TEXT)))
        == """\
Out of memory (CUDA, GPU 1): 512.00 MiB asked for, 256.00 MiB free of 8.00 GiB

Where the memory was                                               bytes   share
────────────────────────────────────────────────────────────────────────────────
allocated by PyTorch, in tensors                                4.00 GiB  50.0 %
allocated by PyTorch in private pools (CUDA graphs)          1024.00 MiB  12.5 %
reserved by PyTorch, in no tensor                            1024.00 MiB  12.5 %
this process beside PyTorch's allocator (context, libraries)  512.00 MiB   6.2 %
process 77                                                   1024.00 MiB  12.5 %
not named in the message                                      256.00 MiB   3.1 %
free                                                          256.00 MiB   3.1 %
────────────────────────────────────────────────────────────────────────────────
all                                                             8.00 GiB 100.0 %

Fragmentation: 1024.00 MiB that PyTorch holds are in no tensor, and with what is
free that is enough for 512.00 MiB, but in no one piece.

What helps
  - Set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts
  (up to torch 2.8: PYTORCH_CUDA_ALLOC_CONF)
  - Let CUDA graphs share one pool: torch.cuda.graph(..., pool=...)
  - For the lines that hold it, and the settings that would have helped, take a
  snapshot: call torch.cuda.memory._record_memory_history() at the start and
  torch.cuda.memory._dump_snapshot('oom.pickle') where it fails; then memplan
  replay oom.pickle"""
    )


def test_json_has_the_same() -> None:
    found = why(TEXT)
    data = json.loads(found.to_json())
    assert data["format"] == "memplan.why"
    assert (data["verdict"], data["lack"]) == ("fragmentation", 512 * 2**20 - 256 * 2**20 - 2**30)
    assert sum(part["bytes"] for part in data["parts"]) == 8 << 30
