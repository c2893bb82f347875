"""Tensor parallelism, with the sequence sharded between its products, of transformers of linear layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memplan.errors import InputError
from memplan.studies.layouts.blocks import Blocks

TensorPlan: TypeAlias = Callable[[nn.Module, DeviceMesh], Any]
"""Makes a module tensor parallel across a mesh of one dimension, in place."""

_PROJECTIONS = (
    frozenset({"q", "wq", "to_q", "query", "q_proj", "q_lin", "linear_q", "query_proj"}),
    frozenset({"k", "wk", "to_k", "key", "k_proj", "k_lin", "linear_k", "key_proj"}),
    frozenset({"v", "wv", "to_v", "value", "v_proj", "v_lin", "linear_v", "value_proj"}),
)
"""Names of the linear layers that make queries, keys and values: transformers, diffusers, torchtitan, torchtune."""
_HEADS = ("n_heads", "num_heads", "n_head", "num_attention_heads", "heads", "n_kv_heads", "num_kv_heads",
          "num_key_value_heads")  # fmt: skip
"""Attributes with a number of heads, of an attention module or its configuration."""


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, blocks: Blocks | None, loss_parallel: bool = False) -> None:
    """Make a transformer tensor parallel, as torch's tutorial does.

    Linear layers of the blocks are sharded: those of attention by heads, those of feed-forward layers by hidden
    features. Norms in the blocks are `SequenceParallel`. Embedding and output head are sharded by the vocabulary.
    Before the first block and after the last, each rank has the whole sequence. With ``loss_parallel`` the logits stay
    sharded, for `losses_of_shards`. Raises InputError if the module is no such transformer, or its heads do not divide.
    """
    from torch.distributed.tensor import Replicate, distribute_module
    from torch.distributed.tensor.parallel import parallelize_module

    planned = _Planned(model, blocks, mesh.size(), loss_parallel=loss_parallel)
    table = planned.embedding
    tied = [name for name in planned.heads if table and _weight(model, name) is _weight(model, table)]
    parallelize_module(model, mesh, planned.styles)
    for name in tied:
        assert table is not None, "only heads with the embedding's weight are in the list"
        model.get_submodule(name).register_parameter("weight", _weight(model, table))
    for name in planned.replicated:
        distribute_module(
            model.get_submodule(name), mesh, None,
            lambda _, inputs, mesh: tuple(_distributed(x, mesh, Replicate()) for x in inputs),  # pyright: ignore[reportArgumentType]
            lambda _, output, __: output.to_local(),
        )  # fmt: skip
    for attention, name in planned.head_counts:
        module = model.get_submodule(attention)
        setattr(module, name, getattr(module, name) // mesh.size())
    for name in planned.gathered:
        model.get_submodule(name).register_forward_pre_hook(functools.partial(_gather, mesh), with_kwargs=True)
    assert blocks is not None, "_Planned refuses a model without blocks"
    first, *_, last = blocks.of(model)
    first.register_forward_pre_hook(functools.partial(_enter, mesh), with_kwargs=True)
    last.register_forward_hook(functools.partial(_leave, mesh))


def check_plan(model: nn.Module, blocks: Blocks | None, ranks: int, *, loss_parallel: bool = False) -> None:
    """Raise InputError where `tensor_parallel` would."""
    _Planned(model, blocks, ranks, loss_parallel=loss_parallel)  # its constructor raises


@contextmanager
def losses_of_shards() -> Iterator[None]:
    """Within this context cross-entropy, and its backward pass, run on shards of logits."""
    from torch.distributed.tensor.parallel import loss_parallel

    context = loss_parallel()
    context.__enter__()
    try:
        yield
    finally:  # an error is not passed on: torch 2.13 would leave its ops of losses in DTensor's dispatcher
        context.__exit__(None, None, None)


class _Planned:
    """How each layer of a transformer is made parallel. Names are those of `nn.Module.get_submodule`.

    Raises:
        InputError: the module is no such transformer, or its heads do not divide.
    """

    def __init__(self, model: nn.Module, blocks: Blocks | None, ranks: int, *, loss_parallel: bool) -> None:
        """Plan all layers of a transformer for ``ranks`` ranks. ``loss_parallel``: whether logits stay sharded. Raises
        InputError if the module is no such transformer, or its heads do not divide."""
        if blocks is None or len(blocks.paths) != 1:
            raise _refused("the model has no single list of equal blocks")
        self.styles: dict[str, Any] = {}
        """Styles of `torch.distributed.tensor.parallel.parallelize_module`, by layer."""
        self.gathered: list[str] = []
        """Modules before whose call the sequence is gathered."""
        self.head_counts: list[tuple[str, str]] = []
        """(attention module, its attribute with a number of heads, to be divided by the number of ranks)."""
        self.embedding: str | None = None
        """The largest embedding outside of the blocks."""
        self.heads: list[str] = []
        """Linear layers outside of the blocks."""
        self.replicated: list[str] = []
        """Other layers outside of the blocks: every rank has all of their parameters."""
        self._model, self._ranks = model, ranks
        path = blocks.paths[0]
        for name, _ in model.get_submodule(path).named_children():
            self._plan_block(f"{path}.{name}")
        self._plan_rest(f"{path}.")
        if loss_parallel:
            self._keep_logits_sharded()

    def _plan_block(self, block: str) -> None:
        """Plan the layers of a block: its attentions, its feed-forward layers and its norms.

        ``block``: name of the module. Raises InputError if it has other layers.
        """
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel

        linear = {name: layer for name, layer in self._layers(block) if isinstance(layer, nn.Linear)}
        # an attention is the parent of a layer that makes queries; the first linear layer after its three is its output
        attentions = [name.rpartition(".")[0] for name in linear if name.rpartition(".")[2] in _PROJECTIONS[0]]
        remaining = list(linear)  # names of linear layers that are not planned yet, in order
        sums: list[str] = []  # outputs of attentions
        for attention in attentions:
            inward = [name for names in _PROJECTIONS for name in linear if _is_child(name, attention, names)]
            after = remaining[max(map(remaining.index, inward)) + 1 :] if len(inward) == 3 else []
            if not after or linear[after[0]].in_features % self._ranks:
                raise _refused(f"{attention} has no linear layers of queries, keys, values and their output")
            self._check_heads(attention, [linear[name].out_features for name in inward])
            remaining = [name for name in remaining if name not in (*inward, after[0])]
            self._spread(block, attention, inward)
            sums.append(after[0])
        if not attentions:
            raise _refused(f"{block} has no linear layers of queries, keys and values")
        # the other linear layers: the last that returns to the block's width is down, those before it gate and up
        width = linear[sums[0]].out_features
        downs = [name for name in remaining if linear[name].out_features == width][-1:]
        ups = [name for name in remaining if name not in downs]
        if remaining:
            hidden = linear[downs[0]].in_features if downs else 0
            sizes = {(linear[up].in_features, linear[up].out_features) for up in ups}
            if sizes != {(width, hidden)} or (len(ups) > 1 and hidden == width):
                names = ", ".join(remaining)
                raise _refused(f"the linear layers {names} are no gate, up and down of a feed-forward layer")
        for parent in dict.fromkeys(up.rpartition(".")[0] for up in ups):
            self._spread(block, parent, [up for up in ups if up.rpartition(".")[0] == parent])
        self.styles |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in (*sums, *downs)}
        inner = tuple(f"{name}." for name in self.gathered)  # within these each rank has the whole sequence
        for name, layer in self._layers(block):
            if name in linear or not list(layer.parameters()):
                continue
            if any(parameter.dim() != 1 for parameter in layer.parameters()):
                raise _refused(f"{name} ({type(layer).__name__}) is neither a linear layer nor a norm")
            per_head = name.rpartition(".")[0] in attentions  # a norm of queries or keys
            is_wide = any(parameter.numel() == width for parameter in layer.parameters())
            is_after_gathering = is_wide if per_head else name.startswith(inner)
            if is_after_gathering:
                raise _refused(f"{name} comes after the sequence is gathered")
            self.styles[name] = SequenceParallel(sequence_dim=2 if per_head else 1, use_local_output=True)

    def _spread(self, block: str, parent: str, names: list[str]) -> None:
        """Plan to shard the output features of the layers ``names`` of a module ``parent``.

        They share an input, a shard of the sequence. It is gathered once, before the parent's call. A parent that is
        never called itself (the block, or a list of modules) leaves the gathering to each layer.
        """
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel

        called = parent != block and not isinstance(self._model.get_submodule(parent), (nn.ModuleList, nn.ModuleDict))
        self.gathered += [parent] if called else []
        layout = Replicate() if called else Shard(1)
        self.styles |= {name: ColwiseParallel(input_layouts=layout) for name in names}

    def _check_heads(self, attention: str, features: list[int]) -> None:
        """Note the attributes of an attention with its number of heads. Raises InputError if heads do not divide by the
        ranks."""
        module = self._model.get_submodule(attention)
        config = getattr(module, "config", None)
        for name in _HEADS:
            attribute = getattr(module, name, None)
            number = getattr(config, name, None) if attribute is None else attribute
            if isinstance(number, int) and number % self._ranks:
                raise _refused(f"{number} heads ({name} of {attention}) do not divide by {self._ranks}")
            if isinstance(attribute, int):
                self.head_counts.append((attention, name))
        size = getattr(module, "head_dim", 1)
        for number in features:
            heads = number // size if isinstance(size, int) and size > 0 else number
            if heads % self._ranks:
                raise _refused(f"{heads} heads or features of {attention} do not divide by {self._ranks}")

    def _plan_rest(self, blocks: str) -> None:
        """Plan the layers outside of the blocks: the largest embedding, linear layers, and others, which each rank has
        whole."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        outside = [(name, layer) for name, layer in self._layers("") if not name.startswith(blocks)]
        embeddings = {name: layer.num_embeddings for name, layer in outside if isinstance(layer, nn.Embedding)}
        self.embedding = max(embeddings, key=lambda name: embeddings[name], default=None)
        for name, layer in outside:
            if name == self.embedding:
                self.styles[name] = RowwiseParallel(input_layouts=Replicate())
            elif isinstance(layer, nn.Linear) and layer.out_features >= self._ranks:
                self.styles[name] = ColwiseParallel(output_layouts=Replicate())
                self.heads.append(name)
            elif list(layer.parameters()):
                self.replicated.append(name)

    def _keep_logits_sharded(self) -> None:
        """Keep the output of the last linear layer, the logits, in shards. Raises InputError without such a layer."""
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel

        if not self.heads:
            raise _refused("no linear layer after the blocks makes logits, whose shards a loss could take")
        self.styles[self.heads[-1]] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)

    def _layers(self, within: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield the names and modules within module ``within`` that have no modules of their own. Raises InputError if
        another module has parameters in addition to those of its layers."""
        for name, module in self._model.get_submodule(within).named_modules(prefix=within):
            parameters = [parameter for parameter, _ in module.named_parameters(recurse=False)]
            if not list(module.children()):
                yield name, module
            elif parameters:
                raise _refused(f"{name or 'the model'} has a parameter outside of its layers: {parameters[0]}")


def _is_child(name: str, parent: str, names: frozenset[str]) -> bool:
    before, _, last = name.rpartition(".")
    return before == parent and last in names


def _refused(reason: str) -> InputError:
    """Return the error for a model without a plan for tensor parallelism."""
    return InputError(
        f"no tensor parallelism: {reason}",
        expected="a transformer of nn.Linear layers q, k, v, output, up and down",
        do="Write its plan: --tensor-plan FILE.py:callable, which takes the module and the mesh",
    )


def _weight(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name).weight


def _distributed(x: Any, mesh: DeviceMesh, placement: Any) -> Any:
    """Return a tensor as a `DTensor` with this placement. Other values are returned unchanged."""
    from torch.distributed.tensor import DTensor

    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, (placement,), run_check=False)


def _first_changed(args: Any, kwargs: dict[str, Any], change: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call with ``change`` applied to the first tensor among them."""
    for number, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:number], change(value), *args[number + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return args, {**kwargs, name: change(value)}
    return args, kwargs


def _gather(mesh: DeviceMesh, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pre-hook that gathers the sequence, of which each rank has a shard, once for all linear layers of a module."""
    from torch.distributed.tensor import Replicate, Shard

    def whole(x: Any) -> Any:
        return _distributed(x, mesh, Shard(1)).redistribute(placements=(Replicate(),))

    return _first_changed(args, kwargs, whole)


def _enter(mesh: DeviceMesh, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pre-hook of the first block: pass on this rank's shard of the sequence."""
    from torch.distributed.tensor import Replicate, Shard

    def shard_of_rank(x: Any) -> Any:
        if x.dim() != 3 or x.shape[1] % mesh.size():
            raise _refused(
                f"{type(block).__name__} takes {tuple(x.shape)}, no sequence that {mesh.size()} ranks divide"
            )
        return _distributed(x, mesh, Replicate()).redistribute(placements=(Shard(1),)).to_local()

    return _first_changed(args, kwargs, shard_of_rank)


def _leave(mesh: DeviceMesh, _: nn.Module, __: Any, output: Any) -> Any:
    """Hook of the last block: gather the sequence of its output."""
    from torch.distributed.tensor import Replicate, Shard

    def whole(x: Any) -> Any:
        return _distributed(x, mesh, Shard(1)).redistribute(placements=(Replicate(),)).to_local()

    return (whole(output[0]), *output[1:]) if isinstance(output, tuple) else whole(output)
