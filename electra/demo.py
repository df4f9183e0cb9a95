"""`electra demo`: from raw text to a trained, tried and compared ELECTRA in a few minutes.

Every step is the one a user takes (tokenizer, prepare, pretrain, export, detect), on real text that
is on the machine already. What the demo claims it has measured before: how often the discriminator
points at a word that was exchanged in sentences it never saw, and whether the pre-trained encoder
learns a labelled task better than the same encoder without pre-training, over three seeds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from .config import PretrainConfig
from .corpus import Corpus, prepare
from .demo_text import DemoText, LabelledDocument, find_text
from .detect import detect, render
from .encoder import Embeddings, Encoder, initialise
from .errors import ElectraError
from .files import json_bytes, write_atomic
from .hf import Pretrained, build_discriminator, export_run, load_pretrained
from .pretrain import pretrain
from .recipes import tiny
from .runlog import read_metrics
from .tokenizer import Tokenizer, train_tokenizer

MINUTES = 3.0  # of pre-training at most; the whole demo has to end within five
VOCABULARY = 8192
SEEDS = (0, 1, 2)
SENTENCES = 200
TRAIN_PARAGRAPHS, TEST_PARAGRAPHS = 1600, 800


def demo(out: Path, *, inputs: Sequence[str] = (), minutes: float | None = None) -> dict[str, Any]:
    """Run everything into `out`, talk about it, and return (and store) what was measured."""
    begin = time.perf_counter()
    console = Console(highlight=False)
    if (out / "demo.json").exists():
        raise ElectraError(
            "This directory already holds a finished demo.",
            where=str(out),
            fix="look at its demo.json and curves.png, or choose another --out",
        )
    text = None if inputs else find_text()
    config = tiny()
    run = dataclasses.replace(config.run, minutes=minutes or MINUTES)
    config = dataclasses.replace(config, run=run)
    result: dict[str, Any] = {"text": text.source if text else list(inputs)}

    console.rule("1  text, tokenizer, corpus")
    console.print(text.source if text else f"your text: {', '.join(inputs)}")
    train, test = _split(text) if text else ((), ())
    files = inputs or [str(_write_text(train, out / "text" / "train.txt"))]
    tokenizer = train_tokenizer(files, vocab_size=VOCABULARY)
    manifest = prepare(files, tokenizer, out / "corpus", sequence_length=_length(config))
    console.print(manifest.summary())

    console.rule("2  pre-training, generator and discriminator together")
    pretrain(config, Corpus.open(out / "corpus"), out / "run")
    measured = [m for m in read_metrics(out / "run") if m["kind"] == "eval"][-1]
    result["held_out"] = measured
    console.print(
        f"held-out text: the generator needs {measured['mlm_loss']:.2f} nats a masked token, token "
        f"frequencies alone {measured['unigram_entropy']:.2f}; the discriminator tells replaced "
        f"tokens from originals with AUC {measured['disc_auc']:.3f} (0.5 is chance)"
    )

    console.rule("3  export, and a look at a sentence")
    report = export_run(out / "run", out / "export")
    model = load_pretrained(out / "export")
    if test:
        result["exchanged_words"] = _show_exchanged_words(model, test, console)
        console.rule("4  does pre-training help?")
        result["labelled_task"] = _compare(model, text, train, test, console)
    else:
        console.print("your text has no labels: the comparison on a task is left out")

    result["seconds"] = round(time.perf_counter() - begin, 1)
    write_atomic(out / "demo.json", json_bytes(result, indent=1))
    console.rule("where everything lies")
    console.print(f"curves       {out / 'run' / 'curves.png'}")
    console.print(f"numbers      {out / 'demo.json'}, {out / 'run' / 'metrics.jsonl'}")
    console.print(f"model        {', '.join(map(str, report.directories))}")
    console.print(f'try it       electra detect --model {out / "export"} "a sentence of yours"')
    console.print(f"load it      AutoModel.from_pretrained('{out / 'export' / 'discriminator'}')")
    console.print(f"all of it took {result['seconds']:.0f} s")
    return result


def _length(config: PretrainConfig) -> int:
    return config.data.sequence_length


def _split(text: DemoText) -> tuple[tuple[LabelledDocument, ...], tuple[LabelledDocument, ...]]:
    """Every sixth document or so is kept from pre-training and from the classifier's training."""
    kept = [int(hashlib.sha256(d.name.encode()).hexdigest(), 16) % 6 != 0 for d in text.documents]
    pairs = list(zip(text.documents, kept, strict=True))
    return tuple(d for d, k in pairs if k), tuple(d for d, k in pairs if not k)


def _write_text(documents: Sequence[LabelledDocument], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = "\n\n".join("\n".join(d.paragraphs) for d in documents)
    write_atomic(path, whole.encode())
    return path


# ---------------------------------------------------------------------- the exchanged word


def _show_exchanged_words(
    model: Pretrained, test: Sequence[LabelledDocument], console: Console
) -> dict[str, Any]:
    """Exchange one word in each of many unseen sentences; how often is it the most suspicious?"""
    draw = random.Random(0)
    sentences = [
        s
        for document in test
        for paragraph in document.paragraphs
        for s in paragraph.replace("? ", ". ").split(". ")
        if 10 <= len(s.split()) <= 20 and s.isascii()
    ]
    draw.shuffle(sentences)
    words = [w for s in sentences[:2000] for w in s.split() if w.isalpha()]
    found, chance, shown = 0, 0.0, None
    tried = sentences[:SENTENCES]
    for sentence in tried:
        parts = sentence.split()
        places = [i for i, w in enumerate(parts) if w.isalpha() and i > 0]
        place = draw.choice(places) if places else 0
        other = draw.choice(words)
        while other.lower() == parts[place].lower():
            other = draw.choice(words)
        changed = " ".join([*parts[:place], other, *parts[place + 1 :]])
        start = len(" ".join(parts[:place])) + (place > 0)
        detection = detect(model, changed, alternatives=0)
        worst = max(detection.words, key=lambda w: w.replaced)
        chance += 1 / len(detection.words)
        if worst.start == start:
            found += 1
            if shown is None and worst.replaced > 0.5:
                shown = (sentence, changed)
    console.print(
        f"one word exchanged for another of the text in each of {len(tried)} unseen sentences: "
        f"the discriminator's first suspicion is right in {found} of them "
        f"({100 * found / len(tried):.0f} %; guessing: {100 * chance / len(tried):.0f} %)"
    )
    if shown is not None:
        console.print(f"written:  {shown[0]}", markup=False)
        console.print(render(detect(model, shown[1])))
    else:
        console.print("(none above P(replaced) = 0.5)")
    return {"sentences": len(tried), "found": found, "by_chance": round(chance, 2)}


# ---------------------------------------------------------------------- the labelled task


class Classifier(nn.Module):
    """The encoder and the paper's head: one linear layer on [CLS]."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(x, torch.zeros_like(x), mask, None)[:, 0])  # (B, 2)


def _compare(
    model: Pretrained,
    text: DemoText | None,
    train: Sequence[LabelledDocument],
    test: Sequence[LabelledDocument],
    console: Console,
) -> dict[str, Any]:
    """Test accuracy of a classifier on the pre-trained and on random encoders, three seeds each."""
    assert text is not None
    console.print(f"{text.question}  ({text.caveat})")
    tokenizer = model.needed_tokenizer()
    inputs = _examples(train, TRAIN_PARAGRAPHS, tokenizer, model)
    unseen = _examples(test, TEST_PARAGRAPHS, tokenizer, model)
    majority = float(unseen[2].float().mean())
    scores: dict[str, list[float]] = {"pretrained": [], "random": []}
    for seed in SEEDS:
        for kind in scores:
            encoder = _encoder(model, random_seed=seed if kind == "random" else None)
            scores[kind].append(_fine_tune(encoder, inputs, unseen, seed))
    table = {"majority": max(majority, 1 - majority), **scores}
    for kind, values in scores.items():
        console.print(
            f"{kind:11} {100 * statistics.mean(values):5.1f} % right, mean of {len(values)} seeds "
            f"({', '.join(f'{100 * v:.1f}' for v in values)})"
        )
    console.print(f"{'majority':11} {100 * table['majority']:5.1f} %")
    helps = min(scores["pretrained"]) > max(scores["random"])
    console.print(
        "every pre-trained seed beats every random one"
        if helps
        else "the seeds overlap: no difference beyond their spread was seen"
    )
    return {**table, "question": text.question, "separated": helps}


def _encoder(model: Pretrained, *, random_seed: int | None) -> Encoder:
    network = model.network("discriminator")
    if random_seed is None:
        encoder, _ = build_discriminator(network)
        return encoder.requires_grad_(True)
    encoder = Encoder(network.config, Embeddings(network.config, network.vocab_size))
    initialise(encoder, network.config.init, random_seed)
    return encoder


def _examples(
    documents: Sequence[LabelledDocument], count: int, tokenizer: Tokenizer, model: Pretrained
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids (N, T), mask (N, T) and labels (N,) of paragraphs of 15 to 120 words."""
    rows = [(p, d.label) for d in documents for p in d.paragraphs if 15 <= len(p.split()) <= 120]
    random.Random(1).shuffle(rows)
    longest = min(64, model.network("discriminator").config.max_positions)
    x = torch.full((min(count, len(rows)), longest), tokenizer.pad_id)
    for i, (paragraph, _) in enumerate(rows[:count]):
        ids = tokenizer.encode(paragraph)[:longest]
        x[i, : len(ids)] = torch.tensor(ids)
    return x, x != tokenizer.pad_id, torch.tensor([label for _, label in rows[:count]])


def _fine_tune(
    encoder: Encoder,
    train: tuple[Tensor, Tensor, Tensor],
    test: tuple[Tensor, Tensor, Tensor],
    seed: int,
    *,
    epochs: int = 2,
    batch: int = 16,
    learning_rate: float = 5e-4,
) -> float:
    """Accuracy on `test` after fine-tuning all weights on `train`."""
    classifier = Classifier(encoder)
    order = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        nn.init.xavier_uniform_(classifier.head.weight, generator=order)
        classifier.head.bias.zero_()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=learning_rate, weight_decay=0.0)
    x, mask, label = train
    steps = epochs * math.ceil(len(x) / batch)
    done = 0
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=order).split(batch):
            warm = min(1.0, (done + 1) / (0.1 * steps))
            optimizer.param_groups[0]["lr"] = learning_rate * min(warm, (1 - done / steps) / 0.9)
            loss = F.cross_entropy(classifier(x[rows], mask[rows]), label[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
            optimizer.step()
            done += 1
    with torch.no_grad():
        parts = zip(*(t.split(64) for t in test[:2]), strict=True)
        guess = torch.cat([classifier(x, m).argmax(-1) for x, m in parts])
    return float((guess == test[2]).float().mean())
