"""What Accelerate makes of accelerated_fsdp.py, in torch's own words."""

import os

import torch
import torch.distributed as dist
from accelerated_fsdp import Block
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.Sequential(*(Block() for _ in range(4)))
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(512, 128))
    for (x,) in DataLoader(data, batch_size=32, sampler=DistributedSampler(data, shuffle=False)):
        loss = model(x.cuda()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
