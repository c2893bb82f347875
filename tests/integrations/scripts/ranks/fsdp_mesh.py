import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh(kind, (options.replicas, world // options.replicas), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if options.replicas > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.bf16 else MixedPrecisionPolicy()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        elif hasattr(module, "_reset_parameters"):
            module._reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for number in range(4):
        x = torch.randn(4, 32, 128, device=device)
        loss = model(x).float().square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        if dist.get_rank() == 0:
            print(number, loss.item(), float(norm.full_tensor()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
