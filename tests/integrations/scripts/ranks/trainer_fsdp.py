import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def config():
    return GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=300, n_positions=64)


class Tokens(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = torch.randint(0, 300, (64,))
        return {"input_ids": tokens, "labels": tokens}


def main():
    model = GPT2LMHeadModel(config())
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=8, num_train_epochs=1, logging_steps=1, report_to=[], bf16=True,
        save_strategy="no", fsdp="full_shard auto_wrap",
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
