from trainer_fsdp import Tokens, config
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments


def main():
    model = GPT2LMHeadModel(config())
    Trainer(
        model,
        TrainingArguments(
            "out",
            per_device_train_batch_size=8,
            num_train_epochs=1,
            logging_steps=1,
            report_to=[],
            bf16=True,
            save_strategy="no",
        ),
        train_dataset=Tokens(),
    ).train()


if __name__ == "__main__":
    main()
