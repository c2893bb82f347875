"""Scripts that torchrun starts, run as one of its ranks: beside real tensors in a fake group, and ranks of gloo."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from emulated_card.dry_process import run_there
from environment import ENVIRONMENT, needs_cuda_torch, slow
from integrations.scripts.script_runs import run, run_here, script_of

import memplan
from memplan.cli import main
from memplan.errors import StepError
from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.process import run_script
from memplan.integrations.scripts.request import Request

RANKS = Path(__file__).parent / "ranks"
TESTS = Path(__file__).parents[2]
NEEDS = {
    "accelerated_ranks": "accelerate",
    "trainer_ranks": "transformers",
    "trainer_fsdp": "transformers",
    "accelerated_fsdp": "accelerate",
    "lightning_ddp": "lightning",
    "lightning_parallel": "pytorch_lightning",
}
LOOP = """
model = nn.Linear(8, 8)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(4, 8)).sum().backward()
    opt.step()
"""


def _copied(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Command:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    shutil.copy(RANKS / f"{name}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return Command(f"{name}.py", arguments)


@pytest.mark.filterwarnings("ignore")  # of DTensor, in the script
@pytest.mark.parametrize(
    ("name", "arguments", "world", "rank"),
    [
        ("plain_ddp", [], 2, 0),
        *slow(
            ("fsdp_mesh", ["--replicas", "2", "--bf16"], 4, 3), ("ddp_accumulate", [], 4, 1), ("fsdp_mesh", [], 8, 0),
            ("tensor_parallel", [], 4, 0), ("accelerated_ranks", [], 2, 0), ("trainer_ranks", [], 2, 1),
            ("lightning_ddp", [], 2, 1),
        ),
    ],
)  # fmt: skip
def test_a_rank_is_what_it_is_with_real_tensors(
    name: str, arguments: list[str], world: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = _copied(name, tmp_path, monkeypatch, *arguments)
    recorded = run_here(Request(command, device="cpu", world=world, rank=rank))
    measured = run_here(Request(command, device="cpu", world=world, rank=rank, really=True))
    peak, real = (memplan.simulate(ran.trace).peak_allocated for ran in (recorded, measured))
    assert peak == pytest.approx(real, rel=0.001)
    assert recorded.facts.updates == measured.facts.updates == 2
    assert f"rank {rank} of {world}" in str(recorded.trace.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plain", "library"),
    [("accelerated_fsdp", "plain_fsdp", "accelerate"), *slow(("lightning_fsdp", "plain_fsdp1", "lightning"))],
)
def test_what_a_library_shards_is_what_torch_does(
    name: str, plain: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They shard on cards alone. In torch's own words such steps are those of dry runs (test_record_ranks_on_card)."""
    pytest.importorskip(library)
    for script in RANKS.glob("*.py"):
        shutil.copy(script, tmp_path)
    monkeypatch.chdir(tmp_path)
    own, torchs = (
        memplan.simulate(run_here(Request(Command(f"{script}.py"), device="h100", world=4)).trace)
        for script in (name, plain)
    )
    assert own.steps[-1].peak_allocated == pytest.approx(torchs.steps[-1].peak_allocated, rel=0.001)


@needs_cuda_torch
@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("trainer_fsdp", "transformers"),
        *slow(("accelerated_fsdp", "accelerate"), ("lightning_parallel", "pytorch_lightning")),
    ],
)
def test_what_a_library_shards_is_what_it_takes_on_an_emulated_card(
    name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, as torch's allocator counts it there, in both steps."""
    command = _copied(name, tmp_path, monkeypatch)
    if not list(Path(str(ENVIRONMENT)).glob(f"lib/python*/site-packages/{library}")):
        pytest.skip(f"no {library} beside torch's CUDA build")
    # torch 2.11 has a workspace of 1 MiB more for cuBLASLt, later ones do not
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    code = (
        f"sys.path.insert(0, {str(TESTS)!r})\nfrom truth.fake_rank import peaks_of_updates\n"
        f"print('peaks', *peaks_of_updates({command.target!r}, 4))"
    )
    printed = re.search(r"^peaks (\d+) (\d+)$", run_there(code, tmp_path), re.MULTILINE)
    assert printed is not None
    ran = run_script(Request(command, device="h100", world=4))
    first, second = (step.peak_allocated for step in memplan.simulate(ran.trace).steps)
    assert [first, max(first, second)] == [int(peak) for peak in printed.groups()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_ddp", "ddp_accumulate", "accelerated_ranks"])
def test_a_rank_is_what_it_is_among_real_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallel. What gloo's threads free, as with sharded parameters, torch's profiler does not see."""
    command = _copied(name, tmp_path, monkeypatch)
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent / "src")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         str(TESTS / "truth" / "gloo_rank.py"), command.target],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    real = {int(rank): int(peak) for rank, peak in re.findall(r"^peak (\d) (\d+)", done.stdout, re.MULTILINE)}
    ran = run_script(Request(command, device="cpu", world=2))
    assert memplan.simulate(ran.trace).peak_allocated == pytest.approx(real[0], rel=0.001)


def test_a_rank_gets_its_share_of_the_data_and_leaves_nothing_behind(tmp_path: Path) -> None:
    text = """
    import os
    import torch.distributed as dist
    from torch.utils.data import DistributedSampler
    assert not dist.is_initialized()
    dist.init_process_group("nccl")
    local = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
    assert local == ["11", "3", "16", "8", "1"], local
    assert (dist.get_rank(), dist.get_world_size(), dist.is_torchelastic_launched()) == (11, 16, True)
    names, one = [None] * 16, [None]
    dist.all_gather_object(names, "same")
    dist.scatter_object_list(one, [[n] for n in range(16)], src=11)
    dist.broadcast_object_list(one, src=0)
    assert names == ["same"] * 16 and one == [[11]], (names, one)
    part = dist.new_group([10, 11], backend="gloo")
    dist.barrier(); dist.monitored_barrier(); dist.barrier(group=part)
    store = dist.TCPStore("localhost", 29400, 16, False)
    store.set("key", "value"); store.add("count", 3)
    assert (store.get("key"), store.add("count", 1), store.check(["no"])) == (b"value", 4, False)
    data = TensorDataset(torch.randn(1600, 8))
    loader = DataLoader(data, batch_size=10, sampler=DistributedSampler(data))
    assert len(loader) == 10
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, in loader:
        loss = model(x).sum()
        loss.backward(); opt.step()
        dist.all_reduce(loss.detach())
    """
    before = dict(os.environ)
    _, facts = run(tmp_path, text, world=16, rank=11)
    assert (facts.ending, facts.updates) == ("steps", 2)
    after = dict(os.environ)
    after.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it when it is first asked to compile
    before.pop("TORCHINDUCTOR_CACHE_DIR", None)
    assert after == before
    assert not dist.is_initialized()


def test_a_rank_has_the_card_of_its_number(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        """
import os, torch
from torch import nn
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
device = torch.device("cuda", local)
assert (torch.cuda.device_count(), torch.cuda.current_device()) == (8, 3)
torch.distributed.init_process_group("nccl", device_id=device)
model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).to(device), device_ids=[local])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 256).cuda()
assert x.device == device and x.get_device() == 3 and torch.cuda.current_stream().device == device
for _ in range(3):
    model(x).sum().backward()
    opt.step()
"""
    )
    script = script_of(str(path), world=8, rank=3)
    on_card = memplan.simulate(memplan.record(script, device="h100"))  # pyright: ignore[reportArgumentType]  # a program
    # two float32 copies of 256 x 256 weights, gradients and a bucket of DDP
    assert on_card.peak_allocated >= 3 * 256 * 256 * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dist.device_mesh.init_device_mesh('cpu', (3, 3))", "default world size 8"),
        ("dist.TCPStore('localhost', 1, 8, True).get('other')", r"store.get\('other'\) waits for another rank"),
        ("dist.init_process_group()\ndist.distributed_c10d._get_default_store().wait(['key'])", "waits for another"),
        ("dist.init_process_group('gloo', 'tcp://localhost:1', rank=0, world_size=4)", "rank 0 of 4"),
    ],
)  # fmt: skip
def test_what_one_rank_alone_cannot_do_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(StepError, match=message):
        run(tmp_path, f"import torch.distributed as dist\n{text}\n{LOOP}", world=8)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "text",
    [
        "dist.init_process_group('nccl')",
        *slow("int(os.environ['LOCAL_RANK'])", "int(os.environ.get('LOCAL_RANK'))", "os.environ['WORLD_SIZE']"),
    ],
)
def test_without_a_world_a_script_of_torchrun_is_told_how_to_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(
        f"import os, torch\nimport torch.distributed as dist\nfrom torch import nn\n{text}\n{LOOP}"
    )
    with pytest.raises(StepError, match=r"starts under torchrun.*--world 8") as caught:
        run_here(Request(Command(str(tmp_path / "train.py")), device="cpu"))
    assert str(caught.value.where).endswith("train.py:4")


@pytest.mark.slow
def test_what_another_rank_would_send_is_named_where_it_is_missed(tmp_path: Path) -> None:
    text = "dist.init_process_group('gloo')\nsent = [None]\ndist.broadcast_object_list(sent)\nsent[0]['lr']"
    (tmp_path / "train.py").write_text(
        f"import torch\nimport torch.distributed as dist\nfrom torch import nn\n{text}\n{LOOP}"
    )
    with pytest.raises(StepError, match=r"broadcast_object_list got nothing.*--rank 0"):
        run_script(Request(Command(str(tmp_path / "train.py")), device="cpu", world=2, rank=1))


@pytest.mark.parametrize("options", [["--world", "2", "--rank", "2"], ["--rank", "1"]])
@pytest.mark.parametrize("command", [["run"], ["check", "--script"]])
def test_a_rank_that_there_is_not_is_bad_usage(command: list[str], options: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    result = CliRunner().invoke(main, [command[0], *options, "--device", "cpu", *command[1:], str(script)])
    assert result.exit_code == 2
    assert re.search(r"rank \d (of 2|without)", result.stderr)
