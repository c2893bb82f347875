"""A rank of a training that torchrun starts, watched: watched_rank.py FOLDER WAY

The ways: "even"; "sharded", the same by `fully_shard`; "kept", where the last rank keeps 16 MiB; "killed", where the
last rank ends in its sixth step as the kernel's out-of-memory killer ends it; "oom", where it asks for half a petabyte
in its sixth step.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memplan

KEPT = 16 << 20


def main(folder: str, way: str, steps: int = 6) -> None:
    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    model: nn.Module = net
    if way == "sharded":
        fully_shard(net)
    else:
        model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = list[torch.Tensor]()
    with memplan.watch(model, optimizer, folder=folder, post_mortem=folder):
        for step in range(steps):
            loss = model(torch.randn(64, 512)).square().mean()
            if last and way == "kept" and not kept:
                kept.append(torch.zeros(KEPT // 4))
            if last and step == steps - 1 and way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if last and step == steps - 1 and way == "oom":
                torch.empty(1 << 49, dtype=torch.uint8)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
