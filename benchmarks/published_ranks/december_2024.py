"""torchtitan 0.2.2 with the groups of parameters of December 2024: each block, and one of embedding, norm and head."""

import runpy
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.models.llama3.infra import parallelize  # pyright: ignore[reportMissingImports]


def apply_fsdp(
    model: Any, dp_mesh: DeviceMesh, param_dtype: torch.dtype, reduce_dtype: torch.dtype, pp_enabled: bool,
    cpu_offload: bool = False, reshard_after_forward_policy: str = "default",
) -> None:  # fmt: skip
    """Replaces torchtitan's function of this name: the last block alone stays gathered after the forward pass."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for number, block in model.layers.items():
        fully_shard(block, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=int(number) < len(model.layers) - 1)
    fully_shard(model, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=True)
    parallelize.disable_fsdp_gradient_division(model)


if __name__ == "__main__":
    parallelize.apply_fsdp = apply_fsdp
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
