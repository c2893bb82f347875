import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    set_seed(42)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(2048, 1, 28, 28), torch.randint(0, 10, (2048,)))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    names = broadcast_object_list(["run-1"])
    hosts = gather_object([f"{names[0]}-{accelerator.process_index}"])
    accelerator.print(len(loader), hosts)
    for epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(epoch, accelerator.gather(loss.detach()).mean().item())
        accelerator.wait_for_everyone()
        accelerator.save_state("states")
    accelerator.end_training()


if __name__ == "__main__":
    main()
