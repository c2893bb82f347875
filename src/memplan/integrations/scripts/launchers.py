"""What sets the layout of a script: flags of its own, or the variables that its launcher sets."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from memplan.integrations.scripts.command import Command
from memplan.studies.layouts.layout import Layout


@dataclass(frozen=True)
class Launch:
    """How a script is started in a layout."""

    arguments: tuple[str, ...] = ()
    """Appended to the script's own."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables."""
    text: str = ""
    """What a user writes for it."""


class Launcher(Protocol):
    """Sets the layouts of a kind of script."""

    batch_by_loader: bool
    """Whether a micro-batch is set in the script's loader; else by `Launch.arguments`."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of all layouts of the script."""
        ...

    def launch(self, layout: Layout, micro_batch: int | None) -> Launch | None:
        """Return how to start the script in a layout, with its own micro-batch for None; None if it cannot be set."""
        ...


def launcher_of(command: Command) -> Launcher | None:
    """Return what sets a script's layout from outside: flags of torchtitan, or variables of Accelerate. None for other
    scripts, and for those that shard their model themselves."""
    if command.is_module:
        return Torchtitan() if re.fullmatch(r"torchtitan(\.\w+)*\.train", command.target) else None
    try:
        text = Path(command.target).read_text(encoding="utf-8")
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    except (OSError, ValueError, SyntaxError):
        return None
    imported = [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]
    shards_itself = _SHARDS.search(text) or any(map(_SHARDING_FLAG.match, command.arguments))
    uses_accelerate = any(_ACCELERATE.fullmatch(name) for name in imported)
    if not uses_accelerate or shards_itself:
        return None
    precision = _MIXED.search(" ".join((text, *command.arguments))) or os.environ.get("ACCELERATE_MIXED_PRECISION")
    return Accelerate(() if precision else ("float32: no mixed precision was given",))


_ACCELERATE = re.compile(r"accelerate\.Accelerator|(transformers|trl)\.\w*Trainer")
_SHARDS = re.compile(
    r"""\bfsdp|fully_shard|FullySharded|DeepSpeed|\bdeepspeed(\s*=|["']\s*:)(?!\s*None)|ParallelismConfig"""
    "|parallelize_module"
)
_SHARDING_FLAG = re.compile("--?(fsdp|deepspeed)")
_MIXED = re.compile("bf16|fp16|fp8|mixed_precision")


class Torchtitan:
    """torchtitan's own trainer, by flags that override its configuration. Seen in 0.2.2."""

    batch_by_loader = False
    notes = ()

    def launch(self, layout: Layout, micro_batch: int | None) -> Launch | None:
        """Return the flags for a layout; without a micro-batch, that of torchtitan's configuration stays. Blocks are
        recomputed whole, or not at all: torchtitan's selective checkpoints are not used."""
        flags = {
            "--parallelism.data_parallel_replicate_degree": layout.replicas,
            "--parallelism.data_parallel_shard_degree": layout.shards,
            "--parallelism.tensor_parallel_degree": layout.tensor,
            "--parallelism.fsdp_reshard_after_forward": "always" if layout.reshard else "never",
            "--activation_checkpoint.mode": "full" if layout.checkpoint else "none",
        }
        if micro_batch is not None:
            flags["--training.local_batch_size"] = micro_batch
        arguments = [f"{name}={value}" for name, value in flags.items()]
        if layout.tensor > 1 and not layout.loss_parallel:
            arguments.append("--parallelism.disable_loss_parallel")
        return Launch(tuple(arguments), text=" ".join(arguments))


@dataclass(frozen=True)
class Accelerate:
    """Scripts of Accelerate and of the trainers of transformers and trl, by the variables that ``accelerate launch``
    sets. Seen in Accelerate 1.15."""

    notes: tuple[str, ...] = ()
    batch_by_loader = True

    def launch(self, layout: Layout, micro_batch: int | None) -> Launch | None:
        """Return the environment variables for a layout; None if Accelerate does not have the layout. It has no tensor
        parallelism, and it checkpoints only models that it shards."""
        if layout.tensor > 1 or (layout.shards == 1 and layout.checkpoint):
            return None
        if layout.shards == 1:
            return Launch((), _UNSHARDED, "accelerate launch --multi_gpu")
        options = {
            "fsdp_version": "2", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": str(layout.reshard).lower(),
            "fsdp_activation_checkpointing": str(layout.checkpoint).lower(), "fsdp_offload_params": "false",
        }  # fmt: skip
        variables, uses = {**_UNSHARDED, "ACCELERATE_USE_FSDP": "true"}, ["--use_fsdp"]
        if layout.replicas > 1:
            options |= {
                "parallelism_config_dp_replicate_size": str(layout.replicas),
                "parallelism_config_dp_shard_size": str(layout.shards),
            }
            variables["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
            uses.append("--use_parallelism_config")
        variables |= {name.upper(): value for name, value in options.items()}
        flags = [f"--{name} {value}" for name, value in options.items()]
        return Launch((), variables, " ".join(["accelerate launch", *uses, *flags]))


_UNSHARDED = {f"ACCELERATE_USE_{kind}": "false" for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")}
"""Variables that the calling process may have set otherwise."""
