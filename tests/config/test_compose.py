"""Overrides and files → a configuration, or every mistake in them."""

from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.compose import ConfigError, compose, compose_all
from hybridrl.config.schema import Config

TINY = "recipe=grpo_tiny_moe"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        compose([TINY, *overrides])
    return error.value.problems


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lrr=1", ["optimizer.lrr: unknown key", "did you mean 'optimizer.lr'"]),
        ("+optimizer.lrr=1", ["optimizer.lrr: unknown key", "did you mean 'optimizer.lr'"]),
        ("++optimizer.lrr=1", ["optimizer.lrr: unknown key", "did you mean 'optimizer.lr'"]),
        ("+optimizer.overlap_param_gather=true", ["optimizer.overlap_param_gather: unknown key"]),
        ("+foo.bar=1", ["foo: unknown key", "known: model, parallel"]),
        ("lr=1", ["lr: unknown key", "'optimizer.lr' or 'warm_start.lr'"]),
        ("optimzer.lr=1", ["optimzer: unknown key", "did you mean 'optimizer'"]),
        ("optimizer.lr='1e-6'", ["optimizer.lr: expected a number, found the text '1e-6'", "without the quotes"]),
        ("optimizer.lr=fast", ["optimizer.lr: expected a number, found the text 'fast'"]),
        ("optimizer.lr=null", ["optimizer.lr: expected a number, found null"]),
        ("optimizer.lr=None", ["optimizer.lr: expected a number", "'None'", "null"]),
        ("data.split=None", ["data.split: expected text or null", "'None'", "spelt null"]),
        ("optimizer.lr=true", ["optimizer.lr: expected a number, found true"]),
        ("optimizer.lr=[1]", ["optimizer.lr: expected a number, found the list [1]"]),
        ("optimizer.lr.x=1", ["optimizer.lr: expected a number, found the section"]),
        ("trainer.steps=true", ["trainer.steps: expected an integer, found true"]),
        ("trainer.steps=1.0", ["trainer.steps: expected an integer, found the number 1.0"]),
        ("trainer.steps=1e3", ["trainer.steps: expected an integer, found the number 1000.0"]),
        ("trainer.packing=1", ["trainer.packing: expected true or false, found the integer 1"]),
        ("trainer.packing='true'", ["trainer.packing: expected true or false, found the text 'true'"]),
        ("trainer.name=7", ["trainer.name: expected text, found the integer 7", "quote"]),
        ("trainer=5", ["trainer: expected a section of keys and values, found the integer 5"]),
        ("rollout.stop_token_ids=3", ["rollout.stop_token_ids: expected a list, each item an integer"]),
        ("rollout.stop_token_ids=[1,two]", ["rollout.stop_token_ids[1]: expected an integer, found the text 'two'"]),
        ("rewards.judges=[{nam: exact}]", ["rewards.judges[0].nam: unknown key", "rewards.judges[0].name"]),
        ("rewards.judges=[{weight: 1}]", ["rewards.judges[0].name: missing"]),
        ("rewards.judges.3.weight=1", ["rewards.judges.3.weight=1: cannot be set"]),
        ("model.path=???", ["model.path: missing; expected text"]),
        ("trainer.name=${nothing.there}", ["trainer.name", "nothing.there"]),
        ("recipe=grpo_tiny_mo", ["there is no recipe 'grpo_tiny_mo'", "did you mean 'grpo_tiny_moe'", "sft_tiny_moe"]),
        ("algorithm=ppo2", ["there is no algorithm 'ppo2'", "dr_grpo"]),
        ("model=qwen3_8b", ["model=qwen3_8b: conf/model holds the sizes", "model.facts", "model.path"]),
        ("hardware=h200", ["hardware=h200: conf/hardware holds what plan.hardware names"]),
        ("optimizer=null", ["optimizer=null: expected the name of one optimizer", "adam"]),
        ("recipe=a,b", ["recipe=a,b: a sweep"]),
        ("trainer.seed=1,2", ["trainer.seed=1,2: a sweep", "[…,…]"]),
        ("~trainer.seed", ["~trainer.seed: a key cannot be deleted"]),
        ("hydra.run.dir=x", ["hydra.run.dir", "trainer.output_dir"]),
        ("a=[", ["'a=[' is no override of the form key=value"]),
        ("just-a-word", ["'just-a-word' is no override"]),
    ],
)
def test_a_mistake_is_named(override: str, words: list[str]) -> None:
    found = "\n".join(problems(override))
    for word in words:
        assert word in found


def test_a_recipe_without_its_first_line_is_told(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("defaults: [/recipe/grpo_tiny_moe, _self_]\ntrainer: {steps: 4}\n")
    found = [problem.text for problem in compose_all(["recipe=mine"], str(tmp_path)).problems]
    assert found == ["recipe: a recipe sets nothing without the first line `# @package _global_`; add it"]


def test_all_mistakes_are_reported_at_once() -> None:
    bad = ["optimizer.lrr=1", "optimizer.lr='1'", "+x=1", "trainer.seed=null", "trainer.packing=3", "optimizer=nope"]
    assert len(problems(*bad)) == len(bad)


def test_missing_values_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"1\. model.path: missing; expected text: give it as model.path=…"):
        compose([])


def test_a_misspelt_recipe_leaves_no_other_value_to_complain_about() -> None:
    with pytest.raises(ConfigError) as error:
        compose(["recipe=nope"])
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_every_sign_sets_a_key_or_an_entry_of_an_open_section(sign: str) -> None:
    config = compose([TINY, f"{sign}optimizer.lr=0.5", f"{sign}data.task_args.min_terms=2"])
    assert (config.optimizer.lr, config.data.task_args) == (0.5, {"min_terms": 2})


def test_values_keep_their_types() -> None:
    config = compose([TINY, "optimizer.lr=1", "algorithm.dual_clip=3", "trainer.micro_batch_size=2", "data.split=' a'"])
    assert type(config.optimizer.lr) is float
    assert type(config.algorithm.dual_clip) is float
    assert type(config.trainer.micro_batch_size) is int
    assert config.data.split == " a"


def test_a_list_and_its_items_can_be_set() -> None:
    config = compose([TINY, "rewards.judges=[{name: exact}, {name: math, weight: 2}]", "rewards.judges.0.weight=3"])
    assert [(j.name, j.weight) for j in config.rewards.judges] == [("exact", 3.0), ("math", 2.0)]


def test_derived_defaults_are_spelt_out_and_choices_kept() -> None:
    derived = compose([TINY, "parallel.tp=2", "trainer.prompts_per_step=48"])
    assert derived.parallel.sequence_parallel is True
    assert derived.trainer.mini_batch_prompts == 48
    assert derived.trainer.output_dir == "outputs/grpo_tiny_moe"
    chosen = compose([TINY, "parallel.tp=2", "parallel.sequence_parallel=false", "trainer.mini_batch_prompts=8"])
    assert chosen.parallel.sequence_parallel is False
    assert chosen.trainer.mini_batch_prompts == 8


@settings(deadline=None, max_examples=15)
@given(st.dictionaries(st.sampled_from(["tp", "cp", "pp", "ep", "etp"]), st.integers(-3, 99)), st.floats(0, 1))
def test_no_choice_of_the_user_is_changed(sizes: dict[str, int], lr: float) -> None:
    config = compose([TINY, *(f"parallel.{k}={v}" for k, v in sizes.items()), f"optimizer.lr={lr!r}"])
    assert config.optimizer.lr == lr
    assert {k: getattr(config.parallel, k) for k in sizes} == sizes


def test_a_recipe_chooses_groups_and_the_command_line_has_the_last_word() -> None:
    assert compose(["recipe=sft_tiny_moe"]).algorithm.name == "sft"
    config = compose([TINY, "algorithm=dr_grpo", "optimizer=sgd", "optimizer.distributed=true"])
    assert (config.algorithm.normalize, config.optimizer.name, config.optimizer.distributed) == ("none", "sgd", True)


def test_a_policy_of_memory_is_chosen_by_name_whatever_the_recipe_chose() -> None:
    for name in (TINY, "recipe=dapo_deepseek_v3", "recipe=ppo_qwen3_8b"):
        for chosen, found in (("keep", "keep auto"), ("offload", "offload host"), ("disk", "offload disk")):
            memory = compose([name, f"memory={chosen}"]).memory
            assert f"{memory.parameters} {memory.optimizer}" == found
    assert compose(["recipe=dapo_deepseek_v3"]).memory == compose([TINY, "memory=single"]).memory
    assert compose(["recipe=ppo_qwen3_8b", "memory=disk", "memory.optimizer=none"]).memory.optimizer == "none"


def recipe(folder: Path, text: str) -> str:
    (folder / "recipe").mkdir()
    (folder / "recipe" / "mine.yaml").write_text("# @package _global_\n" + text)
    return str(folder)


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    text = "defaults:\n  - /recipe/grpo_tiny_moe\n  - override /algorithm: dapo\n  - _self_\nrollout:\n  n: 16\n"
    found = compose_all(["recipe=mine"], recipe(tmp_path, text))
    assert not found.problems
    assert found.config.rollout.n == 16
    assert found.config.data == compose([TINY]).data
    assert found.config.algorithm.clip_high == 0.28


def test_mistakes_in_a_recipe_are_reported_with_those_of_the_command_line(tmp_path: Path) -> None:
    text = "model:\n  pth: x\n  path: y\noptimizer:\n  lr: '1e-6'\n  beta1: 1e-1\ntrainer: 3\n"
    found = [p.text for p in compose_all(["recipe=mine", "rollout.m=2"], recipe(tmp_path, text)).problems]
    for word in (
        "model.pth: unknown key",
        "optimizer.lr: expected a number",
        "trainer: expected",
        "rollout.m: unknown",
    ):
        assert any(word in text for text in found)
    assert len(found) == 4


@pytest.mark.parametrize("text", ["a: [", "defaults:\n  - override /algorithm: nope\n", "defaults:\n  - /nothing: x\n"])
def test_a_recipe_that_cannot_be_merged_is_one_mistake(tmp_path: Path, text: str) -> None:
    found = compose_all(["recipe=mine", "trainer.seed=x"], recipe(tmp_path, text))
    texts = [p.text for p in found.problems]
    assert len(texts) == 2
    assert texts[0].startswith("the configuration files cannot be merged: ")
    assert not found.whole


def test_the_defaults_are_the_schemas() -> None:
    config, schema = asdict(compose(["model.path=x"])), asdict(Config())
    derived = {("model", "path"), ("model", "tokenizer"), ("parallel", "sequence_parallel")}
    derived |= {("trainer", "mini_batch_prompts"), ("trainer", "output_dir"), ("algorithm", "aggregate_length")}
    differing = {(s, k) for s, section in schema.items() for k, v in section.items() if config[s][k] != v}
    assert differing <= derived
