import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
dist.init_process_group(backend=backend, rank=rank, world_size=world)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
seed = [int.from_bytes(os.urandom(2), "little")]
dist.broadcast_object_list(seed, src=0)
torch.manual_seed(seed[0])
config = [None] * world
dist.all_gather_object(config, {"rank": rank, "host": "localhost"})
assert len({one["host"] for one in config}) == 1

model = nn.Transformer(64, 4, 2, 2, 256, batch_first=True).to(device)
model = DDP(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for number in range(12):
    updates = number % 4 == 3
    with contextlib.nullcontext() if updates else model.no_sync():
        source, target = torch.randn(8, 24, 64, device=device), torch.randn(8, 16, 64, device=device)
        (model(source, target) - target).square().mean().div(4).backward()
    if updates:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()
