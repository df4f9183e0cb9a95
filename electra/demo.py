"""`electra demo`: from raw text to a trained, tried and compared ELECTRA in a few minutes.

Every step is the one a user takes (tokenizer, prepare, pretrain, export, detect), on real text that
is on the machine already. What the demo claims it has measured before: how often the discriminator
points at a word that was exchanged in sentences it never saw, and whether the pre-trained encoder
learns a labelled task better than the same encoder without pre-training, over three seeds. The task
is whether two neighbouring words of a sentence changed places: it cannot be solved by which words
occur, and its labels are free.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from .corpus import Corpus, prepare
from .demo_text import DemoText, Prose, find_text
from .detect import detect, render
from .encoder import Embeddings, Encoder, initialise
from .errors import ElectraError
from .files import json_bytes, write_atomic
from .hf import Pretrained, build_discriminator, export_run, load_pretrained
from .pretrain import pretrain
from .recipes import tiny
from .runlog import read_metrics
from .tokenizer import Tokenizer, train_tokenizer

MINUTES = 2.5  # of pre-training at most: the whole demo has to end within five
VOCABULARY = 8192
SEEDS = (0, 1, 2)
SENTENCES = 200
TRAIN_SENTENCES, TEST_SENTENCES = 2000, 1000


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
    text = find_text(inputs)
    config = tiny()
    run = dataclasses.replace(config.run, minutes=minutes or MINUTES)
    config = dataclasses.replace(config, run=run)

    console.rule("1  text, tokenizer, corpus")
    console.print(text.source)
    train, test = _split(text)
    if not train or len(_sentences(test, random.Random(0))) < 20:
        raise ElectraError(
            "The text has too few documents to keep some of them aside.",
            where="--input",
            fix="give some dozens of documents, with a blank line between them",
        )
    console.print(f"{len(test)} of {len(text.documents)} documents are kept aside for steps 3, 4")
    file = _write_text(train, out / "text" / "train.txt")
    tokenizer = train_tokenizer([file], vocab_size=VOCABULARY)
    length = config.data.sequence_length
    manifest = prepare([file], tokenizer, out / "corpus", sequence_length=length)
    console.print(manifest.summary())

    console.rule("2  pre-training, generator and discriminator together")
    pretrain(config, Corpus.open(out / "corpus"), out / "run")
    measured = [m for m in read_metrics(out / "run") if m["kind"] == "eval"][-1]
    console.print(
        f"held-out text: the generator needs {measured['mlm_loss']:.2f} nats a masked token, token "
        f"frequencies alone {measured['unigram_entropy']:.2f}; the discriminator tells replaced "
        f"tokens from originals with AUC {measured['disc_auc']:.3f} (0.5 is chance)"
    )

    console.rule("3  export, and a look at a sentence")
    report = export_run(out / "run", out / "export")
    model = load_pretrained(out / "export")
    exchanged = _show_exchanged_words(model, test, console)

    console.rule("4  does pre-training help?")
    task = _compare(model, train, test, console)

    result = {
        "text": text.source,
        "documents": len(text.documents),
        "kept_aside": len(test),
        "held_out": measured,
        "exchanged_words": exchanged,
        "labelled_task": task,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    write_atomic(out / "demo.json", json_bytes(result, indent=1))
    console.rule("where everything lies")
    console.print(f"curves       {out / 'run' / 'curves.png'}")
    console.print(f"numbers      {out / 'demo.json'}, {out / 'run' / 'metrics.jsonl'}")
    console.print(f"model        {', '.join(map(str, report.directories))}")
    console.print(f'try it       electra detect --model {out / "export"} "a sentence of yours"')
    console.print(f"load it      AutoModel.from_pretrained('{out / 'export' / 'discriminator'}')")
    console.print(f"all of it took {result['seconds']:.0f} s")
    return result


def _split(text: DemoText) -> tuple[tuple[Prose, ...], tuple[Prose, ...]]:
    """Every sixth document or so is kept from pre-training and from the classifier's training."""
    kept = [int(hashlib.sha256(d.name.encode()).hexdigest(), 16) % 6 != 0 for d in text.documents]
    pairs = list(zip(text.documents, kept, strict=True))
    return tuple(d for d, k in pairs if k), tuple(d for d, k in pairs if not k)


def _write_text(documents: Sequence[Prose], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = "\n\n".join("\n".join(d.paragraphs) for d in documents).encode()
    if not path.is_file() or path.read_bytes() != whole:  # touched, it would be another corpus
        write_atomic(path, whole)
    return path


# ---------------------------------------------------------------------- the exchanged word


def _show_exchanged_words(
    model: Pretrained, test: Sequence[Prose], console: Console
) -> dict[str, Any]:
    """Exchange one word in each of many unseen sentences; how often is it the most suspicious?"""
    draw = random.Random(0)
    sentences = _sentences(test, draw)
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
    model: Pretrained, train: Sequence[Prose], test: Sequence[Prose], console: Console
) -> dict[str, Any]:
    """Test accuracy of a classifier on the pre-trained and on random encoders, three seeds each."""
    console.print("have two neighbouring words of this sentence changed places?")
    tokenizer = model.needed_tokenizer()
    given = _swapped_or_not(train, TRAIN_SENTENCES, tokenizer, seed=1)
    unseen = _swapped_or_not(test, TEST_SENTENCES, tokenizer, seed=2)
    share = float(unseen[2].float().mean())
    scores: dict[str, list[float]] = {"pretrained": [], "random": []}
    for seed in SEEDS:
        for kind in scores:
            encoder = _encoder(model, random_seed=seed if kind == "random" else None)
            scores[kind].append(_fine_tune(encoder, given, unseen, seed))
    for kind, values in scores.items():
        console.print(
            f"{kind:11} {100 * statistics.mean(values):5.1f} % right, mean of {len(values)} seeds "
            f"({', '.join(f'{100 * v:.1f}' for v in values)})"
        )
    majority = max(share, 1 - share)
    console.print(f"{'majority':11} {100 * majority:5.1f} %")
    separated = min(scores["pretrained"]) > max(scores["random"])
    console.print(
        "every pre-trained seed beats every random one"
        if separated
        else "the seeds overlap: no difference beyond their spread was seen"
    )
    return {**scores, "majority": majority, "separated": separated, "sentences": len(unseen[2])}


def _sentences(documents: Sequence[Prose], draw: random.Random) -> list[str]:
    """Sentences of 8 to 20 words, in random order."""
    found = [
        sentence
        for document in documents
        for paragraph in document.paragraphs
        for sentence in re.split(r"(?<=[.?!]) ", paragraph)
        if 8 <= len(sentence.split()) <= 20
    ]
    draw.shuffle(found)
    return found


def _swapped_or_not(
    documents: Sequence[Prose], count: int, tokenizer: Tokenizer, *, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids (N, T), mask (N, T) and labels (N,): 1 where two neighbouring words are swapped."""
    draw = random.Random(seed)
    sentences = _sentences(documents, draw)[:count]
    x = torch.full((len(sentences), 32), tokenizer.pad_id)
    label = torch.zeros(len(sentences), dtype=torch.int64)
    for i, sentence in enumerate(sentences):
        words = sentence.split()
        if draw.random() < 0.5:
            k = draw.randrange(1, len(words) - 2)  # neither the first word nor the last
            words[k], words[k + 1] = words[k + 1], words[k]
            label[i] = 1
        ids = tokenizer.encode(" ".join(words))[: x.shape[1]]
        x[i, : len(ids)] = torch.tensor(ids)
    return x, x != tokenizer.pad_id, label


def _encoder(model: Pretrained, *, random_seed: int | None) -> Encoder:
    network = model.network("discriminator")
    if random_seed is None:
        encoder, _ = build_discriminator(network)
        return encoder.requires_grad_(True)
    encoder = Encoder(network.config, Embeddings(network.config, network.vocab_size))
    # The same start as the pre-trained one had; an export does not carry it.
    initialise(encoder, tiny().encoder.init, random_seed)
    return encoder


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
