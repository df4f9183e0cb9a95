"""Detection of replaced tokens: probabilities, places in the text, alternatives, colours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.text import Text

from electra.config import DataConfig, EncoderConfig, GeneratorConfig, PretrainConfig
from electra.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from electra.errors import ElectraError
from electra.formats import hf, hf_export
from electra.formats.layout import build_generator
from electra.objectives import SpecialIds, build_objective
from electra.runtime import whole_vectors
from electra.use.detect import (
    Alternative,
    Detection,
    Token,
    Word,
    cut,
    detect,
    probabilities,
    render,
)

TEXT = "the  Chef ate cooking, 東京!"
WORDS = ["the", "Chef", "ate", "cooking", ",", "東", "京", "!"]
PIECES = ["the", "chef", "ate", "cook", "##ing", ",", "東", "京", "!"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with random but lively weights."""
    directory = tmp_path_factory.mktemp("detect")
    (directory / "vocab.txt").write_text(
        "".join(f"{token}\n" for token in (*SPECIAL_TOKENS, *PIECES, "meal", "the2")), "utf-8"
    )
    config = PretrainConfig(
        encoder=EncoderConfig(
            layers=3,
            hidden_size=22,
            ffn_size=34,
            attention_heads=2,
            embedding_size=14,
            max_positions=17,
        ),
        generator=GeneratorConfig(width=0.5),
        data=DataConfig(sequence_length=11),
    )
    vocab_size = Tokenizer.load(directory / "vocab.txt").vocab_size
    # Three rows of the table stand for no token and must never be proposed.
    objective = build_objective(config, vocab_size + 3, SpecialIds(*range(5)))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            scale = 2.0 if "word" in name else 0.4
            parameter += scale * torch.randn(parameter.shape, generator=draw)
            if name == "generator_head.bias":
                parameter[vocab_size:] = 100.0
    hf_export.export(objective, config, directory / "vocab.txt", directory / "out")
    return directory / "out"


def test_words_and_their_characters(model: Path) -> None:
    result = detect(model, TEXT)
    assert [TEXT[word.start : word.end] for word in result.words] == WORDS
    assert [token.token for token in result.tokens] == PIECES
    cooking = result.words[3]
    assert [TEXT[t.start : t.end] for t in cooking.tokens] == ["cook", "ing"]
    assert cooking.replaced == max(token.replaced for token in cooking.tokens)


@whole_vectors  # as `detect` computes: other sums differ by a millionth
@torch.no_grad()
def test_probabilities_are_those_of_the_discriminator(model: Path) -> None:
    encoder, head, tokenizer = hf.load_discriminator(model)
    x = torch.tensor([tokenizer.encode(TEXT)])
    expected = head(encoder(x, torch.zeros_like(x), None, None)).sigmoid()[0, 1:-1]
    found = [token.replaced for token in detect(model, TEXT).tokens]
    assert found == pytest.approx(expected.tolist(), abs=1e-6)
    assert max(found) - min(found) > 0.05


@torch.no_grad()
def test_alternatives_are_those_of_the_generator(model: Path) -> None:
    loaded = hf.load_pretrained(model)
    encoder, head = build_generator(loaded.network("generator"))
    tokenizer = loaded.needed_tokenizer()
    result = detect(model, TEXT, alternatives=4)
    top = max(token.replaced for token in result.tokens)
    for i, token in enumerate(result.tokens):
        is_suspicious = token.replaced > 0.5 or token.replaced == top
        if not is_suspicious:
            assert token.alternatives == ()
            continue
        x = torch.tensor([tokenizer.encode(TEXT)])
        x[0, i + 1] = tokenizer.mask_id
        h = encoder(x, torch.zeros_like(x), None, None)[0, i + 1]
        g = head(h[None], encoder.embeddings.word.weight)[0, : tokenizer.vocab_size]
        p, best = g.softmax(-1).topk(4)
        likely = int((p >= 0.01).sum())
        assert [a.token for a in token.alternatives] == tokenizer.decode_tokens(best[:likely])
        found = [a.probability for a in token.alternatives]
        assert found == pytest.approx(p[:likely].tolist(), rel=1e-4)


def test_only_alternatives_of_a_percent_are_worth_showing(model: Path) -> None:
    result = detect(model, TEXT, alternatives=16)
    asked = [token.alternatives for token in result.tokens if token.alternatives]
    shares = [a.probability for alternatives in asked for a in alternatives]
    assert min(shares) >= 0.01
    assert min(map(len, asked)) < 16 == hf.load_pretrained(model).needed_tokenizer().vocab_size
    for shown in (render(result).plain, result._repr_html_()):
        assert " 0%" not in shown.partition("the generator's")[2]


def test_where_the_generator_is_found(model: Path) -> None:
    whole = detect(model, TEXT)
    assert detect(model / "discriminator", TEXT) == whole
    assert any(token.alternatives for token in whole.tokens)
    assert not any(token.alternatives for token in detect(model, TEXT, alternatives=0).tokens)
    with pytest.raises(ElectraError, match="no discriminator"):
        detect(model / "generator", TEXT)


def test_a_discriminator_alone_has_no_alternatives(model: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.symlink_to(model / "discriminator")
    assert not any(token.alternatives for token in detect(alone, TEXT).tokens)


@pytest.mark.parametrize("text", ["", "  \n\t"])
def test_a_text_without_words(text: str, model: Path) -> None:
    with pytest.raises(ElectraError, match="no token"):
        detect(model, text)


@pytest.mark.parametrize("words", [*range(1, 40), 400])
@whole_vectors
def test_a_long_text_is_read_in_rows_of_pretraining(words: int, model: Path) -> None:
    loaded = hf.load_pretrained(model)  # 17 positions, trained on 11
    text = " ".join(PIECES[i * i // 3 % 4] for i in range(words))
    encoding, rows = cut(loaded, text)
    ids, room = encoding.ids, 9
    assert [i for row in rows for i in row.own] == list(range(words))
    for row in rows:
        read = list(range(row.first, row.first + row.x.shape[1] - 2))
        assert row.x[0, 1:-1].tolist() == [ids[i] for i in read]
        assert len(read) == min(room, words)
        for i in row.own:  # the middle of no other row is nearer, but for halves
            ways = [abs(2 * (i - other.first) - room + 1) for other in rows]
            assert abs(2 * (i - row.first) - room + 1) <= min(ways) + 1
    result = detect(loaded, text)
    assert [token.token for token in result.tokens] == text.split()
    shown = max(result.tokens, key=lambda token: token.replaced)
    assert shown.alternatives
    for row in rows:
        part = probabilities(loaded.network("discriminator"), row.x)
        for i in row.own:
            assert result.tokens[i].replaced == pytest.approx(part[i - row.first].item(), abs=1e-6)


def test_alternatives_of_a_long_text_are_those_of_its_row(model: Path) -> None:
    loaded = hf.load_pretrained(model)
    text = " ".join(PIECES[i * i // 3 % 4] for i in range(31))
    found, seen = detect(loaded, text), 0
    for row in cut(loaded, text)[1]:
        part = [found.tokens[i] for i in range(row.first, row.first + row.x.shape[1] - 2)]
        alone = detect(loaded, " ".join(token.token for token in part))
        for i in row.own:
            here, there = found.tokens[i], alone.tokens[i - row.first]
            assert here.replaced == pytest.approx(there.replaced, abs=1e-6)
            if here.replaced > 0.51:
                seen += 1
                names = [[a.token for a in token.alternatives] for token in (here, there)]
                assert names[0] == names[1] != []
    assert seen > 1


def test_rows_without_a_suspicious_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("electra.use.detect._SUSPICIOUS", 1.0)
    tokens = detect(model, "the chef ate " * 9).tokens
    assert [bool(t.alternatives) for t in tokens].count(True) == 1
    assert max(tokens, key=lambda token: token.replaced).alternatives


def test_a_model_that_does_not_say_its_rows_has_those_of_its_positions(
    model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model / "discriminator", tmp_path / "alone")
    assert hf.load_pretrained(tmp_path / "alone").row_length == 17
    assert len(cut(hf.load_pretrained(tmp_path / "alone"), "the " * 15)[1]) == 1
    assert hf.load_pretrained(model).row_length == 11


def test_special_tokens_in_the_text_are_tokens(model: Path) -> None:
    result = detect(model, "the [MASK] ate")
    assert [token.token for token in result.tokens] == ["the", "[MASK]", "ate"]


def test_colours() -> None:
    proposed = (Alternative("cooked", 0.6), Alternative("made", 0.25))
    words = (
        Word((Token("the", 0, 3, 0.01),)),
        Word((Token("ate", 4, 7, 1.0, proposed), Token("##s", 7, 8, 0.4))),
    )
    shown = render(Detection("the ates", words))
    assert isinstance(shown, Text)
    assert shown.plain.splitlines()[0] == "the ates"
    assert "cooked 60%, made 25%" in shown.plain
    console = Console(force_terminal=True, color_system="truecolor", width=80)
    with console.capture() as capture:
        console.print(shown)
    line = capture.get().splitlines()[0]
    assert line.startswith("the ")  # without any colour
    assert "48;2;255;0;0mate" in line
    assert "48;2;102;0;0ms" in line


def test_without_colours_what_is_suspicious_is_named() -> None:
    """In a pipe, also where the generator finds nothing likely or is not there."""
    words = (
        Word((Token("the", 0, 3, 0.5),)),
        Word((Token("at", 4, 6, 0.51), Token("##es", 6, 8, 0.4))),
        Word((Token("a", 9, 10, 0.97, (Alternative("one", 0.25),)),)),
        Word((Token("b", 11, 12, 0.99),)),
    )
    console = Console(color_system=None, width=80)
    with console.capture() as capture:
        console.print(render(Detection("the ates a b", words)))
    assert capture.get().splitlines() == [
        "the ates a b",
        "at  replaced 51%",
        "a  replaced 97%; the generator's: one 25%",
        "b  replaced 99%",
    ]


def test_a_discriminator_alone_names_what_is_suspicious(model: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").symlink_to(model / "discriminator")
    found = detect(tmp_path / "alone", TEXT)
    expected = [t for t in found.tokens if t.replaced > 0.5]
    assert expected
    assert [line.split()[0] for line in render(found).plain.splitlines()[1:]] == [
        TEXT[t.start : t.end] for t in expected
    ]


def test_a_text_cannot_steer_the_terminal() -> None:
    text = "a\x1b[31m\x07\rb\u202ec"
    shown = render(Detection(text, (Word((Token("a", 0, 1, 0.9),)),))).plain
    assert shown == "a\ufffd[31m\ufffd\ufffdb\ufffdc\na  replaced 90%"
    shown = render(Detection("\x1b", (Word((Token("a", 0, 1, 0.9),)),))).plain
    assert shown == "\ufffd\n\ufffd  replaced 90%"
    joined = "می\u200cخواهم"
    assert render(Detection(joined, ())).plain == joined


def test_reading_a_model_does_not_load_the_compiler(model: Path) -> None:
    """Which takes as long as importing torch does."""
    code = "import sys; from pathlib import Path; from electra.use.detect import detect; "
    code += "detect(Path(sys.argv[1]), 'the chef'); sys.exit('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_generator_on_the_gpu_gives_the_same_alternatives(model: Path) -> None:
    loaded = hf.load_pretrained(model)
    loaded.network("generator").modules.to("cuda")  # as `electra serve` does
    found, expected = detect(loaded, TEXT).tokens, detect(model, TEXT).tokens
    assert any(token.alternatives for token in expected)
    for one, other in zip(found, expected, strict=True):
        assert [a.token for a in one.alternatives] == [a.token for a in other.alternatives]
