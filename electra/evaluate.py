"""What the two networks can do on held-out text, and whether a run looks dead.

`evaluate` looks at an objective in training, `evaluate_model` at a model on the disk.

The masks of an evaluation are those of step 0 under a fixed seed, so that different steps, and runs
with the same batch and masking settings, are compared on the same positions. So that they are
compared on samples of the same kind, a generator whose temperature falls samples at 1 here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from . import runtime as runtimes
from .batches import Block
from .config import GeneratorConfig, OptimConfig, PretrainConfig, RunConfig, from_dict, to_dict
from .data.corpus import Corpus, Examples
from .errors import ElectraError, Stopped
from .files import read_json, reading
from .formats.hf import Pretrained, config_of, load_pretrained, objective_of
from .objectives import Batch, Objective, Predictions, SpecialIds
from .randomness import StepRng
from .rundir import LoadedRun, load_run
from .use.detect import with_generator

EVAL_SEED = 20_200_323  # the day the paper came out


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out numbers of one moment; the disc_ fields are None without a discriminator."""

    mlm_loss: float
    """Mean negative log-likelihood of the masked tokens, in nats."""
    mlm_accuracy: float
    """Share of masked tokens the best guess gets right."""
    disc_loss: float | None = None
    """Mean binary cross-entropy over all tokens."""
    disc_auc: float | None = None
    """Area under the ROC curve of telling replaced tokens from originals, over all tokens."""
    disc_precision: float | None = None
    """Share of tokens called replaced that are."""
    disc_recall: float | None = None
    """Share of replaced tokens that are called so."""
    replaced_percent: float | None = None
    """Share of the tokens that differ from the original."""
    tokens: int
    """Tokens looked at."""


@torch.no_grad()
def evaluate(
    objective: Objective,
    examples: Examples,
    *,
    batches: int,
    at_once: int = 64,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Corrupt and judge up to `batches` batches of held-out examples, at most `at_once` together.

    Raises Stopped soon after `should_stop` says so.
    """
    config = objective.config
    count = min(len(examples), batches * config.data.batch_size)
    # Evenly spread, so that a small evaluation sees all of the held-out part.
    index = np.linspace(0, len(examples) - 1, count).astype(np.int64)
    nll, right, logits, labels = (list[np.ndarray]() for _ in range(4))
    size = min(config.data.batch_size, at_once)
    for begin in range(0, count, size):
        if should_stop():
            raise Stopped
        batch, p = _predict(objective, examples, index[begin : begin + size], begin)
        original = batch.x.gather(1, p.m.at)
        each = F.cross_entropy(
            p.mlm_logits.float().flatten(0, 1), original.flatten(), reduction="none"
        )
        valid = p.m.valid.flatten()
        nll.append(each[valid].cpu().numpy())
        right.append((p.mlm_logits.argmax(-1) == original).flatten()[valid].cpu().numpy())
        if p.d is not None and p.replaced is not None:
            token = objective.attention_mask(batch)
            logits.append(p.d[token].cpu().numpy())
            labels.append(p.replaced[token].cpu().numpy())
    found = Evaluation(
        mlm_loss=float(np.concatenate(nll).mean()),
        mlm_accuracy=float(np.concatenate(right).mean()),
        tokens=int(examples.lengths[index].sum()),
    )
    if not logits:
        return found
    d, replaced = np.concatenate(logits).astype(np.float64), np.concatenate(labels)
    called = d > 0
    return replace(
        found,
        disc_loss=float((np.logaddexp(0, d) - d * replaced).mean()),
        disc_auc=roc_auc(d, replaced),
        disc_precision=float(replaced[called].mean()) if called.any() else 0.0,
        disc_recall=float(called[replaced].mean()) if replaced.any() else 0.0,
        replaced_percent=100 * float(replaced.mean()),
    )


def evaluate_model(
    model: Path,
    corpus: Corpus,
    *,
    part: Literal["held-out", "all"] = "held-out",
    batches: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> dict[str, Any]:
    """What an `eval` line has, of any model that `load_pretrained` reads, and what it is of.

    A run and its export are looked at as the run did it: `batches` of that size, by default as
    many. Of other models nothing is known: theirs are the masks and batches of the recipe small.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        what, fix = "Several processes cannot share an evaluation.", "start it without torchrun"
        raise ElectraError(what, where=str(model), fix=fix)
    if batches is not None and batches < 1:
        raise ElectraError(f"There are {batches} batches.", "batches", "use 1 or more")
    examples = corpus.whole if part == "all" else corpus.held_out
    if not len(examples):
        fix = "add --part all, or prepare it with a higher --held-out-percent"
        raise ElectraError("The corpus holds out no document.", where=corpus.path, fix=fix)
    counts = token_counts(corpus.train, tuple(corpus.special_ids.values()), corpus.vocab_size)
    objective, told = _open(model, corpus, torch.from_numpy(counts))
    config = objective.config
    # A CPU has the same sums again with as many threads: those of the run, where it is one.
    threads = read_json(model / "run.json").get("threads", torch.get_num_threads())
    run = RunConfig(device=device, compile="no", cuda_graph="no", threads=config.run.threads)
    runtime = runtimes.start(run, threads=threads)
    batches, at_once = batches or config.run.eval_batches, config.data.at_once(64)
    try:
        for module in objective.to(runtime.device).modules():
            if isinstance(module, nn.Linear):  # what has working copies in training
                module.to(runtime.dtype)
        found = evaluate(objective, examples, batches=batches, at_once=at_once)
    except RuntimeError as error:
        if not runtimes.is_out_of_memory(error):
            raise
        what = f"The device has no memory for the model and {at_once} sequences at once."
        fix = "use --device cpu, or a device with more memory"
        raise ElectraError(what, where=str(runtime.device), fix=fix) from error
    finally:
        runtime.leave()
    return {
        **asdict(found),
        "unigram_entropy": unigram_entropy(counts),
        "model": str(model),
        **told,
        "corpus": str(corpus.path),
        "corpus_fingerprint": corpus.fingerprint,
        "tokenizer_hash": corpus.tokenizer_hash,
        "part": part,
        "batches": batches,
        "config": to_dict(config),
        "environment": runtime.describe(),
    }


def _open(model: Path, corpus: Corpus, frequencies: Tensor) -> tuple[Objective, dict[str, Any]]:
    """The networks of a model for the rows of the corpus; its step, and whose masks it gets."""
    if (model / "run.json").is_file():
        loaded = load_run(model, frequencies=frequencies)
        own = loaded.tokenizer_hash
    else:
        loaded = load_pretrained(with_generator(model))
        own = loaded.needed_tokenizer().hash
    if own != corpus.tokenizer_hash:
        what = "The corpus was made with another tokenizer than the model's: "
        what += f"{corpus.tokenizer_hash[:12]}…, not {own[:12]}…."
        fix = "prepare it with the tokenizer that lies with the model"
        raise ElectraError(what, where=corpus.path, fix=fix)
    if isinstance(loaded, LoadedRun):
        objective, told = loaded.objective, {"step": loaded.step, "masks_of": "the run"}
    else:
        objective, told = _rebuilt(loaded, corpus, frequencies)
    config, length = objective.config, corpus.sequence_length
    if length > (longest := config.encoder.max_positions):
        what = f"The corpus holds sequences of {length} tokens, the model reads at most {longest}."
        raise ElectraError(what, corpus.path, f"prepare it with --length {longest}")
    objective.config = replace(config, data=replace(config.data, sequence_length=length))
    return objective, told


def _rebuilt(
    model: Pretrained, corpus: Corpus, frequencies: Tensor
) -> tuple[Objective, dict[str, Any]]:
    """The objective of networks that were exported, with the settings of their run if they tell."""
    base, record = PretrainConfig(), read_json(place := model.path / "electra.json")
    if has_settings := "config" in record:
        with reading(place):
            base = from_dict(PretrainConfig, record["config"], where=f"{place}: config")
    d, g, o = model.discriminator, base.generator, base.objective
    is_alone = d is not None and model.generator is None and g.kind == "network"
    if is_alone or o.kind in ("electric", "replace_mlm"):  # whose generators stay in the run
        what = "There is no network here that corrupts text for the other one."
        fix = "give the run; or put a generator for the same vocabulary beside the discriminator, "
        fix += "as folders generator and discriminator"
        raise ElectraError(what, where=str(model.path), fix=fix)
    # Nothing learns: of the settings those remain that say what is masked, sampled and looked at.
    kind = "mlm" if d is None else "rtd"
    o = replace(o, kind=kind, algorithm="joint", disc_positions="all", disc_start_percent=0.0)
    g = GeneratorConfig() if d is None else replace(g, frozen=False)
    base = replace(base, generator=g, objective=o, optim=OptimConfig())
    config = config_of(model, base)
    size = (d or model.network("generator")).vocab_size  # which may have rows to spare
    frequencies = F.pad(frequencies, (0, size - len(frequencies)))
    special = SpecialIds(**corpus.special_ids)
    objective, _ = objective_of(model, config, size, special, frequencies)
    masks_of = "the run" if has_settings else "the recipe small"
    return objective, {"step": record.get("step"), "masks_of": masks_of}


def _predict(
    objective: Objective, examples: Examples, rows: NDArray[np.int64], begin: int
) -> tuple[Batch, Predictions]:
    """These examples, the first of which has the number `begin` in the evaluation."""
    device = next(objective.parameters()).device
    ids, segment, lengths = examples.gather(rows)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32))[None].to(device)

    length = put(lengths[:, None])
    block = Block(put(ids), put(segment), length, length)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    batch = block.batch(zero, slice(None), objective.config)
    number = torch.arange(begin, begin + len(rows), device=device)
    return batch, objective.predict(batch, StepRng(EVAL_SEED, zero, number), training=False)


def roc_auc(score: np.ndarray, positive: np.ndarray) -> float:
    """P(score of a positive > score of a negative), ties counting one half; 0.5 without both."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        return 0.5
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2  # ranks from 1, ties share their mean
    rank_sum = float(mean_rank[inverse][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def token_counts(
    examples: Examples, special_ids: tuple[int, ...], vocab_size: int
) -> NDArray[np.float64]:
    """(V,) how often each token comes up in up to 16,384 of the examples; specials do not."""
    some = np.linspace(0, len(examples) - 1, min(len(examples), 16_384)).astype(np.int64)
    counts = np.zeros(vocab_size)
    for begin in range(0, len(some), 2048):
        ids, _, _ = examples.gather(some[begin : begin + 2048])
        counts += np.bincount(ids.reshape(-1), minlength=vocab_size)
    counts[list(special_ids)] = 0
    return counts


def unigram_entropy(counts: NDArray[np.float64]) -> float:
    """Entropy of the token frequencies in nats: what a generator reaches that reads no context."""
    share = counts[counts > 0] / max(1.0, counts.sum())
    return float(-(share * np.log(share)).sum())


def diagnose(
    evaluation: Evaluation, unigram: float, progress: float, disc_start: float = 0.0
) -> list[str]:
    """Sentences about what looks wrong and what to try; empty when the run looks alive.

    Before a tenth of the run nothing is said: every run starts at the unigram entropy. Nor of a
    discriminator that has learned for less, if it begins when `disc_start` of the run is done.
    """
    if progress < 0.1:
        return []
    found: list[str] = []
    if evaluation.mlm_loss > unigram - 0.1:
        found.append(
            f"the generator predicts no better than token frequencies ({evaluation.mlm_loss:.2f} "
            f"against an entropy of {unigram:.2f} nats). Try a longer warm-up, a lower learning "
            "rate, a smaller batch with more steps, or --encoder.init local."
        )
    auc, has_learned = evaluation.disc_auc, progress >= disc_start + 0.1
    if auc is not None and auc < 0.53 and has_learned:
        found.append(
            f"the discriminator cannot tell replaced tokens (AUC {auc:.2f}). Wait "
            "for the generator to learn first; if that does not help, lower the learning rate or "
            "make the generator smaller."
        )
    return found
