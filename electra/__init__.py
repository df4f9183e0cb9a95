"""ELECTRA: pre-train text encoders as discriminators, fine-tune them, study them.

What a notebook needs is here, and comes from `api.py` when it is first asked for: `import electra`
itself loads nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        Finetuned,
        Model,
        Report,
        compare,
        load,
        load_finetuned,
        prepare,
        train,
    )
    from .errors import ElectraError

__version__ = "0.1.0"
__all__ = [
    "ElectraError",
    "Finetuned",
    "Model",
    "Report",
    "__version__",
    "compare",
    "load",
    "load_finetuned",
    "prepare",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
