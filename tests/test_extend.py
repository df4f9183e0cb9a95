"""A larger vocabulary: old text keeps its ids and its outputs, new words get the mean of theirs."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import SEQUENCE_LENGTH, SPECIAL, commands_of, language
from hypothesis import example, given, settings
from hypothesis import strategies as st

from electra import cli
from electra.config import PretrainConfig
from electra.data.corpus import Corpus, prepare
from electra.data.tokenizer import SPECIAL_TOKENS, Tokenizer, _bert, normalizers
from electra.errors import ElectraError
from electra.formats import card, hf, hf_export
from electra.formats.extend import choose, extend
from electra.objectives import build_objective
from electra.pretrain import pretrain
from electra.runlog import read_metrics

WORDS = ["riverbird", "stonewind", "Firesong", "bright-riverbird", "naïve"]


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The language, with some long words that occur nowhere else."""
    path = tmp_path_factory.mktemp("domain") / "domain.txt"
    lines = language(120, seed=9).split("\n")
    mixed = [f"one {WORDS[i % len(WORDS)]} {line}" if line else "" for i, line in enumerate(lines)]
    path.write_text("\n".join(mixed))
    return path


@pytest.fixture
def model(micro: PretrainConfig, tokenizer: Tokenizer, tokenizer_dir: Path, tmp_path: Path) -> Path:
    """With weights large enough that every part matters."""
    objective = build_objective(micro, tokenizer.vocab_size, SPECIAL)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    hf_export.export(objective, micro, tokenizer_dir, tmp_path / "model")
    return tmp_path / "model"


def test_new_words_are_the_mean_of_their_pieces_and_old_text_stays(
    model: Path, domain: Path, text: Path, tmp_path: Path
) -> None:
    done = extend(model, [domain], tmp_path / "new", tokens=4)
    assert done.after < done.before
    before, after = hf.load_pretrained(model), hf.load_pretrained(tmp_path / "new")
    old, new = before.needed_tokenizer(), after.needed_tokenizer()
    counts = Counter(re.findall("[a-z]+", domain.read_text().lower().replace("ï", "i")))
    assert old.encode("riverbird")[1:-1] == [old.unk_id]  # there is no ##b
    gains = {word: n * (len(old.encode(word)) - 3) for word, n in counts.items()}
    gains["riverbird"] = counts["riverbird"]
    assert list(done.tokens) == sorted(gains, key=lambda word: (-gains[word], word))[:4]
    assert set(done.tokens) == {"riverbird", "firesong", "stonewind", "naive"}
    first = old.vocab_size
    assert new.vocab_size == first + 4
    assert new.encode("Riverbird")[1:-1] == [first + done.tokens.index("riverbird")]
    for kind in ("discriminator", "generator"):
        a, b = before.network(kind).tensors, after.network(kind).tensors
        assert a.keys() == b.keys()
        for name, tensor in b.items():
            if name in ("encoder.embeddings.word.weight", "head.bias"):
                assert torch.equal(tensor[:first], a[name])
                for i, word in enumerate(done.tokens):
                    pieces = old.encode(word)[1:-1]
                    assert len(pieces) > 1 or word == "riverbird"
                    torch.testing.assert_close(tensor[first + i], a[name][pieces].mean(0))
            else:
                assert torch.equal(tensor, a[name])
    assert len(after.network("generator").tensors["head.bias"]) == first + 4

    # Old text: the same ids, and the same outputs of both networks.
    lines = text.read_text().splitlines()[:50]
    assert [new.encode(line) for line in lines] == [old.encode(line) for line in lines]
    for line in lines[:5]:
        x = torch.tensor([new.encode(line)])
        mask, segment = torch.ones_like(x, dtype=torch.bool), torch.zeros_like(x)
        logits = [
            [
                hf_export._logits(network, network.modules, x, segment, mask)[..., : max(1, first)]
                for network in (model.network("discriminator"), model.network("generator"))
            ]
            for model in (before, after)
        ]
        assert torch.equal(logits[0][0], logits[1][0])
        torch.testing.assert_close(logits[0][1], logits[1][1], rtol=0, atol=1e-6)


@example(vocabulary=["a"], inside=["bca"], words=["ab"], other=["abca"])
@settings(max_examples=150, deadline=None)
@given(
    vocabulary=st.lists(
        st.text("abc", min_size=1, max_size=3), min_size=1, max_size=8, unique=True
    ),
    inside=st.lists(st.text("abc", min_size=1, max_size=3), max_size=8, unique=True),
    words=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=12),
    other=st.lists(st.text("abc", min_size=1, max_size=8), max_size=12),
)
def test_ids_change_only_where_a_new_token_stands(
    vocabulary: list[str], inside: list[str], words: list[str], other: list[str]
) -> None:
    """Of any vocabulary, also one in which a word that begins with a new token could not end."""
    tokens = [*SPECIAL_TOKENS, *vocabulary, *(f"##{piece}" for piece in inside)]
    old = Tokenizer(_bert(tokens, normalizers.BertNormalizer(lowercase=True)))
    try:
        added = choose(Counter(words * 2), old, 3)
    except ElectraError:
        return
    new = old.with_tokens(added)
    assert new.vocab_size == old.vocab_size + len(added)
    for word in [*words, *other]:
        ids = new.encode(word)
        if max(ids) < old.vocab_size:
            assert ids == old.encode(word)
        assert not (old.unk_id in ids and old.unk_id not in old.encode(word))
    whole = [token for token in added if not token.startswith("##")]
    assert [new.encode(word)[1:-1] for word in whole] == [
        [new.backend.token_to_id(word)] for word in whole
    ]


def test_training_goes_on_with_the_new_tokens(
    model: Path, domain: Path, micro: PretrainConfig, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    extend(model, [domain], new, tokens=4)
    pretrained = hf.load_pretrained(new)
    tokenizer = pretrained.needed_tokenizer()
    options = {"sequence_length": SEQUENCE_LENGTH, "held_out_percent": 10.0, "workers": 1}
    prepare([domain], tokenizer, tmp_path / "corpus", **options)
    corpus = Corpus.open(tmp_path / "corpus")
    config = hf.config_of(pretrained, micro)
    initial, notes = hf.initial_state(pretrained, config, corpus.vocab_size)
    assert notes == ()
    pretrain(config, corpus, tmp_path / "run", initial=initial, quiet=True)
    losses = [m["mlm_loss"] for m in read_metrics(tmp_path / "run") if m["kind"] == "train"]
    assert losses[-1] < losses[0]
    hf_export.export_run(tmp_path / "run", tmp_path / "export")
    trained = hf.load_pretrained(tmp_path / "export").network("discriminator").tensors
    name = "encoder.embeddings.word.weight"
    start = pretrained.network("discriminator").tensors[name]
    moved = (trained[name] - start).abs().amax(1)
    assert (moved[-4:] > 0).all()


def test_the_commands_of_the_page(
    model: Path,
    domain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(domain.read_bytes())
    assert model == tmp_path / "model"
    short = ["--data.batch-size", "2", "--run.device", "cpu", "--run.threads", "1", "--quiet"]
    length = ["--data.sequence-length", str(SEQUENCE_LENGTH), "--run.train-steps", "2"]
    more = {
        "prepare": ["--length", str(SEQUENCE_LENGTH), "--workers", "1"],
        "pretrain": [*short, *length],
    }
    for command in commands_of("continue.md"):
        if command[0] == "pretrain":  # a shorter run
            command = command[: command.index("--run.train-steps")]
        code = cli.run([*command, *more.get(command[0], [])])
        assert code == 0, capsys.readouterr().err
    adapted = hf.load_pretrained(tmp_path / "adapted-model")
    wider = hf.load_pretrained(tmp_path / "wider")
    assert adapted.needed_tokenizer().hash == wider.needed_tokenizer().hash
    old = hf.load_pretrained(model)
    assert adapted.network("generator").vocab_size > old.network("generator").vocab_size


def test_rows_that_no_token_used_are_taken_first(model: Path, domain: Path, tmp_path: Path) -> None:
    """Tables are often larger than their vocabulary, for the sake of the hardware."""
    before = hf.load_pretrained(model)
    padded = []
    for network in (before.network("discriminator"), before.network("generator")):
        tensors = dict(network.tensors)
        for name in ("encoder.embeddings.word.weight", "head.bias"):
            if name in tensors:
                rows = torch.full((3, *tensors[name].shape[1:]), 7.0)
                tensors[name] = torch.cat([tensors[name], rows])
        padded.append(replace(network, vocab_size=network.vocab_size + 3, tensors=tensors))
    hf_export.export_networks(
        tuple(padded), before.needed_tokenizer(), tmp_path / "padded", {}, card.Story({})
    )
    for tokens, rows in ((2, 3), (4, 4)):
        extend(tmp_path / "padded", [domain], tmp_path / "new", tokens=tokens)
        after = hf.load_pretrained(tmp_path / "new")
        table = after.network("generator").tensors["encoder.embeddings.word.weight"]
        assert len(table) == before.network("generator").vocab_size + rows
        assert (table == 7.0).all(1).sum() == rows - tokens
        assert after.needed_tokenizer().vocab_size == before.needed_tokenizer().vocab_size + tokens


def test_the_command(
    model: Path, domain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = str(model / "discriminator")
    out = tmp_path / "out"
    arguments = ["extend", alone, "--input", str(domain), "--out", str(out), "--tokens", "2"]
    assert cli.run(arguments) == 0
    shown = capsys.readouterr().out
    assert "2 tokens added: stonewind, naive" in shown
    assert "logits and token ids equal in transformers" in shown
    assert [p.name for p in out.iterdir() if p.is_dir()] == ["discriminator"]
    assert json.loads((out / "electra.json").read_bytes())["tokens_added"] == 2
    vocabulary = (out / "discriminator" / "vocab.txt").read_text().splitlines()
    assert vocabulary[-2:] == ["stonewind", "naive"]


def test_what_cannot_be_extended(model: Path, domain: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ElectraError, match="0 tokens cannot be added"):
        extend(model, [domain], tmp_path / "new", tokens=0)
    (tmp_path / "a.txt").write_text("one one .\n")
    with pytest.raises(ElectraError, match="No word of the text is split"):
        extend(model, [tmp_path / "a.txt"], tmp_path / "new", tokens=5)
    (model / "electra.json").unlink()  # as of a model from elsewhere, with a tokenizer of its kind
    for file in model.rglob("tokenizer.json"):
        parts = json.loads(file.read_bytes())
        parts["pre_tokenizer"] = {"type": "Whitespace"}
        file.write_text(json.dumps(parts))
    with pytest.raises(ElectraError, match="cannot be added to this tokenizer"):
        extend(model, [text], tmp_path / "new", tokens=5)
