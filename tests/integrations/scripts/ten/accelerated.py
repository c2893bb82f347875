import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    set_seed(42)
    acc = Accelerator(gradient_accumulation_steps=2, project_dir="acc")
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    ds = TensorDataset(torch.randn(2048, 1, 28, 28), torch.randint(0, 10, (2048,)))
    dl = DataLoader(ds, batch_size=128, shuffle=True)
    sched = torch.optim.lr_scheduler.StepLR(opt, 100)
    model, opt, dl, sched = acc.prepare(model, opt, dl, sched)
    for epoch in range(3):
        for x, y in dl:
            with acc.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        acc.print("epoch", epoch, acc.gather(loss.detach()).mean().item())
        acc.save_state("acc/ck")
    acc.wait_for_everyone()


if __name__ == "__main__":
    main()
