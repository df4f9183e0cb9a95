"""The one place where a pickle is opened: a program of its own, which only `electra import` starts.

Comes in: the path of a pytorch_model.bin. Goes out: its tensors as safetensors on standard output.
The reader of torch knows tensors and containers only and calls nothing else that a file names. In
case it has a fault, this process may not write files, start programs or reach a network, and gets
memory and time by the size of the file.
"""

import os
import resource
import sys
from typing import Any

_ROOM = 1 << 30


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    is_write = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    is_import = event in ("os.listdir", "os.scandir")
    if is_write or (event.startswith(("socket.", "subprocess.", "os.")) and not is_import):
        raise PermissionError(f"the file wants to do more than be read: {event}")


def main(path: str) -> None:
    import torch
    from safetensors.torch import save

    size = os.path.getsize(path)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    seconds = 60 + size // 10**6
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    limit = pages * resource.getpagesize() + 8 * size + _ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.dont_write_bytecode = True
    sys.addaudithook(_refuse)
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not all(isinstance(n, str) and isinstance(t, torch.Tensor) for n, t in state.items()):
        raise ValueError("it holds other things than tensors")
    if sum(t.numel() * t.element_size() for t in state.values()) > 2 * size:
        raise ValueError("its tensors are larger than the file")
    data = save({n: t.detach().contiguous().clone() for n, t in state.items()})
    sys.stdout.buffer.write(data)


if __name__ == "__main__":
    main(sys.argv[1])
