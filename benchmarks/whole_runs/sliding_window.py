import numpy as np
import torch
from monai.data import DataLoader, Dataset, decollate_batch
from monai.inferers import SlidingWindowInferer
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose, EnsureTyped, NormalizeIntensityd, RandFlipd, RandSpatialCropd


def make(n):
    r = np.random.default_rng(n)
    return {
        "image": r.standard_normal((1, 40, 40, 40)).astype(np.float32),
        "label": r.integers(0, 2, (1, 40, 40, 40)).astype(np.float32),
    }


tr = Compose(
    [
        EnsureTyped(["image", "label"]),
        NormalizeIntensityd("image"),
        RandSpatialCropd(["image", "label"], (32, 32, 32), random_size=False),
        RandFlipd(["image", "label"], 0.5),
    ]
)
train = DataLoader(Dataset([make(i) for i in range(8)], tr), batch_size=2, shuffle=True, num_workers=2)
val = DataLoader(Dataset([make(i) for i in range(2)], EnsureTyped(["image", "label"])), batch_size=1)
dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1).to(dev)
loss_fn = DiceCELoss(to_onehot_y=True, softmax=True)
opt = torch.optim.Adam(net.parameters(), 1e-3)
metric = DiceMetric(include_background=False)
inf = SlidingWindowInferer((32, 32, 32), 2, 0.25)
post = AsDiscrete(argmax=True, to_onehot=2)
for _epoch in range(2):
    net.train()
    for b in train:
        x, y = b["image"].to(dev), b["label"].to(dev)
        opt.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        opt.step()
        print(loss.item())
    net.eval()
    with torch.no_grad():
        for b in val:
            out = inf(b["image"].to(dev), net)
            metric(y_pred=[post(o) for o in decollate_batch(out)], y=b["label"].to(dev))
    print("dice", metric.aggregate().item())
    metric.reset()
    torch.save(net.state_dict(), "net.pt")
