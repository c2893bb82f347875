"""Training a classifier with timm: its model, optimizer, schedule, mixup and moving average of the weights."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, accuracy

device = "cuda" if torch.cuda.is_available() else "cpu"
model = timm.create_model("resnet18", num_classes=20, drop_path_rate=0.05).to(device)
model = model.to(memory_format=torch.channels_last)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, filter_bias_and_bn=True)
schedule = CosineLRScheduler(optimizer, t_initial=2, warmup_t=1, warmup_lr_init=1e-5)
ema = ModelEmaV3(model, decay=0.999)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=20)
criterion = SoftTargetCrossEntropy()
images = torch.randn(48, 3, 96, 96)
labels = torch.randint(0, 20, (48,))
data = torch.utils.data.TensorDataset(images, labels)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, drop_last=True)

updates = 0
for epoch in range(2):
    model.train()
    losses = AverageMeter()
    for x, y in loader:
        x, y = x.to(device, memory_format=torch.channels_last), y.to(device)
        x, y = mixup(x, y)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        updates += 1
        ema.update(model, step=updates)
        losses.update(loss.item(), len(x))
    schedule.step(epoch + 1)
    model.eval()
    top = AverageMeter()
    with torch.inference_mode():
        for x, y in loader:
            (top1,) = accuracy(ema.module(x.to(device)), y.to(device), topk=(1,))
            top.update(top1.item(), len(x))
    print(f"{epoch}: loss {losses.avg:.3f} top1 {top.avg:.1f}")
