"""Google's own numbers for fine-tuning: heads, beams, losses, gradients, layer-wise rates, steps.

The arrays come from the released TensorFlow code (tests/oracle/README.md); the encoder is the
discriminator of tests/oracle/weights.npz, whose helpers are those of test_oracle.py.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from test_oracle import ENCODER, ORACLE, assert_near, load, ours, under
from torch import Tensor

from electra.config import OptimConfig
from electra.encoder import Embeddings, Encoder
from electra.finetuning.features import TaskBatch
from electra.finetuning.heads import SpanHead, TaskModel, build_head
from electra.finetuning.step import layer_multipliers
from electra.finetuning.tasks import Kind
from electra.optim import Adam, learning_rate

JOINT = {
    "start": "squad/dense",
    "end_hidden": "squad/qa_hidden",
    "end": "squad/dense_1",
    "answer_hidden": "squad/dense_2",
    "answer": "squad/dense_3",
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "squad1_no_answerable": (
        {"answerable": "none"},
        {key: JOINT[key] for key in ("start", "end_hidden", "end")},
    ),
    "independent_end": (
        {"end": "independent"},
        {key: name for key, name in JOINT.items() if key != "end_hidden"},
    ),
    "plain_answerable": (
        {"answerable": "plain"},
        {
            **{key: JOINT[key] for key in ("start", "end_hidden", "end")},
            "answer": "squad/dense_2",
        },
    ),
}


def model_tensors(arrays: dict[str, Tensor], layers: dict[str, str]) -> dict[str, Tensor]:
    """TensorFlow's variables under the names of a TaskModel; missing kernels are left out."""
    electra = under(arrays, "electra/")
    generator = {k: v for k, v in load("weights.npz").items() if not k.startswith("electra/")}
    result = {
        key.replace("discriminator.", "encoder."): value
        for key, value in ours(
            {**{f"electra/{name}": value for name, value in electra.items()}, **generator}
        ).items()
        if key.startswith("discriminator.")
    }
    for name, theirs in layers.items():
        if f"task_specific/{theirs}/kernel" in arrays:
            result[f"head.{name}.weight"] = arrays[f"task_specific/{theirs}/kernel"].T
        result[f"head.{name}.bias"] = arrays[f"task_specific/{theirs}/bias"]
    return result


def model_of(
    weights: dict[str, Tensor], layers: dict[str, str], kind: Kind, outputs: int, **options: Any
) -> TaskModel:
    head = build_head(kind, ENCODER, outputs, "paper", **options)
    model = TaskModel(Encoder(ENCODER, Embeddings(ENCODER, 97)), head)
    encoder = {f"electra/{k}": v for k, v in under(load("weights.npz"), "electra/").items()}
    model.load_state_dict(model_tensors({**encoder, **weights}, layers))
    return model


def batch_of(arrays: dict[str, Tensor], **targets: Tensor) -> TaskBatch:
    mask = arrays["in/input_mask"].bool()
    return TaskBatch(arrays["in/input_ids"].long(), arrays["in/segment_ids"].long(), mask, targets)


def squad_batch() -> TaskBatch:
    arrays = load("squad_head.npz")
    return batch_of(
        arrays,
        start=arrays["in/squad_start_positions"].long(),
        end=arrays["in/squad_end_positions"].long(),
        impossible=arrays["in/squad_is_impossible"],
    )


def squad_model(**options: Any) -> TaskModel:
    return model_of(under(load("squad_head.npz"), "weights/"), JOINT, "qa", 2, **options)


def assert_same_gradients(model: TaskModel, expected: dict[str, Tensor]) -> float:
    """Returns their global norm."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert grad is not None
        assert_near(grad, expected[name], 4e-6)
    return torch.stack([g.norm() for g in grads.values() if g is not None]).norm().item()


def logits_in_training(model: TaskModel, batch: TaskBatch) -> dict[str, Tensor]:
    head = model.head
    assert isinstance(head, SpanHead)
    h = model.encoder(batch.x, batch.segment, batch.mask, None)
    start = head.start_logits(h, batch)
    h_start = h[torch.arange(len(h)), batch.targets["start"]]
    return {
        "start_logits": start,
        "end_logits": head.end_logits(h, h_start[:, None], batch)[:, 0],
        "answerable_logit": head.answer_logits(h, start),
    }


def assert_near_logits(actual: Tensor, expected: Tensor) -> None:
    # Around −1000 a float32 is 6e-5 from the next one.
    assert_near(actual, expected, 7e-5)
    inside = expected > -500
    assert_near(actual[inside], expected[inside], 4e-6)


# ---------------------------------------------------------------------- question answering


def test_question_answering_in_training() -> None:
    model, batch, arrays = squad_model(), squad_batch(), load("squad_head.npz")
    for name, logits in logits_in_training(model, batch).items():
        assert_near_logits(logits, arrays[f"train/{name}"])
    losses = model.loss(batch, None)
    assert_near(losses, arrays["train/loss"], 2e-6)
    losses.sum().backward()
    norm = assert_same_gradients(model, model_tensors(under(arrays, "grad/"), JOINT))
    assert norm == pytest.approx(float(arrays["grad_norm_dense"]), rel=1e-6)


def test_beams() -> None:
    model, batch, arrays = squad_model(beam=5), squad_batch(), load("squad_head.npz")
    scores = model.predict(batch)
    assert torch.equal(scores["start_index"], arrays["eval/start_top_index"].long())
    assert_near_logits(scores["start_log_probs"], arrays["eval/start_top_log_probs"])
    assert_near(scores["answerable"], arrays["eval/answerable_logit"], 2e-6)
    theirs = arrays["eval/end_top_index"].long()
    assert_near_logits(scores["end_log_probs"], arrays["eval/end_top_log_probs"])
    # A beam as wide as the rest of the passage reaches positions outside; these tie within 6e-5.
    inside = arrays["eval/end_top_log_probs"] > -500
    assert torch.equal(scores["end_index"][inside], theirs[inside])


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_question_answering(variant: str) -> None:
    options, layers = VARIANTS[variant]
    expected = under(load("squad_head_variants.npz"), f"{variant}/")
    model = model_of(under(expected, "weights/"), layers, "qa", 2, **options)
    batch = squad_batch()
    for name, logits in logits_in_training(model, batch).items():
        assert_near_logits(logits, expected[name])
    losses = model.loss(batch, None)
    assert_near(losses, expected["loss"], 2e-6)
    assert_near(losses.sum(), expected["batch_loss"], 4e-6)


@pytest.mark.parametrize("wrong", ["position", "allowed", "weight"])
def test_other_readings_of_question_answering_stand_out(wrong: str) -> None:
    model, batch, arrays = squad_model(), squad_batch(), load("squad_head.npz")
    if wrong == "position":  # the end given another start
        batch.targets["start"][0] += 1
    elif wrong == "allowed":  # the question counts as passage
        batch = batch._replace(segment=torch.ones_like(batch.segment))
    else:  # answerability the other way round
        batch.targets["impossible"] = 1 - batch.targets["impossible"]
    assert (model.loss(batch, None) - arrays["train/loss"]).abs().max() > 1e-2


# ---------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    ("task", "kind", "outputs"), [("mnli", "classification", 3), ("sts", "regression", 1)]
)
def test_sentence_heads(task: str, kind: Kind, outputs: int) -> None:
    arrays = load("classifier_head.npz")
    layers = {"out": f"{task}/dense"}
    model = model_of(under(arrays, "weights/"), layers, kind, outputs)
    label = arrays["in/mnli_label_ids"].long() if task == "mnli" else arrays["in/sts_targets"]
    batch = batch_of(arrays, label=label)
    logits = model.predict(batch)["logits"]
    if task == "mnli":
        assert_near(logits, arrays["mnli/logits"], 2e-6)
        assert torch.equal(logits.argmax(1), arrays["mnli/predictions"])
    else:
        assert_near(logits[:, 0], arrays["sts/predictions"], 2e-6)
    losses = model.loss(batch, None)
    assert_near(losses, arrays[f"{task}/loss"], 4e-6)
    assert_near(losses.sum(), arrays[f"{task}/batch_loss"], 4e-6)
    if task == "mnli":
        losses.sum().backward()
        norm = assert_same_gradients(model, model_tensors(under(arrays, "mnli/grad/"), layers))
        assert norm == pytest.approx(float(arrays["mnli/grad_norm_dense"]), rel=1e-6)


# ---------------------------------------------------------------------- the optimizer


@pytest.mark.parametrize("layers", [3, 12, 24])
def test_layer_wise_rates(layers: int) -> None:
    config = dataclasses.replace(ENCODER, layers=layers)
    model = TaskModel(
        Encoder(config, Embeddings(config, 7)), build_head("classification", config, 2)
    )
    table = json.loads((ORACLE / "layerwise_lr.json").read_text())[f"n_layers={layers}"]
    multipliers = layer_multipliers(model, 0.8, "released")
    assert multipliers.keys() == dict(model.named_parameters()).keys()
    for name, multiplier in multipliers.items():
        if name.startswith("encoder.blocks."):
            key = f"encoder/layer_{name.split('.')[2]}/"
        else:
            key = {"head": "task_specific/", "encoder": "/embeddings/"}[name.split(".")[0]]
        assert multiplier == pytest.approx(table[key], rel=1e-12), name
    assert table["/embeddings/"] == table["/embeddings_project/"]


TRAINING = OptimConfig(
    learning_rate=1e-3,
    warmup_steps=2,
    schedule="times",
    bias_correction=False,
    epsilon=1e-6,
    weight_decay=0.01,
)


def train(
    steps: int, *, decay: float = 0.8, levels: Any = "released", **wrong: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after `steps` steps of a run of ten, and the losses before each and at the end."""
    config = dataclasses.replace(TRAINING, **wrong)
    model, batch = squad_model(), squad_batch()
    optimizer = Adam(model, config, multipliers=layer_multipliers(model, decay, levels))
    losses: list[float] = []
    for step in range(steps):
        loss = model.loss(batch, None).sum()
        losses.append(loss.item())
        optimizer.accumulate(torch.autograd.grad(loss, optimizer.parameters), first=True)
        rate = learning_rate(config, step, step / 10, 10)
        optimizer.step(torch.tensor(rate), torch.tensor(step))
    return optimizer.state()["model"], [*losses, model.loss(batch, None).sum().item()]


def largest_difference(state: dict[str, Tensor]) -> float:
    after = model_tensors(under(load("squad_trajectory.npz"), "step2/"), JOINT)
    assert len(after) == len(state) - 2  # all but the two kernels that the file leaves out
    return max(float((state[name] - value).abs().max()) for name, value in after.items())


def test_rates_of_the_trajectory() -> None:
    rates = load("squad_trajectory.npz")["learning_rates"]  # (5, 6), the head last
    ours = [learning_rate(TRAINING, step, step / 10, 10) for step in range(5)]
    assert ours == pytest.approx(rates[:, -1].tolist(), rel=1e-6)


def test_two_steps() -> None:
    assert largest_difference(train(2)[0]) < 1e-6


@pytest.mark.parametrize(
    ("wrong", "at_least"),
    [
        ({"levels": "one_each"}, 2e-5),
        ({"decay": 1.0}, 1e-4),
        ({"weight_decay": 0.0}, 1.5e-6),
        ({"max_grad_norm": 1e9}, 1e-4),
        ({"bias_correction": True}, 1e-4),
    ],
)
def test_other_readings_of_the_steps_stand_out(wrong: dict[str, Any], at_least: float) -> None:
    assert largest_difference(train(2, **wrong)[0]) > at_least


def test_five_steps() -> None:
    """Less exactly: the released code clips by a norm in which repeated tokens count apart."""
    expected = load("squad_trajectory.npz")
    state, losses = train(5)
    assert losses == pytest.approx(expected["losses"].tolist(), rel=2e-5)
    for name, theirs in JOINT.items():
        bias = expected[f"step5/task_specific/{theirs}/bias"]
        assert_near(state[f"head.{name}.bias"], bias, 1e-5)
