"""Run a script as torchrun starts it, with real tensors and real collective operations, and print the allocator's peak:

torchrun --nproc-per-node 2 gloo_rank.py SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import sys

from truth.cpu_allocator import allocations, peak_of

if __name__ == "__main__":
    del sys.argv[0]
    sizes = allocations(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
    print("peak", os.environ["RANK"], peak_of(sizes), sum(sizes), flush=True)
