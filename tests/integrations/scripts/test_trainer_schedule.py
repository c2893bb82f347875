"""Evaluations and checkpoints of trainers after hundreds of updates are seen in a run of few."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import slow
from integrations.scripts.script_runs import run

from memplan.studies.runs.phases import phases_of

TEXT = """
from transformers import Trainer, TrainingArguments
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)
    def forward(self, x, labels):
        logits = self.layer(x)
        return {{"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}}
class Rows(Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, index):
        return {{"x": torch.ones(16), "labels": index % 4}}
arguments = TrainingArguments(
    "out", max_steps=100, eval_strategy="steps", eval_steps={every}, save_steps={every}, report_to=[], use_cpu=True,
    disable_tqdm=True,
)
Trainer(Model(), arguments, train_dataset=Rows(), eval_dataset=Rows()).train()
"""


@pytest.mark.parametrize("every", [50, *slow(0.5)])
def test_an_evaluation_after_fifty_updates_comes_after_two(tmp_path: Path, every: float) -> None:
    pytest.importorskip("transformers")
    _, facts = run(tmp_path, TEXT.format(every=every), phases=True, batches=4)
    first = phases_of(facts.parts)[:3]
    assert [span.kind for span in first] == ["train", "evaluate", "save"]
    assert sum(part.updates for part in facts.parts[: first[1].parts[0]]) == 2
    from transformers.trainer_callback import TrainerState

    assert TrainerState.compute_steps.__qualname__ == "TrainerState.compute_steps"  # as before


LIGHTNING = """
import lightning as L
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)
    def training_step(self, batch, index):
        return self.layer(batch[0]).sum()
    def validation_step(self, batch, index):
        self.layer(batch[0])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
data = DataLoader(TensorDataset(torch.zeros(200, 16)), 2)
trainer = L.Trainer(
    max_epochs=1, val_check_interval=50, logger=False, enable_progress_bar=False, accelerator="cpu",
    enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
)
trainer.fit(Module(), data, data)
"""


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_validation_after_fifty_batches_comes_after_two(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    _, facts = run(tmp_path, LIGHTNING, phases=True, batches=6)
    spans = phases_of(facts.parts)
    assert [span.kind for span in spans[:2]] == ["train", "evaluate"]
    assert sum(part.updates for part in facts.parts[: spans[1].parts[0]]) == 2
    from lightning.pytorch.trainer.trainer import Trainer

    assert not hasattr(Trainer, "val_check_interval")
