"""The model card: README.md of an exported model, Markdown below metadata that the Hub reads.

Comes in: the record and the log of a run, or the results of fine-tuning. Goes out: text that says
what the model is, how it is loaded, what it was trained on, how long and at what price, what came
out, and what it is not for; and a small picture of how it learned. Names are other people's text:
in the metadata they are JSON strings, which YAML reads as nothing but strings, below it they are
code, where nothing has a meaning.

Energy is an estimate, named so, and left out where the device is not in `WATTS`:

    kWh = rated power of the device × processes × hours of training × 1.56 / 1000

1.56 is what data centres draw per watt that reaches a machine, on average (Uptime Institute, 2024).
A device draws less than its rated power most of the time; the host beside it is not counted.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..config import LICENSE, EncoderConfig, PretrainConfig, flat, from_dict, to_dict
from ..errors import ElectraError
from ..files import read_json
from ..finetuning.metrics import EPOCH_CHOICE
from ..finetuning.tasks import Task
from ..flops import matmul_flops_per_token, paper_flops
from ..studies.figures import Panel, curve_panels, draw, loss_panel
from ..studies.records import code, confusion_table, read_pretraining, seed_losses, table
from ..studies.report import long_form

PICTURE = "curves.png"
OVERHEAD = 1.56
WATTS = {  # as the makers rate them, by the name that torch gives
    "NVIDIA B200": 1000,
    "NVIDIA H200": 700,
    "NVIDIA H100 80GB HBM3": 700,
    "NVIDIA H100 PCIe": 350,
    "NVIDIA A100-SXM4-80GB": 400,
    "NVIDIA A100-SXM4-40GB": 400,
    "NVIDIA A100 80GB PCIe": 300,
    "NVIDIA A100-PCIE-40GB": 250,
    "NVIDIA L40S": 350,
    "NVIDIA L4": 72,
    "Tesla V100-SXM2-32GB": 300,
    "Tesla V100-SXM2-16GB": 300,
    "Tesla T4": 70,
    "NVIDIA GeForce RTX 4090": 450,
    "NVIDIA GeForce RTX 3090": 350,
}
_TAGS = {  # what the Hub calls it, which need not be a pipeline of transformers
    "discriminator": "feature-extraction",
    "encoder": "feature-extraction",
    "generator": "fill-mask",
    "classification": "text-classification",
    "regression": "text-classification",
    "tagging": "token-classification",
    "qa": "question-answering",
}
_USES = {
    "discriminator": "It is meant to be fine-tuned on a task, to give vectors of texts, or to find "
    "words that do not fit. What it finds unlikely need not be wrong: it checks no facts, and does "
    "not tell who or what wrote a text.",
    "generator": "It fills masked words, and is what the discriminator was trained against; for "
    "other tasks the discriminator, if there is one, is the network to take.",
}
_QUESTIONS = (
    "`tuned.predict([(question, passage)])` answers with a span of the passage. Since 5.3 "
    "transformers has no pipeline for that, whatever the Hub offers; its class gives scores alone."
)
_LIMITS = (
    "It knows the text it was trained on, with its errors and prejudices, and nobody tested what "
    "they do: test that before it decides about people."
)
_NO_LICENCE = (
    "Nobody has said yet. Whoever publishes the model chooses, with an eye to the rights in its "
    "text, by `--license` of the command that wrote it or in the lines at the top."
)
_LEARNED = {
    "mlm_loss": "generator, nats per masked token",
    "disc_auc": "discriminator, AUC (0.5 is chance)",
}


class Story(NamedTuple):
    """What is particular to one model: sections of the card by title, a picture, and scores in
    the form of the Hub."""

    sections: dict[str, str]
    picture: bytes | None = None
    scores: tuple[dict[str, Any], ...] = ()


def readme(
    kind: str, name: str, config: EncoderConfig, vocab_size: int, story: Story, license: str
) -> bytes:
    """The card of a network that transformers loads as the class `name`."""
    if not LICENSE.holds(license):
        what = f"The licence is {license!r}."
        raise ElectraError(what, where="--license", fix=f"use {LICENSE.use}")
    is_tuned = kind not in ("discriminator", "generator")
    metadata: dict[str, Any] = {"library_name": "transformers", "license": license}
    metadata |= {"pipeline_tag": _TAGS[kind], "tags": ["electra"]}
    if story.scores:
        metadata["model-index"] = [{"name": "electra", "results": story.scores}]
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in metadata.items()]
    load = "tuned = electra.load_finetuned" if is_tuned else "model = electra.load"
    first = f"""\
# ELECTRA {kind}

Loads as `{name}`. It has {config.layers} layers of {config.hidden_size} units, a vocabulary of
{vocab_size:,} tokens, and reads sequences of up to {config.max_positions}. Trained after Clark
et al. (ICLR 2020) by electra {__version__}.

```python
from transformers import AutoTokenizer, {name}

model = {name}.from_pretrained("DIRECTORY")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
```

```python
import electra

{load}("DIRECTORY")
```
"""
    sections = dict(story.sections)
    settings = sections.pop("Settings", "")  # are long, and go to the end
    if story.picture:
        sections["How it learned"] = f"![learning curves]({PICTURE})"
    use = "It was trained for the task above, on texts like those of its training set."
    sections["Use and limits"] = f"{_USES.get(kind, use)} {_LIMITS}"
    sections["Licence"] = _NO_LICENCE if license == "unknown" else f"{license}."
    sections |= {"Settings": settings} if settings else {}
    parts = [f"## {title}\n\n{text}\n" for title, text in sections.items()]
    return "\n".join(["---", *lines, "---", "", first, *parts]).encode()


# ---------------------------------------------------------------------- pre-training


def of_pretraining(config: PretrainConfig, step: int | None, run: Path | None) -> Story:
    """The story of a run; without its directory, as far as the settings tell it."""
    if run is None:
        return Story({"Training": _rows(training_facts({"config": to_dict(config)}, step, None))})
    until = math.inf if step is None else step  # nothing is told of what came after
    record, found = read_json(run / "run.json"), read_pretraining(run, "", until=until)
    held = found["curves"]["eval"]
    names = {key: name for key, name in _LEARNED.items() if held[key]}
    sections = {"Training": _rows(training_facts(record, step, found["seconds"]))}
    if names:
        last = {name: f"{held[key][-1][1]:.4g}" for key, name in names.items()}
        sections["Results on held-out text"] = _rows(last)
    sections["Settings"] = _settings(record["config"])
    return Story(sections, _picture(curve_panels([found], names)))


def training_facts(
    record: dict[str, Any], step: int | None, seconds: float | None
) -> dict[str, str]:
    """What pre-training took, in Markdown; `record` is run.json, or what is known of it."""
    config = from_dict(PretrainConfig, record["config"], where="run.json: config")
    data, known = config.data, dict(record.get("data", {}))
    facts = {"recipe": code(config.name), "objective": code(config.objective.kind)}
    if known:
        names = [code(name) for name in known["files"]]
        count, documents, tokens = (int(known[key]) for key in ("count", "documents", "tokens"))
        more = count - len(names)
        facts["text"] = ", ".join(names) + f" and {more:,} more" * (more > 0)
        size = f"{int(known['bytes']) / 1e6:,.1f} MB"
        facts["amount of text"] = f"{documents:,} documents, {size}, {tokens:,} tokens"
    if "corpus_fingerprint" in record:
        facts["corpus, SHA-256"] = code(record["corpus_fingerprint"])
    if start := record.get("init"):
        facts["started from"] = _name(start)
    if (positions := config.encoder.max_positions) > data.sequence_length:
        seen = f"rows of pre-training reach the first {data.sequence_length:,}"
        facts["positions"] = f"{positions:,}; {seen}"
    if step is not None:
        tokens = step * config.tokens_per_step
        facts["length"] = f"{step:,} steps of {data.batch_size} × {data.sequence_length} tokens"
        if vocab_size := int(record.get("vocab_size", 0)):
            products = tokens * matmul_flops_per_token(config, vocab_size)
            by_paper = paper_flops(config, vocab_size, step)
            facts["FLOPs"] = f"{products:.3g} in products, {by_paper:.3g} by the paper's rules"
    facts["seed"] = str(config.run.seed)
    return facts | _price(dict(record.get("environment", {})), seconds)


def _price(environment: dict[str, Any], seconds: float | None) -> dict[str, str]:
    """Time, machine and energy, as far as they are known."""
    device, processes = str(environment.get("device", "")), int(environment.get("processes", 1))
    facts: dict[str, str] = {}
    if device:
        facts["device"] = f"{processes} × {code(device)}, {code(environment.get('dtype'))}"
    if seconds:
        hours = seconds / 3600
        facts["time"] = f"{hours:,.2f} h" if hours >= 1 else f"{seconds / 60:,.1f} min"
        if (kwh := energy(device, seconds, processes)) is not None:
            facts["energy, estimated"] = (
                f"{kwh:.3g} kWh: {WATTS[device]} W (rated) × {processes} × {hours:.3g} h × "
                f"{OVERHEAD} (data centre)"
            )
    return facts


def energy(device: str, seconds: float, processes: int = 1) -> float | None:
    """Estimated kWh (see the top), or nothing for a device whose power is not known."""
    watts = WATTS.get(device)
    return None if watts is None else watts * processes * seconds / 3600 * OVERHEAD / 1000


# ---------------------------------------------------------------------- fine-tuning


def of_finetuning(
    task: Task, results: dict[str, Any], length: int, *, has_class: bool, run: Path | None
) -> Story:
    """The story of a fine-tuned model; `results` is results.json, or its summary."""
    lines = [f"Fine-tuned for {task.kind} on {code(task.name)}, rows of at most {length} tokens."]
    if task.labels:
        lines.append(f"Labels: {', '.join(map(code, task.labels))}.")
    if not has_class:
        lines.append("transformers has no class for its head, which is in head.safetensors.")
    if task.kind == "qa":
        lines.append(_QUESTIONS)
    if "model" in results:
        lines.append(f"Started from {_name(results['model'])}.")
    seconds = sum(s.get("seconds", 0) / s.get("seeds_at_once", 1) for s in _seeds(results))
    if price := _price(dict(results.get("environment", {})), seconds):
        lines.append(_rows(price))
    sections, scores = {"Task": "\n\n".join(lines)}, ()
    if "median" in (summary := results.get("summary", results)):
        sections["Results"] = results_text(task, results)
        scores = (_hub_scores(task, summary, chosen="epoch_choice" in results),)
    sections["Settings"] = _settings(dict(results.get("settings", {})))
    losses = seed_losses(run) if run else []
    panels = [loss_panel([{"run": "", "losses": losses}])] if losses else []
    return Story(sections, _picture(panels), scores)


def results_text(task: Task, results: dict[str, Any]) -> str:
    """The summary over seeds, and each of them."""
    summary, seeds = long_form(results.get("summary", results)), _seeds(results)
    text = [f"{code(task.metric)} × 100, median of the seeds: {summary}."]
    head, rows = ["seed", "scores × 100"], [[str(int(s["seed"])), _scores(s)] for s in seeds]
    if "epoch_choice" in results:
        text.append(EPOCH_CHOICE)
        head += ["epoch", "last_score × 100"]
        for row, s in zip(rows, seeds, strict=True):
            row += [f"{s['kept_epoch']} of {len(s['epochs'])}", f"{100 * s['last_score']:.1f}"]
    if rows:
        text.append("\n".join(table(head, rows)))
    if lines := confusion_table(results):
        text.append("\n".join(lines))
    return "\n\n".join(text)


def _seeds(results: dict[str, Any]) -> list[dict[str, Any]]:
    return list(results.get("seeds", [])) if "summary" in results else []


def _scores(seed: dict[str, Any]) -> str:
    """accuracy 58.7, f1 60.1 of the split that is reported"""
    values: dict[str, Any] = next(iter(dict(seed.get("scores", {})).values()), {})
    shown = [f"{code(name)} {100 * value:.1f}" for name, value in values.items()]
    return ", ".join(shown) + " (failed)" * bool(seed.get("failed"))


def _hub_scores(task: Task, summary: dict[str, Any], *, chosen: bool) -> dict[str, Any]:
    name, metric = _plain(task.name), _plain(task.metric)
    title = f"{metric}, median of {int(summary['seeds'])} seeds"
    title += ", epochs chosen by it" * chosen
    return {
        "task": {"type": _TAGS[task.kind]},
        "dataset": {"name": name, "type": name},
        "metrics": [{"type": metric, "name": title, "value": summary["median"]}],
    }


# ---------------------------------------------------------------------- pieces of it


def _plain(text: str) -> str:
    """Words alone: the Hub shows these names as it likes."""
    return re.sub(r"[^\w .,+-]+", "", text).strip() or "unnamed"


def _name(path: object) -> str:
    """The last part of a path: where it lay is nobody's business."""
    return code(str(path).rstrip("/").rpartition("/")[2])


def _rows(facts: dict[str, str], head: tuple[str, str] = ("", "")) -> str:
    return "\n".join(table(head, list(facts.items())))


def _settings(values: dict[str, Any]) -> str:
    return _rows({code(k): code(v) for k, v in flat(values).items()}, ("setting", "value"))


def _picture(panels: list[Panel]) -> bytes | None:
    return draw(panels, size=(4.2, 3.2), dpi=80) if panels else None
