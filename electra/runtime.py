"""Where a run happens: device, precision, processes, threads, signals.

Everything is decided once, before the first step, and written into the run; a wish that cannot be
met is an error, never a quiet substitute.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from .config import RunConfig
from .errors import ElectraError, LostProcess, StopRequest

_kept = deque["dist.Work"](maxlen=1)
_GRACE = timedelta(seconds=5)  # in which a process that is alive notices that another is not


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The resolved answers."""

    device: torch.device
    dtype: torch.dtype
    compiled: bool
    cuda_graph: bool
    threads: int
    rank: int = 0
    world: int = 1
    is_first_here: bool = True  # of its machine's processes: does what one of them has to do there
    store: Any = None  # where processes leave word for each other when something goes wrong
    at_leave: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def describe(self) -> dict[str, Any]:
        """What a reader of a result wants to know about the machine."""
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else None
        return {
            "device": gpu or cpu_name(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "compiled": self.compiled,
            "cuda_graph": self.cuda_graph,
            "threads": self.threads,
            "processes": self.world,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **source(),
        }

    def agree(self, value: float) -> float:
        """The main process's `value`, on every process."""
        if self.world == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        with self.together():
            work = cast("dist.Work", dist.broadcast(shared, src=0, async_op=True))
            work.wait()
            # A thread of gloo's drops what is finished when it gets to it, the tensor with it: were
            # that after Python has ended, the process would abort.
            _kept.append(work)
            return float(shared.item())

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on at least one process."""
        if self.world == 1:
            return flag
        shared = torch.tensor([int(flag)], device=self.device)
        with self.together():
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
            return bool(shared.item())

    def first_word(self, word: str) -> tuple[int, str]:
        """Of the processes that have a word, the first one and its word; 0 and "" if none has."""
        if self.world == 1:
            return 0, word
        data = word.encode()
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        sizes = sizes.to(self.device)
        with self.together():
            dist.all_reduce(sizes)
            told: list[int] = sizes.tolist()
            first = next((rank for rank, size in enumerate(told) if size), None)
            if first is None:
                return 0, ""
            letters = torch.tensor(list(data if first == self.rank else bytes(told[first])))
            letters = letters.to(self.device)
            dist.broadcast(letters, src=first)
            return first, bytes(letters.tolist()).decode()

    def leave(self) -> None:
        """End what was started here: process group, deterministic mode, threads, whole vectors."""
        self.at_leave.close()

    def sum_(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over all processes, in place."""
        if self.world > 1:
            with self.together():
                dist.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Turn a failed exchange into an error that names the process at fault."""
        try:
            yield
        except RuntimeError as error:
            is_exchange = isinstance(error, dist.DistError) or "gloo" in str(error)
            if not is_exchange or is_out_of_memory(error):
                raise
            self.report("")
            for rank, word in roll_call(self.store, "word", self.world, _GRACE).items():
                if word != "":
                    raise _lost(rank, word, error) from error
            raise  # all are there: it was something else

    def report(self, word: str) -> None:
        """Tell the others why this process ends; empty if it ends because another one did."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"electra/word/{self.rank}", word)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting: what is queued there next sees the copy. (Unpinned memory
    would first wait for all queued steps.)"""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def usable_memory(device: torch.device) -> float:
    """Bytes of a GPU that this process may use: a user may have said how much (torch's
    `per_process_memory_fraction`), and others share the device then."""
    share = torch.cuda.get_per_process_memory_fraction(device)
    return share * torch.cuda.get_device_properties(device).total_memory


def is_out_of_memory(error: BaseException) -> bool:
    """Looks at context and cause too, as a failed graph recording raises another error, and at the
    words that compilers and libraries use."""
    told = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
    return any(
        isinstance(e, torch.OutOfMemoryError) or any(words in str(e) for words in told)
        for e in (error, error.__context__, error.__cause__)
        if e is not None
    )


def refuse_undetermined(error: RuntimeError) -> None:
    """An operator that torch does not run in deterministic mode becomes an error for people."""
    if found := re.match(r"(\S+) does not have a deterministic implementation", str(error)):
        raise ElectraError(
            f"{found[1]} gives other bits from run to run on this device, and deterministic mode "
            "does not let it.",
            where="deterministic",
            fix="leave deterministic mode off, or compile (the default on a GPU), which replaces "
            "some operators by others",
        ) from error


def roll_call(store: Any, question: str, world: int, patience: timedelta) -> dict[int, str | None]:
    """What each process left at electra/`question`, None where nothing came in time."""
    answers: dict[int, str | None] = {}
    end = time.monotonic() + patience.total_seconds()
    for rank in range(world if store else 0):
        key = f"electra/{question}/{rank}"
        answers[rank] = None
        with contextlib.suppress(RuntimeError):  # it waited in vain, or the store is gone
            while not store.check([key]) and time.monotonic() < end:
                time.sleep(0.05)
            answers[rank] = store.get(key).decode() if store.check([key]) else None
    return answers


def _lost(rank: int, word: str | None, seen: RuntimeError | None = None) -> LostProcess:
    what = f"Process {rank} " + (f"failed: {word}" if word else "does not answer.")
    if seen is not None and not word:  # perhaps it is well and waits: then this is the true fault
        what += f" Seen from here: {next(iter(str(seen).splitlines()), type(seen).__name__)}"
    return LostProcess(
        what,
        where=f"rank {rank}",
        fix="look at its messages and its machine, then give the same command again; if it was "
        "only slow, raise --run.timeout-seconds",
    )


def start(config: RunConfig, *, threads: int | None = None) -> Runtime:
    """Resolve device, precision, threads and process group; `threads` is that of a resumed run."""
    wants_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if wants_cuda and not torch.cuda.is_available():
        raise ElectraError(
            "There is no usable CUDA device.",
            where="run.device",
            fix="take the CPU (--run.device, --device), or check the driver with `electra env`",
        )
    device = torch.device("cpu")
    if wants_cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    with contextlib.ExitStack() as at_leave:  # also left where something below is refused
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        store: Any = None
        if world > 1 and not dist.is_initialized():
            limit = timedelta(seconds=config.timeout_seconds)
            store, rank, world = _join_group("nccl" if wants_cuda else "gloo", limit)
            at_leave.callback(dist.destroy_process_group)
        if config.deterministic:
            _determine(at_leave)
        dtype = _dtype(config, on_gpu=wants_cuda)
        if not wants_cuda:
            _keep_freed_memory()
            at_leave.enter_context(whole_vectors)
        compiled, graph = _ways(config, on_gpu=wants_cuda, world=world)
        threads = config.threads or threads or fastest_threads()
        at_leave.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        return Runtime(
            device=device,
            dtype=dtype,
            compiled=compiled,
            cuda_graph=graph,
            threads=threads,
            rank=rank,
            world=world,
            # Where a launcher numbers no processes of a machine, each of them is the first.
            is_first_here=rank == 0 or int(os.environ.get("LOCAL_RANK", 0)) == 0,
            store=store,
            at_leave=at_leave.pop_all(),
        )


def _determine(at_leave: contextlib.ExitStack) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    at_leave.callback(torch.use_deterministic_algorithms, before, warn_only=only_warns)
    memory: Any = torch.utils.deterministic
    at_leave.callback(
        setattr, memory, "fill_uninitialized_memory", memory.fill_uninitialized_memory
    )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # With warnings alone torch's attention would go on adding up its gradients in any order.
    torch.use_deterministic_algorithms(True)
    # Memory need not be filled before it is written: that shows mistakes, and takes time.
    memory.fill_uninitialized_memory = False


def _ways(config: RunConfig, *, on_gpu: bool, world: int) -> tuple[bool, bool]:
    """Whether the step is compiled, and whether it is recorded as a CUDA graph."""
    in_shares = config.sharding == "weights" and world > 1
    compiled = on_gpu and not in_shares if config.compile == "auto" else config.compile == "yes"
    # torch unpickles what it compiled before. By default that is in a folder in which anybody can
    # prepare files, under a key that does not change when an operator of ours does.
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    own = f"{cache}/electra/compiled/{source_hash()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", own)
    graph = on_gpu and world == 1 if config.cuda_graph == "auto" else config.cuda_graph == "yes"
    if graph and not on_gpu:
        raise ElectraError(
            "A CUDA graph needs a CUDA device.", where="run.cuda_graph", fix="use auto or no"
        )
    return compiled, graph


def _join_group(backend: str, limit: timedelta) -> tuple[Any, int, int]:
    """Meet the other processes; the store they share, this one's rank, and how many they are."""
    store: Any
    with _ended_by_signals():
        store, rank, world = next(iter(rendezvous("env://", timeout=limit)))
        store.set(f"electra/here/{rank}", "yes")
        for other, answer in roll_call(store, "here", world, limit).items():
            if answer is None:
                raise _lost(other, None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    store = store.clone()
    store.set_timeout(_GRACE)  # it may live in the process that froze
    return store, rank, world


def _dtype(config: RunConfig, *, on_gpu: bool) -> torch.dtype:
    if config.precision == "fp32" or (config.precision == "auto" and not on_gpu):
        return torch.float32
    if not on_gpu and not bf16_survives():
        raise ElectraError(
            "bf16 arithmetic kills the process on this CPU (tried in a child process).",
            where="run.precision",
            fix="use --run.precision fp32, which is also the faster one here; or cap the "
            "instruction set with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
        )
    return torch.bfloat16


@contextlib.contextmanager
def _ended_by_signals() -> Generator[None]:
    """Inside, a signal ends the process at once: no Python handler runs while torch's C++ waits for
    other processes, and there is nothing to save yet."""
    heard: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
        heard = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in heard:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


def _keep_freed_memory() -> None:
    """Keep what a step frees for the next one, where the C library is glibc.

    It would give large tensors back to the kernel, which then clears their pages again at every
    step: a tenth of the time of `tiny`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class _WholeVectors(contextlib.ContextDecorator):
    """Inside, AMD's processors multiply float32 matrices with all of their vector units.

    torch does it by MKL, which uses half of their width. oneDNN uses all, twice as fast; torch asks
    it only where bfloat16 is said to be precise enough, which oneDNN then computes in float32 all
    the same, as these processors have no faster way. (Meanwhile torch's older question for the
    precision, `torch.get_float32_matmul_precision`, is refused by torch.)
    """

    _torchs: Any = torch.backends.mkldnn

    def __init__(self) -> None:
        self._lock, self._blocks, self._before = threading.Lock(), 0, "none"
        self.active = False  # whether a block is open in which products are computed this way

    def __enter__(self) -> None:
        if self.pay:
            self._begin()

    def __exit__(self, *_: object) -> None:
        if self.pay:
            self._end()

    def _begin(self) -> None:
        with self._lock:  # the setting is that of the process: the last block puts it back
            if self._blocks == 0:
                self._before = self._torchs.matmul.fp32_precision
                self._torchs.matmul.fp32_precision = "bf16"
            self._blocks += 1
            self.active = True

    def _end(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                self._torchs.matmul.fp32_precision = self._before
                self.active = False

    @functools.cached_property
    def pay(self) -> bool:
        """Whether that is so on this processor, and the products are float32's: tried, since a
        later oneDNN could take the permission at its word."""
        try:
            told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        except OSError:
            return False
        if "AuthenticAMD" not in told or " avx512f" not in told or " amx_tile" in told:
            return False
        a = torch.arange(2**18, dtype=torch.float32, device="cpu").sin().view(1024, 256)
        self._begin()
        try:
            product = a.T @ a
        finally:
            self._end()
        exact = a.T.double() @ a.double()
        return bool((product - exact).norm() < 1e-6 * exact.norm())


whole_vectors = _WholeVectors()


@functools.cache
def bf16_survives() -> bool:
    """Whether bf16 products work on this CPU, tried in a child process.

    Some virtual machines advertise AMX but hide its tile palette; the first bf16 product then ends
    the process with an illegal instruction, and no query of torch tells beforehand.
    """
    code = (
        "import torch, torch.nn.functional as F\n"
        "a = torch.ones(64, 64, dtype=torch.bfloat16)\n"
        "q = a.view(1, 1, 64, 64)\n"
        "F.linear(a, a, a[0]); a @ a; F.scaled_dot_product_attention(q, q, q)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    return child.returncode == 0


@functools.cache
def fastest_threads() -> int:
    """One thread or all cores, whichever is faster right now at what a small encoder does.

    Its many short operations meet at a barrier each; on a machine that is busy with other work,
    waiting there can make two threads several times slower than one.
    """
    available = len(os.sched_getaffinity(0))
    if available == 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return 1
    before = torch.get_num_threads()
    h, up = torch.randn(1024, 128), torch.randn(128, 512)
    seconds: dict[int, float] = {}
    for threads in (1, available):
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        for _ in range(60):
            torch.mm(torch.nn.functional.gelu(h @ up), up.T)
        seconds[threads] = time.perf_counter() - begin
    torch.set_num_threads(before)
    return min(seconds, key=lambda n: seconds[n])


@functools.cache
def source_hash() -> str:
    """Of the package's files."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).as_posix()
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def source() -> dict[str, str]:
    """Which code runs: a hash over the package's files and, in a git checkout, its commit."""

    def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True)

    found = {"source": source_hash()}
    try:
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ".")
        tracked = git("ls-files", "--error-unmatch", __file__)
    except OSError:  # no git here
        return found
    if commit.returncode == tracked.returncode == 0:
        found["commit"] = commit.stdout.decode().strip() + " and changes" * bool(changes.stdout)
    return found


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Best measured FLOP/s of a large square matrix product: what MFU is a share of."""
    n = 8192 if device.type == "cuda" else 768
    a = torch.randn(n, n, device=device).to(dtype)
    best = float("inf")
    for _ in range(8):
        begin = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best


def cpu_name() -> str:
    """The processor's own name for itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
