"""Layouts whose ranks share each layer: bytes are those of real tensors, gradients those of one rank."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from environment import slow
from models.sharded_steps import WIDTH, Block, Feedforward, Transformer, in_tensors
from models.tensor_ranks import compared, step_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from truth.rank_peak import measured_peak_of_rank

import memplan
from memplan._torch.distributed import one_rank_of
from memplan.cli import main
from memplan.errors import InputError
from memplan.simulation.simulate import simulate
from memplan.studies.layouts.layout import layouts_of
from memplan.studies.layouts.tensor_parallel import losses_of_shards

pytestmark = [  # torch's own, in a real run, too
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a target size:UserWarning"),
]
LENGTH = 64
OPTIONS: dict[str, Any] = {"targets": f"8x{LENGTH}x500", "loss": "mse_loss", "optimizer": "adamw", "device": "h100"}
TOKENS = f"8x{LENGTH}:int64<500"


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (8, {"shards": 2, "replicas": 2, "loss_of_shards": True}),
        *slow((2, {"loss_of_shards": True}), (2, {})),
        *slow((4, {"shards": 2}), (8, {"shards": 2, "replicas": 2}), (4, {}), (4, {"loss_of_shards": True})),
    ],
)  # fmt: skip
def test_a_rank_is_what_it_is_with_real_tensors(world: int, options: dict[str, Any]) -> None:
    build = step_of(**options)
    predicted = simulate(memplan.record(build, world=world)).peak_allocated
    assert predicted == pytest.approx(measured_peak_of_rank(build, world), rel=1e-3)


def test_it_takes_what_the_plan_of_torchs_tutorial_does_beside_the_whole_sequence_at_both_ends() -> None:
    derived, by_hand = (
        simulate(memplan.record(step_of(by_hand=by_hand), world=2)).peak_allocated for by_hand in (False, True)
    )
    whole = 4 * LENGTH * WIDTH * 4
    assert by_hand < derived <= by_hand + whole


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.parametrize("loss_of_shards", slow(False, True))
def test_two_ranks_have_the_gradients_of_one(loss_of_shards: bool, tmp_path: Path) -> None:
    spawn(compared, (str(tmp_path), loss_of_shards), nprocs=2)
    number, worst = (tmp_path / "0").read_text().split()
    assert int(number) == len(list(Transformer().parameters()))
    assert float(worst) < 1e-5


@functools.cache
def rows_of(make: Any, *, world: int = 2, tensor: tuple[int, ...] = (2,), **options: Any) -> dict[str, Any]:
    result = memplan.layouts(make, TOKENS, world=world, tensor=tensor, micro_batch=(8,), **options, **OPTIONS)
    return {row.layout.title: row for row in result.rows}


class TwoHeads(Transformer):
    """A transformer that says how many heads it has, as its attention need not."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.n_heads = 2  # pyright: ignore


class OneHead(Transformer):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.n_heads = 1  # pyright: ignore


def test_a_head_that_ranks_do_not_divide_is_refused() -> None:
    reason = r"no tensor parallelism: 1 heads \(n_heads of blocks.0.attention\) do not divide by 2"
    with pytest.raises(InputError, match=reason):
        rows_of(OneHead)


@pytest.mark.slow
def test_layouts_share_layers_and_shard_the_rest_and_heads_that_do_not_divide_are_refused() -> None:
    rows = rows_of(TwoHeads, world=4, tensor=(2, 4))
    suffixes = "", ", kept", ", recomputed", ", kept, recomputed"
    assert set(rows) == {*(f"FSDP2 2 x TP 2{suffix}" for suffix in suffixes), "TP 4", "TP 4, recomputed"}
    assert {row.reason for title, row in rows.items() if title.startswith("TP")} == {
        "no tensor parallelism: 2 heads (n_heads of blocks.0.attention) do not divide by 4"
    }
    assert all(row.recorded and row.fits for title, row in rows.items() if title.startswith("FSDP2"))
    assert rows["FSDP2 2 x TP 2, recomputed"].allocated < rows["FSDP2 2 x TP 2"].allocated


def of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.slow
def test_machines_hold_copies_of_what_they_shard_and_losses_are_of_whole_logits_or_of_shards() -> None:
    result = memplan.layouts(
        Transformer, TOKENS, world=8, per_node=4, tensor=(2,), loss_parallel=True, micro_batch=(8,),
        targets=f"8x{LENGTH}:int64<500", loss=of_tokens, device="h100",
    )  # fmt: skip
    rows = {row.layout.title: row for row in result.rows}
    places = [f"{name}{loss}" for name in ("FSDP2 4 x TP 2", "HSDP 2 x 2 x TP 2") for loss in ("", ", loss parallel")]
    endings = "", ", kept", ", recomputed", ", kept, recomputed"
    assert set(rows) == {f"{place}{ending}" for place in places for ending in endings}
    assert all(row.recorded and row.fits for row in result.rows)
    for place in places[::2]:
        # logits, their logarithms, and the gradient of either: at the peak two of them are there, now as shards
        saved = rows[place].allocated - rows[f"{place}, loss parallel"].allocated
        assert saved >= 2 * 8 * LENGTH * 250 * 4
    loads = memplan.Layouts.from_json(result.to_json())
    assert [row.layout for row in loads.rows] == [row.layout for row in result.rows]


class Headless(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()


@pytest.mark.slow
def test_without_logits_there_are_no_shards_of_them() -> None:
    rows = memplan.layouts(Headless, TOKENS, world=2, tensor=(2,), loss_parallel=True, device="h100").rows
    reason = "no tensor parallelism: no linear layer after the blocks makes logits, whose shards a loss could take"
    assert {row.reason for row in rows} == {"", reason}
    assert all(bool(row.reason) == row.layout.loss_parallel for row in rows)


def test_losses_of_shards_need_ranks_that_share_layers() -> None:
    with pytest.raises(InputError, match="losses of shards of the logits, where no ranks share a layer"):
        list(layouts_of(8, 8, (1,), (1,), (False, True)))
    assert any(layout.loss_parallel for layout in layouts_of(8, 8, (1,), (1, 2), (False, True)))


def test_an_error_leaves_no_losses_of_shards_behind() -> None:
    dispatcher: Any = vars(DTensor)["_op_dispatcher"]
    before = set(dispatcher._custom_op_handlers)
    within: set[Any] = set()

    def step() -> None:
        with losses_of_shards():
            within.update(dispatcher._custom_op_handlers)
            raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        step()
    assert within > before
    assert set(dispatcher._custom_op_handlers) == before


def test_ranks_end_with_a_torch_that_names_its_caches_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.tensor.debug._clear_sharding_prop_cache")
    with one_rank_of(2, 0):
        pass
    assert not dist.is_initialized()


def test_what_ranks_of_a_layer_exchange_is_waited_for() -> None:
    """Of n bytes a ring of r ranks sends n (r - 1) / r to gather or to reduce to shards, forward and backward: twice
    a block for attention and for the feed-forward layer, once the sequence after the last block. The embedding is
    reduced to all, at twice that, and so are the gradients of the head's input; the logits are gathered."""
    row = rows_of(Transformer)["TP 2"]
    hidden, logits = (8 * LENGTH * width * 4 for width in (WIDTH, 500))
    blocks, norms = 3 * 8 * hidden, 3 * 4 * 2 * WIDTH * 4
    # the embedding, its gradient from shards of the first block, the last block's result, the head's gradient
    ends = (2 + 1 + 1 + 2) * hidden + logits
    assert row.exchanging == pytest.approx((blocks + ends + norms) / 2 / 450e9, rel=0.02)
    assert row.seconds == pytest.approx(max(row.compute + row.exchanging, row.sending))


class Fused(nn.Module):
    """A block whose queries, keys and values are of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), Feedforward()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.mlp(q + k + v)


class Scaled(Block):
    """A block with a parameter that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


def of_blocks(kind: type[nn.Module]) -> Transformer:
    model = Transformer()
    model.blocks = nn.ModuleList(kind() for _ in range(2))
    return model


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Fused, "blocks.0 has no linear layers of queries, keys and values"),
        (Scaled, "blocks.0 has a parameter outside of its layers: scale"),
    ],
)
def test_blocks_of_other_forms_are_refused(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        rows_of(lambda: of_blocks(kind))


def test_sequences_that_do_not_divide_are_refused() -> None:
    with pytest.raises(memplan.MemplanError, match=r"takes \(1, 63, 128\), no sequence that 2 ranks divide"):
        memplan.layouts(Transformer, "8x63:int64<500", world=2, tensor=(2,), device="h100")


def by_tutorial(model: Any, mesh: DeviceMesh) -> None:
    in_tensors(model, mesh)


@pytest.mark.slow
def test_a_plan_of_the_users_own() -> None:
    own = rows_of(Transformer, tensor_plan=by_tutorial)["TP 2"]
    derived = rows_of(Transformer)["TP 2"]
    assert 0 < own.allocated < derived.allocated


def test_the_command_takes_degrees_and_a_plan(tmp_path: Path) -> None:
    line = [
        "layouts",
        "tests/models/sharded_steps.py:Transformer",
        "--input",
        TOKENS,
        "--world",
        "2",
        "--device",
        "h100",
    ]
    plan = ["--tensor", "2", "--tensor-plan", "tests/studies/layouts/test_tensor_parallel.py:by_tutorial"]
    done = CliRunner().invoke(main, [*line, *plan, "--json", str(tmp_path / "all.json")])
    assert done.exit_code == 0, done.output
    assert "The fastest that fits: TP 2" in done.stdout
    assert [row.layout.tensor for row in memplan.Layouts.load(tmp_path / "all.json").rows] == [2, 2]
    assert CliRunner().invoke(main, [*line, "--tensor", "3"]).exit_code == 2
    with pytest.raises(InputError, match="--tensor 2"):
        list(layouts_of(4, 2, (1,), (3,)))


@pytest.mark.parametrize("has_script", [True, False])
def test_a_script_that_shards_by_itself_has_its_own_layout(
    has_script: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    script = ["--script", "train.py"] if has_script else []
    done = CliRunner().invoke(main, ["layouts", *script, "--world", "8", "--device", "h100"])
    assert done.exit_code == 2
    expected = "memplan largest --world 8 --device CARD --script train.py" if script else "no TARGET"
    assert expected in done.stderr
