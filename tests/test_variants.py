"""benchmarks/step_variants.py: variants that set values of the package."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from electra import optim, pretrain
from electra.gpu import fused, kernels

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import step_variants

MODULES: dict[str, Any] = {
    "fused": fused,
    "kernels": kernels,
    "optim": optim,
    "pretrain": pretrain,
}


def value_of(path: str) -> Any:
    module, *names = path.split(".")
    value: Any = MODULES[module]
    for name in names:
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


SETTING = [name for name, variant in step_variants.VARIANTS.items() if "set" in variant]
VALUES = [value for name in SETTING for value in step_variants.VARIANTS[name]["set"].items()]


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        *VALUES,
        ("kernels.ADD_NORM_BACKWARD", {"STAGES": 2}),
        ("kernels.LAYER_BACKWARD.FEED", {"maxnreg": None}),
    ],
)
def test_a_value_of_a_module_is_set(
    path: str, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, first, *_ = path.split(".")
    own = getattr(MODULES[module], first)
    monkeypatch.setattr(MODULES[module], first, copy.deepcopy(own))
    before = copy.deepcopy(value_of(path))
    step_variants.put(path, wanted)
    after = value_of(path)
    assert before != after
    assert after == ({**before, **wanted} if isinstance(before, dict) else wanted)


def test_what_is_compiled_with_other_values_lies_in_other_folders() -> None:
    """torch would take one for the other: its key does not know our operators."""
    values = [variant.get("set", {}) for variant in step_variants.VARIANTS.values()]
    different = {str(value) for value in values}
    assert len(different) == 1 + len(SETTING)
    folders = {step_variants.cache_of("here", value) for value in values}
    assert len(folders) == len(different)
    assert step_variants.cache_of("here", {}) == "here"
    assert all(folder.startswith("here") for folder in folders)


def test_a_switch_that_is_not_there_is_an_error() -> None:
    for path in ("fused.NO_SUCH", "kernels.LAYER_BACKWARD.NO_SUCH"):
        with pytest.raises((AttributeError, KeyError)):
            step_variants.put(path, True)


def test_settings_of_a_kernel_reach_the_functions_that_have_them_as_default() -> None:
    for way, path in (
        (kernels.layer_backward, "kernels.LAYER_BACKWARD"),
        (kernels.add_norm_backward, "kernels.ADD_NORM_BACKWARD"),
    ):
        defaults: tuple[Any, ...] = way.__defaults__ or ()
        assert any(value_of(path) is d for d in defaults), path
