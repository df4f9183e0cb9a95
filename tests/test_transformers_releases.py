"""Our exports in releases of transformers other than the installed one.

Set ELECTRA_TRANSFORMERS to a folder with such a release, made for example by

    pip install --target FOLDER --no-deps transformers==4.57.6 tokenizers==0.22.2 \\
        huggingface_hub==0.36.2 requests urllib3 certifi idna charset-normalizer

and ELECTRA_RECORD to a file, if what was found is to be kept.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_export_finetuned as finetuned
import test_hf as pretrained
import torch
from safetensors.torch import save_file

from electra.data.tokenizer import Tokenizer, train_tokenizer
from electra.formats import hf, hf_export, layout

ROOT = Path(__file__).parents[1]
RELEASE = os.environ.get("ELECTRA_TRANSFORMERS", "")
ALPHABET = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZéèêïöüåßñçÉÖÅŁłğışœΣσς京東😀́'-.,!?0123"
)


def lines(count: int) -> list[str]:
    """Words of all sorts, cased and accented, with known ones between them."""
    draw = random.Random(4)
    known = " ".join(pretrained.TEXTS).split()

    def word() -> str:
        if draw.random() < 0.4:
            return draw.choice(known)
        return "".join(draw.choices(ALPHABET, k=draw.randint(1, 9)))

    return [" ".join(word() for _ in range(draw.randint(1, 12))) for _ in range(count)]


def write_case(directory: Path, auto: str, tokenizer: Tokenizer, limit: int, expected: Any) -> None:
    # One tokenizer is in all the directories; it is looked at closely in one of them.
    texts = lines(10_000 if directory.name.endswith("discriminator-AutoModel") else 100)
    rows = [
        ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]
        for ids in map(tokenizer.encode, texts)
    ]
    case = {"auto": auto, "lines": texts, "ids": rows}
    directory.with_suffix(".json").write_text(json.dumps(case), encoding="utf-8")
    given = finetuned.batch(tokenizer.vocab_size)
    tensors = {"input_ids": given.x, "token_type_ids": given.segment}
    tensors["attention_mask"] = given.mask.long()
    with torch.no_grad():
        outputs = expected(given.x, given.segment, given.mask)
    tensors |= {name: t.contiguous() for name, t in outputs.items()}
    save_file(tensors, directory.with_suffix(".safetensors"))


def write_cases(place: Path, name: str, tokenizer_dir: Path) -> None:
    """Both networks under all their classes, and a model of each kind of task."""
    config, tokenizer = pretrained.settings(), Tokenizer.load(tokenizer_dir)
    objective = pretrained.objective_of(config, tokenizer_dir)
    for network in layout.networks_of(objective):
        model = network.modules

        def states(x: Any, segment: Any, mask: Any, model: Any = model) -> Any:
            return {"last_hidden_state": model.encoder(x, segment, mask, None)}

        def logits(x: Any, s: Any, mask: Any, network: Any = network, model: Any = model) -> Any:
            return {"logits": hf_export._logits(network, model, x, s, mask)}

        head = "ForPreTraining" if network.kind == "discriminator" else "ForMaskedLM"
        for auto, expected in (("AutoModel", states), (f"AutoModel{head}", logits)):
            hf_export.export(objective, config, tokenizer_dir, place.parent / "export")
            directory = place / f"{name}-{network.kind}-{auto}"
            (place.parent / "export" / network.kind).rename(directory)
            limit = network.config.max_positions
            write_case(directory, auto, tokenizer, limit, expected)
    for kind in ("classification", "regression", "tagging", "qa"):
        form = "hf" if kind == "qa" else "paper"
        task = finetuned.task_of(kind)
        directory = place / f"{name}-{kind}"
        finetuned.export(directory, task, form, tokenizer)
        model = hf.load_finetuned(directory).model

        def outputs(x: Any, s: Any, mask: Any, model: Any = model, kind: str = kind) -> Any:
            head = model.head
            h = model.encoder(x, s, mask, None)
            if kind == "qa":
                return dict(zip(("start_logits", "end_logits"), head.logits(h), strict=True))
            return {"logits": head.logits(h, None)}

        write_case(directory, finetuned.AUTO[kind].__name__, tokenizer, 23, outputs)


@pytest.mark.skipif(not RELEASE, reason="ELECTRA_TRANSFORMERS names no other release")
def test_exports_are_the_same_in_another_release(tmp_path: Path) -> None:
    place = tmp_path / "cases"
    place.mkdir()
    text = tmp_path / "text.txt"
    text.write_text("\n".join(lines(300)), encoding="utf-8")
    kinds = {
        "cased": {"lowercase": False},
        "uncased": {"lowercase": True},
        "lowercase-with-accents": {"lowercase": True, "strip_accents": False},
    }
    for name, options in kinds.items():
        train_tokenizer([text], vocab_size=900, **options).save(tmp_path / name)
        write_cases(place, name, tmp_path / name)
    script = ROOT / "benchmarks" / "transformers_compat.py"
    done = subprocess.run(
        [sys.executable, str(script), str(place)],
        env={**os.environ, "PYTHONPATH": RELEASE, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    if "ELECTRA_RECORD" in os.environ:
        Path(os.environ["ELECTRA_RECORD"]).write_text(done.stdout)
    assert Path(RELEASE, "transformers").is_dir()
    assert len(record["cases"]) == 3 * 8
    for name, case in record["cases"].items():
        assert case["largest_difference"] <= 1e-5, name
        assert case["lines_with_other_ids"] == 0, name
        allowed = {"unexpected_keys"} if case["auto_class"] == "AutoModel" else set()
        assert set(case["loading"]) <= allowed, name
