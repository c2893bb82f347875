"""Among real ranks of gloo: does the backward pass of a sharded model fail, or give other gradients than the whole one?

torchrun --nproc-per-node 2 gloo_views.py WAY,WAY: ways of `models.parallel_uses.Residual`. Prints for each whether its
gradients are "right", "wrong", or the backward pass "fails".
"""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from models.parallel_uses import WIDTH, Residual, shard

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for way in sys.argv[1].split(","):
        torch.manual_seed(0)
        model: Any = Residual(way)
        whole = copy.deepcopy(model)
        shard(model)
        batch = torch.randn(8, WIDTH)
        whole(batch).sum().backward()
        try:
            model(batch).sum().backward()
            pairs = zip(model.parameters(), whole.parameters(), strict=True)
            same = all(torch.equal(own.grad.full_tensor(), other.grad) for own, other in pairs)
            outcome = "right" if same else "wrong"
        except RuntimeError as error:
            outcome = "fails" if "setStorage" in str(error) else str(error)
        if dist.get_rank() == 0:
            print(f"{way}: {outcome}", flush=True)
    dist.destroy_process_group()
