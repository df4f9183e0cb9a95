"""The command line: quick help, errors a person can act on, and the whole way from text to use."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from electra import __version__, cli
from electra import pretrain as loop
from electra.checkpoint import read_checkpoint
from electra.data.corpus import Corpus
from electra.errors import ElectraError
from electra.formats.hf import load_pretrained
from electra.objectives import SpecialIds, build_objective
from electra.rundir import load_run
from electra.runlog import read_metrics

ROOT = Path(__file__).parents[1]
MICRO = [
    "tiny",
    *("--encoder.layers", "2"),
    *("--encoder.hidden-size", "20"),
    *("--encoder.ffn-size", "28"),
    *("--encoder.attention-heads", "2"),
    *("--encoder.embedding-size", "14"),
    *("--encoder.max-positions", "29"),
    *("--generator.width", "0.5"),
    *("--generator.depth", "0.5"),
    *("--data.sequence-length", "23"),
    *("--data.batch-size", "8"),
    *("--run.train-steps", "12"),
    *("--run.threads", "1"),
    *("--run.device", "cpu"),
    *("--run.log-every", "4"),
    *("--run.eval-every", "6"),
]


def electra(*args: str | Path) -> int:
    """One command in this process: its exit code, also where the parser ends it itself."""
    try:
        return cli.run([str(arg) for arg in args])
    except SystemExit as end:
        return int(end.code or 0)


def child(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )


# ---------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_is_there_at_once_and_without_torch(command: str) -> None:
    arguments = [command, "--help"] if command else ["--help"]
    code = (
        "import sys\n"
        "from electra.cli import run\n"
        "try:\n"
        f"    run({arguments!r})\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'pyarrow', 'transformers', 'tokenizers', 'matplotlib'}\n"
        "    print(*heavy & set(sys.modules), file=sys.stderr)\n"
    )
    seconds = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = child(code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.returncode == 0, result.stderr
        assert result.stderr.strip() == ""
        assert "electra" in result.stdout
        if min(seconds) < (0.5 if command else 0.2):
            return
    raise AssertionError(f"help took {seconds} seconds")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_help_of_a_flag_is_one_paragraph(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line ends while the next word would still have had room: the source's own line breaks
    are not shown."""
    monkeypatch.setenv("COLUMNS", "80")
    assert electra(command, "--help") == 0
    lines = [line.strip("│").rstrip() for line in capsys.readouterr().out.splitlines()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    texts = [(n, line) for n, line in enumerate(lines) if indents[n] > 1]
    assert texts
    for (n, line), (m, after) in pairwise(texts):
        if m == n + 1 and indents[n] == indents[m] and "--" not in line + after:
            assert len(f"{line} {after.split()[0]}") > 76, f"{line}\n{after}"


def test_the_overview_names_every_command_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert electra() == electra("--help") == 0
    shown = capsys.readouterr().out
    for name in cli.COMMANDS:  # with a whole sentence
        assert re.search(rf"^  electra {name} .*\.$", shown, re.M), name
    assert "small++" in shown


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert electra("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("line", ["", "--version", "plan small", "completion bash", "plan --help"])
def test_a_reader_that_has_seen_enough_is_no_error(line: str) -> None:
    """As `electra plan small | head -n 1`."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "electra", *line.split()]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, timeout=120)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture(scope="module")
def model(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a run of twelve steps."""
    out = tmp_path_factory.mktemp("model")
    assert electra("pretrain", *MICRO, "--corpus", corpus.path, "--out", out / "run") == 0
    assert electra("export", out / "run", "--out", out / "model") == 0
    return out / "model"


def in_shell(line: str) -> subprocess.CompletedProcess[str]:
    electra = f"env PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m electra"
    line = line.replace("electra ", f"{electra} ", 1)
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )


def test_work_is_done_though_nobody_reads_what_is_told(
    corpus: Corpus, model: Path, tmp_path: Path
) -> None:
    """As `electra pretrain … 2>&1 | head -n 1`: the rest of the steps are trained and saved."""
    settings = shlex.join([*MICRO, "--corpus", str(corpus.path), "--out", f"{tmp_path}/run"])
    done = in_shell(f"electra pretrain {settings} 2>&1 | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 0
    assert load_run(tmp_path / "run").step == 12
    for command in (f"detect --model {model} 'the cook'", "plan nosuch"):
        done = in_shell(f"electra {command} 2>&1 | true; exit ${{PIPESTATUS[0]}}")
        assert done.returncode == (2 if "nosuch" in command else 0)


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("electra plan small >&-", 0, ""),
        ("electra plan nosuch 2>&-", 2, ""),
        ("electra plan small >/dev/full", 2, "Cannot write: No space left on device."),
        ("electra plan nosuch 2>/dev/full", 2, ""),
    ],
)
def test_output_that_is_closed_or_full(line: str, code: int, told: str) -> None:
    done = in_shell(line)
    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr
    assert bool(told) == bool(done.stderr)
    assert "Traceback" not in done.stderr


def test_a_suspicious_text_is_one_line_in_a_pipe(model: Path) -> None:
    text = " ".join(["the cook"] * 30)
    assert text in in_shell(f"electra detect --model {model} '{text}'").stdout.splitlines()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_without_arguments_is_read_or_told_what_it_lacks(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    without = {"check", "plan", "report", "onnx", "serve", "ui", "demo", "env"}
    if command in without:
        assert isinstance(cli.parse([command]), cli.COMMANDS[command])
    else:
        with pytest.raises(SystemExit, match="2"):
            cli.parse([command])
        assert f"Missing from electra {command}" in capsys.readouterr().err


def test_a_reader_that_leaves_early_sees_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "electra", "pretrain", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    told = process.stderr.read().decode()
    process.stderr.close()
    process.wait(60)
    assert "Traceback" not in told


# ---------------------------------------------------------------------- mistakes


def refused(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """What a refused command says: what, where and what to do, and exit code 2."""
    assert electra(*args) == 2
    told = capsys.readouterr().err
    assert "where: " in told
    assert "to do: " in told
    assert "Traceback" not in told
    return told


def test_a_misspelt_command_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "'pretrain'" in refused(capsys, "pretrian")
    assert "known here:" in refused(capsys, "xyzzy")


def test_a_misspelt_recipe_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "'small'" in refused(capsys, "plan", "smal")
    assert "'tiny'" in refused(capsys, "pretrain", "tiney", "--out", tmp_path / "run")
    assert "'tiny'" in refused(capsys, "pretrain", "--out", tmp_path / "run", "tiney")


@pytest.mark.parametrize(
    ("command", "flag", "right"),
    [
        ("pretrain", "--optim.learing-rate", "--optim.learning-rate"),
        ("pretrain", "--encoder.layer", "--encoder.layers"),
        ("plan", "--vocabsize", "--vocab-size"),
        ("prepare", "--lenght", "--length"),
    ],
)
def test_a_misspelt_flag_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str], command: str, flag: str, right: str
) -> None:
    needed = {"pretrain": ["--out", "x"], "plan": []}.get(
        command, ["--input", "x", "--tokenizer", "x", "--out", "x"]
    )
    assert electra(command, *needed, flag, "3") == 2
    told = capsys.readouterr().err
    assert right in told
    assert "Traceback" not in told


def test_every_mistake_of_a_user_is_explained(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: Path,
    tokenizer_dir: Path,
    corpus: Corpus,
) -> None:
    none, out = tmp_path / "none", tmp_path / "out"
    (tmp_path / "bad.toml").write_text("[optim]\nlearning_rte = 1\n")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty.txt").write_text("")
    cases: list[list[str | Path]] = [
        ["tokenizer", "--input", none, "--out", out],
        ["tokenizer", "--input", tmp_path / "empty.txt", "--out", out],
        ["tokenizer", "--input", text, "--out", out, "--vocab-size", "9"],
        ["prepare", "--input", none, "--tokenizer", tokenizer_dir, "--out", out],
        ["prepare", "--input", text, "--tokenizer", none, "--out", out],
        ["prepare", "--input", text, "--tokenizer", tokenizer_dir, "--out", tmp_path / "file"],
        ["prepare", "--input", text, "--tokenizer", tokenizer_dir, "--out", out, "--length", "2"],
        ["check"],
        ["plan", "small", "--config", none],
        ["plan", "small", "--config", tmp_path / "bad.toml"],
        ["plan", "small", "--encoder.hidden-size", "250"],
        ["plan", "small", "--generator.width", "0.3"],
        ["pretrain", "tiny", "--out", out],
        ["pretrain", "tiny", "--out", out, "--corpus", none],
        ["pretrain", "tiny", "--out", out, "--corpus", corpus.path, "--input", text],
        ["pretrain", "tiny", "--out", out, "--input", none],
        ["pretrain", "tiny", "--out", out, "--corpus", corpus.path],  # length 64, not 23
        ["pretrain", *MICRO, "--out", tmp_path / "file", "--corpus", corpus.path],
        ["pretrain", *MICRO, "--out", out, "--corpus", corpus.path, "--run.cuda-graph", "yes"],
        ["pretrain", *MICRO, "--out", out, "--corpus", corpus.path, "--init", none],
        ["export", none, "--out", out],
        ["detect", "a text", "--model", none],
    ]
    if not torch.cuda.is_available():
        cases.append(
            ["pretrain", *MICRO, "--out", out, "--corpus", corpus.path, "--run.device", "cuda"]
        )
    for case in cases:
        told = refused(capsys, *case)
        assert told.startswith("electra: "), case
    assert (tmp_path / "file").read_text() == "mine"


def test_debug_shows_where_an_error_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert electra("plan", "smal", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


# ---------------------------------------------------------------------- settings


def settings_of(capsys: pytest.CaptureFixture[str], *args: str | Path) -> dict[str, str]:
    assert electra("pretrain", *args, "--dry-run") == 0
    shown = capsys.readouterr().out.splitlines()
    return dict(line.split(" = ", 1) for line in shown)


def test_a_dry_run_prints_every_setting(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shown = settings_of(capsys, "base", "--out", out, "--profile", "released")
    assert shown["name"] == "base"
    assert shown["encoder.hidden_size"] == "768"
    assert shown["objective.mask_token_percent"] == "85.0"
    assert shown["optim.bias_correction"] == "False"
    assert len(shown) > 50
    assert not out.exists()


NO_NETWORKS = {
    "fraction of 0.3 gives hidden_size 76.8": ["--generator.width", "0.3"],
    "fraction of 0.3 gives layers 3.6": ["--generator.depth", "0.3"],
    "depth is 0.0": ["--generator.depth", "0"],
    "fraction of 0.2 gives": ["--generator.width", "0.2", "--generator.kind", "uniform"],
    "too narrow": ["--encoder.embedding-size", "3", "--encoder.init", "local"],
}


@pytest.mark.parametrize("what", NO_NETWORKS)
def test_networks_that_cannot_be_built_are_refused_before_anything_is_done(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path, what: str
) -> None:
    """Also without --dry-run before text is prepared; all of them with what building says."""
    run = ["pretrain", "small", "--out", tmp_path / "run", *NO_NETWORKS[what]]
    told = refused(capsys, *run, "--dry-run")
    assert what in told
    assert refused(capsys, *run, "--input", text) == told
    assert refused(capsys, "plan", "small", *NO_NETWORKS[what]) == told
    assert not (tmp_path / "run").exists()
    with pytest.raises(ElectraError) as caught:
        build_objective(
            cli.parse(["plan", "small", *NO_NETWORKS[what]]).settings, 97, SpecialIds(*range(5))
        )
    assert told == f"electra: {caught.value}\n"


def test_a_frozen_generator_without_a_model_is_refused_before_text_is_prepared(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    flags = ["--generator.frozen", "--generator.sharing", "none"]
    run = ["pretrain", "tiny", "--out", tmp_path / "run", *flags]
    for more in (["--dry-run"], ["--input", text]):
        assert "A frozen generator has to be a trained one." in refused(capsys, *run, *more)
    assert not (tmp_path / "run").exists()


def test_without_a_generator_its_fractions_are_not_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    odd = ["bert-small", "--generator.width", "0.3"]
    assert settings_of(capsys, *odd, "--out", tmp_path / "x")["generator.width"] == "0.3"
    assert electra("plan", *odd) == 0
    assert re.search(r"^generator +none$", capsys.readouterr().out, re.M)


def test_flags_go_before_the_file_and_the_file_before_the_recipe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[run]\nseed = 5\ntrain_steps = 7\n")
    flags = ["--config", file, "--run.seed", "6"]
    shown = settings_of(capsys, "large", "--out", tmp_path / "run", *flags)
    assert (shown["run.seed"], shown["run.train_steps"]) == ("6", "7")
    assert shown["encoder.layers"] == "24"


def test_an_output_inside_the_text_is_refused(
    capsys: pytest.CaptureFixture[str], tokenizer_dir: Path, text: Path, tmp_path: Path
) -> None:
    """The same command would find another input the next time."""
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(text, texts)
    (tmp_path / "link").symlink_to(texts)
    start = ["--input", tmp_path / "link", "--out", texts / "new"]
    for command in (["tokenizer"], ["prepare", "--tokenizer", tokenizer_dir], ["pretrain", "tiny"]):
        assert "inside of" in refused(capsys, *command, *start)
    assert [path.name for path in texts.iterdir()] == [text.name]


def test_the_last_of_equal_flags_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also of those that decide what the other flags start from: scripts add theirs at the end."""
    for seed in (5, 6):
        (tmp_path / f"{seed}.toml").write_text(f"[run]\nseed = {seed}\n")
    start = ["tiny", "--out", tmp_path / "run", "--config", tmp_path / "5.toml"]
    assert settings_of(capsys, *start, f"--config={tmp_path}/6.toml")["run.seed"] == "6"
    assert settings_of(capsys, *start, "--config", "None")["run.seed"] == "0"  # as --help writes it
    profiles = ["--profile", "paper", "--profile", "released"]
    assert settings_of(capsys, *start, *profiles)["objective.mask_token_percent"] == "85.0"


@pytest.mark.parametrize("place", ["first", "last"])
def test_the_recipe_may_stand_before_or_behind_the_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    flags = ["--out", str(tmp_path / "run"), "--run.seed", "3"]
    shown = settings_of(capsys, *(["tiny", *flags] if place == "first" else [*flags, "tiny"]))
    assert (shown["name"], shown["run.seed"]) == ("tiny", "3")
    assert shown["encoder.layers"] == "4"


@pytest.mark.parametrize(
    "command",
    [
        "plan tiny --tokens-per-second 0",
        "plan tiny --tokens-per-second nan",
        "plan tiny --vocab-size 0",
        "export RUN --out NEW --shard-megabytes nan",
        "export RUN --out NEW --shard-megabytes inf",
    ],
)
def test_numbers_of_which_nothing_can_be_made(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert "use a number above 0" in refused(capsys, *command.split())


def test_no_minutes_are_not_the_default_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = refused(capsys, "demo", "--minutes", "0", "--out", tmp_path / "demo")
    assert "run.minutes" in told
    assert not (tmp_path / "demo").exists()


def test_a_report_of_nothing_is_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No run is named" in refused(capsys, "report")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("small", "13,549,057"), ("base", "109,483,009"), ("large", "335,142,913")],
)
def test_a_plan_shows_what_a_recipe_takes(
    capsys: pytest.CaptureFixture[str], name: str, parameters: str
) -> None:
    assert electra("plan", name, "--tokens-per-second", "1000000") == 0
    shown = capsys.readouterr().out
    assert parameters in shown
    assert "FLOPs" in shown


def test_the_environment_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert electra("env") == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    assert __version__ in shown


# ---------------------------------------------------------------------- the whole way


def test_from_text_to_a_coloured_sentence(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    tokenizer, corpus, run = (tmp_path / name for name in ("ein Wörterbuch", "c", "mein Lauf"))
    assert electra("tokenizer", "--input", text, "--out", tokenizer, "--vocab-size", "97") == 0
    assert "97 tokens" in capsys.readouterr().out
    prepared = ["--tokenizer", tokenizer, "--out", corpus, "--length", "23", "--workers", "1"]
    assert electra("prepare", "--input", text, *prepared, "--held-out-percent", "10") == 0
    assert "300 documents" in capsys.readouterr().out
    assert electra("check", "--corpus", corpus) == 0
    assert electra("pretrain", *MICRO, "--corpus", corpus, "--out", run) == 0
    told = capsys.readouterr()
    hint = shlex.split(told.out.partition("next: electra ")[2])  # as a shell reads it
    assert "discriminator AUC" in told.err
    assert "(token frequencies alone " in told.err  # what the generator has to beat
    assert (run / "curves.png").exists()
    assert hint == ["export", str(run), "--out", f"{run}/export"]
    assert electra(*hint) == 0
    export = run / "export"
    assert (export / "discriminator" / "model.safetensors").exists()
    assert (export / "generator" / "config.json").exists()
    capsys.readouterr()
    for model in (export, run):
        assert electra("detect", "all old birds see stones .", "--model", model) == 0
        assert "stones" in capsys.readouterr().out


def test_any_checkpoint_that_is_there_can_be_exported(
    capsys: pytest.CaptureFixture[str], corpus: Corpus, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "export"
    kept = ["--run.save-every", "4", "--run.keep-checkpoints", "1", "--run.keep-every", "4"]
    assert electra("pretrain", *MICRO, "--corpus", corpus.path, "--out", run, "--quiet", *kept) == 0
    seen: list[Tensor] = []
    for step in (4, 8, 12):
        assert electra("export", run, "--out", out, "--step", str(step)) == 0
        assert json.loads((out / "electra.json").read_bytes())["step"] == step
        (word,) = (n for n in load_pretrained(out).network("generator").tensors if "word" in n)
        seen.append(load_pretrained(out).network("generator").tensors[word])
        saved = read_checkpoint(run / "checkpoints" / f"step-{step:08d}").tensors["model"]
        assert any(torch.equal(t, seen[-1]) for t in saved.values() if t.shape == seen[-1].shape)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    told = refused(capsys, "export", run, "--out", out, "--step", "7")
    assert "no checkpoint of step 7" in told
    assert "there are those of 4, 8, 12" in told
    assert json.loads((out / "electra.json").read_bytes())["step"] == 12  # it is still there
    os.truncate(run / "checkpoints" / "step-00000008" / "model.safetensors", 8)
    assert electra("export", run, "--out", out, "--step", "8") == 3  # and no other is taken


def test_text_for_a_model_that_exists_is_read_with_its_tokenizer(
    text: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    common = ["pretrain", *MICRO, "--input", text, "--vocab-size", "97", "--quiet"]
    assert electra(*common, "--out", first) == 0
    again = [*common[:-3], "--quiet", "--init", first, "--out", second]  # with the usual vocabulary
    assert electra(*again) == 0
    hashes = [Corpus.open(run / "made" / "corpus").tokenizer_hash for run in (first, second)]
    assert hashes[0] == hashes[1]
    assert electra(*again) == 0  # the same command again


def test_accents_are_not_removed_in_silence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, run = tmp_path / "a.txt", tmp_path / "run"
    text.write_text("größere Bücher für schöne Mädchen .\n\n" * 300, "utf-8")
    for command in (["tokenizer", "--out", tmp_path / "tok"], ["pretrain", *MICRO, "--out", run]):
        assert electra(*command, "--input", text, "--vocab-size", "97") == 0
        assert "bear a mark (ä, é, й), which is removed; --no-low" in capsys.readouterr().err


def test_text_alone_is_enough_to_train(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = ["pretrain", *MICRO, "--input", text, "--out", run, "--vocab-size", "97", "--quiet"]
    assert electra(*arguments) == 0
    made = Corpus.open(run / "made" / "corpus")
    assert made.manifest.settings["builder"] == "packed"
    loaded = load_run(run)
    assert loaded.step == 12
    assert loaded.tokenizer_hash == made.tokenizer_hash
    before = (run / "metrics.jsonl").read_bytes()
    assert electra(*arguments) == 0  # complete: nothing is made or trained again
    assert (run / "metrics.jsonl").read_bytes() == before
    capsys.readouterr()
    for other in (["--vocab-size", "98"], ["--no-lowercase"]):
        assert "asked for with" in refused(capsys, *arguments, *other)
    (run / "made" / "asked.json").unlink()  # as of a run from before it was written
    assert electra(*arguments) == 0


@pytest.mark.parametrize(
    ("more", "builder"), [([], "segments"), (["--builder", "packed"], "packed")]
)
def test_text_is_cut_as_the_profile_says(
    text: Path, tmp_path: Path, more: list[str], builder: str
) -> None:
    arguments = ["pretrain", *MICRO, "--input", text, "--vocab-size", "97", "--quiet", *more]
    assert electra(*arguments, "--profile", "released", "--out", tmp_path) == 0
    assert Corpus.open(tmp_path / "made" / "corpus").manifest.settings["builder"] == builder


def test_a_flag_of_the_text_is_not_silently_left_out(
    capsys: pytest.CaptureFixture[str], corpus: Corpus, tmp_path: Path
) -> None:
    flags = ["--vocab-size", "97", "--no-lowercase", "--builder", "segments", "--quiet"]
    common = ["pretrain", *MICRO, "--corpus", corpus.path, "--out", tmp_path / "run"]
    assert electra(*common, *flags) == 0
    told = capsys.readouterr().err
    lines = [f"warning: --{n} has no effect here" for n in ("vocab-size", "lowercase", "builder")]
    assert told.splitlines() == lines
    assert electra(*common, "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_training_continues_from_an_export(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, export, second = (tmp_path / n for n in ("first", "export", "second"))
    common = ["--corpus", corpus.path, "--quiet"]
    assert electra("pretrain", *MICRO, *common, "--out", first) == 0
    assert electra("export", first, "--out", export) == 0
    trained = {n: p.detach() for n, p in load_run(first).objective.named_parameters()}

    begun: dict[str, Tensor] = {}
    record = loop.Trainer.record

    def remembering(self: loop.Trainer) -> None:
        begun.update({n: p.detach().clone() for n, p in self.objective.named_parameters()})
        record(self)

    monkeypatch.setattr(loop.Trainer, "record", remembering)
    sizes = [*MICRO[:1], *MICRO[MICRO.index("--data.sequence-length") :]]
    assert electra("pretrain", *sizes, *common, "--out", second, "--init", export) == 0
    assert begun.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(begun[name], tensor), name
    assert load_run(second).config.encoder.hidden_size == 20
    assert load_pretrained(second).generator is not None
    assert [m["step"] for m in read_metrics(second) if m["kind"] == "train"] == [4, 8, 12]


def test_a_discriminator_alone_goes_on_with_a_new_generator(
    capsys: pytest.CaptureFixture[str], corpus: Corpus, tmp_path: Path
) -> None:
    first, export, second = (tmp_path / n for n in ("first", "export", "second"))
    common = ["--corpus", corpus.path, "--quiet"]
    assert electra("pretrain", *MICRO, *common, "--out", first) == 0
    assert electra("export", first, "--out", export) == 0
    sizes = [*MICRO[:1], *MICRO[MICRO.index("--data.sequence-length") :]]
    alone = [*sizes, *common, "--init", export / "discriminator", "--out", second]
    fresh = ["--generator.width", "0.5", "--generator.depth", "0.5"]
    assert electra("pretrain", *alone, *fresh) == 0
    assert "holds no generator: it starts from new weights" in capsys.readouterr().err
    assert load_pretrained(second).network("generator").config.hidden_size == 10
    a, b = (load_pretrained(p).network("discriminator").tensors for p in (export, second))
    moved = max(float((a[name] - b[name]).abs().max()) for name in a)
    assert 0 < moved < 0.1  # the trained weights, a few steps later


def test_the_learning_rate_restarts_with_a_short_warmup(
    capsys: pytest.CaptureFixture[str], corpus: Corpus, tmp_path: Path
) -> None:
    """The recipe warms up for 10,000 steps, more than a continued run often has."""
    run = tmp_path / "run"
    assert electra("pretrain", *MICRO, "--corpus", corpus.path, "--quiet", "--out", run) == 0

    def settings(*more: str | Path) -> dict[str, str]:
        capsys.readouterr()
        assert electra("pretrain", "small", "--out", tmp_path / "x", "--dry-run", *more) == 0
        return dict(line.split(" = ") for line in capsys.readouterr().out.splitlines())

    assert settings()["optim.warmup_percent"] == "None"
    again = settings("--init", run)
    assert (again["optim.warmup_percent"], again["optim.warmup_steps"]) == ("6.0", "10000")
    assert again["optim.learning_rate"] == settings()["optim.learning_rate"]
    own = settings("--init", run, "--optim.warmup-steps", "7")
    assert (own["optim.warmup_percent"], own["optim.warmup_steps"]) == ("None", "7")
    assert settings("--init", run, "--optim.warmup-percent", "1")["optim.warmup_percent"] == "1.0"
    file = tmp_path / "a.toml"
    file.write_text("[optim]\nlearning_rate = 1e-4\n")
    assert settings("--init", run, "--config", file)["optim.warmup_percent"] == "6.0"
    file.write_text("[optim]\nwarmup_steps = 5\n")
    assert settings("--init", run, "--config", file)["optim.warmup_percent"] == "None"
    stored = settings("--init", run, "--config", run / "config.json")
    kept = json.loads((run / "config.json").read_text())["optim"]["warmup_percent"]
    assert stored["optim.warmup_percent"] == str(kept)


def test_a_warm_up_in_steps_is_not_hidden_by_a_share(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The recipe `tiny` has one of 10 %."""
    file, whole = tmp_path / "a.toml", tmp_path / "whole.toml"
    file.write_text("[optim]\nwarmup_steps = 5\n")
    whole.write_text("[optim]\nwarmup_steps = 5\nwarmup_percent = 3.0\n")
    for more, expected in (
        ((), ("10.0", "10000")),
        (("--optim.warmup-steps", "7"), ("None", "7")),
        (("--config", file), ("None", "5")),
        (("--config", whole), ("3.0", "5")),
        (("--config", whole, "--optim.warmup-steps", "7"), ("None", "7")),
        (("--config", file, "--optim.warmup-percent", "1"), ("1.0", "5")),
    ):
        capsys.readouterr()
        assert electra("pretrain", "tiny", "--out", tmp_path / "x", "--dry-run", *more) == 0
        shown = dict(line.split(" = ") for line in capsys.readouterr().out.splitlines())
        assert (shown["optim.warmup_percent"], shown["optim.warmup_steps"]) == expected


def test_other_settings_on_the_same_directory_are_listed(
    capsys: pytest.CaptureFixture[str], corpus: Corpus, tmp_path: Path
) -> None:
    arguments = ["pretrain", *MICRO, "--corpus", corpus.path, "--out", tmp_path / "run", "--quiet"]
    assert electra(*arguments) == 0
    assert "run.seed: 0 → 9" in refused(capsys, *arguments, "--run.seed", "9")
    stored = json.loads((tmp_path / "run" / "config.json").read_bytes())
    assert stored["run"]["seed"] == 0


def test_a_damaged_run_ends_with_its_own_exit_code(
    capsys: pytest.CaptureFixture[str], corpus: Corpus, tmp_path: Path
) -> None:
    arguments = ["pretrain", *MICRO, "--corpus", corpus.path, "--out", tmp_path / "run", "--quiet"]
    assert electra(*arguments) == 0
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        os.truncate(path / "model.safetensors", 8)
    for _ in range(2):
        assert electra(*arguments) == 3
        assert "No checkpoint is intact" in capsys.readouterr().err
