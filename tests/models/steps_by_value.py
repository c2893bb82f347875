"""Training steps whose sizes are values: of each, a build that draws them anew whenever it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Build = Callable[[], Callable[[], None]]


def _trained(net: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return step


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    """Overlap of each box with each other: [n, 4], [m, 4] -> [n, m]."""
    low = torch.maximum(left[:, None, :2], right[None, :, :2])
    high = torch.minimum(left[:, None, 2:], right[None, :, 2:])
    inter = (high - low).clamp(min=0).prod(-1)
    area = [(one[:, 2:] - one[:, :2]).prod(-1) for one in (left, right)]
    return inter / (area[0][:, None] + area[1][None] - inter + 1e-6)


def _boxes(count: int) -> Tensor:
    corner = torch.rand(count, 2)
    return torch.cat([corner, corner + 0.05 + 0.4 * torch.rand(count, 2)], 1)


def detr(*, by_lists: bool = False) -> Build:
    """Queries matched to boxes, by scipy or by numbers of one's own, then the losses of those that are matched."""

    def matched(cost: Tensor) -> tuple[Tensor, Tensor]:
        if not by_lists:
            from scipy.optimize import linear_sum_assignment

            rows, columns = linear_sum_assignment(cost.detach().cpu().numpy())
            return torch.as_tensor(rows), torch.as_tensor(columns)
        costs, free = cost.detach().tolist(), set(range(cost.shape[0]))
        rows = list[int]()
        for column in range(cost.shape[1]):
            best = min(free, key=lambda row: costs[row][column])
            free.remove(best)
            rows.append(best)
        return torch.tensor(rows), torch.arange(cost.shape[1])

    def build() -> Callable[[], None]:
        net, queries = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 9)), torch.randn(2, 60, 32)
        targets = [(_boxes(7), torch.randint(0, 4, (7,))), (_boxes(12), torch.randint(0, 4, (12,)))]
        present = torch.rand(2, 12) < 0.6

        def loss_of() -> Tensor:
            total = torch.zeros(())
            for picture, (boxes, labels) in enumerate(targets):
                out = net(queries[picture])
                keep = present[picture, : len(boxes)]
                chosen, kinds = boxes[keep], labels[keep]
                cost = torch.cdist(out[:, :4], chosen, p=1) - out[:, 4:].softmax(-1)[:, kinds]
                rows, columns = matched(cost)
                wanted = torch.full((60,), 4)
                wanted[rows] = kinds[columns]
                total = total + F.cross_entropy(out[:, 4:], wanted)
                total = total + F.l1_loss(out[rows, :4], chosen[columns])
                total = total + (1 - _pairs(out[rows, :4], chosen[columns]).diag()).sum()
            return total

        return _trained(net, loss_of)

    return build


def faster_rcnn() -> Callable[[], None]:
    """Anchors that are positive, negative or neither, a sample of them; the best proposals, those that overlap left
    out in a loop."""
    head, roi = nn.Linear(32, 5), nn.Linear(32, 9)
    net = nn.ModuleList([head, roi])
    features, anchors, truth = torch.randn(300, 32), _boxes(300), _boxes(5)

    def kept(boxes: Tensor, scores: Tensor) -> Tensor:
        order, found = scores.argsort(descending=True), list[Tensor]()
        while order.numel() > 0 and len(found) < 20:
            found.append(order[0])
            overlaps = _pairs(boxes[order[0]][None], boxes[order[1:]])[0]
            order = order[1:][overlaps <= 0.5]
        return torch.stack(found)

    def loss_of() -> Tensor:
        out = head(features)
        best, which = _pairs(anchors, truth).max(1)
        positive, negative = torch.where(best > 0.3)[0], torch.where(best < 0.1)[0]
        drawn = positive[torch.randperm(positive.numel())[:64]]
        others = negative[torch.randperm(negative.numel())[: 128 - drawn.numel()]]
        sampled = torch.cat([drawn, others])
        labels = torch.zeros(300)
        labels[drawn] = 1.0
        loss = F.binary_cross_entropy_with_logits(out[sampled, 4], labels[sampled])
        loss = loss + F.smooth_l1_loss(out[drawn, :4], truth[which[drawn]] - anchors[drawn], reduction="sum")
        scores, top = out[:, 4].detach().topk(100)
        chosen = top[kept(anchors[top], scores)]
        second = roi(features[chosen])
        foreground = _pairs(anchors[chosen], truth).amax(1) > 0.3
        loss = loss + F.cross_entropy(second[:, :5], foreground.long())
        return loss + second[foreground][:, 5:].abs().sum()

    return _trained(net, loss_of)


def graph() -> Callable[[], None]:
    """Messages along edges, without self-loops, to nodes of which a mask trains."""
    first, second = nn.Linear(16, 32), nn.Linear(32, 4)
    x, edges, labels = torch.randn(200, 16), torch.randint(0, 200, (2, 900)), torch.randint(0, 4, (200,))
    training = torch.rand(200) < 0.5

    def spread(h: Tensor, edges: Tensor) -> Tensor:
        count = torch.zeros(200).index_add(0, edges[1], torch.ones(edges.shape[1]))
        summed = torch.zeros_like(h).scatter_add(0, edges[1][:, None].expand(-1, h.shape[1]), h[edges[0]])
        return summed / count.clamp(min=1)[:, None]

    def loss_of() -> Tensor:
        kept = edges[:, edges[0] != edges[1]]
        out = second(spread(first(x).relu(), kept))
        degree = torch.bincount(kept[1], minlength=200)
        busy = out[training & (degree > 3)]
        return F.cross_entropy(out[training], labels[training]) + busy.square().sum()

    return _trained(nn.ModuleList([first, second]), loss_of)


def ctc() -> Callable[[], None]:
    """Sequences and transcripts of random lengths."""
    net, x = nn.Linear(20, 12), torch.randn(60, 6, 20)
    lengths, wanted = torch.randint(30, 61, (6,)), torch.randint(1, 15, (6,))
    texts = torch.randint(1, 12, (6, int(wanted.max())))

    def loss_of() -> Tensor:
        return F.ctc_loss(net(x).log_softmax(-1), texts, lengths, wanted)

    return _trained(net, loss_of)


def ppo() -> Callable[[], None]:
    """Minibatches in random order, losses of what is valid, until the policy has moved too far."""
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 5))
    states, actions, returns = torch.randn(512, 8), torch.randint(0, 4, (512,)), torch.randn(512)
    before, valid = torch.randn(512) * 0.1 - 1.4, torch.rand(512) < 0.8
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def step() -> None:
        for _ in range(3):
            far = torch.zeros(())
            for part in torch.randperm(512).split(128):
                chosen = part[valid[part]]
                out = net(states[chosen])
                advantage = returns[chosen] - out[:, 4].detach()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                new = out[:, :4].log_softmax(-1).gather(1, actions[chosen, None])[:, 0]
                ratio = (new - before[chosen]).exp()
                loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                loss = loss + F.mse_loss(out[:, 4], returns[chosen])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                far = (before[chosen] - new.detach()).mean()
            if far.item() > 0.3:
                break

    return step


def packed() -> Callable[[], None]:
    """Sequences of random lengths, cut to the longest, packed, and a loss of the steps that are there."""
    net, head, x = nn.GRU(16, 24, batch_first=True), nn.Linear(24, 3), torch.randn(10, 50, 16)
    lengths = torch.randint(1, 51, (10,))

    def loss_of() -> Tensor:
        longest = int(lengths.max())
        given = pack_padded_sequence(x[:, :longest], lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(net(given)[0], batch_first=True)
        there = torch.arange(longest)[None] < lengths[:, None]
        return head(out)[there].square().mean()

    return _trained(nn.ModuleList([net, head]), loss_of)


def ragged() -> Callable[[], None]:
    """Tokens of documents of random lengths one behind the other, attention within each."""
    net, lengths = nn.Linear(16, 48), torch.randint(5, 40, (8,))
    tokens = torch.randn(int(lengths.sum()), 16)

    def loss_of() -> Tensor:
        q, k, v = net(tokens).chunk(3, 1)
        parts = zip(*(one.split(lengths.tolist()) for one in (q, k, v)), strict=True)
        out = torch.cat([(a @ b.t() / 4).softmax(-1) @ c for a, b, c in parts])
        of = torch.repeat_interleave(torch.arange(8), lengths)
        return torch.zeros(8, 16).index_add(0, of, out).square().sum()

    return _trained(net, loss_of)


def experts(*, sort: bool = False) -> Build:
    """A router sends each token to two of four experts: by masks, or sorted and split by how many each gets."""

    def build() -> Callable[[], None]:
        router, x = nn.Linear(16, 4), torch.randn(256, 16)
        parts: Any = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))

        def loss_of() -> Tensor:
            weights, chosen = router(x).softmax(-1).topk(2, -1)
            out = torch.zeros_like(x)
            if not sort:
                for number, expert in enumerate(parts):
                    token, slot = torch.where(chosen == number)
                    if token.numel() == 0:
                        continue
                    out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
                return out.square().sum() + F.one_hot(chosen).float().mean((0, 1)).sum()
            order = chosen.flatten().argsort()
            counts = torch.bincount(chosen.flatten(), minlength=4).tolist()
            given = x[order // 2].split(counts)
            done = torch.cat([expert(one) for expert, one in zip(parts, given, strict=True)])
            return out.index_add(0, order // 2, done * weights.flatten()[order, None]).square().sum()

        return _trained(nn.ModuleList([router, parts]), loss_of)

    return build


def experts_of_one_weight() -> Callable[[], None]:
    """The same with all experts' weights in one, whose gradient the backward pass adds up from the last part on."""
    router, first, x = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 64, 32) * 0.1), torch.randn(96, 32)
    second = nn.Parameter(torch.randn(4, 32, 64) * 0.1)
    skew = torch.randn(4) * 3

    def loss_of() -> Tensor:
        chosen = (router(x) + skew).argmax(-1)
        order, counts = chosen.argsort(), torch.bincount(chosen, minlength=4).tolist()
        given, done = x[order].split(counts), list[Tensor]()
        hidden = torch.cat([F.linear(one, first[at]) for at, one in enumerate(given)]).relu()
        for at, one in enumerate(hidden.split(counts)):
            done.append(F.linear(one, second[at]))
        return torch.cat(done).square().sum()

    net = nn.ModuleList([router])
    net.register_parameter("first", first)
    net.register_parameter("second", second)
    return _trained(net, loss_of)


STEPS: dict[str, Build] = {
    "detr": detr(),
    "detr, matched by lists": detr(by_lists=True),
    "faster rcnn": faster_rcnn,
    "graph with masks": graph,
    "ctc": ctc,
    "ppo": ppo,
    "packed sequences": packed,
    "ragged attention": ragged,
    "experts by masks": experts(),
    "experts in order": experts(sort=True),
    "experts of one weight": experts_of_one_weight,
}
