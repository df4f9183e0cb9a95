"""One step of fine-tuning and what it needs: the data of a task, the trainer, and predictions.

Comes in: the splits of a task, a pre-trained encoder, settings with everything decided. Goes out:
rows of tokens and what they are scored by (`TextData`, `SquadData`); a model that is one optimizer
step further (`Trainer`); what the head says of every row (`predict`).

The whole run of a seed is planned on the host beforehand (which rows, how long, what rate) and lies
on the device; the step in `Trainer.train_step` then needs nothing from the host. On a GPU it is
recorded once per batch length and replayed, for all seeds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import FinetuneConfig
from ..data.tokenizer import Tokenizer
from ..encoder import Embeddings, Encoder
from ..errors import NumericError
from ..formats.hf import LoadedEncoder
from ..optim import Adam, learning_rate
from ..randomness import SeededDropout
from ..runtime import Runtime, whole_vectors
from . import metrics, squad, tasks
from .features import BUCKETS, DeviceFeatures, Features, Plan, encode_texts, encode_words
from .heads import TaskModel, build_head, initialise_head
from .tasks import Examples, Loaded, Task

Predictions = dict[str, NDArray[Any]]

# ---------------------------------------------------------------------- data of a task


class TextData:
    """Classification, regression and tagging. What training asks of it, SquadData has as well."""

    def __init__(self, loaded: Loaded, tokenizer: Tokenizer, config: FinetuneConfig) -> None:
        """config: resolved."""
        self.task, self.examples = loaded.task, loaded.splits
        self.outputs = 1 if self.task.kind == "regression" else len(self.task.labels)
        self._tokenizer, self._length = tokenizer, config.length or loaded.task.length
        train = loaded.splits["train"]
        if config.max_train is not None:
            train = Examples(*(part[: config.max_train] for part in dataclasses.astuple(train)))
        if config.both_orders and len(self.task.texts) == 2:
            swapped = [(b, a) for a, b in train.texts]
            train = Examples(train.texts + swapped, train.labels * 2, train.ids * 2)
        self.train = self.encode(train)
        # The first one is reported.
        self.splits = {n: self.encode(e) for n, e in loaded.splits.items() if n != "train"}

    def encode(self, examples: Examples) -> Features:
        if self.task.kind == "tagging":
            return encode_words(examples.texts, examples.labels, self._tokenizer, self._length)
        is_number = self.task.kind == "regression"
        known = examples.labels or [0] * len(examples.texts)
        labels = np.array(known, np.float64 if is_number else np.int64)
        if is_number:
            labels = (labels - self.task.offset).astype(np.float32) / np.float32(self.task.scale)
        return encode_texts(examples.texts, labels, self._tokenizer, self._length)

    def answers(self, predictions: Predictions, features: Features) -> list[Any]:
        """Class indices, numbers in the data's own unit, or the tag indices of each sentence."""
        logits = predictions["logits"]
        if self.task.kind == "regression":
            scaled = logits[:, 0] * np.float32(self.task.scale)
            return (scaled.astype(np.float64) + self.task.offset).tolist()
        best = logits.argmax(-1)
        if self.task.kind == "classification":
            return best.tolist()
        words = (features.targets["labels"] >= 0).sum(1)  # of each row
        owner = np.repeat(features.example, words)
        ends = np.searchsorted(owner, np.arange(int(features.example.max(initial=-1)) + 2))
        return [best[a:b].tolist() for a, b in itertools.pairwise(ends)]

    def _graded(self, split: str, predictions: Predictions) -> tuple[list[Any], list[Any]]:
        """The answers, and the labels they should be."""
        return self.answers(predictions, self.splits[split]), self.examples[split].labels

    def score(self, split: str, predictions: Predictions) -> dict[str, float]:
        if not self.examples[split].labels:
            return {}
        return metrics.score(self.task, *self._graded(split, predictions))

    def confusion(self, split: str, predictions: Predictions) -> dict[str, dict[str, int]]:
        return metrics.confusion(self.task, *self._graded(split, predictions))

    def failed(self, split: str, predictions: Predictions) -> bool:
        return metrics.is_degenerate(self.task, *self._graded(split, predictions))

    def ensemble(self, predictions: Sequence[Predictions]) -> Predictions | None:
        """Mean probability of each class, or mean value."""
        logits = np.stack([p["logits"] for p in predictions]).astype(np.float64)
        if self.task.kind != "regression":
            logits -= logits.max(-1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            return {"logits": np.log(np.exp(logits).mean(0))}
        return {"logits": logits.mean(0)}

    def write_test(self, split: str, predictions: Predictions, out: Path) -> None:
        answers, ids = self.answers(predictions, self.splits[split]), self.examples[split].ids
        tasks.write_predictions(self.task, split, ids, answers, out)


class SquadData:
    """Questions on passages."""

    def __init__(
        self,
        questions: dict[str, list[squad.Question]],
        task: Task,
        tokenizer: Tokenizer,
        config: FinetuneConfig,
    ) -> None:
        """config: resolved."""
        self.task, self.questions, self.outputs = task, questions, 2
        self._threshold = squad.RELEASED_THRESHOLD if task.name == "squad2" else None
        length = config.length or task.length
        train = questions["train"][: config.max_train]
        self.train, _ = squad.windows(train, tokenizer, length=length, training=True)
        self.splits: dict[str, Features] = {}
        self._windows: dict[str, list[squad.Window]] = {}
        for name, asked in questions.items():
            if name != "train":
                found = squad.windows(asked, tokenizer, length=length, training=False)
                self.splits[name], self._windows[name] = found

    def _answers(self, split: str, predictions: Predictions) -> squad.Answers:
        return squad.answers(self.questions[split], self._windows[split], predictions)

    def score(self, split: str, predictions: Predictions) -> dict[str, float]:
        try:
            given = self._answers(split, predictions)
        except NumericError:  # a seed that diverged has failed; the others go on
            return {"exact": 0.0, "f1": 0.0, self.task.metric: 0.0}
        scores = squad.evaluate(self.questions[split], given, self._threshold)
        return {n: v if n.endswith("threshold") else v / 100 for n, v in scores.items()}

    def failed(self, split: str, predictions: Predictions) -> bool:
        """Whether it hardly finds an answer: F1 below 10 of 100 where there is one."""
        scores = self.score(split, predictions)
        return scores.get("has_ans_f1", scores["f1"]) < 0.1

    def ensemble(self, predictions: Sequence[Predictions]) -> Predictions | None:
        del predictions  # beams of different seeds hold different spans
        return None

    def write_test(self, split: str, predictions: Predictions, out: Path) -> None:
        squad.write_predictions(out, self._answers(split, predictions), self._threshold)


Data = TextData | SquadData


# ---------------------------------------------------------------------- the trainer


def layer_multipliers(
    model: TaskModel, decay: float, levels: Literal["one_each", "released"] = "one_each"
) -> dict[str, float]:
    """Layer-wise learning rates: decay^level, level 0 for the head and growing downwards.

    one_each: the top layer has level 1, the embeddings L + 1. released: the code still counts a
    pooler that is not there, so the top layer has level 2 and the embeddings L + 2.
    """
    L, gap = model.encoder.config.layers, int(levels == "released")

    def level(name: str) -> int:
        if name.startswith("head."):
            return 0
        if name.startswith("encoder.blocks."):
            return L - int(name.split(".")[2]) + gap
        return L + 1 + gap

    return {name: decay ** level(name) for name, _ in model.named_parameters()}


class Trainer:
    """The optimizer steps of one seed after another, with one model and one set of graphs."""

    def __init__(
        self,
        encoder: LoadedEncoder,
        features: Features,
        task: Task,
        outputs: int,
        config: FinetuneConfig,
        runtime: Runtime,
        *,
        data: DeviceFeatures | None = None,
    ) -> None:
        """config: resolved. data: `features` on the device, if they are there already."""
        assert config.layer_decay is not None
        assert config.dropout is not None
        assert config.attention_dropout is not None
        self.config, self.runtime, self.features = config, runtime, features
        self.encoder_tensors = encoder.tensors
        settings = dataclasses.replace(
            encoder.config, dropout=config.dropout, attention_dropout=config.attention_dropout
        )
        self._new_head = lambda: build_head(task.kind, settings, outputs, config.head)
        network = Encoder(settings, Embeddings(settings, encoder.vocab_size))
        self.model = TaskModel(network, self._new_head()).to(runtime.device)
        if runtime.compiled:
            # The block once, for all its copies and all lengths: that takes a fraction of the time
            # of compiling the whole step, and what lies around the blocks hardly matters. They
            # differ in the number of their dropout site, which needs no program of its own here.
            torch._dynamo.config.allow_unspec_int_on_nn_module = True  # pyright: ignore[reportPrivateImportUsage]
            for block in network.blocks:
                block.compile(dynamic=True)
        self.optimizer = Adam(
            self.model,
            config.optim,
            working_dtype=runtime.dtype,
            multipliers=layer_multipliers(self.model, config.layer_decay, config.layer_levels),
        )
        device = runtime.device
        self.data = data or DeviceFeatures(features, device)
        self.dropout = SeededDropout(device)
        # Several trainers work side by side, each in a stream of its own: one alone leaves most
        # of a large GPU idle.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        S = self._plan(config.seed).rows.shape[0]
        self.steps, B = S, config.batch_size
        self.per_epoch = math.ceil(len(features) / B)  # steps
        self.rows = torch.zeros(S, B, dtype=torch.int32, device=device)
        self.weight = torch.zeros(S, B, device=device)
        self.losses = torch.zeros(S, device=device)
        rates = [learning_rate(config.optim, s, s / S, S) for s in range(S)]
        self.rates = torch.tensor(rates, device=device)
        self.slot = torch.zeros((), dtype=torch.int64, device=device)  # steps done
        self.lengths: list[int] = []  # T of each step
        self.seed, self.step_number = config.seed, 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _plan(self, seed: int) -> Plan:
        assert self.config.epochs is not None
        on_gpu = self.runtime.device.type == "cuda"
        return Plan.make(
            self.features,
            batch=self.config.batch_size,
            epochs=self.config.epochs,
            seed=seed,
            padding=self.config.padding,
            # A GPU replays a graph per length; a CPU can as well compute just what is there.
            buckets=BUCKETS if on_gpu else range(2, self.features.tokens.shape[1]),
        )

    # ------------------------------------------------------------------ the step

    def train_step(self, T: int) -> None:
        """One optimizer step on a batch of T tokens; all it needs is on the device."""
        slot = self.slot.view(1)
        rows = self.rows.index_select(0, slot)[0]  # (B,)
        weight = self.weight.index_select(0, slot)[0]
        batch = self.data.batch(rows, T)
        batch.targets["weight"] = weight
        losses = self.model.loss(batch, self.dropout)  # (B,)
        loss = (losses * weight).sum()
        if self.config.loss == "mean":
            loss = loss / weight.sum()
        grads = torch.autograd.grad(loss, self.optimizer.parameters)
        self.optimizer.accumulate(grads, first=True)
        self.optimizer.step(self.rates.index_select(0, slot)[0], self.slot)
        self.losses.index_copy_(0, slot, loss.detach().view(1))
        self.slot += 1

    def step(self) -> None:
        T = self.lengths[self.step_number]
        if self.runtime.cuda_graph and T not in self._graphs:
            self.record(T)
        self.dropout.seed(self.seed, self.step_number)
        with self.at_work():
            if self.runtime.cuda_graph:
                self._graphs[T].replay()
            else:
                with self.dropout.in_use():
                    self.train_step(T)
        self.step_number += 1

    # ------------------------------------------------------------------ around it

    def at_work(self) -> contextlib.AbstractContextManager[Any]:
        """What happens inside the block happens in this trainer's stream."""
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.stream is not None:
            self.stream.synchronize()

    def record(self, T: int) -> None:
        """Record the step for batches of T tokens; training state stays as it was."""
        with self.at_work(), self.dropout.in_use():
            self.optimizer.live.fill_(False)
            # Libraries make their handles and workspaces in the first steps, and a length that is
            # new is compiled: neither can happen while recording.
            if not self._graphs or self.runtime.compiled:
                for _ in range(2):
                    self.train_step(T)
                    self.slot.fill_(self.step_number)
                self.wait()
            graph = torch.cuda.CUDAGraph()
            # Nothing outlives a replay but what lies in our own buffers, so all may share memory.
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            # The saves of other seeds use the device in threads of their own meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self.train_step(T)
            graph.capture_end()
            self._graphs[T] = graph
            self.optimizer.live.fill_(True)

    def begin(self, seed: int) -> None:
        """Back to the pre-trained encoder under a new head."""
        self.seed, self.step_number = seed, 0
        head = self._new_head()
        initialise_head(head, seed)
        fresh = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
        encoder = {f"encoder.{name}": tensor for name, tensor in self.encoder_tensors.items()}
        plan = self._plan(seed)
        self.lengths = plan.lengths
        with self.at_work():
            self.optimizer.load({"model": {**encoder, **fresh}})
            for moment in (self.optimizer.m, self.optimizer.v, self.optimizer.bad_steps):
                moment.zero_()
            self.rows.copy_(torch.from_numpy(plan.rows))
            self.weight.copy_(torch.from_numpy(plan.weight))
            self.losses.zero_()
            self.slot.zero_()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of a checkpoint, by file."""
        self.wait()
        # Losses of bad steps are not finite, which a checkpoint refuses: their bits are saved.
        log = {"losses": self.losses.view(torch.int32), "bad_steps": self.optimizer.bad_steps}
        return {**self.optimizer.state(), "log": log}

    def load(self, tensors: dict[str, dict[str, Tensor]], step: int) -> None:
        with self.at_work():
            self.optimizer.load({key: tensors[key] for key in ("model", "m", "v")})
            self.losses.copy_(tensors["log"]["losses"].view(torch.float32))
            self.optimizer.bad_steps.copy_(tensors["log"]["bad_steps"])
            self.slot.fill_(step)
        self.step_number = step

    def weights(self) -> dict[str, Tensor]:
        """The model's state in float32 on the CPU."""
        self.wait()
        state = self.optimizer.state()["model"]
        return {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}


@whole_vectors
@torch.no_grad()
def predict(
    model: TaskModel,
    features: Features,
    device: torch.device,
    *,
    batch: int = 128,
    padding: int | None = None,
) -> Predictions:
    """What the head says of every row, in the order of the rows.

    A forward pass has `batch` rows of similar length; or fewer, if the next one is so much longer
    that more than `padding` tokens had to be added to the others, and a pass of its own is cheaper.
    """
    if len(features) == 0:
        return {}
    data = DeviceFeatures(features, device)
    order = np.argsort(features.lengths, kind="stable")
    # Beams have the same size in every batch only if no batch is shorter than a beam.
    shortest = model.head.options.get("beam", 0)
    step = 8 if device.type == "cuda" else 1  # its attention kernels want that
    widest, lengths, end = features.tokens.shape[1], features.lengths[order], 0
    found: dict[str, list[NDArray[Any]]] = {}  # row by row
    while end < len(order):
        begin, end = end, end + 1
        while end < min(begin + batch, len(order)) and (
            padding is None or (end - begin) * (lengths[end] - lengths[end - 1]) <= padding
        ):
            end += 1
        needed = max(shortest, -(-int(lengths[end - 1]) // step) * step)
        rows = torch.from_numpy(order[begin:end]).to(device)
        # Importing the compiler takes seconds; where it is not imported, nothing is compiled.
        is_loaded = "torch._dynamo" in sys.modules
        stance = torch.compiler.set_stance("force_eager") if is_loaded else contextlib.nullcontext()
        with stance:
            said = model.predict(data.batch(rows, min(needed, widest)))
        for name, scores in said.items():
            scores = scores.float() if scores.is_floating_point() else scores
            found.setdefault(name, []).extend(scores.cpu().numpy())
    back, labels = np.argsort(order), features.targets.get("labels")
    in_order = {name: [rows[j] for j in back] for name, rows in found.items()}
    if labels is None:
        return {name: np.stack(rows) for name, rows in in_order.items()}
    first = labels >= 0  # tagging: the first piece of each word
    return {
        name: np.concatenate([row[mark[: len(row)]] for row, mark in zip(rows, first, strict=True)])
        for name, rows in in_order.items()
    }
