import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(s, n):
        s.n = n

    def __len__(s):
        return s.n

    def __getitem__(s, i):
        g = torch.Generator().manual_seed(i)
        corners = torch.rand(1 + i * 7 % 12, 2, generator=g) * 0.7
        boxes = torch.cat([corners, corners + 0.05 + torch.rand(len(corners), 2, generator=g) * 0.2], 1)
        return torch.randn(3, 64, 64, generator=g), boxes, torch.arange(len(boxes)) % 5


def collate(rows):
    images, boxes, labels = zip(*rows, strict=True)
    return torch.stack(images), list(boxes), list(labels)


class Detector(nn.Module):
    def __init__(s):
        super().__init__()
        layers = []
        for a, b in ((3, 32), (32, 64), (64, 96)):
            layers += [nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()]
        s.body, s.boxes, s.classes = nn.Sequential(*layers), nn.Conv2d(96, 4, 1), nn.Conv2d(96, 6, 1)

    def forward(s, x):
        x = s.body(x)
        return s.boxes(x).flatten(2).mT.sigmoid(), s.classes(x).flatten(2).mT


def overlaps(a, b):
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    area = lambda x: (x[:, 2:] - x[:, :2]).clamp(min=0).prod(-1)  # noqa: E731
    return both / (area(a)[:, None] + area(b)[None] - both + 1e-6)


def loss_of(boxes, classes, targets, labels):
    total = 0
    for box, logits, target, label in zip(boxes, classes, targets, labels, strict=True):
        with torch.no_grad():
            best = overlaps(box, target).argmax(0)
        wanted = torch.full((len(box),), 5, device=box.device).scatter(0, best, label)
        total = total + nn.functional.cross_entropy(logits, wanted)
        total = total + nn.functional.smooth_l1_loss(box[best], target)
    return total / len(targets)


dev = "cuda" if torch.cuda.is_available() else "cpu"
net = Detector().to(dev)
opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
data = DataLoader(Images(84), 8, collate_fn=collate)
val = DataLoader(Images(60), 8, collate_fn=collate)
for epoch in range(2):
    net.train()
    for x, boxes, labels in data:
        loss = loss_of(*net(x.to(dev)), [b.to(dev) for b in boxes], [n.to(dev) for n in labels])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    found = []
    with torch.no_grad():
        for x, boxes, labels in val:
            for box, logits in zip(*net(x.to(dev)), strict=True):
                scores, kinds = logits.softmax(-1)[:, :5].max(-1)
                best = scores.topk(20).indices
                found.append((box[best], scores[best], kinds[best]))
    torch.save(net.state_dict(), "net.pt")
