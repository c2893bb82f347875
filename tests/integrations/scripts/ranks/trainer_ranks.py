import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = torch.randint(0, 300, (64,))
        return {"input_ids": tokens, "labels": tokens}


def main():
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=300, n_positions=64))
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=1, logging_steps=1,
        report_to=[], use_cpu=not torch.cuda.is_available(), ddp_find_unused_parameters=False, save_strategy="epoch",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens())
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
