"""Settings: the paper's tables, the profiles' differences, and errors that name the setting."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from electra.config import (
    DataConfig,
    EncoderConfig,
    FinetuneConfig,
    GeneratorConfig,
    ObjectiveConfig,
    OptimConfig,
    PretrainConfig,
    RunConfig,
    from_dict,
    read_settings_file,
    to_dict,
)
from electra.errors import ElectraError
from electra.recipes import RECIPES, recipe
from electra.rundir import differences

# Paper, appendix A, table 6.
PAPER = {
    "small": {
        "encoder.layers": 12,
        "encoder.hidden_size": 256,
        "encoder.ffn_size": 1024,
        "encoder.attention_heads": 4,
        "encoder.embedding_size": 128,
        "generator.width": 1 / 4,
        "objective.mask_percent": 15,
        "data.sequence_length": 128,
        "data.batch_size": 128,
        "run.train_steps": 1_000_000,
        "optim.learning_rate": 5e-4,
    },
    "base": {
        "encoder.layers": 12,
        "encoder.hidden_size": 768,
        "encoder.ffn_size": 3072,
        "encoder.attention_heads": 12,
        "encoder.embedding_size": 768,
        "generator.width": 1 / 3,
        "objective.mask_percent": 15,
        "data.sequence_length": 512,
        "data.batch_size": 256,
        "run.train_steps": 766_000,
        "optim.learning_rate": 2e-4,
    },
    "large": {
        "encoder.layers": 24,
        "encoder.hidden_size": 1024,
        "encoder.ffn_size": 4096,
        "encoder.attention_heads": 16,
        "encoder.embedding_size": 1024,
        "generator.width": 1 / 4,
        "objective.mask_percent": 25,
        "data.sequence_length": 512,
        "data.batch_size": 2048,
        "run.train_steps": 400_000,
        "optim.learning_rate": 2e-4,
    },
}
OF_ALL = {
    "encoder.max_positions": 512,
    "encoder.dropout": 0.1,
    "encoder.attention_dropout": 0.1,
    "encoder.layer_norm_eps": 1e-12,
    "encoder.init": "paper",
    "generator.depth": 1,
    "generator.sharing": "embeddings",
    "generator.temperature": 1,
    "objective.kind": "rtd",
    "objective.disc_weight": 50,
    "objective.gen_weight": 1,
    "optim.warmup_steps": 10_000,
    "optim.beta1": 0.9,
    "optim.beta2": 0.999,
    "optim.epsilon": 1e-6,
    "optim.weight_decay": 0.01,
    "optim.max_grad_norm": 1,
}


def value(config: PretrainConfig, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def changes(a: PretrainConfig, b: PretrainConfig) -> dict[str, Any]:
    """Dotted setting -> its value in b, for all that differ."""
    keys = differences(to_dict(a), to_dict(b)).keys() - {"name"}
    return {key: value(b, key) for key in keys}


# ---------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("profile", ["best", "paper", "released"])
def test_recipes_are_the_papers_table(name: str, profile: Any) -> None:
    config = recipe(name, profile)
    for path, expected in (PAPER[name] | OF_ALL).items():
        assert value(config, path) == pytest.approx(expected), path
    assert config.encoder.head_size == 64


@pytest.mark.parametrize(
    ("name", "base", "expected"),
    [
        (
            "small++",
            "small",
            {
                "generator.width": 1.0,
                "data.sequence_length": 512,
                "run.train_steps": 4_000_000,
            },
        ),
        ("base++", "base", {"run.train_steps": 4_000_000}),
        ("large-1.75m", "large", {"run.train_steps": 1_750_000}),
        (
            "bert-small",
            "small",
            {
                "objective.kind": "mlm",
                "objective.mask_token_percent": 80.0,
                "objective.random_token_percent": 10.0,
                "run.train_steps": 1_450_000,
            },
        ),
        (
            "bert-base",
            "base",
            {
                "objective.kind": "mlm",
                "objective.mask_token_percent": 80.0,
                "objective.random_token_percent": 10.0,
                "run.train_steps": 1_000_000,
            },
        ),
        (
            "bert-large",
            "large",
            {
                "objective.kind": "mlm",
                "objective.mask_percent": 15.0,
                "objective.mask_token_percent": 80.0,
                "objective.random_token_percent": 10.0,
                "run.train_steps": 464_000,
            },
        ),
    ],
)
def test_the_other_recipes_differ_where_the_paper_says(
    name: str, base: str, expected: dict[str, Any]
) -> None:
    assert changes(recipe(base), recipe(name)) == expected
    assert recipe(name).name == name


def test_speedruns_are_small_and_differ_in_their_minutes() -> None:
    runs = {minutes: recipe(f"speedrun-{minutes}") for minutes in (5, 10, 25)}
    for minutes, config in runs.items():
        assert config.name == f"speedrun-{minutes}"
        assert config.run.minutes == minutes
        assert changes(runs[5], config).keys() <= {"run.minutes"}
    sizes = ("layers", "hidden_size", "ffn_size", "attention_heads", "embedding_size")
    sized = {f"encoder.{name}" for name in (*sizes, "max_positions")}  # what transformers loads
    assert not changes(recipe("small"), runs[5]).keys() & (sized | {"objective.kind"})
    assert runs[5].encoder.dropout == 0.0
    assert (runs[5].optim.kind, runs[5].optim.schedule) == ("muon", "wsd")


RELEASED = {
    "objective.mask_count": "round",
    "objective.mask_positions": "with_replacement",
    "objective.duplicate_draws": "average",
    "objective.mask_token_percent": 85.0,
    "optim.schedule": "times",
    "optim.bias_correction": False,
}


@pytest.mark.parametrize("name", PAPER)
def test_profiles_differ_on_the_collected_points_and_no_others(name: str) -> None:
    best = recipe(name)
    assert changes(best, recipe(name, "paper")) == {"objective.disc_head": "linear"}
    assert changes(best, recipe(name, "released")) == RELEASED
    assert best.objective.disc_head == "dense"


def test_a_profile_that_there_is_not_is_refused() -> None:
    wrong: Any = "Paper"
    with pytest.raises(ElectraError, match="no profile 'Paper'"):
        recipe("small", wrong)


def test_the_released_bert_masks_85_and_nothing_at_random() -> None:
    objective = recipe("bert-small", "released").objective
    assert (objective.mask_token_percent, objective.random_token_percent) == (85.0, 0.0)
    assert objective.kind == "mlm"


@pytest.mark.parametrize(("name", "slots"), [("small", 19), ("base", 79), ("large", 130)])
def test_released_predictions_per_sequence(name: str, slots: int) -> None:
    assert recipe(name, "released").masked_slots == slots


@pytest.mark.parametrize(("name", "slots"), [("small", 20), ("base", 77), ("large", 128)])
def test_predictions_per_sequence_by_the_papers_formula(name: str, slots: int) -> None:
    assert recipe(name).masked_slots == slots


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("small", (12, 64, 256, 1)),
        ("small++", (12, 256, 1024, 4)),
        ("base", (12, 256, 1024, 4)),
        ("large", (24, 256, 1024, 4)),
    ],
)
def test_generators_have_the_published_sizes(name: str, sizes: tuple[int, ...]) -> None:
    config = recipe(name)
    g = config.generator_encoder
    assert (g.layers, g.hidden_size, g.ffn_size, g.attention_heads) == sizes
    assert g.embedding_size == config.encoder.embedding_size


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_a_file(name: str, tmp_path: Path) -> None:
    config = recipe(name, "released")
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(to_dict(config)))
    assert from_dict(PretrainConfig, read_settings_file(path), where=str(path)) == config


def test_a_misspelt_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(ElectraError, match="'smal'") as caught:
        recipe("smal")
    assert "'small'" in caught.value.fix


# ---------------------------------------------------------------------- values that make no sense

WRONG: list[tuple[str, type, dict[str, Any]]] = [
    ("encoder.layers", EncoderConfig, {"layers": 0}),
    ("encoder.hidden_size", EncoderConfig, {"hidden_size": -4}),
    ("encoder.max_positions", EncoderConfig, {"max_positions": 0}),
    ("encoder.attention_heads", EncoderConfig, {"hidden_size": 20, "attention_heads": 3}),
    ("encoder.dropout", EncoderConfig, {"dropout": 1.0}),
    ("encoder.attention_dropout", EncoderConfig, {"attention_dropout": -0.1}),
    ("generator.width", GeneratorConfig, {"width": 0.0}),
    ("generator.depth", GeneratorConfig, {"depth": -1.0}),
    ("generator.sharing", GeneratorConfig, {"sharing": "all"}),
    ("generator.temperature", GeneratorConfig, {"temperature": 0.0}),
    ("objective.mask_percent", ObjectiveConfig, {"mask_percent": 0.0}),
    ("objective.mask_percent", ObjectiveConfig, {"mask_percent": 1.2e-07}),
    ("objective.mask_percent", ObjectiveConfig, {"mask_percent": 100.0}),
    (
        "objective.mask_token_percent",
        ObjectiveConfig,
        {"mask_token_percent": 95.0, "random_token_percent": 10.0},
    ),
    ("objective.disc_weight", ObjectiveConfig, {"disc_weight": float("nan")}),
    ("objective.gen_weight", ObjectiveConfig, {"gen_weight": -1.0}),
    ("optim.learning_rate", OptimConfig, {"learning_rate": 0.0}),
    ("optim.learning_rate", OptimConfig, {"learning_rate": float("nan")}),
    ("objective.disc_start_percent", ObjectiveConfig, {"disc_start_percent": 51.0}),
    ("optim.average", OptimConfig, {"average": 1.0}),
    ("optim.muon_rate", OptimConfig, {"muon_rate": 0.0}),
    ("optim.muon_momentum", OptimConfig, {"muon_momentum": 1.0}),
    ("optim.generator_rate", OptimConfig, {"generator_rate": 0.0}),
    ("optim.warmup_steps", OptimConfig, {"warmup_steps": -1}),
    ("optim.warmup_percent", OptimConfig, {"warmup_percent": 101.0}),
    ("optim.decay_percent", OptimConfig, {"decay_percent": -1.0}),
    ("optim.beta1", OptimConfig, {"beta1": 1.0}),
    ("optim.beta2", OptimConfig, {"beta2": -0.5}),
    ("optim.epsilon", OptimConfig, {"epsilon": -1e-6}),
    ("optim.weight_decay", OptimConfig, {"weight_decay": -0.01}),
    ("optim.max_grad_norm", OptimConfig, {"max_grad_norm": 0.0}),
    ("data.sequence_length", DataConfig, {"sequence_length": 7}),
    ("data.batch_size", DataConfig, {"batch_size": 0}),
    ("data.micro_batch", DataConfig, {"micro_batch": 0}),
    ("run.train_steps", RunConfig, {"train_steps": 0}),
    ("run.minutes", RunConfig, {"minutes": 0.0}),
    ("run.threads", RunConfig, {"threads": -1}),
    ("run.log_every", RunConfig, {"log_every": 0}),
    ("run.eval_every", RunConfig, {"eval_every": 0}),
    ("run.eval_batches", RunConfig, {"eval_batches": 0}),
    ("run.save_every", RunConfig, {"save_every": 0}),
    ("run.keep_checkpoints", RunConfig, {"keep_checkpoints": 0}),
    ("run.keep_every", RunConfig, {"keep_every": 0}),
    ("run.max_bad_steps", RunConfig, {"max_bad_steps": 0}),
    ("length", FinetuneConfig, {"length": 2}),  # no room for a token
]


@pytest.mark.parametrize(
    ("path", "cls", "values"), WRONG, ids=[f"{p}={next(iter(v.values()))}" for p, _, v in WRONG]
)
def test_a_value_that_makes_no_sense_is_refused_by_its_name(
    path: str, cls: Any, values: dict[str, Any]
) -> None:
    with pytest.raises(ElectraError) as caught:
        cls(**values)
    assert path in caught.value.where
    assert caught.value.fix


def test_a_word_stands_beside_numbers_that_have_a_rule() -> None:
    given = from_dict(DataConfig, {"micro_batch": "auto"}, where="x.toml")
    assert given.micro_batch == "auto"
    assert [given.at_once(6), DataConfig(micro_batch=4).at_once(6)] == [6, 4]
    assert [DataConfig().at_once(6), DataConfig(micro_batch=9).at_once(6)] == [6, 6]
    with pytest.raises(ElectraError, match="'often' is not int or 'auto' or None"):
        from_dict(DataConfig, {"micro_batch": "often"}, where="x.toml")


def test_sequences_longer_than_the_positions_are_refused() -> None:
    with pytest.raises(ElectraError, match="513") as caught:
        PretrainConfig(data=DataConfig(sequence_length=513))
    assert caught.value.where == "data.sequence_length"


@pytest.mark.parametrize("width", [0.3, 0.007])
def test_a_generator_of_a_broken_size_is_refused(width: float) -> None:
    config = PretrainConfig(generator=GeneratorConfig(width=width))
    with pytest.raises(ElectraError) as caught:
        _ = config.generator_encoder
    assert "generator.width" in caught.value.where


@pytest.mark.parametrize(("layers", "proposed"), [(12, ["1/4", "1/2"]), (6, ["1/2"]), (3, ["1"])])
def test_the_fraction_that_is_proposed_gives_a_whole_size(layers: int, proposed: list[str]) -> None:
    config = PretrainConfig(
        encoder=EncoderConfig(layers=layers), generator=GeneratorConfig(depth=0.7)
    )
    with pytest.raises(ElectraError) as caught:
        _ = config.generator_encoder
    assert caught.value.fix.endswith(f"such as {' or '.join(proposed)}")
    for fraction in proposed:
        generator = GeneratorConfig(depth=float(Fraction(fraction)))
        assert replace(config, generator=generator).generator_encoder.layers


def test_a_third_is_understood_from_its_decimals() -> None:
    base = recipe("base")
    rough = replace(base, generator=GeneratorConfig(width=0.3333333))
    assert rough.generator_encoder.hidden_size == 256


# ---------------------------------------------------------------------- files


def read(text: str, tmp_path: Path, suffix: str = "toml") -> PretrainConfig:
    path = tmp_path / f"my.{suffix}"
    path.write_text(text)
    return from_dict(
        PretrainConfig, read_settings_file(path), where=str(path), base=recipe("small")
    )


def test_a_file_replaces_what_it_names(tmp_path: Path) -> None:
    config = read("[optim]\nlearning_rate = 1\n[run]\nminutes = 2.5\n", tmp_path)
    assert changes(recipe("small"), config) == {"optim.learning_rate": 1.0, "run.minutes": 2.5}
    assert isinstance(config.optim.learning_rate, float)


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("[optim]\nlearning_rte = 1.0", "learning_rte", "learning_rate"),
        ("[encodr]\nlayers = 3", "encodr", "encoder"),
        ("[objective]\nmask_percentage = 15", "mask_percentage", "mask_percent"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_and_the_file(
    tmp_path: Path, text: str, wrong: str, right: str
) -> None:
    with pytest.raises(ElectraError, match=f"'{wrong}'") as caught:
        read(text, tmp_path)
    assert f"'{right}'" in caught.value.fix
    assert "my.toml" in caught.value.where


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[encoder]\nlayers = 2.5", "layers"),
        ("[encoder]\nlayers = true", "layers"),
        ("[encoder]\nlayers = '2'", "layers"),
        ("[encoder]\ndropout = 'none'", "dropout"),
        ("[encoder]\ninit = 'papre'", "init"),
        ("[optim]\nbias_correction = 1", "bias_correction"),
        ("[run]\nminutes = false", "minutes"),
        ("name = 3", "name"),
        ("encoder = 3", "encoder"),
    ],
)
def test_a_wrong_type_is_refused_with_its_place(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ElectraError) as caught:
        read(text, tmp_path)
    assert "my.toml" in caught.value.where
    assert key in caught.value.where


def test_null_is_a_value_where_it_is_allowed(tmp_path: Path) -> None:
    assert read('{"run": {"minutes": null}}', tmp_path, "json").run.minutes is None
    with pytest.raises(ElectraError):
        read('{"run": {"seed": null}}', tmp_path, "json")


@pytest.mark.parametrize(
    ("text", "suffix"), [("[encoder", "toml"), ("{", "json"), ("[1, 2]", "json"), ("\x00", "toml")]
)
def test_a_broken_file_is_a_clear_error(tmp_path: Path, text: str, suffix: str) -> None:
    with pytest.raises(ElectraError) as caught:
        read(text, tmp_path, suffix)
    assert f"my.{suffix}" in caught.value.where


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ElectraError) as caught:
        read_settings_file(tmp_path / "none.toml")
    assert caught.value.where.endswith("none.toml")


def test_a_file_that_is_not_text_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ElectraError) as caught:
        read_settings_file(tmp_path / "x.toml")
    assert "x.toml" in caught.value.where


# ---------------------------------------------------------------------- the objects themselves


def test_settings_cannot_be_changed() -> None:
    config = recipe("small")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.encoder.layers = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_every_setting_is_explained() -> None:
    """The docstring under a field is its help on the command line."""
    import ast
    import inspect

    import electra.config

    tree = ast.parse(inspect.getsource(electra.config))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            for field, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
                if not isinstance(field, ast.AnnAssign) or node.name == "PretrainConfig":
                    continue
                assert isinstance(after, ast.Expr), ast.unparse(field)
                assert isinstance(after.value, ast.Constant), ast.unparse(field)


@pytest.mark.parametrize(
    ("group", "idle", "partner"),
    [
        ("optim", {"muon_rate": 1e-3}, {"kind": "muon"}),
        ("optim", {"muon_momentum": 0.9}, {"kind": "muon"}),
        ("optim", {"decay_percent": 40.0}, {"schedule": "wsd"}),
        ("objective", {"duplicate_draws": "average"}, {"mask_positions": "with_replacement"}),
        ("generator", {"temperature_steps": 10}, {"temperature": 2.0}),
    ],
)
def test_a_setting_that_does_nothing_is_named_until_its_partner_is_set(
    group: str, idle: dict[str, Any], partner: dict[str, Any]
) -> None:
    plain = recipe("small")
    (name,) = idle
    alone = replace(plain, **{group: replace(getattr(plain, group), **idle)})
    (said,) = alone.without_effect()
    assert said.startswith(f"{group}.{name} {idle[name]} has no effect")
    for key, value in partner.items():
        assert f"{group}.{key}" in said
        assert str(value) in said or key == "temperature"
    both = replace(plain, **{group: replace(getattr(plain, group), **idle, **partner)})
    assert list(both.without_effect()) == []


@pytest.mark.parametrize(
    ("keep_every", "told"),
    [
        (None, None),
        (1000, None),
        (9000, None),
        (1500, "keeps the checkpoints of every 3,000 steps only"),
        (10, "keeps the checkpoints of every 1,000 steps only"),
        (7001, "has no effect"),
        (10_000, "has no effect"),
    ],
)
def test_checkpoints_that_are_never_made_cannot_be_kept(
    keep_every: int | None, told: str | None
) -> None:
    plain = recipe("small")
    run = replace(plain.run, train_steps=10_000, save_every=1000, keep_every=keep_every)
    said = list(replace(plain, run=run).without_effect())
    assert len(said) == (told is not None)
    if told is not None:
        assert said[0].startswith(f"run.keep_every {keep_every} {told}")
        assert "checkpoints are made every 1,000 steps (run.save_every)" in said[0]


@pytest.mark.parametrize(
    ("objective", "generator", "idle"),
    [
        ({"kind": "mlm"}, {"width": 0.5}, "generator.width 0.5"),
        ({"kind": "mlm"}, {"kind": "uniform"}, "generator.kind uniform"),
        ({"kind": "mlm"}, {"disallow_correct": True}, "generator.disallow_correct True"),
        ({"kind": "mlm", "disc_weight": 20.0}, {}, "objective.disc_weight 20.0"),
        ({}, {"kind": "unigram", "depth": 0.5}, "generator.depth 0.5"),
        ({}, {"kind": "uniform", "sharing": "none"}, "generator.sharing none"),
        ({"gen_weight": 2.0}, {"kind": "uniform"}, "objective.gen_weight 2.0"),
    ],
)
def test_settings_of_networks_that_are_not_there_are_named(
    objective: dict[str, Any], generator: dict[str, Any], idle: str
) -> None:
    plain = recipe("small")
    config = replace(
        plain,
        objective=replace(plain.objective, **objective),
        generator=replace(plain.generator, **generator),
    )
    (said,) = config.without_effect(plain)
    needed = "another objective.kind than mlm" if "kind" in objective else "generator.kind network"
    assert said == f"{idle} has no effect: it needs {needed}"


def test_no_recipe_has_a_setting_that_does_nothing() -> None:
    assert [s for name in RECIPES for s in recipe(name).without_effect(RECIPES[name]())] == []
    for name in ("base", "tiny"):  # whose generators are of their own sizes, which nobody gave
        plain = recipe(name)
        alone = replace(plain, objective=replace(plain.objective, kind="mlm"))
        assert list(alone.without_effect(RECIPES[name]())) == []
    two = replace(recipe("small"), objective=ObjectiveConfig(stage_two="fresh"))
    assert [said.split()[0] for said in two.without_effect()] == ["objective.stage_two"]
