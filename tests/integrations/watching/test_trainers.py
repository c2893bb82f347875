"""Trainers of other libraries, watched: by the context manager and by callbacks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # torch's own name for it
from environment import slow
from torch import nn

import memplan
from memplan.integrations.watching.trainers import for_lightning, for_transformers

STEPS = 6
PETABYTE = 1 << 50
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of the trainers' own, about workers and loggers


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(16), "labels": torch.tensor(index % 4)}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def trainer(folder: Path, *callbacks: Any, keep: bool = False, fail_at: int | None = None) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Trainer(transformers.Trainer):
        kept: list[torch.Tensor] = []  # noqa: RUF012
        calls = 0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **others)
            if keep:
                self.kept.append(outputs["logits"])
            self.calls += 1
            if self.calls == fail_at:
                torch.empty(PETABYTE, dtype=torch.uint8)
            return (loss, outputs) if return_outputs else loss

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, max_steps=STEPS, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    return Trainer(model=Classifier(), args=arguments, train_dataset=Samples(), callbacks=list(callbacks))


def test_a_leak_in_a_trainer_of_transformers_is_named(tmp_path: Path) -> None:
    made = trainer(tmp_path, keep=True)
    with memplan.watch(made, quiet=True) as seen:
        made.train()
    (leak,) = seen.leaks
    assert leak.where is not None
    assert leak.where.startswith("tests/integrations/watching/test_trainers.py:")
    assert leak.kept_at is not None
    assert leak.kept_at.startswith("tests/integrations/watching/test_trainers.py:")
    assert leak.held_by == "the attribute `kept` of the class Trainer"
    assert (leak.layer, leak.bytes, leak.noticed) == ("net.2", 8 * 4 * 4, 4)


def test_a_callback_of_transformers_watches_the_training(tmp_path: Path) -> None:
    callback = for_transformers(quiet=True)
    trainer(tmp_path, callback).train()
    assert [row.step for row in callback.seen.rows] == list(range(1, STEPS + 1))
    assert callback.seen.leaks == ()
    assert callback.seen.rows[3].peak is not None
    with memplan.watch(nn.Linear(1, 1), quiet=True):  # it has ended: another one can begin
        pass


@pytest.mark.parametrize("fail_at", [*slow(2), 6])
def test_a_callback_of_transformers_writes_a_post_mortem(tmp_path: Path, fail_at: int) -> None:
    callback = for_transformers(quiet=True, post_mortem=tmp_path)
    made = trainer(tmp_path, callback, fail_at=fail_at)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        made.train()
    data = json.loads(callback.seen.post_mortem.read_text())
    assert (data["asked"], data["step"]) == (PETABYTE, fail_at)
    with memplan.watch(nn.Linear(1, 1), quiet=True):
        pass


def test_accelerates_wrapped_optimizer_ends_steps() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    bare = Classifier()
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters()))
    kept = list[torch.Tensor]()
    with memplan.watch(model, optimizer, quiet=True) as seen:
        for _ in range(STEPS):
            loss = model(torch.randn(8, 16), torch.zeros(8, dtype=torch.long))["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss)
    assert len(seen.rows) == STEPS
    assert [(leak.bytes, leak.kept_at is not None) for leak in seen.leaks] == [(4, True)]


def lightning_run(keep: bool, fail_at: int | None, *callbacks: Any) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.classifier, self.losses, self.calls = Classifier(), list[torch.Tensor](), 0

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.classifier(**batch)["loss"]
            if keep:
                self.losses.append(loss)
            self.calls += 1
            if self.calls == fail_at:
                torch.empty(PETABYTE, dtype=torch.uint8)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    made = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(Module(), torch.utils.data.DataLoader(Samples(), batch_size=8))


def test_a_callback_of_lightning_names_a_leak() -> None:
    pytest.importorskip("lightning")
    callback = for_lightning(quiet=True)
    lightning_run(True, None, callback)
    (leak,) = callback.seen.leaks
    assert leak.held_by == "the attribute `losses` of layer Module"
    assert (leak.bytes, leak.noticed) == (4, 4)
    assert len(callback.seen.rows) == STEPS


def test_a_callback_of_lightning_writes_a_post_mortem(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    callback = for_lightning(quiet=True, post_mortem=tmp_path)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        lightning_run(False, 2, callback)
    assert json.loads(callback.seen.post_mortem.read_text())["step"] == 2
    with memplan.watch(nn.Linear(1, 1), quiet=True):
        pass
