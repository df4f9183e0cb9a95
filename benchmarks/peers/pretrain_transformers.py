# What a user of transformers writes to train an encoder on a folder of text. ELECTRA's objective
# has no trainer there, so this is the masked language modelling of its generator class.
from pathlib import Path

from datasets import load_dataset
from tokenizers import BertWordPieceTokenizer
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraTokenizerFast,
    Trainer,
    TrainingArguments,
)

files = sorted(str(path) for path in Path("texts").glob("*.txt"))
vocabulary = BertWordPieceTokenizer()
vocabulary.train(files, vocab_size=30522, show_progress=False)
Path("tokenizer").mkdir(exist_ok=True)
vocabulary.save_model("tokenizer")
ElectraTokenizerFast("tokenizer/vocab.txt").save_pretrained("tokenizer")
tokenizer = AutoTokenizer.from_pretrained("tokenizer")
lines = load_dataset("text", data_files=files, split="train").filter(
    lambda row: row["text"].strip()
)
rows = lines.map(
    lambda batch: tokenizer(batch["text"], truncation=True, max_length=64),
    batched=True,
    remove_columns="text",
)
config = ElectraConfig(
    vocab_size=len(tokenizer),
    num_hidden_layers=4,
    hidden_size=128,
    embedding_size=128,
    intermediate_size=512,
    num_attention_heads=4,
    max_position_embeddings=128,
)
trainer = Trainer(
    ElectraForMaskedLM(config),
    TrainingArguments(
        "out",
        max_steps=2000,
        per_device_train_batch_size=16,
        learning_rate=6e-4,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
)
trainer.train()
trainer.save_model("model")
tokenizer.save_pretrained("model")
