"""One small specimen of everything the program writes and reads again, for tests that damage it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from electra import cli
from electra.config import DataConfig, EncoderConfig, GeneratorConfig, PretrainConfig, RunConfig
from electra.data.corpus import Corpus
from electra.formats import hf_export
from electra.pretrain import pretrain

SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "t",
            "paragraphs": [
                {
                    "context": "all old rivers hear all green stones .",
                    "qas": [
                        {
                            "id": str(n),
                            "question": "who hears ?",
                            "answers": [{"answer_start": 8, "text": "rivers"}],
                        }
                        for n in range(4)
                    ],
                }
            ],
        }
    ],
}


SMALLEST = PretrainConfig(
    name="small",
    encoder=EncoderConfig(
        layers=1,
        hidden_size=8,
        ffn_size=8,
        attention_heads=1,
        embedding_size=8,
        max_positions=24,
    ),
    generator=GeneratorConfig(width=1.0, depth=1.0),
    data=DataConfig(sequence_length=23, batch_size=2),
    run=RunConfig(train_steps=2, device="cpu", threads=1, log_every=1, eval_every=2),
)


class Artefacts(NamedTuple):
    """Directories and files; a test works on copies of them."""

    corpus: Path
    run: Path  # of pretrain
    export: Path
    tuned: Path  # of finetune
    table: Path  # a .csv with text and label
    squad: Path  # a folder


def make_artefacts(directory: Path, corpus: Corpus) -> Artefacts:
    made = Artefacts(
        corpus.path,
        *(directory / name for name in ("run", "export", "tuned", "table.csv", "squad")),
    )
    pretrain(SMALLEST, corpus, made.run, quiet=True)
    rows = [
        f"{'a river' if i % 2 else 'one stone'} {i},{'wet' if i % 2 else 'dry'}\n"
        for i in range(40)
    ]
    made.table.write_text("text,label\n" + "".join(rows))
    made.squad.mkdir()
    for split in ("train", "dev"):
        (made.squad / f"{split}-v1.1.json").write_text(json.dumps(SQUAD))
    with pytest.MonkeyPatch.context() as patch:
        # What transformers says of the models is tested elsewhere, and its import is slow.
        patch.setattr(hf_export, "_compare", lambda *_: [])
        hf_export.export_run(made.run, made.export)
        tune = ["finetune", "--model", made.export, "--data", made.table, "--out", made.tuned]
        tune += ["--quiet", "--epochs", "1", "--device", "cpu", "--threads", "1"]
        assert cli.run([str(arg) for arg in tune]) == 0
    return made
