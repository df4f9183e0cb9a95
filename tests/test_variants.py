"""benchmarks/step_variants.py: every candidate is a switch that is there, and off."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from electra import fused, kernels, optim, pretrain

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


@pytest.mark.parametrize("name", step_variants.CANDIDATES)
def test_a_candidate_is_off_until_its_variant_sets_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, wanted in step_variants.CANDIDATES[name].items():
        module, first, *_ = path.split(".")
        own = getattr(MODULES[module], first)
        monkeypatch.setattr(MODULES[module], first, copy.deepcopy(own))
        before = copy.deepcopy(value_of(path))
        step_variants.put(path, wanted)
        after = value_of(path)
        assert before != after
        if isinstance(before, dict):
            assert after == {**before, **wanted}
            assert after.keys() == before.keys()  # no option that the kernel does not have
        else:
            assert (before, after) == (False, True)


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
