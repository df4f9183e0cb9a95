# What a user of sentence-transformers writes to train on pairs of texts and to go on after a stop.
import sys
from pathlib import Path

import pandas
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers.trainer_utils import get_last_checkpoint

out, steps = Path(sys.argv[1]), int(sys.argv[2])
texts = pandas.read_csv("reviews.csv")["text"].tolist()
encoder = SentenceTransformer("model/discriminator", device="cpu")
trainer = SentenceTransformerTrainer(
    encoder,
    SentenceTransformerTrainingArguments(
        str(out),
        max_steps=steps,
        per_device_train_batch_size=4,
        save_steps=3,
        save_total_limit=2,
        logging_steps=1,
        full_determinism=True,
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"anchor": texts[:-1], "positive": texts[1:]}),
    loss=MultipleNegativesRankingLoss(encoder),
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)) if out.is_dir() else None)
encoder.save_pretrained(str(out / "final"))
