"""Layouts of a module over several cards: their bytes are those of the same step, written by hand."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from environment import slow
from models.sharded_steps import Block, Transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import memplan
from memplan.cli import main
from memplan.errors import FormatError, InputError, StepError, TargetError
from memplan.reports.html.saved_results import results_of
from memplan.studies.layouts.layout import layouts_of
from memplan.studies.layouts.layouts import LayoutBytes

LENGTH = 64
OPTIONS: dict[str, Any] = {"targets": f"8x{LENGTH}x500", "loss": "mse_loss", "optimizer": "adamw", "device": "h100"}
TOKENS = f"8x{LENGTH}:int64<500"


def by_hand(make: Callable[[], nn.Module], title: str, batch: int) -> Callable[[], Callable[[], None]]:
    """The step of a layout, as a script of torchrun has it, in bfloat16."""

    def build() -> Callable[[], None]:
        dist.init_process_group("nccl")
        model: Any = make()
        if "recomputed" in title:
            for block in model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        sizes = (2, 2) if title.startswith("HSDP") else (dist.get_world_size(),)
        mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
        if title.startswith("DDP"):
            model = DistributedDataParallel(model.cuda())
        else:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for block in (*model.blocks, model):
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward="kept" not in title)
        update = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(batch, LENGTH, dtype=torch.int64, device="cuda")
        target = torch.zeros(batch, LENGTH, 500, device="cuda")

        def step() -> None:
            update.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=title.startswith("DDP")):
                output = model(tokens)
                loss = nn.functional.mse_loss(output, target)
            loss.backward()
            update.step()

        return step

    return build


class Short(Transformer):
    """Two blocks: while one runs, the weights of the other are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:2]


@functools.cache
def of_transformer(world: int) -> dict[str, LayoutBytes]:
    """The layouts by title."""
    result = memplan.layouts(Short, TOKENS, world=world, per_node=2, autocast="bf16", micro_batch=(8,), **OPTIONS)
    return {row.layout.title: row for row in result.rows}


@pytest.mark.filterwarnings("ignore")  # of the loss, and of FSDP2: torch's own
@pytest.mark.parametrize(("world", "layouts"), [(2, 6), *slow((4, 10))])
def test_each_layout_is_the_step_written_by_hand(world: int, layouts: int) -> None:
    rows = of_transformer(world)
    assert len(rows) == layouts
    for row in list(rows.values()) if world == 4 else [rows["DDP 2, recomputed"], rows["FSDP2 2, kept"]]:
        build = by_hand(Short, row.layout.title, 8)
        timeline = memplan.simulate(memplan.record(build, device="h100", world=world))
        assert (row.layout.title, row.allocated) == (row.layout.title, timeline.peak_allocated)
        assert row.recorded
        assert row.reserved == timeline.peak_reserved


class Deep(nn.Module):
    """Equal blocks, more than are recorded."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Drawn(Deep):
    """Its constructor reads values: whether drawn weights are within bounds, rates of stochastic depth, a flag."""

    def __init__(self) -> None:
        super().__init__(2)
        for block, rate in zip(self.blocks, torch.linspace(0.5, 0.9, 2).tolist(), strict=True):
            nn.init.trunc_normal_(block[0].weight, std=0.02)  # pyright: ignore[reportIndexIssue]
            assert rate > 0.4
        if self.blocks[0][0].weight.sum() > 0:  # pyright: ignore[reportIndexIssue]
            self.cuda()


def test_a_constructor_that_reads_values_or_names_the_card() -> None:
    drawn, plain = (
        memplan.layouts(make, "8x1024", world=2, device="h100", optimizer="sgd").rows
        for make in (Drawn, functools.partial(Deep, 2))
    )
    assert all(row.fits for row in drawn)
    sizes = {row.layout.title: row.allocated for row in plain}
    for row in drawn:
        assert row.allocated == pytest.approx(sizes[row.layout.title], rel=1e-3)


def test_few_blocks_are_recorded_of_many_and_all_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"world": 8, "device": "h100", "optimizer": "adamw", "micro_batch": (256,)}
    make = functools.partial(Deep, 7)
    result = memplan.layouts(make, "256x1024", **options)
    assert result.blocks == 7
    assert [row.recorded for row in result.rows] == [True] + [False] * 5
    monkeypatch.setattr("memplan.studies.layouts.layouts._FEW", (3, 7))  # so many blocks are recorded whole
    whole = {row.layout: row for row in memplan.layouts(make, "256x1024", **options).rows}
    assert all(row.recorded for row in whole.values())
    for row in result.rows:
        assert row.allocated == pytest.approx(whole[row.layout].allocated, rel=1e-4), row.layout.title


def test_time_is_that_of_flops_and_of_what_is_sent() -> None:
    """A linear layer's training step takes three products; a ring sends (r - 1) / r of what it gathers."""
    tokens, width = 32768, 8192  # products of such sizes are bound by FLOPs
    result = memplan.layouts(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(7))),
        f"{tokens}x{width}", world=8, device="h100", optimizer="sgd", autocast="bf16", micro_batch=(tokens,),
    )  # fmt: skip
    product = 2 * tokens * width * width
    flops = (3 * 7 - 1) * product  # the first layer's input needs no gradient
    weights = 7 * (width * width + width)
    rows = {row.layout.title: row for row in result.rows}
    assert rows["FSDP2 8"].flops == flops
    assert rows["FSDP2 8, recomputed"].flops == flops + 7 * product
    rate = 989.4e12  # H100 SXM5, dense bfloat16: NVIDIA's data sheet has 1,979 TFLOP/s with sparsity
    for row in rows.values():
        assert 1 <= row.compute / (row.flops / rate) < 1.3, row.layout.title
    assert rows["FSDP2 8"].sending == pytest.approx((2 * 2 + 4) * weights * 7 / 8 / 450e9, rel=1e-6)
    assert rows["FSDP2 8, kept"].sending == pytest.approx((2 + 4) * weights * 7 / 8 / 450e9, rel=1e-6)
    assert rows["DDP 8"].sending == pytest.approx(2 * 4 * weights * 7 / 8 / 450e9, rel=1e-6)


def test_attention_is_counted() -> None:
    """Scores and values take 4 n^2 d a head forward, and 10 n^2 d backward (five products of that size)."""
    tokens = 8 * LENGTH
    products = 2 * (4 + 8) * 2 * tokens * 128 * 128 + 2 * tokens * 128 * 500
    assert of_transformer(2)["FSDP2 2"].flops == 3 * products + 2 * 14 * 8 * LENGTH * LENGTH * 128


def test_frozen_weights_have_no_gradients_to_hold_or_to_send() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        model[:3].requires_grad_(requires_grad=False)
        return model

    result = memplan.layouts(make, "8x1024", world=2, device="h100", optimizer="sgd", dtype="bf16")
    sending = {row.layout.title: row.sending for row in result.rows}
    assert sending["DDP 2"] == pytest.approx(2 * 2 * 1024 * 1024 / 2 / 450e9)
    assert sending["FSDP2 2"] == pytest.approx((2 * 4 + 1) * 2 * 1024 * 1024 / 2 / 450e9)


class Tapered(Deep):
    """Blocks of one class and several sizes."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64 * n, 64 * n + 64)) for n in range(1, 8))


class Counted(Deep):
    """A module that needs all of its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(8):
            x = self.blocks[number](x)
        return x


@pytest.mark.parametrize(("make", "inputs"), [(Tapered, "8x64"), (Counted, "8x1024")])
def test_a_module_whose_blocks_differ_or_are_all_needed_is_recorded_whole(make: type[nn.Module], inputs: str) -> None:
    result = memplan.layouts(make, inputs, world=2, device="h100", optimizer="sgd")
    assert all(row.recorded for row in result.rows)


def test_what_cannot_fit_is_not_recorded() -> None:
    result = memplan.layouts(
        lambda: nn.Linear(65536, 65536), "1x65536", world=4, device="t4", optimizer="adamw", micro_batch=(1, 2)
    )
    reasons = {row.layout.title: row.reason for row in result.rows if row.layout.micro_batch == 1}
    assert reasons["DDP 4"] == "weights and gradients alone do not fit"
    assert result.best is None
    larger = {row.layout.title: row.reason for row in result.rows if row.layout.micro_batch == 2}
    assert larger == {title: reason or "a smaller micro-batch does not fit" for title, reason in reasons.items()}


def test_a_world_that_does_not_divide_into_machines() -> None:
    with pytest.raises(InputError, match="--per-node 6"):
        list(layouts_of(12, 8, (1,)))
    assert {layout.mesh for layout in layouts_of(16, 8, (1,))} == {(16,), (2, 8)}
    assert {layout.mesh for layout in layouts_of(4, 8, (1,))} == {(4,)}


def test_a_target_that_is_no_module() -> None:
    with pytest.raises(TargetError, match="sharded here"):
        memplan.layouts(lambda: lambda: None, world=2, device="h100")
    with pytest.raises(InputError, match="a card"):
        memplan.layouts(Block, "1x8x128", world=2, device="cpu")


def test_errors_of_the_target_are_said_as_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> nn.Module:
        raise ValueError("no weights")

    with pytest.raises(StepError, match="broken raised ValueError: no weights"):
        memplan.layouts(broken, "1x8", world=2, device="h100")
    with pytest.raises(StepError, match="reduction dim"):
        memplan.layouts(lambda: nn.Linear(8, 8), "1x7", world=2, device="h100")
    assert capfd.readouterr() == ("", "")


def test_the_command_prints_the_fastest_that_fits(tmp_path: Path) -> None:
    line = ["layouts", "examples/gpt2.py:make", "--arg", "layers=1", "--arg", "width=64", "--world", "2"]
    pytest.importorskip("plotly")
    files = ["--json", str(tmp_path / "all.json"), "--html", str(tmp_path / "all.html")]
    done = CliRunner().invoke(
        main, [*line, "--input", "1x64:int64<50257", "--device", "rtx4090", "--optimizer", "adamw", *files]
    )
    assert done.exit_code == 0, done.output
    assert "The fastest that fits: " in done.output
    saved = memplan.Layouts.load(tmp_path / "all.json")
    plain = json.loads((tmp_path / "all.json").read_text())
    assert [row["title"] for row in plain["rows"]] == [row.layout.title for row in saved.rows]
    assert saved.to_json() == (tmp_path / "all.json").read_text()
    (page,) = results_of(saved.to_json(), "all.json")
    assert saved.best is not None
    assert page.verdict.startswith(f"The fastest that fits: {saved.best.layout.title}, ")
    points = page.charts[0].data["points"]
    assert [point["peak"] for point in points] == [row["needs"] for row in plain["rows"] if row["needs"]]
    assert page.verdict.removeprefix("The fastest that fits: ") in (tmp_path / "all.html").read_text()
    with pytest.raises(FormatError, match=r"rows\[0\] is no mapping"):
        memplan.Layouts.from_dict(plain | {"rows": [1]})
    with pytest.raises(FormatError, match="lacks 'shards'"):
        memplan.Layouts.from_dict(plain | {"rows": [{"replicas": 1}]})
    assert CliRunner().invoke(main, [*line, "--micro-batch", "0", "--device", "h100"]).exit_code == 2
    assert CliRunner().invoke(main, [*line, "--device", "cpu"]).exit_code == 2
