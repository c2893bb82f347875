"""A fitted model in the places where people train: trainers of other libraries, plain loops, several processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from truth.cpu_allocator import allocations, peak_of
from verification.fitting.quick import fit

from memplan.verification.fitting.fit import Fitted

STEPS, BATCH, WIDTH = 5, 256, 48
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of the trainers' own, about workers and loggers


def network() -> nn.Sequential:
    """With a loss outside it has much to save; with dropout it shows whether random numbers are the same."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


class Classifier(nn.Module):
    """Computes its loss itself, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def samples() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(STEPS * BATCH, WIDTH), torch.arange(STEPS * BATCH) % 4)


def batch() -> tuple[Tensor, Tensor]:
    x, y = samples().tensors
    return x[:BATCH], y[:BATCH]


def as_unfitted(fitted: Fitted, twin: nn.Module, train: Callable[[nn.Module], None]) -> None:
    """Train the fitted model and its twin, and see that nothing stepped aside and that every weight has the same
    bits."""
    assert fitted.changed
    before = [one.detach().clone() for one in fitted.model.parameters()]
    train(fitted.model)
    assert fitted.stats.planned == STEPS
    assert (fitted.stats.unplanned, fitted.stats.why) == (0, {})
    assert not any("anew" in note for note in fitted.notes)
    train(twin)
    pairs = list(zip(fitted.model.state_dict().values(), twin.state_dict().values(), strict=True))
    assert all(torch.equal(*pair) for pair in pairs)
    assert not any(torch.equal(*pair) for pair in zip(before, fitted.model.parameters(), strict=True))


def with_loss_outside(budget: str = "70%", **options: Any) -> tuple[Fitted, nn.Module]:
    model, (x, y) = network(), batch()
    twin = copy.deepcopy(model)
    return fit(model, x, targets=y, loss=F.cross_entropy, budget=budget, pairs=0, **options), twin


def test_a_plain_loop_with_the_loss_outside_keeps_the_budget() -> None:
    fitted, twin = with_loss_outside()
    peaks = list[int]()
    x, y = batch()
    resident = sum(one.untyped_storage().nbytes() for one in (*twin.parameters(), x, y))

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(2)

        def step(x: Tensor, y: Tensor) -> None:
            output = model(x)  # which this frame holds until backward() is done
            F.cross_entropy(output, y).backward()

        for x, y in DataLoader(samples(), BATCH):
            optimizer.zero_grad()
            peaks.append(peak_of(allocations(lambda x=x, y=y: step(x, y))))
            optimizer.step()

    as_unfitted(fitted, twin, train)
    assert resident + max(peaks[:STEPS]) <= fitted.plan.budget < resident + max(peaks[STEPS:])


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, (x, y) = Classifier(), batch()
    twin = copy.deepcopy(model)

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return STEPS * BATCH

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            x, y = data[index]
            return {"x": x, "labels": y}

    data = samples()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=BATCH, max_steps=STEPS, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", seed=3,
    )  # fmt: skip
    fitted = fit(model, kwargs={"x": x, "labels": y}, loss=lambda out: out["loss"], budget="70%", pairs=0)
    as_unfitted(
        fitted, twin, lambda model: transformers.Trainer(model=model, args=arguments, train_dataset=Rows()).train()
    )


@pytest.mark.slow
def test_lightning() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def train(model: nn.Module) -> None:
        torch.manual_seed(2)
        made = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.fit(model, DataLoader(samples(), BATCH))

    model, (x, y) = Module(), batch()
    twin = copy.deepcopy(model)
    as_unfitted(fit(model, x, targets=y, loss=F.cross_entropy, budget="70%", pairs=0), twin, train)


def one_of_two(rank: int, store: str, folder: str) -> None:
    """Train by DDP with half of each batch, fitted and unfitted, and write the weights."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    fitted, twin = with_loss_outside()

    def train(bare: nn.Module) -> None:
        model = nn.parallel.DistributedDataParallel(bare)
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(2 + rank)
        data = samples()
        data.tensors = (data.tensors[0] * (1 + rank), data.tensors[1])  # each has its own
        for x, y in DataLoader(data, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    as_unfitted(fitted, twin, train)
    torch.save(fitted.model.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ddp_in_two_processes(tmp_path: Path) -> None:
    spawn(one_of_two, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
