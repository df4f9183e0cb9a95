# What a user of transformers writes to fine-tune on reviews.csv with its columns text and stars.
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("model/discriminator")
data = load_dataset("csv", data_files="reviews.csv", split="train")
data = data.class_encode_column("stars").rename_column("stars", "labels")
model = AutoModelForSequenceClassification.from_pretrained(
    "model/discriminator", num_labels=data.features["labels"].num_classes
)
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=128), batched=True)
data = data.train_test_split(0.1, seed=0)
trainer = Trainer(
    model,
    TrainingArguments("out", learning_rate=3e-4, num_train_epochs=3, report_to="none"),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
)
trainer.train()
print(trainer.evaluate())
trainer.save_model("tuned")
