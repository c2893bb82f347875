"""Process groups of torch.distributed without other processes.

Everything here was seen in torch 2.13; what sets up no rank (`own_process_groups` without a ``world``) in 2.11, too.
Private names: ``torch.distributed.distributed_c10d._new_process_group_helper`` and ``_world``,
``torch.nn.parallel.distributed._verify_param_shape_across_processes`` and ``_sync_module_states``,
``torch._C._distributed_c10d.Reducer._rebuild_buckets``, and of ``torch.distributed.tensor._sharding_prop``
``detect_fake_mode``; ``torch.distributed.tensor.placement_types._StridedShard``,
``torch.nn.modules.batchnorm._BatchNorm``; of ``torch.distributed.fsdp._flat_param`` ``_data_ptr_allocated`` and
``_same_storage``; ``torch.distributed._composable_state._State`` and
``torch.distributed.tensor.debug._clear_sharding_prop_cache`` (2.11, too). Seen in torch 2.11:
``torch.ops._c10d_functional_autograd.all_to_all_single``.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.modules.batchnorm as batchnorm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from memplan._torch.deepspeed import deepspeed_refused
from memplan._torch.eager import no_modes
from memplan._torch.lone_ranks import OBJECT_COLLECTIVES, OneRankStore, forget_ranks
from memplan._torch.parameter_chunks import chunks_on_demand
from memplan._torch.patches import only_in_this_thread, patched
from memplan._torch.pipelines import stages_without_neighbours
from memplan.errors import StepError

COMPOSABLE_STATES: tuple[type, ...] = ()
"""Classes of the state that `fully_shard` and the like store in a module's ``__dict__``, which their hooks change."""
if dist.is_available():
    from torch.distributed._composable_state import _State

    COMPOSABLE_STATES = (_State,)

_NODE = 8
"""GPUs of a node at most."""


@dataclass(frozen=True)
class Rank:
    """A rank of several, as `torchrun` starts it on nodes of at most eight GPUs."""

    rank: int = 0
    world: int = 1

    @property
    def local_world(self) -> int:
        """Return the number of ranks on a node: the largest divisor of the world up to eight."""
        return max(size for size in range(1, _NODE + 1) if self.world % size == 0)

    @property
    def local_rank(self) -> int:
        """Return the rank's number on its node, which is that of its GPU."""
        return self.rank % self.local_world

    def variables(self) -> dict[str, str]:
        """Return the environment variables that torchrun sets."""
        node = self.rank // self.local_world
        values = {
            "RANK": self.rank, "LOCAL_RANK": self.local_rank, "GROUP_RANK": node, "ROLE_RANK": self.rank,
            "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.local_world, "ROLE_WORLD_SIZE": self.world,
            "GROUP_WORLD_SIZE": self.world // self.local_world, "ROLE_NAME": "default", "MASTER_ADDR": "localhost",
            "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        return {name: str(value) for name, value in values.items()}


TORCHRUN_VARIABLES = tuple(Rank().variables())
_current: list[Rank] = [Rank()]


def current_rank() -> Rank:
    """Return the rank that is being recorded; rank 0 of 1 by default."""
    return _current[-1]


def is_data_parallel(module: nn.Module) -> bool:
    """Return whether a module is a wrapper for data parallel training: `DistributedDataParallel` or
    `FullyShardedDataParallel`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, DistributedDataParallel) or (
        fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
    )


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


@contextlib.contextmanager
def own_process_groups(*, fake: bool, world: int | None = None, rank: int = 0) -> Iterator[None]:
    """Destroy, at the end of this context, a default process group that was initialized within it.

    Args:
        fake: whether process groups use torch's fake backend, without other processes. Its collective operations do
            nothing, so that tensors need no values. Rank and world size come from the environment, or from the call.
        world, rank: set torchrun's environment variables to this rank and world size within the context, and use the
            fake backend.
    """
    if not dist.is_available():
        yield
        return
    begun = dist.is_initialized()
    _ended.clear()
    with contextlib.ExitStack() as stack:
        if world is not None:
            stack.enter_context(_started_by_torchrun(Rank(rank, world)))
        if fake or world is not None:
            if not begun:
                forget_ranks()
            stack.enter_context(_fake_groups())
            stack.enter_context(_own_random_tracker())
        if world is not None:  # the modules to patch take a second to import; scripts of one process need not wait
            stack.enter_context(_flat_parameters_without_card())
            stack.enter_context(chunks_on_demand())
            stack.enter_context(stages_without_neighbours(_note_stage))
            stack.enter_context(_messages_noted())
        try:
            yield
        finally:
            if dist.is_initialized() and not begun:
                _ended[:] = _current_groups()
                dist.destroy_process_group()
                _forget_shardings()


def _forget_shardings() -> None:
    """Clear `DTensor`'s caches of sharding propagation.

    Meshes of the same ranks are equal, also those of process groups that are destroyed: a cached result would name
    their groups.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        vars(debug).get("_clear_sharding_prop_cache", lambda: None)()  # caches of a torch without it stay


@contextlib.contextmanager
def _own_random_tracker() -> Iterator[None]:
    """Within this context, `DTensor` has its own tracker of random numbers, which it makes once for the device of the
    first mesh: afterwards, another one would be asked for numbers on a card.

    `_rng_tracker` was seen in torch 2.11 to 2.15.
    """

    def exchange(new: Any) -> Any:
        """Set the tracker, and return the one before."""
        module: Any = sys.modules.get("torch.distributed.tensor._random")
        if not hasattr(module, "_rng_tracker"):
            return None
        before, module._rng_tracker = module._rng_tracker, new
        return before

    before = exchange(None)
    try:
        yield
    finally:
        exchange(before)


@contextlib.contextmanager
def one_rank_of(world: int, rank: int) -> Iterator[None]:
    """Be a rank of ``world`` in this context, as in `own_process_groups`, with the default process group
    initialized."""
    with own_process_groups(fake=True, world=world, rank=rank):
        dist.init_process_group()
        yield


def has_process_group() -> bool:
    """Return whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


def ranks() -> tuple[int, int]:
    """Return (rank, world size) of the default process group; (0, 1) without a group."""
    return (dist.get_rank(), dist.get_world_size()) if has_process_group() else (0, 1)


def started_rank() -> tuple[int, int]:
    """Return (rank, world size): of the default process group, else from torchrun's variables, else (0, 1)."""
    if has_process_group():
        return ranks()
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    started = rank.isdecimal() and world.isdecimal() and int(rank) < int(world)
    return (int(rank), int(world)) if started else (0, 1)


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks of the default process group, in order. Every rank has to call this."""
    if not has_process_group():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a `DTensor`, detached; other tensors unchanged."""
    return tensor.detach().to_local() if is_distributed(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` wrapped a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost modules that `fully_shard` wrapped, by name."""
    sharded = {name: module for name, module in model.named_modules() if is_fully_sharded(module)}
    return {
        name: module
        for name, module in sharded.items()
        if not any(is_fully_sharded(inner) for inner in module.modules() if inner is not module)
    }


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a tensor-parallel model that `fully_shard` did not wrap, by name.

    They are the children, of one class, of the `ModuleList`, `ModuleDict` or `Sequential` with most parameters; {} if
    there is none.
    """
    stacks = {
        name: stack
        for name, stack in model.named_modules()
        if isinstance(stack, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        and len(stack) > 1
        and len({type(child) for child in stack.children()}) == 1
        and all(any(map(is_distributed, child.parameters())) for child in stack.children())
    }
    if not stacks:
        return {}
    largest = max(stacks, key=lambda name: sum(parameter.numel() for parameter in stacks[name].parameters()))
    prefix = f"{largest}." if largest else ""
    return {prefix + name: child for name, child in stacks[largest].named_children()}


class Group(NamedTuple):
    """A process group of several ranks, and how this rank uses it."""

    ranks: tuple[int, ...]
    piped: bool
    """Whether this rank sends to or receives from single ranks of the group."""
    stages: tuple[int, ...]
    """Indices of this rank's pipeline stages in the group."""


def rank_groups() -> tuple[Group, ...]:
    """Return the process groups of at least two ranks that include this rank, in order; after their end, the groups of
    the last `own_process_groups`."""
    return _current_groups() if has_process_group() else tuple(_ended)


_ended: list[Group] = []
_piped: set[tuple[int, ...]] = set()
_stages: dict[tuple[int, ...], set[int]] = {}


def _current_groups() -> tuple[Group, ...]:
    """Return the process groups of at least two ranks that include this rank, in order."""
    from torch.distributed.distributed_c10d import _world

    members = {tuple(dist.get_process_group_ranks(group)) for group in list(_world.pg_map)}
    return tuple(
        Group(ranks, ranks in _piped, tuple(sorted(_stages.get(ranks, ()))))
        for ranks in sorted(members)
        if len(ranks) > 1 and dist.get_rank() in ranks
    )


def _note_stage(stage: Any) -> None:
    """Note a pipeline stage that was constructed on this rank."""
    ranks = tuple(dist.get_process_group_ranks(stage.group))
    _piped.add(ranks)
    _stages.setdefault(ranks, set()).add(stage.stage_index)


@contextlib.contextmanager
def _messages_noted() -> Iterator[None]:
    """Note the groups in which this rank sends to or receives from single ranks."""
    _piped.clear()
    _stages.clear()

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of `send` or `recv` of process groups that notes the group's ranks."""

        def note(group: Any, *args: Any, **kwargs: Any) -> Any:
            _piped.add(tuple(dist.get_process_group_ranks(group)))
            return call(group, *args, **kwargs)

        return note

    with patched(dist.ProcessGroup, send=noted(dist.ProcessGroup.send), recv=noted(dist.ProcessGroup.recv)):
        yield


@contextlib.contextmanager
def _started_by_torchrun(rank: Rank) -> Iterator[None]:
    """Set the environment variables of torchrun for a rank within this context; `current_rank` returns the rank."""
    variables = rank.variables()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _current.append(rank)
    try:
        yield
    finally:
        _current.pop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_initialize = dist.init_process_group if dist.is_available() else None


def _initialize_fake(
    backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
    store: Any = None, *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    """Replace `torch.distributed.init_process_group`: initialize the fake backend. A second call does nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend

    assert _initialize is not None, "torch.distributed is available"
    if dist.is_initialized():
        return
    if store is None and init_method in (None, "env://"):
        missing = [name for name, size in (("RANK", rank), ("WORLD_SIZE", world_size)) if size < 0]
        if any(name not in os.environ for name in missing):
            raise StepError(
                "init_process_group reads RANK and WORLD_SIZE, which torchrun sets",
                expected="the number of ranks",
                do="It starts under torchrun: say how many ranks there are, as in --world 8",
            )
    rank = int(os.environ.get("RANK", 0)) if rank < 0 else rank
    world = int(os.environ.get("WORLD_SIZE", 1)) if world_size < 0 else world_size
    started = current_rank()
    if len(_current) > 1 and (rank, world) != (started.rank, started.world):
        raise StepError(
            f"init_process_group makes rank {rank} of {world}",
            expected=f"rank {started.rank} of {started.world}, which is recorded",
            do=f"Let it read RANK and WORLD_SIZE, or record with world {world} and rank {rank}",
        )
    for name in ("device_id", "pg_options"):
        kwargs.pop(name, None)
    _initialize("fake", store=OneRankStore(), rank=rank, world_size=world, timeout=timeout, **kwargs)


def _nothing(*_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def _fake_groups() -> Iterator[None]:
    """Make every process group use torch's fake backend, and let nothing wait for another rank."""
    from torch.distributed import distributed_c10d

    helper: Any = vars(distributed_c10d)["_new_process_group_helper"]

    def make_fake(size: Any, rank: Any, ranks: Any, _backend: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace the constructor of process groups: use the fake backend, without options of the real one."""
        kwargs |= {"backend_options": None, "device_id": None}
        return helper(size, rank, ranks, dist.Backend("fake"), *args, **kwargs)

    instead = {
        "init_process_group": _initialize_fake, "TCPStore": OneRankStore, "FileStore": OneRankStore,
        "monitored_barrier": _nothing, **OBJECT_COLLECTIVES,
    }  # fmt: skip
    names = "torch.distributed.device_mesh", "torch.distributed.rendezvous"
    modules = [dist, distributed_c10d, *(sys.modules[name] for name in names if name in sys.modules)]
    with contextlib.ExitStack() as stack:
        for module in modules:
            present = {name: value for name, value in instead.items() if name in vars(module)}
            stack.enter_context(patched(module, **present))
        stack.enter_context(patched(distributed_c10d, _new_process_group_helper=make_fake))
        stack.enter_context(_data_parallel_without_peers())
        # SyncBatchNorm's ops have no kernels without a GPU; its tensors of the input's size are those of BatchNorm
        stack.enter_context(patched(torch.nn.SyncBatchNorm, forward=batchnorm._BatchNorm.forward))
        stack.enter_context(_shapes_propagated_unseen())
        stack.enter_context(deepspeed_refused())
        yield


@contextlib.contextmanager
def _data_parallel_without_peers() -> Iterator[None]:
    """Let `DistributedDataParallel` be constructed without the other ranks. Its reductions complete at once: the fake
    backend's work has no results."""
    from torch._C._distributed_c10d import Reducer
    from torch.nn.parallel import distributed

    begin = distributed.DistributedDataParallel.__init__
    register = distributed.DistributedDataParallel.register_comm_hook

    def begin_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        """Construct `DistributedDataParallel` with a hook that reduces gradients at once."""
        begin(self, *args, **kwargs)
        register(self, None, _reduced)

    with (
        patched(distributed, _verify_param_shape_across_processes=_nothing, _sync_module_states=_nothing),
        # a hook of the user's would wait for work without results
        patched(distributed.DistributedDataParallel, __init__=begin_alone, register_comm_hook=_nothing),
        # which orders the buckets anew after the first backward pass, as many bytes, and reads numbers from tensors
        patched(Reducer, _rebuild_buckets=lambda _: False),
    ):
        yield


@contextlib.contextmanager
def exchanges_checked(check: Callable[[Sequence[Any], int], Sequence[int]]) -> Iterator[None]:
    """Call ``check`` with each list of split sizes passed to `all_to_all_single`, and with the number of rows of the
    tensor that it splits, -1 if unknown. The exchange uses the sizes that ``check`` returns."""

    def checked(exchange: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that checks the split sizes among its arguments before it calls ``exchange``."""
        signature = inspect.signature(exchange)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            arguments = bound.arguments
            for name, sizes in list(arguments.items()):
                if isinstance(sizes, (list, tuple)):  # input_split_sizes, output_split_sizes
                    # the tensor that they split; functional ops call the input `self`, and have no argument `output`
                    tensors = ("input", "self") if name.startswith("input") else ("output",)
                    rows = next((len(arguments[tensor]) for tensor in tensors if tensor in arguments), -1)
                    arguments[name] = check(sizes, rows)
            return exchange(*bound.args, **bound.kwargs)

        return only_in_this_thread(call, exchange)

    names = "all_to_all_single", "all_to_all_single_autograd"
    within = "torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"
    with contextlib.ExitStack() as stack:
        for module in (sys.modules[name] for name in within if name in sys.modules):
            present = {name: checked(vars(module)[name]) for name in names if name in vars(module)}
            stack.enter_context(patched(module, **present))
        # torch 2.11's all_to_all_single_autograd calls this op itself, also where a script imported the function before
        functional: Any = vars(torch.ops).get("_c10d_functional_autograd")
        if functional is not None and hasattr(functional, "all_to_all_single"):
            op = functional.all_to_all_single

            def op_with_signature(self: Any, output_split_sizes: Any, input_split_sizes: Any, group_name: Any) -> Any:
                return op(self, output_split_sizes, input_split_sizes, group_name)

            replaced = _OpCalledBy(checked(op_with_signature), op)
            stack.enter_context(patched(functional, all_to_all_single=replaced))
        yield


class _OpCalledBy:
    """An op that is called through ``call``. Its overloads and other attributes stay its own: modules that a script
    imports meanwhile go through all ops, as torch's table of decompositions does."""

    def __init__(self, call: Callable[..., Any], op: Any) -> None:
        self._call, self._op = call, op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)


class _IndexOfCard(TorchFunctionMode):
    """Makes ``torch.device(1)`` a CUDA device, as on a machine with a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device and args and isinstance(args[0], int) and torch.accelerator.current_accelerator():
            return torch.device("cuda", args[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _flat_parameters_without_card() -> Iterator[None]:
    """Let `FullyShardedDataParallel` be constructed with the index of a card. Fake storages, which have no address, are
    compared by identity."""
    from torch.distributed.fsdp import _flat_param as flat
    from torch.distributed.fsdp import fully_sharded_data_parallel as sharded

    begin = sharded.FullyShardedDataParallel.__init__

    def begin_on_index(self: Any, *args: Any, **kwargs: Any) -> None:
        with _IndexOfCard():
            begin(self, *args, **kwargs)

    def storage(tensor: Any) -> int:
        """Return the address of the storage object, which identifies it."""
        return getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata

    with (
        patched(FakeTensor, data_ptr=lambda tensor: storage(tensor) + tensor.storage_offset() * tensor.element_size()),
        patched(sharded.FullyShardedDataParallel, __init__=begin_on_index),
        patched(
            flat,
            _data_ptr_allocated=lambda tensor: tensor.untyped_storage().size() > 0,
            _same_storage=lambda a, b: storage(a) == storage(b),
        ),
    ):
        yield


@contextlib.contextmanager
def _shapes_propagated_unseen() -> Iterator[None]:
    """Keep the shape propagation of `DTensor` out of the recording.

    It runs in a fake mode of its own, since the active mode would count its tensors. Indices of strided shards are
    computed on real tensors.
    """
    from torch.distributed.tensor import _sharding_prop as propagation
    from torch.distributed.tensor import placement_types

    detect: Any = vars(propagation)["detect_fake_mode"]
    strided = placement_types._StridedShard
    indices: Any = vars(strided)["local_shard_size_and_offset"]

    def real_indices(*args: Any, **kwargs: Any) -> Any:
        with no_modes():
            return indices(*args, **kwargs)

    with (
        patched(strided, local_shard_size_and_offset=real_indices),
        patched(propagation, detect_fake_mode=only_in_this_thread(lambda *_: None, detect)),
    ):
        yield


_reports: list[Callable[[Any], None]] = []
_all_reduce: Any = dist.all_reduce if dist.is_available() else None  # not what replaces it for the user's calls


@contextlib.contextmanager
def reductions_reported(report: Callable[[Any], None]) -> Iterator[None]:
    """Call ``report`` with each gradient bucket that `DistributedDataParallel` reduces in this context."""
    _reports.append(report)
    try:
        yield
    finally:
        _reports.remove(report)


def _reduced(_state, bucket):  # pyright: ignore  # torch reads annotations, and takes these words alone
    """Report a bucket of gradients and reduce it, as the communication hook of `DistributedDataParallel`."""
    for report in _reports:
        report(bucket)
    _all_reduce(bucket.buffer())
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
