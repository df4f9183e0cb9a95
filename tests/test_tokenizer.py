"""Tokenizer: ids are those of `tokenizers` and transformers; training repeats bit for bit."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

import electra.data.tokenizer
from electra.data.tokenizer import (
    SPECIAL_TOKENS,
    LineEncoder,
    Tokenizer,
    take_runs,
    train_tokenizer,
)
from electra.errors import ElectraError, Stopped

ORACLE = Path(__file__).parent / "oracle"
NASTY = (
    "İstanbul ISTANBUL ß ẞ ΟΔΟΣ ὈΔΥΣΣΕΎΣ Ǆ ﬁ ¼ café cafe\u0301 Å\u030a e\u0301\u0323 \u0301x",
    "漢字かなカナ 한국어 中文,文字。 \U00020000 ｆｕｌｌ",
    "👩\u200d👩\u200d👧 \u200b\u2060\ufeff zero\u200bwidth soft\u00adhyphen",
    "nb\u00a0sp thin\u2009sp line\u2028sep par\u2029sep ideo\u3000graphic",
    "ogham\u1680 mongolian\u180e nel\u0085x",
    "ctrl\x01\x02 vt\x0bx ff\x0cx fs\x1cx gs\x1dx rs\x1ex us\x1fx del\x7f c1\x9f\ufffd",
    "[MASK] x[MASK]y [mask] [MASK][SEP] [CLS [PAD]. [UNK], [MA\x1cSK] [MA\x01SK] MASK] [[MASK]]",
    "don't U.S.A. u.s.a. 3.14 a_b x+y=z <b> $5 ^^ `` ~~ “quotes” —dash… ‹›¿¡ §¶",
    "",
    "   ",
    "a" * 99 + " " + "a" * 100 + " " + "a" * 101,
    "\ue000 \U0010ffff \u0378 \ud7ff",
)


def vocabulary(directory: Path, *, config: dict[str, Any] | None = None) -> Path:
    """A vocabulary with all letters of the nasty lines that it can have, and some longer pieces."""
    characters = sorted({c for line in NASTY for c in line + line.lower() if not c.isspace()})
    pieces = ["the", "##ing", "mask", "##sk", "cafe", "café", "istanbul", "οδος", "οδοσ", "aa"]
    tokens = [*SPECIAL_TOKENS, *characters, *(f"##{c}" for c in characters), *pieces]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "vocab.txt"
    path.write_bytes("".join(f"{token}\n" for token in tokens).encode())
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def variants(directory: Path) -> dict[str, Tokenizer]:
    uncased = Tokenizer.load(vocabulary(directory))
    cased = Tokenizer.load(vocabulary(directory), lowercase=False)
    accents = Tokenizer.load(vocabulary(directory / "accents", config={"strip_accents": False}))
    unclean = Tokenizer.from_json(uncased.to_json())
    unclean.backend.normalizer = normalizers.BertNormalizer(clean_text=False, lowercase=True)
    bare = Tokenizer.from_json(uncased.to_json())
    bare.backend.normalizer = None
    added = Tokenizer.from_json(uncased.to_json())
    added.backend.add_tokens(["U.S.A.", AddedToken("fi", normalized=False, single_word=True)])
    spaced = Tokenizer.from_json(uncased.to_json())
    spaced.backend.add_tokens(["thin sp"])
    split = Tokenizer.from_json(uncased.to_json())
    split.backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return {
        "uncased": uncased,
        "cased": cased,
        "accents kept": accents,
        "not cleaned": Tokenizer(unclean.backend),
        "no normaliser": Tokenizer(bare.backend),
        "added tokens": Tokenizer(added.backend),
        "added token with a space": Tokenizer(spaced.backend),
        "other pre-tokenizer": Tokenizer(split.backend),
    }


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return variants(tmp_path_factory.mktemp("tokenizers"))


def library_ids(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
    encodings = tokenizer.backend.encode_batch(lines, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def fast_ids(encoder: LineEncoder, lines: list[str]) -> list[list[int]]:
    ids, lengths = encoder.encode_lines(lines)
    assert len(ids) == lengths.sum()
    assert len(lengths) == len(lines)
    stops = np.cumsum(lengths)
    return [ids[stop - size : stop].tolist() for stop, size in zip(stops, lengths, strict=True)]


# ---------------------------------------------------------------- the fast path


def test_nasty_lines_have_the_ids_of_the_library(tokenizers: dict[str, Tokenizer]) -> None:
    lines = list(NASTY) + [line[::-1] for line in NASTY] + [" ".join(NASTY)]
    for name, tokenizer in tokenizers.items():
        encoder = LineEncoder(tokenizer)
        for _ in range(2):  # the second time from the cache
            assert fast_ids(encoder, lines) == library_ids(tokenizer, lines), name


characters = st.one_of(
    st.sampled_from(sorted(set("".join(NASTY)))),
    st.sampled_from([" ", "\t", "[", "]", "[MASK]", "[SEP]", "\x1c", "\x85", "\u0301", "thin sp"]),
    st.characters(exclude_categories=["Cs"], exclude_characters="\n"),
)
lines_strategy = st.lists(st.lists(characters, max_size=20).map("".join), max_size=5)


@settings(max_examples=250, deadline=None)
@given(lines=lines_strategy)
def test_any_lines_have_the_ids_of_the_library(
    tokenizers: dict[str, Tokenizer], lines: list[str]
) -> None:
    for name, tokenizer in tokenizers.items():
        assert fast_ids(LineEncoder(tokenizer), lines) == library_ids(tokenizer, lines), name


@settings(max_examples=250, deadline=None)
@given(texts=lines_strategy, ascii=st.text("a-[].! MASK_é\u0301", max_size=60))
def test_cutting_a_long_text_changes_no_token_and_no_offset(
    tokenizers: dict[str, Tokenizer], texts: list[str], ascii: str
) -> None:
    marked = Tokenizer.from_json(tokenizers["uncased"].to_json())
    marked.backend.add_tokens([AddedToken("a-!", normalized=False)])
    texts = [*texts, ascii, "".join(texts), *NASTY]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(electra.data.tokenizer, "_PIECE", 3)
        for name, tokenizer in (tokenizers | {"marks in a token": marked}).items():
            wanted = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
            found = list(tokenizer.encode_with_offsets(texts))
            for text, want, (ids, offsets) in zip(texts, wanted, found, strict=True):
                assert ids.tolist() == want.ids, (name, text)
                assert [*map(tuple, offsets.tolist())] == want.offsets, (name, text)
        assert len(list(tokenizers["uncased"]._pieces("!" * 100))) > 10


def test_every_character_has_the_ids_of_the_library(tokenizers: dict[str, Tokenizer]) -> None:
    """All of Unicode, each character alone, inside a word and before a space."""
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and c != 0x0A]
    blocks = [points[start : start + 64] for start in range(0, len(points), 64)]
    lines = [" ".join(f"a{c}b {c} a{c} b" for c in block) for block in blocks]
    chosen = [line for line in lines if ord(line[1]) < 0x3100] + lines[200::40]
    tokenizer = tokenizers["uncased"]
    encoder = LineEncoder(tokenizer)
    for start in range(0, len(chosen), 100):
        batch = chosen[start : start + 100]
        assert fast_ids(encoder, batch) == library_ids(tokenizer, batch)


def test_the_cache_is_bounded(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LineEncoder, "_MAX_WORDS", 50)
    monkeypatch.setattr(LineEncoder, "_MAX_PIECES", 50)
    monkeypatch.setattr(LineEncoder, "_MAX_CHARACTERS", 2000)
    tokenizer = tokenizers["uncased"]
    encoder = LineEncoder(tokenizer)
    rng = random.Random(0)
    for number in range(100):
        size = 300 if number % 10 == 0 else 5
        lines = [" ".join("".join(rng.choices("abcé,.", k=size)) for _ in range(8))]
        assert fast_ids(encoder, lines) == library_ids(tokenizer, lines)
        assert len(encoder._numbers) <= 50 + 8
        assert encoder._piece_ids.cache_info().currsize <= 50


def test_only_local_tokenizers_take_the_fast_path(tokenizers: dict[str, Tokenizer]) -> None:
    local = {name for name, tokenizer in tokenizers.items() if tokenizer.is_word_local}
    assert set(tokenizers) - local == {"added token with a space", "other pre-tokenizer"}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=20))
def test_runs_are_slices(runs: list[tuple[int, int]]) -> None:
    values = np.arange(100, 120, dtype=np.uint32)
    starts, lengths = np.array(runs, np.int64).reshape(-1, 2).T
    expected = [value for start, size in runs for value in values[start : start + size]]
    assert take_runs(values, starts, lengths).tolist() == expected


# ---------------------------------------------------------------- loading and saving


def test_the_reference_tokens_of_the_released_code() -> None:
    tokenizer = Tokenizer.load(ORACLE / "builder_vocab.txt")
    rows = json.loads((ORACLE / "builder_tokens.json").read_text())
    for row in rows:
        ((ids, offsets),) = tokenizer.encode_with_offsets([row["line"]])
        assert ids.tolist() == row["ids"]
        assert tokenizer.decode_tokens(ids) == row["tokens"]
        assert len(offsets) == len(ids)
    assert fast_ids(LineEncoder(tokenizer), [row["line"] for row in rows]) == [
        row["ids"] for row in rows
    ]


def test_special_ids_and_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(vocabulary(tmp_path))
    assert tokenizer.special_names == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    names = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id)
    assert (*names, tokenizer.mask_id) == (0, 1, 2, 3, 4)
    assert tokenizer.decode_tokens(tokenizer.encode("a", "b")) == [
        *("[CLS]", "a", "[SEP]", "b", "[SEP]")
    ]
    assert tokenizer.backend.encode("a", "b").type_ids == [0, 0, 0, 1, 1]
    ((_, offsets),) = tokenizer.encode_with_offsets(["a é"])
    assert offsets.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("name", ["uncased", "cased", "accents kept", "other pre-tokenizer"])
def test_saving_and_loading_keeps_ids_and_hash(
    tokenizers: dict[str, Tokenizer], tmp_path: Path, name: str
) -> None:
    tokenizer = tokenizers[name]
    tokenizer.save(tmp_path / "a")
    again = Tokenizer.load(tmp_path / "a")
    again.save(tmp_path / "b")
    assert again.hash == tokenizer.hash == Tokenizer.load(tmp_path / "b" / "tokenizer.json").hash
    assert (again.lowercase, again.vocab_size) == (tokenizer.lowercase, tokenizer.vocab_size)
    for file in ("tokenizer.json", "vocab.txt", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert library_ids(again, list(NASTY)) == library_ids(tokenizer, list(NASTY))


def test_hashes_tell_tokenizers_apart(tokenizers: dict[str, Tokenizer]) -> None:
    assert len({tokenizer.hash for tokenizer in tokenizers.values()}) == len(tokenizers)


def test_a_configuration_beside_the_vocabulary_is_respected(tmp_path: Path) -> None:
    assert Tokenizer.load(vocabulary(tmp_path / "a")).lowercase
    cased = vocabulary(tmp_path / "b", config={"do_lower_case": False})
    assert not Tokenizer.load(cased).lowercase
    assert Tokenizer.load(cased, lowercase=True).lowercase
    kept = vocabulary(tmp_path / "c", config={"strip_accents": False})
    assert Tokenizer.load(kept.parent).encode("É") != Tokenizer.load(tmp_path / "a").encode("É")


@pytest.mark.parametrize("name", ["uncased", "cased", "accents kept"])
def test_transformers_loads_the_same_ids(
    tokenizers: dict[str, Tokenizer], tmp_path: Path, name: str
) -> None:
    from test_transformers_releases import lines
    from transformers import AutoTokenizer, ElectraConfig

    tokenizer = tokenizers[name]
    tokenizer.save(tmp_path, max_length=77)
    ElectraConfig(vocab_size=tokenizer.vocab_size).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for line in (*NASTY, "Åse så en Elg i Ålesund", "Ein Größenwahn", "东京タワー"):
        encoded = theirs(line, "pair")
        assert encoded["input_ids"] == tokenizer.encode(line, "pair")
        assert encoded["token_type_ids"] == tokenizer.backend.encode(line, "pair").type_ids
    many = lines(10_000)
    assert theirs(many)["input_ids"] == list(map(tokenizer.encode, many))
    assert theirs.model_max_length == 77
    assert (theirs.pad_token_id, theirs.mask_token_id) == (tokenizer.pad_id, tokenizer.mask_id)


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_missing_special_token_is_named(tmp_path: Path, token: str) -> None:
    path = vocabulary(tmp_path)
    path.write_text(path.read_text().replace(f"{token}\n", ""))
    with pytest.raises(ElectraError) as caught:
        Tokenizer.load(path)
    assert token in caught.value.what
    assert str(path) in caught.value.where


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("vocab.txt", b"[PAD]\n\n[UNK]\n", "Blank line"),
        ("vocab.txt", b"[PAD]\na\na\n", "'a' stands on line 2 already"),
        ("vocab.txt", b"[PAD]\n\xff\n", "Cannot read"),
        ("tokenizer.json", b"{}", "not a tokenizer"),
        ("tokenizer.json", b"\x80", "Cannot read"),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ElectraError, match=what) as caught:
        Tokenizer.load(tmp_path)
    assert name in caught.value.where
    assert caught.value.fix


def test_a_directory_without_tokenizer_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ElectraError, match="neither"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ElectraError, match="Cannot read"):
        Tokenizer.load(tmp_path / "vocab.txt")


def test_lowercase_cannot_overrule_a_complete_tokenizer(tmp_path: Path) -> None:
    Tokenizer.load(vocabulary(tmp_path)).save(tmp_path / "saved")
    with pytest.raises(ElectraError, match="lowercase=False was asked"):
        Tokenizer.load(tmp_path / "saved", lowercase=False)


# ---------------------------------------------------------------- training


def sentences(path: Path, size: int = 2000) -> Path:
    """Made-up sentences with many ties between equally frequent pairs."""
    rng = random.Random(1)
    syllables = ["ka", "lo", "mi", "ta", "re", "su", "ni", "vo", "é", "ß", "李", "д"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(400)]
    lines = [" ".join(rng.choices(words, k=8)).capitalize() + "." for _ in range(size)]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def test_training_is_the_same_in_every_process(tmp_path: Path) -> None:
    path = sentences(tmp_path / "a.txt")
    code = (
        "import sys; from electra.data.tokenizer import train_tokenizer\n"
        "t = train_tokenizer([sys.argv[1]], vocab_size=300)\n"
        "print(t.hash, t.vocab_size)"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code, str(path)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(electra.data.tokenizer.__file__).parents[2],
        ).stdout
        for _ in range(10)
    }
    here = {train_tokenizer([path], vocab_size=300) for _ in range(4)}
    assert printed == {f"{tokenizer.hash} 300\n" for tokenizer in here}
    assert len(printed) == 1


def test_a_trained_vocabulary(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([sentences(tmp_path / "a.txt")], vocab_size=300)
    tokens = tokenizer.decode_tokens(range(300))
    assert tuple(tokens[:5]) == SPECIAL_TOKENS
    assert {"k", "##k", "s"} <= set(tokens)
    assert "é" not in tokens  # accents are stripped, as BERT does when lower-casing
    assert "##李" not in tokens  # Chinese characters stand alone
    ids = tokenizer.encode("Kalo mita 李.")
    assert tokenizer.unk_id not in ids
    special = tokenizer.backend.get_added_tokens_decoder()
    assert sorted(special) == [0, 1, 2, 3, 4]
    lines = (tmp_path / "a.txt").read_text(encoding="utf-8").split("\n\n")
    assert fast_ids(LineEncoder(tokenizer), lines) == library_ids(tokenizer, lines)


def test_cased_training_keeps_case_and_accents(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([sentences(tmp_path / "a.txt")], vocab_size=300, lowercase=False)
    assert {"K", "é"} <= set(tokenizer.decode_tokens(range(300)))
    assert tokenizer.encode("É") != tokenizer.encode("é")
    assert not tokenizer.lowercase


def test_accents_that_are_removed_unasked_are_told(tmp_path: Path) -> None:
    told: list[str] = []
    marked = sentences(tmp_path / "a.txt")
    train_tokenizer([marked], vocab_size=300, note=told.append)
    assert "of the letters bear a mark" in told[0]
    assert "--no-lowercase" in told[0]
    (tmp_path / "b.txt").write_text("plain words and one café\n" + "plain words\n" * 50, "utf-8")
    train_tokenizer([tmp_path / "b.txt"], vocab_size=300, note=told.append)
    train_tokenizer([marked], vocab_size=300, note=told.append, lowercase=False)
    train_tokenizer([marked], vocab_size=300, note=told.append, strip_accents=True)
    assert len(told) == 1


def test_little_text_gives_a_smaller_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one two one two three")
    tokenizer = train_tokenizer([path], vocab_size=30522)
    assert tokenizer.vocab_size < 30
    assert tokenizer.decode_tokens(tokenizer.encode("one three"))[1:3] == ["one", "t"]


def test_a_vocabulary_smaller_than_the_alphabet(tmp_path: Path) -> None:
    with pytest.raises(ElectraError, match="too small") as caught:
        train_tokenizer([sentences(tmp_path / "a.txt")], vocab_size=20)
    assert caught.value.where == "vocab_size"


def test_a_sample_without_a_word_is_no_vocabulary(tmp_path: Path) -> None:
    """It would have been five special tokens, and "the text has no more than that"."""
    (tmp_path / "a.txt").write_text("one river\n" * 30)
    with pytest.raises(ElectraError, match="No word was found") as caught:
        train_tokenizer([tmp_path / "a.txt"], vocab_size=97, max_bytes=1)
    assert caught.value.where == "max_bytes"


def test_large_text_is_sampled_the_same_way_every_time(tmp_path: Path) -> None:
    path = sentences(tmp_path / "a.txt")
    limit = path.stat().st_size // 4
    sample = train_tokenizer([path], vocab_size=300, max_bytes=limit)
    assert sample.hash == train_tokenizer([path], vocab_size=300, max_bytes=limit).hash
    assert sample.hash != train_tokenizer([path], vocab_size=300).hash


def test_training_stops_when_asked(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train_tokenizer([sentences(tmp_path / "a.txt")], should_stop=lambda: True)


def test_words_with_special_tokens_stay_whole_tokens(tmp_path: Path) -> None:
    """[MASK] in raw text is the special token, in the fast path as in the library."""
    tokenizer = Tokenizer.load(vocabulary(tmp_path))
    line = "a [MASK] b[MASK]c"
    ids = fast_ids(LineEncoder(tokenizer), [line])[0]
    assert ids.count(tokenizer.mask_id) == 2
    assert ids == library_ids(tokenizer, [line])[0]


def test_a_wordpiece_model_without_bert_is_encoded_by_the_library() -> None:
    backend = Backend(models.WordPiece({t: i for i, t in enumerate([*SPECIAL_TOKENS, "a b"])}))
    tokenizer = Tokenizer(backend)
    assert not tokenizer.is_word_local
    assert fast_ids(LineEncoder(tokenizer), ["a b", "c"]) == [[5], [1]]


def test_the_hash_is_over_canonical_json(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(vocabulary(tmp_path))
    canonical = json.dumps(
        json.loads(tokenizer.to_json()), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    assert tokenizer.hash == hashlib.sha256(canonical.encode()).hexdigest()
