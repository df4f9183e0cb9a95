"""`electra <command>`: from the words of a command line to an exit code.

tyro makes flags and help out of the classes in `commands`. An `ElectraError` is shown as what,
where and what to do, without a traceback (unless --debug), and sets the exit code.
"""

from __future__ import annotations

import ctypes
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from . import __version__
from .commands import (
    COMMANDS,
    AblateCommand,
    Command,
    EmbedCommand,
    EvaluateCommand,
    FinetuneCommand,
    GlueCommand,
    PlanCommand,
    PredictCommand,
    PrepareCommand,
    PretrainCommand,
    tell,
)
from .config import PretrainConfig, from_dict, read_settings_file
from .errors import EXIT_OK, EXIT_STOPPED, ElectraError, Stopped, StopRequest, nearest
from .recipes import RECIPES, recipe, tuning_profile


def main(argv: Sequence[str] | None = None) -> None:
    """The program; ends with one of the exit codes in errors.py."""

    def end(*_: object) -> None:
        try:
            os.write(2, b"electra: stopped; nothing is lost, give the same command again\n")
        finally:
            os._exit(EXIT_STOPPED)

    def react(handler: Any) -> None:
        for number in StopRequest.SIGNALS:
            signal.signal(number, handler)

    react(end)  # where there is something to save, a `StopRequest` takes over
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)
    argv = list(sys.argv[1:] if argv is None else argv)
    # It needs no network, except for hf:NAME; what it imports is asked not to use any either.
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "1")
    if not any(re.match("(--input=)?hf:", arg) for arg in argv):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # A killed torchrun cannot end its processes, which would go on and hold the directory:
        # the kernel is to ask them to stop (PR_SET_PDEATHSIG).
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    code = run(argv)
    react(signal.SIG_IGN)  # the outcome stands
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # gloo's threads may abort a process that unwinds
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


class _Output(io.FileIO):
    """A stream of which nobody has to read the end: `electra … | head` does its work all the same.

    The results of a command for which a disk has no room are an error, what it tells is not.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError) or self.fileno() == 2:
                return len(data)
            what, fix = f"Cannot write: {error.strerror}.", "make room, or write elsewhere"
            raise ElectraError(what, where="standard output", fix=fix) from error


def _lasting(stream: Any, number: int) -> Any:
    """One of the process's own streams as an `_Output`; where it has none, one to nowhere."""
    if stream is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    elif stream not in (sys.__stdout__, sys.__stderr__):
        return stream  # a test's, or a notebook's
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(number, "w", closefd=False)),
        encoding=getattr(stream, "encoding", "utf-8"),
        errors=getattr(stream, "errors", "backslashreplace"),
        line_buffering=stream is None or stream.line_buffering or stream.write_through,
    )


def run(argv: list[str]) -> int:
    """Carry out one command line and return its exit code."""
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"]
    try:
        code = _carry_out(argv)
        sys.stdout.flush()
        return code
    except ElectraError as error:
        if debug:
            traceback.print_exc()
        tell(f"electra: {error}")
        return error.exit_code
    except Stopped as stopped:
        tell("electra: stopped and saved; the same command continues")
        if stopped.broke_off:  # Python would wait for the threads of a compiler
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_STOPPED)
        return EXIT_STOPPED


def _carry_out(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return EXIT_OK
    if argv[0] == "--version":
        print(__version__)
        return EXIT_OK
    command = parse(argv)
    _check_out(command)
    return command.run() or EXIT_OK


def _check_out(command: Command) -> None:
    """Refuse a place that cannot be written to before hours of work are put into it."""
    out: Path | None = getattr(command, "out", None)
    if out is not None and not getattr(command, "dry_run", False):
        from .files import check_place, exclusive, refuse_another

        is_file = isinstance(command, EvaluateCommand | PredictCommand | EmbedCommand)
        check_place(out.parent if is_file else out)
        if isinstance(command, PretrainCommand | FinetuneCommand):
            is_pretraining = isinstance(command, PretrainCommand)
            refuse_another(out, "run.json" if is_pretraining else "finetune.json")
        # A look before heavy imports; the lock is held later, where there is something to write.
        writers = PrepareCommand | PretrainCommand | FinetuneCommand | AblateCommand
        is_first = os.environ.get("RANK", "0") == "0"
        if isinstance(command, writers) and is_first and (out / ".lock").is_file():
            with exclusive(out):
                pass


def parse(argv: list[str]) -> Command:
    name, args = argv[0], argv[1:]
    for arg in argv:
        if arg != arg.encode(errors="ignore").decode():  # what the system could not decode
            fix = "write it in UTF-8; rename a file whose name is not"
            raise ElectraError("An argument is not valid UTF-8.", where=ascii(arg), fix=fix)
    if name not in COMMANDS:
        what = f"There is no command {name!r}."
        raise ElectraError(what, where="electra", fix=nearest(name, COMMANDS))
    cls: Any = COMMANDS[name]
    prog = f"electra {name}"
    if cls in (FinetuneCommand, GlueCommand):
        needed: dict[str, Any] = dict.fromkeys(("data", "out"), tyro.MISSING)
        start = tuning_profile(_value_of("--profile", args) or "paper")
        return read_flags(cls, args=args, default=cls(**needed, settings=start), prog=prog)
    if cls not in (PlanCommand, PretrainCommand):
        return read_flags(cls, args=args, prog=prog)

    def parse(recipe_name: str) -> Any:
        # The recipe, the profile and the settings file decide what the flags start from.
        needed = {"out": tyro.MISSING} if cls is PretrainCommand else {}
        default = cls(**needed, settings=_starting_point(recipe_name, args))
        return read_flags(cls, args=args, default=default, prog=prog)

    first = args[0] if args and not args[0].startswith("-") else "small"
    command = parse(first)
    # A recipe behind the flags is only known now.
    return command if command.recipe == first else parse(command.recipe)


def read_flags(cls: Any, **how: Any) -> Any:
    """tyro.cli, where the docstring of a field is one paragraph of help: tyro keeps its line breaks
    before lines that begin with a space, as they all do below a field."""
    import docstring_parser

    parse = docstring_parser.parse_from_object

    def in_one_line(thing: Any) -> Any:
        parsed = parse(thing)
        for field_ in parsed.params:
            field_.description = " ".join((field_.description or "").split())
        return parsed

    docstring_parser.parse_from_object = in_one_line
    try:
        return tyro.cli(cls, **how)
    finally:
        docstring_parser.parse_from_object = parse


def _starting_point(name: str, args: list[str]) -> PretrainConfig:
    """Settings before the flags: recipe, then profile, then --init sizes, then --config file."""
    profile: Any = _value_of("--profile", args) or "best"
    config, path = recipe(name, profile), _value_of("--config", args)
    values = read_settings_file(Path(path)) if path is not None else {}
    if (init := _value_of("--init", args)) is not None:
        from .formats.hf import config_of, load_pretrained

        config = config_of(load_pretrained(Path(init)), config)
    config = from_dict(PretrainConfig, values, where=path or "", base=config)
    if any(re.match("--optim.warmup[-_]steps", arg) for arg in args):
        config = replace(config, optim=replace(config.optim, warmup_percent=None))
    return config


def _value_of(flag: str, args: list[str]) -> str | None:
    """The last value of a flag, as tyro takes it; its help calls nothing None."""
    value = None
    for arg, following in zip(args, [*args, None][1:], strict=True):
        if arg == flag and following is not None:
            value = following
        elif arg.startswith(flag + "="):
            value = arg.partition("=")[2]
    return None if value == "None" else value


def _overview() -> str:
    lines = [f"electra {__version__}: pre-train text encoders as discriminators", ""]
    for name, cls in COMMANDS.items():
        lines.append(f"  electra {name:10} {(cls.__doc__ or '').splitlines()[0]}")
    lines += ["", "electra COMMAND --help shows the settings of a command."]
    lines += [f"recipes: {', '.join(RECIPES)}"]
    return "\n".join(lines)
