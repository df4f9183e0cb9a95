"""What a release of transformers makes of our exports: directories load, ids and logits agree.

Runs under the release that is to be tried, without this package. CASES holds one directory per
export, and beside each of them NAME.json (class, lines and their ids) and NAME.safetensors (inputs
and the outputs they should give), written by `tests/test_transformers_releases.py`:

    PYTHONPATH=OTHER python benchmarks/transformers_compat.py CASES
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file


@torch.no_grad()
def compare(directory: Path) -> dict[str, Any]:
    """Raises nothing: a difference is a number, a tensor too many is named."""
    case = json.loads(directory.with_suffix(".json").read_text(encoding="utf-8"))
    tensors = load_file(directory.with_suffix(".safetensors"))
    given = {name: tensors.pop(name) for name in ("input_ids", "token_type_ids", "attention_mask")}
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    ids = tokenizer(case["lines"], truncation=True)["input_ids"]
    other = sum(a != b for a, b in zip(ids, case["ids"], strict=True))
    auto = getattr(transformers, case["auto"])
    options = {"local_files_only": True, "output_loading_info": True}
    model, info = auto.from_pretrained(directory, **options)
    outputs = model.eval()(**given)
    mask = given["attention_mask"].bool()
    differences: list[float] = []
    for name, expected in tensors.items():
        found = outputs[name]
        if expected.shape[:2] == mask.shape:
            found, expected = found[mask], expected[mask]
        differences.append(float((found - expected).abs().max()))
    return {
        "auto_class": case["auto"],
        "class": type(model).__name__,
        "tokenizer": type(tokenizer).__name__,
        "lines": len(case["lines"]),
        "lines_with_other_ids": other,
        "largest_difference": max(differences),
        "outputs": sorted(tensors),
        "loading": {key: sorted(map(str, value)) for key, value in info.items() if value},
    }


def main() -> None:
    cases = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    names = ("transformers", "tokenizers", "safetensors", "torch")
    record = {"versions": {name: version(name) for name in names}}
    print(json.dumps({**record, "cases": {path.name: compare(path) for path in cases}}, indent=1))


if __name__ == "__main__":
    main()
