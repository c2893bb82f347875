"""What Lightning makes of lightning_fsdp.py, in torch's own words."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.Sequential(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True,
        device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(1024, 512))
    for (x,) in DataLoader(data, batch_size=32, sampler=DistributedSampler(data, shuffle=False)):
        optimizer.zero_grad()
        model(x.cuda()).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
