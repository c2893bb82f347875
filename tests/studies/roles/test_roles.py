"""Every rank of a step: as many bytes as each holds with real tensors in the same fake process group."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from environment import slow
from integrations.scripts.script_runs import run_here
from models import pipelined_steps
from models.sharded_steps import step_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from truth.rank_peak import measured_peak_of_rank

import memplan
from memplan._text import ranks_text
from memplan.cli import main
from memplan.errors import FormatError, StepError, UsageError
from memplan.reports.roles import summary

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@functools.cache
def of_shards(way: str, world: int) -> memplan.Roles:
    return memplan.roles(step_of(way), world=world)


@pytest.mark.parametrize(
    ("way", "world", "expected"),
    [
        # 128, 500 and 512 rows by 3: 43, 167 and 171 on the first two
        ("fsdp", 3, [(0, 1), (2,)]),
        *slow(
            # by 12: 11, 42 and 43 on the first eleven
            ("fsdp", 12, [tuple(range(11)), (11,)]),
            ("hsdp", 12, [(0, 1, 2, 3, 4, 6, 7, 8, 9, 10), (5, 11)]),
            ("ddp", 4, [(0, 1, 2, 3)]),
        ),
    ],
)
def test_sharded_ranks_are_what_they_are_with_real_tensors(
    way: str, world: int, expected: list[tuple[int, ...]]
) -> None:
    found = of_shards(way, world)
    assert [role.ranks for role in found.roles] == expected
    for role in found.roles:
        for rank in {role.ranks[0], role.ranks[len(role.ranks) // 2], role.ranks[-1]}:
            peak = role.explanation.timeline.peak_allocated
            assert peak == pytest.approx(measured_peak_of_rank(step_of(way), world, rank), rel=1e-3)


@pytest.mark.slow
def test_stages_of_a_pipeline_are_what_they_are_with_real_tensors_the_fullest_first() -> None:
    build = pipelined_steps.step_of("1f1b", 4)
    found = memplan.roles(build, world=3)
    peaks = {role.ranks[0]: role.explanation.timeline.peak_allocated for role in found.roles}
    assert sorted(role.ranks + role.stages for role in found.roles) == [(0, 0), (1, 1), (2, 2)]
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    assert peaks == {rank: pytest.approx(measured_peak_of_rank(build, 3, rank), rel=1e-3) for rank in range(3)}


@pytest.mark.slow
def test_few_of_many_ranks_are_recorded() -> None:
    """1,000 rows by 512: each of the first 500 ranks has two, and the others none."""

    def build() -> Callable[[], None]:
        dist.init_process_group("gloo")
        model: Any = fully_shard(nn.Linear(64, 1000), mesh=init_device_mesh("cpu", (512,)))
        data = torch.zeros(4, 64)
        return lambda: model(data).sum().backward()

    found = memplan.roles(build, world=512)
    assert sorted(role.ranks for role in found.roles) == [tuple(range(500)), tuple(range(500, 512))]
    assert len(found.recorded) < 25
    # torch pads each gradient to 1,024 rows before it is reduced
    measured = {measured_peak_of_rank(build, 512, rank) for rank in (0, 511)}
    assert {role.explanation.timeline.peak_allocated for role in found.roles} == measured
    assert "The others lie between recorded ranks that do the same" in " ".join(str(found).split())


def test_ranks_whose_tensors_differ_in_size_alone_are_told_apart() -> None:
    """On rank 1 a tensor is 4 KiB larger."""

    def build() -> Callable[[], object]:
        rank = dist.get_rank()
        return lambda: torch.zeros(1024 * (2 if rank == 1 else 1)).sum()

    found = memplan.roles(build, world=3)
    assert [role.ranks for role in found.roles] == [(1,), (0, 2)]
    peaks = [role.explanation.timeline.peak_allocated for role in found.roles]
    assert peaks[0] - peaks[1] == 4096


@pytest.mark.slow
def test_ranks_that_send_to_single_others_are_all_recorded() -> None:
    """A pipeline by hand, of two groups of eight ranks; the sixth rank of each has a larger stage."""

    def build() -> Callable[[], None]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        along = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "stage"))["stage"].get_group()
        stage = nn.Linear(64, 128 if rank % 8 == 5 else 64)

        def step() -> None:
            received = torch.zeros(4, 64)
            if rank % 8:
                dist.recv(received, group=along, group_src=rank % 8 - 1)
            sent = stage(received).detach()
            if rank % 8 < 7:
                dist.send(sent, group=along, group_dst=rank % 8 + 1)

        return step

    found = memplan.roles(build, world=16)
    assert (5, 13) in [role.ranks for role in found.roles]
    trace = memplan.record(build, world=16, rank=3)
    assert [group.ranks for group in trace.groups if group.piped] == [tuple(range(8))]


def test_saved_and_loaded(tmp_path: Path) -> None:
    found = of_shards("fsdp", 3)
    found.save(tmp_path / "roles.json")
    assert memplan.Roles.load(tmp_path / "roles.json").to_json() == found.to_json()
    damaged = json.loads(found.to_json())
    del damaged["roles"][0]["explanation"]["by_cause"]
    with pytest.raises(FormatError):
        memplan.Roles.from_dict(damaged)
    with pytest.raises(FormatError, match="ranks"):
        memplan.Roles.from_dict(json.loads(found.to_json()) | {"world": 10**15})
    damaged = json.loads(found.to_json()) | {"roles": []}
    with pytest.raises(FormatError):
        memplan.Roles.from_dict(damaged)


def test_errors_name_the_rank() -> None:
    with pytest.raises(StepError, match=r"^rank 1: stage 1 of the pipeline learns the shapes"):
        memplan.roles(pipelined_steps.step_of("1f1b", 4, shapes=False), world=2)
    with pytest.raises(UsageError, match=r"memplan\.roles"):
        memplan.record(step_of("fsdp"), world=2, rank="all")  # pyright: ignore[reportArgumentType]


BUILD = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch import nn

def build():
    dist.init_process_group("nccl")
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)).cuda()
    fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    data = torch.zeros(64, 1000, device="cuda")
    return lambda: model(data).sum().backward()
"""
SCRIPT = (
    BUILD
    + """
step = build()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
for _ in range(2):
    step()
    optimizer.step()
"""
)


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, args)])


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "sharded.py").write_text(BUILD)
    return f"{tmp_path / 'sharded.py'}:build"


def test_the_command_lists_and_draws_all_ranks(target: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page, saved = tmp_path / "ranks.html", tmp_path / "ranks.json"
    result = run(
        "explain", target, "--world", "3", "--rank", "all", "--device", "h100", "--html", page, "--json", saved
    )
    assert (result.exit_code, result.stderr) == (0, "")
    # 1000 rows by 3: 334, 334, 332
    said = " ".join(result.stdout.split())
    assert "The fullest: ranks 0-1" in said
    assert all(text in said for text in ("allocated peak", "reserved", "build, rank 2"))
    text = page.read_text()
    assert all(part in text for part in (": 3 ranks on h100", "build, ranks 0-1", "build, rank 2"))
    roles = json.loads(saved.read_text())["roles"]
    assert [role["ranks"] for role in roles] == [[0, 1], [2]]
    again = run("report", saved, "--html", tmp_path / "again.html")
    assert again.exit_code == 0, again.output
    assert "build, rank 2" in (tmp_path / "again.html").read_text()


def test_a_script_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.integrations.scripts.process.run_script", run_here)
    (tmp_path / "train.py").write_text(SCRIPT.replace("1000", "999"))  # 500 and 499 rows
    result = run("run", "--world", "2", "--rank", "all", "--device", "h100", tmp_path / "train.py")
    assert result.exit_code == 0, result.output
    assert "All 2 ranks were recorded." in result.stdout
    assert "train.py, rank 1" in " ".join(result.stdout.split())
    assert "The script:" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "all"], "--rank all without --world"),
        (["--rank", "all", "--world", "2", "--measure"], "--rank all with --measure"),
        (["--rank", "all", "--world", "2", "--trace", "t.json"], "--rank all with --trace"),
        (["--rank", "some", "--world", "2"], "some"),
        (["--rank", "all", "--world", "2", "--no-train", "--weights", "int8"], "--rank all with"),
    ],
)
def test_what_does_not_go_with_all_ranks(target: str, options: list[str], message: str) -> None:
    result = run("explain", target, "--device", "h100", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) <= 4


def test_other_commands_take_a_single_rank(target: str) -> None:
    for command in ("check", "guard", "largest"):
        result = run(command, target, "--device", "h100", "--world", "2", "--rank", "all")
        assert (result.exit_code, "memplan explain" in result.stderr) == (2, True), result.output


def test_ranks_as_text() -> None:
    assert ranks_text((3,)) == "rank 3"
    assert ranks_text((0, 1, 2, 5, 7, 8)) == "ranks 0-2, 5, 7-8"
    assert ranks_text((0, 8, 16)) == "ranks 0-16 by 8"
    assert ranks_text((0, 5)) == "ranks 0, 5"


def test_a_line_in_megatrons_words() -> None:
    """Two layers of 256 x 256 on one rank, AdamW: weights, gradients and two states of each, 512 rows saved of each."""

    def build() -> Callable[[], None]:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
        update, rows = torch.optim.AdamW(model.parameters(), foreach=False), torch.zeros(512, 256)

        def step() -> None:
            model(rows).sum().backward()
            update.step()
            update.zero_grad()

        return step

    text = str(summary(memplan.roles(build, world=1)).sections)
    states, saved = 4 * 2 * 256 * 256 * 4, 512 * 256 * 4
    assert f"weight and optimizer {states / 2**20:.2f} MB, activation {saved / 2**20:.2f} MB." in text
