"""Heads against transformers, beams against brute force, and what every head has to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import peers
import pytest
import torch
import transformers
from torch import Tensor, nn

from electra.config import EncoderConfig
from electra.encoder import Embeddings, Encoder, initialise
from electra.errors import ElectraError
from electra.finetuning.features import TaskBatch
from electra.finetuning.heads import (
    ANSWER_TOKENS,
    Form,
    Head,
    LinearSpanHead,
    SentenceHead,
    SpanHead,
    TaskModel,
    build_head,
    initialise_head,
)
from electra.finetuning.tasks import Kind
from electra.randomness import StepRng

# Pairwise different, so that no transposed or swapped axis can pass.
B, T, V, D, C = 5, 19, 31, 22, 3
LENGTHS = (19, 13, 7, 11, 5)
FIRST = (6, 4, 3, 8, 3)  # tokens of segment 0
CONFIG = EncoderConfig(
    layers=2,
    hidden_size=D,
    ffn_size=34,
    attention_heads=2,
    embedding_size=14,
    max_positions=29,
    dropout=0.0,
    attention_dropout=0.0,
)
KINDS: list[tuple[Kind, int]] = [
    ("classification", C),
    ("regression", 1),
    ("tagging", C),
    ("qa", 2),
]
FORMS: list[Form] = ["paper", "hf"]


def batch_of(kind: Kind) -> TaskBatch:
    draw = torch.Generator().manual_seed(3)
    position, length = torch.arange(T), torch.tensor(LENGTHS)[:, None]
    mask = position < length
    x = torch.randint(5, V, (B, T), generator=draw) * mask
    segment = ((position >= torch.tensor(FIRST)[:, None]) & mask).long()
    labels = torch.randint(0, C, (B, T), generator=draw)
    is_word = (torch.rand(B, T, generator=draw) < 0.6) & mask
    targets: dict[Kind, dict[str, Tensor]] = {
        "classification": {"label": labels[:, 0]},
        "regression": {"label": torch.randn(B, generator=draw)},
        "tagging": {"labels": torch.where(is_word, labels, -1)},
        "qa": {
            "start": torch.tensor([7, 4, 0, 0, 3]),
            "end": torch.tensor([9, 4, 0, 0, 3]),
            "impossible": torch.tensor([0, 0, 1, 0, 0]),
        },
    }
    return TaskBatch(x, segment, mask, targets[kind])


def model_of(
    kind: Kind, outputs: int, form: Form, config: EncoderConfig = CONFIG, **options: Any
) -> TaskModel:
    """With weights large enough that every part matters."""
    encoder = Encoder(config, Embeddings(config, V))
    initialise(encoder, "paper", 1)
    model = TaskModel(encoder, build_head(kind, config, outputs, form, **options))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return model


# ---------------------------------------------------------------------- transformers


def in_transformers(model: TaskModel, kind: Kind, outputs: int) -> Any:
    """The same model as a class of transformers, in float64."""
    config = peers.electra_config(CONFIG, V, num_labels=outputs)
    classes: dict[Kind, Any] = {
        "tagging": transformers.ElectraForTokenClassification,
        "qa": transformers.ElectraForQuestionAnswering,
    }
    theirs = classes.get(kind, transformers.ElectraForSequenceClassification)(config).double()
    scopes: dict[Kind, dict[str, str]] = {
        "tagging": {"out": "classifier"},
        "qa": {"out": "qa_outputs"},
    }
    layers = scopes.get(kind, {"dense": "classifier.dense", "out": "classifier.out_proj"})
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        state |= dict(renamed(name, value, layers))
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not missing
    assert not unexpected
    return theirs.eval()


def renamed(name: str, value: Tensor, layers: dict[str, str]) -> list[tuple[str, Tensor]]:
    scope, *rest, end = name.split(".")
    if scope == "head":
        return [(f"{layers[rest[0]]}.{end}", value)]
    if rest[0] == "embeddings":
        fixed = {
            "word": "word_embeddings",
            "position": "position_embeddings",
            "segment": "token_type_embeddings",
            "norm": "LayerNorm",
        }
        return [(f"electra.embeddings.{fixed[rest[1]]}.{end}", value)]
    if rest[0] == "project":
        return [(f"electra.embeddings_project.{end}", value)]
    layer = f"electra.encoder.layer.{rest[1]}"
    if rest[2] == "qkv":
        names = [f"{layer}.attention.self.{part}.{end}" for part in ("query", "key", "value")]
        return list(zip(names, value.chunk(3), strict=True))
    place = {
        "out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "ffn_norm": "output.LayerNorm",
    }[rest[2]]
    return [(f"{layer}.{place}.{end}", value)]


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
def test_same_as_transformers(kind: Kind, outputs: int) -> None:
    """Logits, the batch's loss and the gradient of the head, in float64."""
    model, batch = model_of(kind, outputs, "hf").double(), batch_of(kind)
    t = batch.targets
    labels = {
        "classification": lambda: {"labels": t["label"]},
        "regression": lambda: {"labels": t["label"].double()},
        "tagging": lambda: {"labels": torch.where(t["labels"] < 0, -100, t["labels"])},
        "qa": lambda: {"start_positions": t["start"], "end_positions": t["end"]},
    }[kind]()
    theirs = in_transformers(model, kind, outputs)
    result = theirs(
        input_ids=batch.x, attention_mask=batch.mask, token_type_ids=batch.segment, **labels
    )
    loss = model.loss(batch, None)
    assert loss.shape == (B,)
    assert loss.mean().item() == pytest.approx(result.loss.item(), rel=1e-12)
    if kind == "qa":
        head = model.head
        assert isinstance(head, LinearSpanHead)
        h = model.encoder(batch.x, batch.segment, batch.mask, None)
        logits, expected = head.logits(h), (result.start_logits, result.end_logits)
    else:
        logits, expected = model.predict(batch)["logits"], result.logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)

    loss.mean().backward()
    result.loss.backward()
    out = {"tagging": "classifier", "qa": "qa_outputs"}.get(kind, "classifier.out_proj")
    grad = model.head.get_submodule("out").weight.grad
    torch.testing.assert_close(grad, theirs.get_submodule(out).weight.grad, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------- what all heads do


@pytest.mark.parametrize(
    ("kind", "outputs", "form"),
    # Not the questions of transformers, whose softmax runs over padding as well.
    [(*kind, form) for kind in KINDS for form in FORMS if (kind[0], form) != ("qa", "hf")],
)
def test_loss_of_an_example_is_its_own(kind: Kind, outputs: int, form: Form) -> None:
    """Each example alone gives the loss it has in the batch, whatever padding surrounds it."""
    model, batch = model_of(kind, outputs, form).double(), batch_of(kind)
    losses = model.loss(batch, None)
    words = (batch.targets["labels"] >= 0).sum(1) if kind == "tagging" else torch.ones(B)
    for i, n in enumerate(LENGTHS):
        row = TaskBatch(
            *(part[i : i + 1, :n] for part in batch[:3]),
            {
                k: v[i : i + 1, :n] if v.dim() > 1 else v[i : i + 1]
                for k, v in batch.targets.items()
            },
        )
        expected = model.loss(row, None)[0]
        if kind == "tagging" and form == "hf":  # here words count alike
            expected = expected * words[i] / words.double().mean()
        assert losses[i].item() == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "outputs"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:TF32")  # of the switch below, on machines without it
def test_types(kind: Kind, outputs: int, form: Form, dtype: torch.dtype) -> None:
    """Linear layers in bfloat16 with the rest in float32; results in float32, close to exact."""
    model, batch = model_of(kind, outputs, form), batch_of(kind)
    exact = model.double().loss(batch, None)
    model = model.float() if dtype == torch.bfloat16 else model.to(dtype)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Some virtual machines end a process at the first bfloat16 product of oneDNN.
    with torch.backends.mkldnn.flags(enabled=False):
        losses = model.loss(batch, None)
        scores = model.predict(batch)
    assert losses.dtype == wide
    assert {s.dtype for s in scores.values() if s.is_floating_point()} == {wide}
    rough = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.5}[dtype]
    torch.testing.assert_close(losses.double(), exact, rtol=rough, atol=rough)


@pytest.mark.parametrize(
    ("kind", "form", "places"),
    [
        ("classification", "paper", 1),
        ("classification", "hf", 2),
        ("tagging", "paper", 1),
        ("qa", "paper", 0),
        ("qa", "hf", 0),
    ],
)
def test_dropout_of_the_heads(kind: Kind, form: Form, places: int) -> None:
    class Seen(StepRng):
        sites: list[int] = []  # noqa: RUF012

        def dropout(self, x: Tensor, p: float, site: int) -> Tensor:
            assert p == 0.4
            self.sites.append(site)
            return super().dropout(x, p, site)

    config = dataclasses.replace(CONFIG, dropout=0.4)
    model, batch = model_of(kind, C, form, config), batch_of(kind)
    rng = Seen(0, torch.tensor(0), torch.arange(B))
    rng.sites.clear()
    losses = model.loss(batch, rng)
    heads = [site for site in rng.sites if site >= 10_000]
    assert len(heads) == len(set(heads)) == places
    assert len(set(rng.sites)) == len(rng.sites)
    assert not torch.allclose(losses, model.loss(batch, None))
    again = model.predict(batch)
    assert all(torch.equal(again[k], v) for k, v in model.predict(batch).items())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "outputs"), KINDS)
def test_learns(kind: Kind, outputs: int, form: Form) -> None:
    """Every parameter has a gradient, and following it fits the batch."""
    torch.manual_seed(0)
    model, batch = model_of(kind, outputs, form), batch_of(kind)
    initialise_head(model.head, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    before = model.loss(batch, None).mean().item()
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(batch, None).mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    assert model.loss(batch, None).mean().item() < 0.2 * before


def test_examples_without_words_cost_nothing() -> None:
    for form in FORMS:
        model, batch = model_of("tagging", C, form), batch_of("tagging")
        batch.targets["labels"][2] = -1
        losses = model.loss(batch, None)
        assert losses[2] == 0
        assert (losses[[0, 1, 3, 4]] > 0).all()
        batch.targets["labels"][:] = -1
        losses = model.loss(batch, None)
        assert (losses == 0).all()
        losses.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# ---------------------------------------------------------------------- spans


def log_probs(model: TaskModel, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """log p(start), (B, T), and log p(end | start), (B, T, T), for every start on its own."""
    head = model.head
    h = model.encoder(batch.x, batch.segment, batch.mask, None)
    allowed = (batch.segment == 1) & batch.mask
    allowed[:, 0] = True
    if isinstance(head, LinearSpanHead):
        start, end = head.logits(h)
        ends = end[:, None].expand(-1, T, -1)
    else:
        assert isinstance(head, SpanHead)
        start = head.start(h)[..., 0]
        if head.end_hidden is None:
            ends = head.end(h)[..., 0][:, None].expand(-1, T, -1)
        else:
            pairs = torch.cat(
                [h[:, :, None].expand(-1, -1, T, -1), h[:, None].expand(-1, T, -1, -1)], -1
            )
            ends = head.end(nn.functional.gelu(head.end_hidden(pairs)))[..., 0]
    start = start.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    return start, ends.masked_fill(~allowed[:, None], -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("beam", [4, 20])
@pytest.mark.parametrize("variant", ["joint", "independent", "hf"])
@torch.no_grad()
def test_beam_against_all_spans(variant: str, beam: int) -> None:
    options = {} if variant == "hf" else {"end": variant}
    model = model_of("qa", 2, "hf" if variant == "hf" else "paper", beam=beam, **options).double()
    batch = batch_of("qa")
    found = model.predict(batch)
    K = min(beam, T)
    assert found["start_index"].shape == (B, K)
    assert found["end_index"].shape == (B, K, K)
    start, end = log_probs(model, batch)
    for i in range(B):
        best = start[i].argsort(descending=True)[:K]
        for k, s in enumerate(best.tolist()):
            if not start[i, s].isfinite():
                assert (found["start_log_probs"][i, k:] < -900).all()
                break
            assert found["start_index"][i, k] == s
            torch.testing.assert_close(found["start_log_probs"][i, k], start[i, s])
            expected, index = end[i, s].sort(descending=True)
            inside = expected[:K].isfinite()
            ours = found["end_log_probs"][i, k]
            torch.testing.assert_close(ours[inside], expected[:K][inside])
            assert torch.equal(found["end_index"][i, k][inside], index[:K][inside])
            assert (ours[~inside] < -900).all()
        # With room for all starts and ends, the best span of the beam is the best of all.
        if beam >= T:
            span = found["start_log_probs"][i, :, None] + found["end_log_probs"][i]
            assert span.max().item() == pytest.approx((start[i, :, None] + end[i]).max().item())


@torch.no_grad()
def test_null_score_of_the_linear_head() -> None:
    """[CLS] against the best span of the passage, in order and not too long."""
    draw = torch.Generator().manual_seed(5)
    n, question = 90, 7
    head = build_head("qa", CONFIG, 2, "hf").double()
    h = torch.randn(2, n, D, generator=draw, dtype=torch.float64)
    # Start and end are the first two channels: the best span has just the longest length, a
    # better end comes one token later, and [CLS] would be a better start.
    assert isinstance(head, LinearSpanHead)
    head.out.weight.copy_(torch.eye(2, D))
    h[0, 20, 0], h[0, 20 + ANSWER_TOKENS - 1, 1], h[0, 20 + ANSWER_TOKENS, 1] = 30.0, 9.0, 12.0
    h[:, 0, 0] = 40.0
    mask = torch.arange(n) < torch.tensor([[n], [n - 40]])
    segment = ((torch.arange(n) >= question) & mask).long()
    batch = TaskBatch(torch.zeros(2, n, dtype=torch.int64), segment, mask, {})
    start, end = head.logits(h)
    for i, last in enumerate((n, n - 40)):
        best = max(
            (start[i, s] + end[i, e]).item()
            for s in range(question, last)
            for e in range(s, min(s + ANSWER_TOKENS, last))
        )
        null = (start[i, 0] + end[i, 0]).item()
        assert head.predict(h, batch)["answerable"][i].item() == pytest.approx(null - best)


def test_without_answerability_the_score_is_neutral() -> None:
    model = model_of("qa", 2, "paper", answerable="none")
    assert not any("answer" in name for name, _ in model.named_parameters())
    assert (model.predict(batch_of("qa"))["answerable"] == 0).all()


# ---------------------------------------------------------------------- building


def test_initialisation() -> None:
    config = dataclasses.replace(CONFIG, hidden_size=256, attention_heads=4)
    heads: list[Head] = [build_head("qa", config, 2), build_head("classification", config, 2, "hf")]
    for head in heads:
        initialise_head(head, 3)
        first = {name: value.clone() for name, value in head.named_parameters()}
        initialise_head(head, 4)
        for name, value in head.named_parameters():
            if name.endswith("bias"):
                assert (value == 0).all()
            else:
                assert not torch.equal(value, first[name])
                inputs, outputs = value.shape[1], value.shape[0]
                glorot = (2 / (inputs + outputs)) ** 0.5
                std = glorot if head.form == "paper" else 0.02
                assert value.std().item() == pytest.approx(std, rel=0.25)
        initialise_head(head, 3)
        assert all(torch.equal(value, first[name]) for name, value in head.named_parameters())
    paper = dict(heads[0].named_parameters())["end_hidden.weight"]
    assert paper.abs().max().item() <= (6 / (512 + 512)) ** 0.5  # uniform, not normal


@pytest.mark.parametrize(
    ("kind", "outputs"), [("classification", 1), ("regression", 2), ("tagging", 0)]
)
def test_impossible_outputs(kind: Kind, outputs: int) -> None:
    with pytest.raises(ElectraError, match=f"{kind} head cannot have {outputs} outputs") as error:
        build_head(kind, CONFIG, outputs)
    assert error.value.fix


def test_names_of_the_state() -> None:
    """Checkpoints and exports rely on them."""
    names = {name for name in model_of("qa", 2, "paper").state_dict() if name.startswith("head.")}
    layers = ("start", "end_hidden", "end", "answer_hidden", "answer")
    assert names == {f"head.{layer}.{end}" for layer in layers for end in ("weight", "bias")}
    head = build_head("classification", CONFIG, C, "hf")
    assert isinstance(head, SentenceHead)
    assert set(head.state_dict()) == {"dense.weight", "dense.bias", "out.weight", "out.bias"}
