"""What others do, beside eager torch: the same gradients, or those that are known to be wrong."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memplan.verification.peers.peers import COMPILED, EAGER, Peer, as_peer, blocks_of, peers
from memplan.verification.proof.float64_gradients import GradientErrors, gradient_errors

compiles = pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(torch.relu(self.wide(self.norm(x)))))


def network(dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(dropout), Block(dropout), nn.Linear(16, 5))


IMAGES, LABELS = torch.linspace(-1, 1, 1024).reshape(64, 16), torch.arange(64) % 5


def gradients(model: nn.Module, peer: Peer) -> tuple[dict[str, Tensor | None], Tensor]:
    """Of one step from a fixed random state, and that state afterwards."""
    images = IMAGES.to(next(model.parameters()).dtype)
    step = as_peer(lambda x, y: F.cross_entropy(model(x), y), peer, blocks_of(model))
    torch.manual_seed(1)
    step(images, LABELS).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, torch.get_rng_state()


def errors(peer: Peer, true: Peer, dropout: float) -> GradientErrors:
    """A peer's against those of the same step in float64."""
    return gradient_errors(
        gradients(network(dropout), peer)[0], gradients(copy.deepcopy(network(dropout)).double(), true)[0]
    )


def test_float64_draws_the_same_dropout_as_eager_mode() -> None:
    assert errors(EAGER, EAGER, 0.1).relative < 1e-6


def test_checkpoints_keep_less_and_change_nothing() -> None:
    kept = list[int]()

    def saved(peer: Peer) -> tuple[dict[str, Tensor | None], Tensor]:
        bytes_ = dict[int, int]()

        def note(tensor: Tensor) -> Tensor:
            bytes_[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model = network()
            found = gradients(model, peer)
        kept.append(sum(bytes_.values()))
        assert not [name for block in blocks_of(model) for name in vars(block) if name == "forward"]
        return found

    (one, state), (other, after) = saved(EAGER), saved(Peer("checkpoint per block", checkpointed=True))
    assert all(torch.equal(one[name], other[name]) for name in one)  # pyright: ignore[reportArgumentType]
    assert torch.equal(state, after)
    assert kept[1] < kept[0] / 2


@pytest.mark.slow
@compiles
def test_memory_budgets_below_1_are_wrong_with_dropout_and_right_without() -> None:
    budget = Peer("torch.compile, memory budget 0.3", compiled=True, memory_budget=0.3)
    plain = errors(COMPILED, COMPILED, 0.1)  # it draws other numbers than eager mode, in float64 the same
    assert plain.relative < 1e-6
    torch.compiler.reset()
    wrong = errors(budget, COMPILED, 0.1).exceeding(plain)
    assert len(wrong) > 4
    assert max(wrong.values()) > 0.1
    torch.compiler.reset()
    assert errors(budget, EAGER, 0.0).exceeding(errors(EAGER, EAGER, 0.0)) == {}


def test_autocast_computes_in_fewer_bits() -> None:
    lossy = Peer("autocast", autocast=torch.bfloat16)
    assert 1e-4 < errors(lossy, EAGER, 0.1).relative < 0.1
    assert (lossy.group, COMPILED.group, EAGER.group) == ("lossy", "compiled", "eager")


def test_the_peers_of_a_step() -> None:
    with_blocks, without = peers(blocks=True), peers(blocks=False, budgets=(0.5,))
    assert [peer.name for peer in without] == ["eager", "torch.compile", "torch.compile, memory budget 0.5"]
    assert [peer.memory_budget for peer in with_blocks if peer.memory_budget < 1] == [
        0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0,
    ]  # fmt: skip
    assert sum(peer.checkpointed for peer in with_blocks) == 2
    assert with_blocks[0] == EAGER


class Repeated(nn.Module):
    """A stem, blocks in a list, and a part that the blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Block(0.0), Block(0.0)])
        self.twin = self.layers[0]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (network(), ["0", "1"]),
        (Repeated(), ["layers.0", "layers.1"]),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []),
        (nn.Sequential(Block(0.0)), []),
        (nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]), ["0", "1", "2"]),
        (nn.Sequential(*[nn.Sequential(Block(0.0), Block(0.0)) for _ in range(2)]), ["0.0", "0.1", "1.0", "1.1"]),
        (nn.Sequential(nn.Sequential(nn.ReLU(), nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU())), []),
    ],
)
def test_blocks_are_the_outermost_repeated_parts(model: nn.Module, names: list[str]) -> None:
    by_id: dict[int, Any] = {id(part): name for name, part in model.named_modules()}
    assert [by_id[id(block)] for block in blocks_of(model)] == names
