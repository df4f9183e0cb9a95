"""Text to token ids: load, train and save a tokenizer, and encode lines fast.

Comes in: a `vocab.txt`, a `tokenizer.json`, or raw text to train a WordPiece vocabulary from. Goes
out: ids that are always those of the `tokenizers` library, and a directory that transformers loads
with the same ids. Two things here are not in that library: training is reproducible bit for bit
(its own WordPiece training is not), and `LineEncoder` encodes each distinct word only once.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from ..errors import ElectraError, Stopped
from ..files import json_bytes, json_sha256, read_json, reading, write_atomic
from .text import Source, TextStats, draw, expand_inputs, read_documents, split_suffix

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_ACCENTS = 0.005  # share of the letters, up to which removing their marks is no worry
_CASING = ("do_lower_case", "strip_accents")  # of tokenizer_config.json
_MAX_WORD = 100  # characters; a longer word is [UNK], as in BERT
_PIECE = 1 << 10  # characters of a long text that are encoded at once
_MAX_CHUNKS = 1 << 22  # distinct ones that are counted at once when a vocabulary is trained


class Tokenizer:
    """A `tokenizers.Tokenizer` whose special tokens are known to be there."""

    def __init__(self, backend: Backend) -> None:
        """Takes over `backend`; a missing template or decoder is set to BERT's."""
        if missing := [t for t in SPECIAL_TOKENS if backend.token_to_id(t) is None]:
            what = f"The tokenizer has no token {' '.join(missing)}."
            raise ElectraError(what, fix=f"ELECTRA needs {' '.join(SPECIAL_TOKENS)}; add them")
        ids = [cast(int, backend.token_to_id(token)) for token in SPECIAL_TOKENS]
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = ids
        names = [token[1:-1].lower() for token in SPECIAL_TOKENS]
        self.special_names = dict(zip(names, ids, strict=True))
        highest, count = max(backend.get_vocab().values()), backend.get_vocab_size()
        if highest > 2 * count + 1000:  # a model would need a row for each
            what = f"The highest id is {highest:,}, but there are only {count:,} tokens."
            raise ElectraError(what, fix="number the tokens without large gaps")
        backend.no_truncation()
        backend.no_padding()
        if backend.post_processor is None:
            backend.post_processor = processors.TemplateProcessing(
                single="[CLS]:0 $A:0 [SEP]:0",
                pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
                special_tokens=[("[CLS]", self.cls_id), ("[SEP]", self.sep_id)],
            )
        if backend.decoder is None:
            backend.decoder = decoders.WordPiece()
        self.backend = backend

    @classmethod
    def load(cls, path: str | Path, *, lowercase: bool | None = None) -> Tokenizer:
        """From a `tokenizer.json`, a `vocab.txt`, or a directory with one of the two.

        A bare vocabulary says nothing about upper case: it is taken as uncased, unless `lowercase`
        or a `tokenizer_config.json` beside it says otherwise.
        """
        path = Path(path)
        if path.is_dir():
            names = [name for name in ("tokenizer.json", "vocab.txt") if (path / name).is_file()]
            if not names:
                what = "The directory holds neither tokenizer.json nor vocab.txt."
                raise ElectraError(what, path, "name the tokenizer's own directory or file")
            path = path / names[0]
        try:
            if path.suffix == ".json":
                tokenizer = cls.from_json(_read(path))
            else:
                tokenizer = cls(_backend_from_vocabulary(path, lowercase))
        except ElectraError as error:
            raise ElectraError(error.what, error.where or path, error.fix) from error
        if lowercase is not None and tokenizer.lowercase != lowercase:
            what = f"lowercase={lowercase} was asked for, but tokenizer.json says otherwise."
            fix = "leave lowercase away: tokenizer.json is complete without it"
            raise ElectraError(what, path, fix)
        return tokenizer

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        try:
            backend = Backend.from_str(text)
            for pair in (None, "[MASK]"):  # some faults only show in use
                backend.encode("a É \U0010ffff", pair)
        except BaseException as error:  # the library raises bare Exception, or panics
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            what = f"This is not a tokenizer of the tokenizers library: {error}."
            raise ElectraError(what, fix="write tokenizer.json again") from error
        return cls(backend)

    def to_json(self) -> str:
        return self.backend.to_str()

    def require(self, wanted: object, where: Path) -> None:
        """That it is the tokenizer whose hash was written down with the model of `where`."""
        if self.hash != wanted:
            what = f"The tokenizer {self.hash[:12]}… is not the model's: {str(wanted)[:12]}…."
            fix = "restore the tokenizer's files as they were written with the model"
            raise ElectraError(what, where, fix)

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: one more than the highest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def hash(self) -> str:
        """SHA-256 of all that decides about ids; the same after saving and loading."""
        return json_sha256(self._parts)

    @property
    def lowercase(self) -> bool:
        steps = self._parts["normalizer"] or {}
        return any(
            step["type"] == "Lowercase" or step.get("lowercase", False)
            for step in steps.get("normalizers", [steps] if steps else [])
        )

    @cached_property
    def is_word_local(self) -> bool:
        """Whether the ids of a text are those of its words between white space, one after another.

        True of BERT's normaliser and pre-tokenizer, which never look across white space, unless an
        added token contains some.
        """
        parts = self._parts
        return (
            parts["model"]["type"] == "WordPiece"
            and (parts["normalizer"] or {"type": "BertNormalizer"})["type"] == "BertNormalizer"
            and (parts["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer"
            and all(len(token["content"].split()) == 1 for token in parts["added_tokens"])
        )

    @property
    def _parts(self) -> dict[str, Any]:
        return json.loads(self.backend.to_str())

    def encode(self, text: str, pair: str | None = None) -> list[int]:
        """Ids with [CLS] and [SEP], as a model reads them."""
        return self.backend.encode(text, pair).ids

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Ids (n,) of each text without [CLS] and [SEP], and (n, 2) the characters of each id."""
        for i in range(0, len(texts), 1000):  # in parts, since encodings are large
            cut = [list(self._pieces(text)) for text in texts[i : i + 1000]]
            pieces = list(chain.from_iterable(cut))
            encodings = iter(self.backend.encode_batch(pieces, add_special_tokens=False))
            for parts in cut:
                found = list(islice(encodings, len(parts)))
                ids, counts = flatten([one.ids for one in found])
                places = chain.from_iterable(one.offsets for one in found)
                offsets = np.fromiter(chain.from_iterable(places), np.int32, 2 * len(ids))
                sizes = np.fromiter(map(len, parts), np.int32, len(parts))
                first = np.repeat(np.cumsum(sizes, dtype=np.int32) - sizes, counts)
                yield ids.astype(np.int32), offsets.reshape(-1, 2) + first[:, None]

    def _pieces(self, text: str) -> Iterator[str]:
        """The text, cut where that changes no token: the library is twice as fast on short ones."""
        start = 0
        while len(text) - start > 2 * _PIECE and self._border:
            found = self._border.search(text, start + _PIECE)
            if not found:
                break
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]

    @cached_property
    def _border(self) -> re.Pattern[str] | None:
        """A blank or mark of ASCII, in no added token, that ends a word whatever is before it."""
        added = self.backend.get_added_tokens_decoder().values()
        if not self.is_word_local or any(
            token.normalized or token.lstrip or token.rstrip or token.single_word for token in added
        ):
            return None
        inside = set("".join(token.content for token in added))
        marks = "".join(c for c in " " + string.punctuation if c not in inside)
        return re.compile(f"[{re.escape(marks)}](?=[ -~])")

    def decode_tokens(self, ids: Iterable[int]) -> list[str]:
        """The token of each id as it stands in the vocabulary."""
        return [self.backend.id_to_token(int(index)) or "[UNK]" for index in ids]

    def with_tokens(self, tokens: Sequence[str]) -> Tokenizer:
        """The same tokenizer with more WordPiece tokens, numbered behind those that it has."""
        parts, first = self._parts, self.vocab_size
        parts["model"]["vocab"] |= {token: first + i for i, token in enumerate(tokens)}
        return Tokenizer.from_json(json.dumps(parts))

    def save(self, directory: Path, *, max_length: int = 512) -> None:
        """Writes a directory that transformers' AutoTokenizer loads with the same ids.

        The class is named PreTrainedTokenizerFast on purpose: beside an ELECTRA configuration
        transformers would otherwise build its own uncased normaliser, whatever tokenizer.json says.
        """
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / "tokenizer.json", self.backend.to_str(pretty=True).encode())
        if self._parts["model"]["type"] == "WordPiece":
            tokens = self.decode_tokens(range(self.vocab_size))
            write_atomic(directory / "vocab.txt", "".join(f"{t}\n" for t in tokens).encode())
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            **{f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS},
        }
        write_atomic(directory / "tokenizer_config.json", json_bytes(config, indent=2))


class LineEncoder:
    """Encodes lines to exactly the ids of `tokenizers`, several times faster.

    Words between white space repeat, so each distinct one is encoded once and looked up from then
    on; the ids of a line are put together by numpy. A new word of plain ASCII, the common case by
    far, goes to the WordPiece model without the library's normaliser and pre-tokenizer, which do
    nothing to it but lower-case and split off punctuation. Where words depend on their neighbours
    (`Tokenizer.is_word_local` is false), every line goes to `tokenizers` as a whole.
    """

    # Python's str.split takes these for white space, the tokenizers library does not. A line with
    # one of them is looked up whole.
    _ODD_SPACES = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
    _PIECES = re.compile(r"[!-/:-@\[-`{-~]|[0-9A-Za-z]+")
    # Bounds of what is remembered, about 100 MB; larger ones were not faster on English prose.
    _MAX_WORDS = 1 << 18
    _MAX_PIECES = 1 << 17
    _MAX_CHARACTERS = 1 << 24

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._lowercase = tokenizer.lowercase
        self._is_word_local = tokenizer.is_word_local
        self._is_plain = _plain_word(tokenizer)
        tokenize = tokenizer.backend.model.tokenize

        @lru_cache(self._MAX_PIECES)
        def piece_ids(piece: str) -> list[int]:
            """Of a normalised word without punctuation, or of one punctuation mark."""
            return [token.id for token in tokenize(piece)]

        self._piece_ids = piece_ids
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__  # a new word gets the next number
        self._forget()

    def encode_lines(self, lines: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All ids of the lines back to back, and the number of ids of each line."""
        if not self._is_word_local:
            encodings = self._backend.encode_batch_fast(list(lines), add_special_tokens=False)
            return flatten([encoding.ids for encoding in encodings])
        if len(self._numbers) > self._MAX_WORDS or self._characters > self._MAX_CHARACTERS:
            self._forget()

        words, ends = list[str](), list[int]()
        text = "\n".join(lines)
        has_odd_spaces = any(space in text for space in self._ODD_SPACES)
        for line in lines:
            if has_odd_spaces and any(space in line for space in self._ODD_SPACES):
                words.append(line)
            else:
                words += line.split()
            ends.append(len(words))
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        self._encode_new_words()

        lengths = self._lengths[numbers]
        ids = take_runs(self._ids, self._starts[numbers], lengths)
        stops = np.concatenate([[0], np.cumsum(lengths)])
        return ids, np.diff(stops[ends], prepend=0)

    def _encode_new_words(self) -> None:
        new = list(islice(reversed(self._numbers), len(self._numbers) - len(self._lengths)))[::-1]
        others = [word for word in new if not self._is_plain(word)]
        encodings = self._backend.encode_batch_fast(others, add_special_tokens=False)
        rows = {word: encoding.ids for word, encoding in zip(others, encodings, strict=True)}
        ids, lengths = flatten([rows[w] if w in rows else self._plain_ids(w) for w in new])
        starts = len(self._ids) + np.cumsum(lengths) - lengths
        self._ids = np.concatenate([self._ids, ids])
        self._starts = np.concatenate([self._starts, starts])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._characters += sum(map(len, new))

    def _plain_ids(self, word: str) -> list[int]:
        pieces = self._PIECES.findall(word.lower() if self._lowercase else word)
        if len(pieces) == 1:
            return self._piece_ids(pieces[0])
        return [index for piece in pieces for index in self._piece_ids(piece)]

    def _forget(self) -> None:
        self._numbers.clear()
        self._characters = 0
        self._ids = np.empty(0, np.uint32)
        self._starts = np.empty(0, np.int64)
        self._lengths = np.empty(0, np.int64)


def _plain_word(tokenizer: Tokenizer) -> Callable[[str], object]:
    """Tells whether a word is printable ASCII in which no added token such as [MASK] can begin."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    if any(token.normalized for token in added):
        return lambda _: False  # these are looked for in the normalised text instead
    starts = {token.content[0] for token in added}
    plain = "".join(c for c in map(chr, range(0x21, 0x7F)) if c not in starts)
    return re.compile(f"[{re.escape(plain)}]+").fullmatch


def take_runs(
    values: NDArray[np.uint32], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """`values[start : start + length]` of all runs, back to back, without a loop over them."""
    stops = np.cumsum(lengths)
    total = int(stops[-1]) if len(stops) else 0
    return values[np.repeat(starts - (stops - lengths), lengths) + np.arange(total)]


def flatten(rows: list[list[int]]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.fromiter(chain.from_iterable(rows), np.uint32, int(lengths.sum()))
    return ids, lengths


def train_tokenizer(
    inputs: Sequence[str | Path],
    *,
    vocab_size: int = 30522,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    column: str = "text",
    max_bytes: int = 1 << 30,
    should_stop: Callable[[], bool] = lambda: False,
    note: Callable[[str], object] = lambda _: None,
) -> Tokenizer:
    """A WordPiece tokenizer of the text, the same bytes whenever it is trained from the same text.

    Text beyond `max_bytes` is sampled document by document, by a hash of the document's number. The
    vocabulary is smaller than `vocab_size` if no pair of pieces is left that occurs twice.
    `strip_accents=None` strips them when lower-casing, as BERT does; `note` is told if that changes
    many letters.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    how: dict[str, Any] = {"column": column, "max_bytes": max_bytes, "should_stop": should_stop}
    characters = Counter[str]()
    split = (normalizer, pre_tokenizers.BertPreTokenizer())
    words = count_words(inputs, *split, characters=characters, **how)
    share = accents_share(characters)
    if lowercase and strip_accents is None and share > MAX_ACCENTS:
        what = f"{share:.1%} of the letters bear a mark (ä, é, й), which is removed"
        note(f"warning: {what}; --no-lowercase keeps them")
    if not words:
        what = "No word was found in the text that was looked at."
        fix = f"check that it is text, or look at more than {max_bytes:,} bytes of it"
        raise ElectraError(what, "max_bytes", fix)
    pieces = [*SPECIAL_TOKENS, *_alphabet(words, vocab_size)]
    if len(pieces) > vocab_size:
        what = f"{vocab_size:,} tokens are too small a vocabulary: characters need {len(pieces):,}."
        raise ElectraError(what, "vocab_size", f"use at least {2 * len(pieces):,}")
    return Tokenizer(_bert(_merge(words, pieces, vocab_size), normalizer))


def count_words(
    inputs: Sequence[str | Path],
    normalizer: Any,
    pre_tokenizer: Any,
    *,
    column: str = "text",
    max_bytes: int = 1 << 30,
    should_stop: Callable[[], bool] = lambda: False,
    characters: Counter[str] | None = None,
) -> Counter[str]:
    """How often each word occurs in the text, or in a sample of about `max_bytes` of it.

    characters: counts those of the text before it is normalised.
    """
    paths = expand_inputs(inputs)
    share = _sample_share(paths, column, max_bytes)
    chunks: Counter[str] = Counter()  # between white space
    documents = read_documents(paths, column=column, stats=TextStats())
    for number, document in enumerate(documents):
        if should_stop():
            raise Stopped
        if share < 1 and draw(0, "tokenizer", number) >= share:
            continue
        for line in document.lines:
            chunks.update(line.split())
        rare = 1
        while len(chunks) > _MAX_CHUNKS:  # keeps memory flat; what is rare so far stays rare
            chunks = Counter({chunk: n for chunk, n in chunks.items() if n > rare})
            rare *= 2
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        if characters is not None:
            for character in chunk:
                characters[character] += count
        normalized = normalizer.normalize_str(chunk) if normalizer else chunk
        for word, _ in pre_tokenizer.pre_tokenize_str(normalized):
            if len(word) <= _MAX_WORD:
                words[word] += count
    return words


def accents_share(characters: Counter[str]) -> float:
    """The share of the letters that bear a mark (ä, é, й), which stripping accents removes."""
    letters = sum(count for character, count in characters.items() if character.isalpha())
    marks = sum(
        count
        for character, count in characters.items()
        if any(unicodedata.category(c) == "Mn" for c in unicodedata.normalize("NFD", character))
    )
    return marks / max(letters, 1)


def _sample_share(paths: list[Source], column: str, max_bytes: int) -> float:
    """The share of documents to train on; compressed text has to be read to know its size."""
    files = [path for path in paths if isinstance(path, Path)]
    formats = [split_suffix(path) for path in files]
    is_packed = any(compression or suffix == ".parquet" for suffix, compression in formats)
    is_packed |= len(files) < len(paths)
    if not is_packed and sum(path.stat().st_size for path in files) <= max_bytes:
        return 1.0
    stats = TextStats()
    for _ in read_documents(paths, column=column, stats=stats):
        pass
    return min(1.0, max_bytes / stats.bytes)


def _merge(words: Counter[str], pieces: list[str], vocab_size: int) -> list[str]:
    """WordPiece training proper: the given pieces, then the merged ones in order of their merge.

    Left alone, the library numbers single characters in the random order of a hash table and breaks
    ties between merges by these numbers, so each run gives another vocabulary. Characters that are
    passed as "special" tokens are numbered first and in the order given, which fixes all of it.
    """
    learner = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=pieces,
        limit_alphabet=0,
    )
    step = 1 << 14
    text = (  # each word as often as it was counted, since the trainer takes no counts
        " ".join([word] * min(step, count - start))
        for word, count in sorted(words.items())
        for start in range(0, count, step)
    )
    learner.train_from_iterator(text, trainer)
    ids = learner.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _alphabet(words: Counter[str], vocab_size: int) -> list[str]:
    """The single characters of the vocabulary, sorted, first those that begin words.

    The most frequent characters that make up 99.99 % of the text (thousands in Chinese), and at
    least the 1,000 most frequent ones as in BERT, or an eighth of a small vocabulary.
    """
    counts: Counter[str] = Counter()
    inside: set[str] = set()
    for word, count in words.items():
        inside.update(word[1:])
        for character in word:
            counts[character] += count
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    covered = np.cumsum([counts[character] for character in ranked])
    needed = int(np.searchsorted(covered, 0.9999 * counts.total())) + 1
    kept = sorted(ranked[: max(needed, min(1000, vocab_size // 8))])
    return kept + [f"##{character}" for character in kept if character in inside]


def _bert(vocabulary: Iterable[str], normalizer: normalizers.BertNormalizer) -> Backend:
    """WordPiece between BERT's normaliser and its splitting at white space and punctuation."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    model = models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=_MAX_WORD)
    backend = Backend(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens([token for token in SPECIAL_TOKENS if token in ids])
    return backend


def _backend_from_vocabulary(path: Path, lowercase: bool | None) -> Backend:
    tokens = _read(path).removesuffix("\n").split("\n")
    seen: dict[str, int] = {}
    for number, token in enumerate(tokens, start=1):
        if not token or token in seen:
            twice = f"Token '{token}' stands on line {seen.get(token)} already."
            fix = "write every token once, one per line; the line decides its id"
            raise ElectraError(twice if token else "Blank line.", f"{path}, line {number}", fix)
        seen[token] = number
    beside, fix = path.with_name("tokenizer_config.json"), "repair or remove the file"
    read = read_json(beside, fix=fix)
    config = {key: read[key] for key in _CASING if read.get(key) is not None}
    with reading(beside, fix):
        if not all(isinstance(value, bool) for value in config.values()):
            raise ValueError(f"{config} are not true or false")
    normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", True) if lowercase is None else lowercase,
        strip_accents=config.get("strip_accents"),
    )
    return _bert(tokens, normalizer)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        what = f"Cannot read the tokenizer: {why}."
        raise ElectraError(what, path, "check the path and the file") from error
