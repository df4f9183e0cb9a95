"""`electra demo`: from raw text to a trained, tried and compared ELECTRA in a few minutes.

Every step is the one a user takes (tokenizer, prepare, pretrain, export, detect, finetune), on real
text that is on the machine already. What the demo claims it has measured before: how often the
discriminator points at a word that was exchanged in sentences it never saw, and whether the
pre-trained encoder learns a labelled task better than the same encoder without pre-training, over
three seeds. The task is whether two neighbouring words of a sentence changed places: it cannot be
solved by which words occur, and its labels are free. The model of the checkout, where there is one,
then finds the same words and learns the same task, to show what more text and a GPU are worth.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config import FinetuneConfig
from ..data.corpus import Corpus, prepare
from ..data.tokenizer import train_tokenizer
from ..encoder import Embeddings, Encoder, initialise
from ..errors import ElectraError
from ..files import json_bytes, shipped_model, write_atomic
from ..finetuning.finetune import finetune, resolve
from ..finetuning.step import TextData
from ..finetuning.tasks import Examples, Loaded, Task
from ..formats.hf import LoadedEncoder, Pretrained, encoder_of, load_encoder, load_pretrained
from ..formats.hf_export import export_run
from ..pretrain import pretrain
from ..recipes import tiny
from ..runlog import read_metrics
from ..studies.ablate import change
from .demo_text import DemoText, Prose, find_text
from .detect import detect, render

MINUTES = 2.5  # of pre-training at most: the whole demo has to end within five
VOCABULARY = 8192
SEEDS = 3
SENTENCES = 200
TRAIN_SENTENCES, TEST_SENTENCES = 2000, 1000
console = Console(highlight=False)


def demo(out: Path, *, inputs: Sequence[str] = (), minutes: float | None = None) -> dict[str, Any]:
    """Run everything into `out`, talk about it, and return (and store) what was measured."""
    begin = time.perf_counter()
    if (out / "demo.json").exists():
        what = "This directory already holds a finished demo."
        fix = "look at its demo.json and curves.png, or choose another --out"
        raise ElectraError(what, where=str(out), fix=fix)
    text = find_text(inputs)
    # In the same minutes the demo's text teaches more with Muon than with Adam (docs/log.md).
    muon = {"kind": "muon", "muon_rate": 3e-3}
    config = change(tiny(), run={"minutes": MINUTES if minutes is None else minutes}, optim=muon)

    console.rule("1  text, tokenizer, corpus")
    console.print(text.source)
    train, test = _split(text)
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
    exchanged = _show_exchanged_words(model, test)

    console.rule("4  does pre-training help?")
    console.print("have two neighbouring words of this sentence changed places?")
    splits = {
        "train": _swapped_or_not(train, TRAIN_SENTENCES, seed=1),
        "dev": _swapped_or_not(test, TEST_SENTENCES, seed=2),
    }
    task = _compare(load_encoder(out / "export"), splits, out / "tuned")

    console.rule("5  the same with the model that comes with electra")
    shipped = _shipped(splits, test, out / "tuned", exchanged, task)

    result = {
        "text": text.source,
        "documents": len(text.documents),
        "kept_aside": len(test),
        "held_out": measured,
        "exchanged_words": exchanged,
        "labelled_task": task,
        "shipped_model": shipped,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    write_atomic(out / "demo.json", json_bytes(result, indent=1))
    _show_places(out, report.directories)
    console.print(f"all of it took {result['seconds']:.0f} s")
    return result


def _split(text: DemoText) -> tuple[list[Prose], list[Prose]]:
    """Every sixth document or so is kept from pre-training and from the classifier's training."""
    train: list[Prose] = []
    test: list[Prose] = []
    for document in text.documents:
        digest = int(hashlib.sha256(document.name.encode()).hexdigest(), 16)
        (train if digest % 6 else test).append(document)
    if not train or len(_sentences(test, random.Random(0))) < 20:
        what = "The text has too few documents to keep some of them aside."
        fix = "give some dozens of documents, with a blank line between them"
        raise ElectraError(what, where="--input", fix=fix)
    return train, test


def _write_text(documents: Sequence[Prose], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = "\n\n".join("\n".join(d.paragraphs) for d in documents).encode()
    if not path.is_file() or path.read_bytes() != whole:  # touched, it would be another corpus
        write_atomic(path, whole)
    return path


def _show_places(out: Path, models: Sequence[Path]) -> None:
    console.rule("where everything lies")
    for name, place in {
        "curves": out / "run" / "curves.png",
        "numbers": f"{out / 'demo.json'}, {out / 'run' / 'metrics.jsonl'}",
        "model": ", ".join(map(str, models)),
        "try it": f'electra detect --model {out / "export"} "a sentence of yours"',
        "fine-tuned": out / "tuned" / "pretrained" / "model",
        "load it": f"AutoModel.from_pretrained('{out / 'export' / 'discriminator'}')",
    }.items():
        console.print(f"{name:12} {place}")


# ---------------------------------------------------------------------- the exchanged word


def _show_exchanged_words(model: Pretrained, test: Sequence[Prose]) -> dict[str, Any]:
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


def _compare(trained: LoadedEncoder, splits: dict[str, Examples], out: Path) -> dict[str, Any]:
    """Test accuracy after fine-tuning the pre-trained and a random encoder, three seeds each."""
    encoder = Encoder(trained.config, Embeddings(trained.config, trained.vocab_size))
    initialise(encoder, tiny().encoder.init, 0)  # as the pre-trained one was before
    start = dict(encoder.state_dict())
    untrained = dataclasses.replace(trained, tensors=start, description="the same without training")
    settings = {"learning_rate": 5e-4, "layer_decay": 1.0, "epochs": 2}
    scores = {
        kind: _tune(kind, model, splits, out, **settings)
        for kind, model in (("pretrained", trained), ("random", untrained))
    }
    labels = splits["dev"].labels
    majority = max(statistics.mean(labels), 1 - statistics.mean(labels))
    console.print(f"{'majority':11} {100 * majority:5.1f} %")
    separated = min(scores["pretrained"]) > max(scores["random"])
    told = "the seeds overlap: no difference beyond their spread was seen"
    console.print("every pre-trained seed beats every random one" if separated else told)
    return {**scores, "majority": majority, "separated": separated, "sentences": len(labels)}


def _tune(
    kind: str, model: LoadedEncoder, splits: dict[str, Examples], out: Path, **settings: Any
) -> list[float]:
    """The accuracy of every seed."""
    labels = ("as it was", "changed")
    task = Task(name="word order", kind="classification", metric="accuracy", labels=labels)
    settings |= {"batch_size": 16, "dropout": 0.0, "attention_dropout": 0.0, "eval_every": "end"}
    settings["length"] = min(32, model.config.max_positions)
    config = resolve(FinetuneConfig(seeds=SEEDS, **settings), model.config, task)
    data = TextData(Loaded(task, splits), model.tokenizer, config)
    results = finetune(config, model, data, out / kind, quiet=True)
    values = [seed["score"] for seed in results["seeds"]]
    console.print(
        f"{kind:11} {100 * statistics.mean(values):5.1f} % right, mean of {len(values)} seeds "
        f"({', '.join(f'{100 * v:.1f}' for v in values)})"
    )
    return values


def _shipped(
    splits: dict[str, Examples],
    test: Sequence[Prose],
    out: Path,
    exchanged: dict[str, Any],
    task: dict[str, Any],
) -> dict[str, Any] | None:
    """What the model of the checkout makes of the same sentences, beside the tiny one's numbers."""
    try:
        path = shipped_model()
    except ElectraError as error:
        console.print(f"left out: {error.where} is not here; a checkout of electra has it")
        return None
    model, begin = load_pretrained(path), time.perf_counter()
    found = _show_exchanged_words(model, test)
    # One pass, with the paper's rates: a step takes it many times as long as the tiny one.
    scores = _tune("small-en", encoder_of(model), splits, out, epochs=1)
    rows = {"tiny": (exchanged, task["pretrained"]), "small-en": (found, scores)}
    for name, (words, values) in rows.items():
        console.print(
            f"{name:11} {words['found']} of {words['sentences']} exchanged words found first, "
            f"{100 * statistics.mean(values):.1f} % right in the task"
        )
    seconds = round(time.perf_counter() - begin, 1)
    return {"exchanged_words": found, "labelled_task": scores, "seconds": seconds}


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


def _swapped_or_not(documents: Sequence[Prose], count: int, *, seed: int) -> Examples:
    """Sentences with label 1 where two neighbouring words changed places."""
    draw = random.Random(seed)
    texts, labels = list[tuple[str, ...]](), list[int]()
    for sentence in _sentences(documents, draw)[:count]:
        words = sentence.split()
        labels.append(int(draw.random() < 0.5))
        if labels[-1]:
            k = draw.randrange(1, len(words) - 2)  # neither the first word nor the last
            words[k], words[k + 1] = words[k + 1], words[k]
        texts.append((" ".join(words),))
    return Examples(texts, labels, list(map(str, range(len(texts)))))
