"""A one-stage detector with a trainer of its own, in the way of ultralytics: EMA, warm-up, mixed precision, validation."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def conv(a, b, k=3, s=1):
    return nn.Sequential(
        nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b, eps=1e-3, momentum=0.03), nn.SiLU(inplace=True)
    )


class C2f(nn.Module):
    def __init__(self, a, b, n=1):
        super().__init__()
        self.c = b // 2
        self.cv1, self.cv2 = conv(a, b, 1), conv((2 + n) * self.c, b, 1)
        self.m = nn.ModuleList(nn.Sequential(conv(self.c, self.c), conv(self.c, self.c)) for _ in range(n))

    def forward(self, x):
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(y[-1] + m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class Detector(nn.Module):
    def __init__(self, nc=4, w=16):
        super().__init__()
        self.nc = nc
        self.stem = nn.Sequential(conv(3, w, 3, 2), conv(w, 2 * w, 3, 2), C2f(2 * w, 2 * w))
        self.p3, self.p4 = (
            nn.Sequential(conv(2 * w, 4 * w, 3, 2), C2f(4 * w, 4 * w)),
            nn.Sequential(conv(4 * w, 8 * w, 3, 2), C2f(8 * w, 8 * w)),
        )
        self.up = nn.Upsample(scale_factor=2)
        self.neck = C2f(12 * w, 4 * w)
        self.heads = nn.ModuleList(nn.Sequential(conv(c, 32), nn.Conv2d(32, 4 + nc, 1)) for c in (4 * w, 8 * w))

    def forward(self, x):
        p3 = self.p3(self.stem(x))
        p4 = self.p4(p3)
        p3 = self.neck(torch.cat((self.up(p4), p3), 1))
        out = [head(p).flatten(2).transpose(1, 2) for head, p in zip(self.heads, (p3, p4))]
        return torch.cat(out, 1)


class Boxes(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        image = torch.randint(0, 256, (3, 128, 128), dtype=torch.uint8)
        return image, torch.tensor([[i % 4, 0.5, 0.5, 0.2, 0.3]] * (1 + i % 3))

    @staticmethod
    def collate(batch):
        images, boxes = zip(*batch)
        rows = [torch.cat((torch.full((len(b), 1), float(i)), b), 1) for i, b in enumerate(boxes)]
        return torch.stack(images), torch.cat(rows)


class EMA:
    def __init__(self, model, decay=0.9999, tau=2000):
        self.ema, self.updates = copy.deepcopy(model).eval(), 0
        self.decay = lambda n: decay * (1 - math.exp(-n / tau))
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        self.updates += 1
        d, state = self.decay(self.updates), model.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= d
                v += (1 - d) * state[k].detach()


def loss_of(pred, targets, nc):
    b, n, _ = pred.shape
    wanted = torch.zeros(b, n, nc, device=pred.device)
    index = targets[:, 0].long()
    wanted[index, (targets[:, 2] * (n - 1)).long(), targets[:, 1].long()] = 1
    boxes = pred[index, (targets[:, 2] * (n - 1)).long(), :4].sigmoid()
    return F.binary_cross_entropy_with_logits(pred[..., 4:], wanted, reduction="sum") / b + F.l1_loss(
        boxes, targets[:, 2:]
    )


model = Detector().to(device)
decayed = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim <= 1]
optimizer = torch.optim.SGD(rest, lr=0.01, momentum=0.937, nesterov=True)
optimizer.add_param_group({"params": decayed, "weight_decay": 5e-4})
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
ema = EMA(model)
train = DataLoader(Boxes(), batch_size=8, shuffle=True, collate_fn=Boxes.collate)
val = DataLoader(Boxes(), batch_size=12, collate_fn=Boxes.collate)

for epoch in range(2):
    model.train()
    optimizer.zero_grad()
    for i, (images, targets) in enumerate(train):
        images = images.to(device, non_blocking=True).float() / 255
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1, (epoch * len(train) + i + 1) / 4)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(model(images), targets.to(device), model.nc)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ema.update(model)
    with torch.no_grad():
        total = sum(loss_of(ema.ema(x.to(device).float() / 255), y.to(device), model.nc) for x, y in val)
    print(f"epoch {epoch}: val {float(total) / len(val):.3f}")
torch.save({"model": copy.deepcopy(ema.ema).half(), "optimizer": optimizer.state_dict()}, "last.pt")
