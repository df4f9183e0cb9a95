"""Examples per second of fine-tuning: ours against transformers' Trainer, on the same machine.

    pip install accelerate
    python benchmarks/finetune_speed.py --data GLUE_DIR --tokenizer vocab.txt --out results/finetune

Both train ElectraForSequenceClassification's small size (12 x 256, head `hf`) from random weights
with dropout 0.1, batch 32, AdamW and a linear schedule, in bf16 on a GPU and float32 on a CPU.
The Trainer pads each batch to its longest row, once with random batches (its default) and once with
its own grouping by length, with the fused optimizer; data loading and logging are as light as it
allows. Timed from a warm state to the last step, setup apart; several rounds, interleaved.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import tyro
from transformers import (
    DataCollatorWithPadding,
    ElectraConfig,
    ElectraForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)

from electra import runtime as runtimes
from electra.config import FinetuneConfig, RunConfig
from electra.data.tokenizer import Tokenizer
from electra.encoder import Embeddings, Encoder, initialise
from electra.finetuning import tasks
from electra.finetuning.finetune import resolve
from electra.finetuning.step import TextData, Trainer
from electra.formats.hf import LoadedEncoder
from electra.recipes import small


@dataclass(frozen=True, kw_only=True)
class Arguments:
    data: Path
    """GLUE in its official folders."""
    tokenizer: Path
    """vocab.txt or tokenizer.json."""
    out: Path
    """Where the JSON record goes."""
    tasks: tuple[str, ...] = ("mrpc", "sst2")
    steps: int = 105
    """Timed steps of the Trainer in one round; its grouping begins with the longest batches, so
    few steps would flatter us."""
    our_steps: int = 1000
    """Timed steps of ours in one round."""
    rounds: int = 3
    compile: Literal["auto", "yes", "no"] = "auto"
    """As for `electra finetune`; auto compiles on a GPU here, because setup is not timed."""


def random_encoder(tokenizer: Tokenizer) -> LoadedEncoder:
    config = small().encoder
    encoder = Encoder(config, Embeddings(config, tokenizer.vocab_size))
    initialise(encoder, "paper", 0)
    return LoadedEncoder(
        config=config,
        vocab_size=tokenizer.vocab_size,
        tensors=dict(encoder.state_dict()),
        tokenizer=tokenizer,
        description="random small",
    )


class Ours:
    def __init__(self, data: TextData, encoder: LoadedEncoder, config: FinetuneConfig) -> None:
        run = RunConfig(device=config.device, compile=config.compile)
        self.runtime = runtimes.start(run)
        self.recorded: set[int] = set()
        self.trainer = Trainer(encoder, data.train, data.task, data.outputs, config, self.runtime)

    def seconds(self, steps: int) -> tuple[float, int]:
        t = self.trainer
        t.begin(0)
        for T in sorted(set(t.lengths)):  # every graph is recorded before the clock runs
            if self.runtime.cuda_graph and T not in self.recorded:
                t.record(T)
                self.recorded.add(T)
        t.begin(0)
        steps = min(steps, t.steps)
        for _ in range(2):
            t.step()
        synchronize()
        begin = time.perf_counter()
        for _ in range(steps - 2):
            t.step()
        synchronize()
        return time.perf_counter() - begin, (steps - 2) * t.config.batch_size


class Clock(TrainerCallback):
    def __init__(self, warm: int) -> None:
        self.warm = warm
        self.begin = self.end = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step == self.warm:
            synchronize()
            self.begin = time.perf_counter()
        if state.global_step == state.max_steps:
            synchronize()
            self.end = time.perf_counter()


def theirs(
    rows: list[dict[str, Any]], tokenizer: Any, labels: int, steps: int, grouped: bool, out: Path
) -> tuple[float, int]:
    config = small().encoder
    torch.manual_seed(0)
    model = ElectraForSequenceClassification(
        ElectraConfig(
            vocab_size=len(tokenizer),
            embedding_size=config.embedding_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.attention_heads,
            intermediate_size=config.ffn_size,
            max_position_embeddings=config.max_positions,
            num_labels=labels,
            attn_implementation="sdpa",
        )
    )
    cuda = torch.cuda.is_available()
    warm = 10
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        per_device_train_batch_size=32,
        max_steps=steps + warm,
        learning_rate=3e-4,
        warmup_steps=10,
        bf16=cuda,
        use_cpu=not cuda,
        optim="adamw_torch_fused",
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="group_by_length" if grouped else "random",
    )
    clock = Clock(warm)
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[clock],
    )
    trainer.train()
    return clock.end - clock.begin, steps * 32


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    a = tyro.cli(Arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = Tokenizer.load(a.tokenizer)
    encoder = random_encoder(tokenizer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, pad_token="[PAD]")
    a.out.mkdir(parents=True, exist_ok=True)
    table: list[dict[str, Any]] = []
    threads = 0
    for name in a.tasks:
        loaded = tasks.load(name, a.data)
        config = resolve(FinetuneConfig(head="hf", compile=a.compile), encoder.config, loaded.task)
        data = TextData(loaded, tokenizer, dataclasses.replace(config, both_orders=False))
        mine = Ours(data, encoder, config)
        threads = mine.runtime.threads
        f = data.train
        rows = [
            {
                "input_ids": f.tokens[i, : f.lengths[i]].tolist(),
                "token_type_ids": [int(k >= f.first[i]) for k in range(f.lengths[i])],
                "attention_mask": [1] * int(f.lengths[i]),
                "labels": int(f.targets["label"][i]),
            }
            for i in range(len(f))
        ]
        rates: dict[str, list[float]] = {}
        for _ in range(a.rounds):
            for label, run in (
                ("electra", lambda m=mine: m.seconds(a.our_steps)),
                (
                    "transformers Trainer",
                    lambda r=rows, n=data.outputs: theirs(r, fast, n, a.steps, False, a.out),
                ),
                (
                    "transformers Trainer, grouped by length",
                    lambda r=rows, n=data.outputs: theirs(r, fast, n, a.steps, True, a.out),
                ),
            ):
                seconds, examples = run()
                rates.setdefault(label, []).append(examples / seconds)
                print(f"{name} {label}: {examples / seconds:,.0f} examples/s", flush=True)
        ours = statistics.median(rates["electra"])
        best = max(statistics.median(v) for k, v in rates.items() if k != "electra")
        default = statistics.median(rates["transformers Trainer"])
        table.append(
            {
                "task": name,
                "examples_per_second_median": {k: statistics.median(v) for k, v in rates.items()},
                "examples_per_second_all": rates,
                "times_the_default": ours / default,
                "times_the_best": ours / best,
            }
        )
        del mine
    record = {
        "what": "fine-tuning examples per second, small size, batch 32, medians of the rounds",
        "rows": table,
        "rounds": a.rounds,
        "steps": {"electra": a.our_steps, "transformers": a.steps},
        "transformers": transformers.__version__,
        "environment": {
            **runtimes.start(RunConfig(compile=a.compile), threads=threads).describe(),
            "threads": threads,
        },
    }
    (a.out / "finetune_speed.json").write_text(json.dumps(record, indent=1))
    for row in table:
        print(f"\n{row['task']}")
        for label, rate in row["examples_per_second_median"].items():
            print(f"  {label:42} {rate:10,.0f} examples/s")
        print(
            f"  {row['times_the_default']:.1f} x the Trainer as it is, "
            f"{row['times_the_best']:.1f} x its best form"
        )


if __name__ == "__main__":
    main()
