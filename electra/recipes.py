"""Every experiment as a function that returns its complete settings.

The paper's hyper-parameter table (appendix A, table 6) stands here column by column. A profile
says how the points are read on which the paper's text and the released code differ
(docs/deviations.md): `paper` is the text, `released` is Google's code, `best` is the default: the
paper's masking, the released discriminator head, textbook Adam.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

from .config import (
    DataConfig,
    EncoderConfig,
    FinetuneConfig,
    GeneratorConfig,
    ObjectiveConfig,
    OptimConfig,
    PretrainConfig,
    RunConfig,
)
from .errors import ElectraError, nearest

Profile = Literal["best", "paper", "released"]


def tiny() -> PretrainConfig:
    """A few minutes on two CPU cores: small enough to watch, real enough to learn."""
    return PretrainConfig(
        name="tiny",
        encoder=replace(
            _encoder(layers=4, width=128, heads=4),
            max_positions=128,
            dropout=0.0,
            attention_dropout=0.0,
            init="local",
        ),
        generator=GeneratorConfig(width=1.0, depth=0.25),
        optim=OptimConfig(learning_rate=6e-4, warmup_percent=10.0, beta2=0.98),
        data=DataConfig(sequence_length=64, batch_size=16),
        run=RunConfig(train_steps=2000, eval_every=500, save_every=500, eval_batches=16),
    )


def small() -> PretrainConfig:
    """ELECTRA-Small: 14M parameters, 1M steps, batch 128, length 128."""
    return PretrainConfig(name="small")


def small_plus_plus() -> PretrainConfig:
    """ELECTRA-Small++: 4M steps, length 512, a generator of full width, as released."""
    c = _run_for(small(), "small++", 4_000_000)
    wide, long = replace(c.generator, width=1.0), replace(c.data, sequence_length=512)
    return replace(c, generator=wide, data=long)


def base() -> PretrainConfig:
    """ELECTRA-Base: 110M parameters, 766k steps, batch 256, length 512."""
    return PretrainConfig(
        name="base",
        encoder=_encoder(layers=12, width=768, heads=12),
        generator=GeneratorConfig(width=1 / 3),
        optim=OptimConfig(learning_rate=2e-4),
        data=DataConfig(sequence_length=512, batch_size=256),
        run=RunConfig(train_steps=766_000),
    )


def base_plus_plus() -> PretrainConfig:
    """ELECTRA-Base++: as base for 4M steps on the larger corpus."""
    return _run_for(base(), "base++", 4_000_000)


def large() -> PretrainConfig:
    """ELECTRA-Large (400K): 335M parameters, batch 2048, length 512, 25 % masked."""
    return PretrainConfig(
        name="large",
        encoder=_encoder(layers=24, width=1024, heads=16),
        generator=GeneratorConfig(width=0.25),
        objective=ObjectiveConfig(mask_percent=25.0),
        optim=OptimConfig(learning_rate=2e-4),
        data=DataConfig(sequence_length=512, batch_size=2048),
        run=RunConfig(train_steps=400_000),
    )


def large_1_75m() -> PretrainConfig:
    """ELECTRA-1.75M: large, trained for 1.75M steps."""
    return _run_for(large(), "large-1.75m", 1_750_000)


def bert_small() -> PretrainConfig:
    """BERT-Small: the small encoder with masked language modelling, 1.45M steps for equal FLOPs."""
    return _run_for(masked_lm(small()), "bert-small", 1_450_000)


def bert_base() -> PretrainConfig:
    """BERT-Base: the base encoder with masked language modelling, 1M steps."""
    return _run_for(masked_lm(base()), "bert-base", 1_000_000)


def bert_large() -> PretrainConfig:
    """BERT-Large: the large encoder with masked language modelling, 464k steps, 15 % masked."""
    return _run_for(masked_lm(large()), "bert-large", 464_000)


def speedrun(minutes: int) -> PretrainConfig:
    """ELECTRA-Small in the minutes of a speedrun on one GPU (docs/speedrun.md)."""
    return PretrainConfig(
        name=f"speedrun-{minutes}",
        encoder=EncoderConfig(init="local", dropout=0.0, attention_dropout=0.0),
        optim=OptimConfig(
            kind="muon", muon_rate=8e-4, warmup_steps=2000, schedule="wsd", decay_percent=40.0
        ),
        run=RunConfig(minutes=float(minutes)),  # these end it, not the million steps
    )


def _encoder(layers: int, width: int, heads: int) -> EncoderConfig:
    """One whose embeddings are as wide as its layers, as in BERT."""
    sizes = {"hidden_size": width, "ffn_size": 4 * width, "embedding_size": width}
    return replace(EncoderConfig(), layers=layers, attention_heads=heads, **sizes)


def _run_for(c: PretrainConfig, name: str, steps: int) -> PretrainConfig:
    return replace(c, name=name, run=replace(c.run, train_steps=steps))


def masked_lm(c: PretrainConfig) -> PretrainConfig:
    """The BERT baseline of the same size: 15 % of the tokens, shown 80/10/10."""
    shown = {"mask_percent": 15.0, "mask_token_percent": 80.0, "random_token_percent": 10.0}
    return replace(c, objective=replace(c.objective, kind="mlm", **shown))


RECIPES: dict[str, Callable[[], PretrainConfig]] = {
    "tiny": tiny,
    "small": small,
    "small++": small_plus_plus,
    "base": base,
    "base++": base_plus_plus,
    "large": large,
    "large-1.75m": large_1_75m,
    "bert-small": bert_small,
    "bert-base": bert_base,
    "bert-large": bert_large,
    **{f"speedrun-{minutes}": partial(speedrun, minutes) for minutes in (5, 10, 25)},
}


def with_profile(config: PretrainConfig, profile: Profile) -> PretrainConfig:
    """`config` with every point of docs/deviations.md read as the profile reads it."""
    if profile not in (known := get_args(Profile)):
        what, fix = f"There is no profile {profile!r}.", f"use one of {', '.join(known)}"
        raise ElectraError(what, where="profile", fix=fix)
    if profile == "best":
        return config
    if profile == "paper":
        return replace(config, objective=replace(config.objective, disc_head="linear"))
    objective = replace(
        config.objective,
        mask_count="round",
        mask_positions="with_replacement",
        duplicate_draws="average",
        mask_token_percent=85.0,
        random_token_percent=0.0,
        disc_head="dense",
    )
    optim = replace(config.optim, schedule="times", bias_correction=False)
    return replace(config, objective=objective, optim=optim)


def recipe(name: str, profile: Profile = "best") -> PretrainConfig:
    """The settings of the recipe called `name`."""
    if name not in RECIPES:
        what = f"There is no recipe {name!r}."
        raise ElectraError(what, where="recipe", fix=nearest(name, RECIPES))
    return with_profile(RECIPES[name](), profile)


def tuning_profile(name: str) -> FinetuneConfig:
    """Fine-tuning as the paper says it (table 7), or with the defaults of the released code."""
    if name == "paper":
        return FinetuneConfig()
    if name != "released":
        what, fix = f"There is no profile {name!r}.", "use paper or released"
        raise ElectraError(what, where="--profile", fix=fix)
    return FinetuneConfig(
        learning_rate=1e-4,
        layer_levels="released",
        schedule="times",
        weight_decay=0.01,
        bias_correction=False,
        loss="sum",
        padding="dynamic",
    )
