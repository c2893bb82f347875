"""What a script's loaders give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from integrations.scripts.script_runs import run

from memplan import spec
from memplan.integrations.scripts.loaders import Rules, batch_size, resized, text_of_shapes

TRAIN = """
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step(); opt.zero_grad()
"""
SMALL = """
loader = DataLoader(TensorDataset(torch.randn(60, 3, 12, 12), torch.randint(0, 5, (60,))), batch_size=20)
"""
NEEDS_VALUES = """
import numpy as np
class Crops(Dataset):
    def __init__(self): self.images = np.random.rand(60, 3, 20, 20).astype(np.float32)
    def __len__(self): return 60
    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index])
        corner = torch.nonzero(image.sum(0) > 0)[0]
        assert bool((image <= 1).all()), "values are needed"
        if image.mean() > 2:
            raise ValueError("too bright")
        rows = np.array([int(corner[0]), int(corner[1])])
        return image[:, rows[0]:rows[0] + 12, rows[1]:rows[1] + 12].clone(), index % 5
loader = DataLoader(Crops(), batch_size=20)
"""
ABSENT = """
class Images(Dataset):
    def __init__(self, folder): self.names = open(folder + "/names.txt").read().split()
    def __len__(self): return len(self.names)
    def __getitem__(self, index): raise NotImplementedError
loader = DataLoader(Images("/nowhere"), batch_size=4, shuffle=True)
"""


def _sizes(trace: object) -> set[tuple[int, ...]]:
    return {storage.shape for storage in trace.storages if storage.shape is not None}  # pyright: ignore[reportAttributeAccessIssue]


def test_the_first_batch_is_told(tmp_path: Path) -> None:
    _, facts = run(tmp_path, SMALL + TRAIN)
    (batch,) = facts.batches
    assert (batch.text, batch.size, batch.length, facts.batch_size) == ("20x3x12x12, 20 (int64)", 20, 3, 20)
    assert str(batch.where).endswith("script.py:10")


def test_another_batch_than_the_loader_gives(tmp_path: Path) -> None:
    trace, _ = run(tmp_path, SMALL + TRAIN, rules=Rules(batch=500))
    assert (500, 8, 10, 10) in _sizes(trace), "more samples than the data set has"
    assert (20, 8, 10, 10) not in _sizes(trace)


@pytest.mark.parametrize("way", ["in a tuple", "in a dict"])
def test_a_described_batch_stands_for_data_that_are_not_here(tmp_path: Path, way: str) -> None:
    specs = (spec("7x3x16x16"), spec("7:int64<5"))
    text = ABSENT + TRAIN
    rules = Rules(specs)
    if way == "in a dict":
        text = text.replace("for x, y in loader:", "for b in loader:\n    x, y = b['x'], b['y']")
        rules = Rules(kwargs=dict(zip("xy", specs, strict=True)))
    trace, facts = run(tmp_path, text, rules=rules)
    assert facts.absent == ("Images",)
    assert (7, 8, 14, 14) in _sizes(trace)
    assert facts.batches[0].given


def test_data_that_need_values_are_loaded_for_real(tmp_path: Path) -> None:
    trace, facts = run(tmp_path, NEEDS_VALUES + TRAIN)
    assert facts.batches[0].text == "20x3x12x12, 20 (int64)"
    assert (20, 8, 10, 10) in _sizes(trace)


def test_a_data_set_that_fails_in_both_ways_raises_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="raised KeyError: 'missing'"):
        run(tmp_path, NEEDS_VALUES.replace("return image", "{}['missing']\n        return image") + TRAIN)


def test_leading_dimension_and_words() -> None:
    batch = {"image": torch.zeros(4, 3, 8, 8), "label": torch.zeros(4, dtype=torch.int64), "scale": torch.tensor(2.0)}
    assert batch_size(batch) == 4
    assert text_of_shapes(batch) == "4x3x8x8, 4 (int64), a number"
    assert batch_size(["text"]) is None


def test_resizing_keeps_what_has_another_leading_dimension() -> None:
    batch = [torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(()), "text", 4]
    shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in resized(batch, 4, 9)]
    assert shapes == [(9, 3), (5, 3), (), "text", 4]
