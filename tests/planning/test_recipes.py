"""Every recipe passes the dry run on the hardware that it states."""

import re
from pathlib import Path

import pytest

from hybridrl.plan import prepare
from hybridrl.planning.estimate import estimate
from hybridrl.planning.layouts import trained_weights

RECIPES = Path(__file__).resolve().parent.parent.parent / "recipes"
STATED = re.compile(r"Hardware: (\d+) nodes? of 8 \w+(?:, or (\d+))?")


def cases() -> list[tuple[str, int]]:
    """Each recipe for nodes of GPUs, with each number of nodes that its head names."""
    found = []
    for path in sorted(RECIPES.glob("*.yaml")):
        stated = STATED.search(path.read_text().replace("\n# ", " "))
        found += [(path.stem, int(nodes)) for nodes in stated.groups() if nodes] if stated else []
    return found


def test_the_recipes_are_those_that_are_promised() -> None:
    models = {"qwen3_30b_a3b": [1, 4], "qwen3_235b_a22b": [8, 16], "deepseek_v3": [32, 64], "glm4_5_355b": [16]}
    models |= {"moonlight_16b": [1], "mixtral_8x7b": [1]}
    wanted = {(f"{kind}_{model}", n) for kind in ("grpo", "dapo") for model, nodes in models.items() for n in nodes}
    wanted |= {("gspo_qwen3_30b_a3b", 1), ("gspo_qwen3_30b_a3b", 4), ("ppo_qwen3_8b", 1)}
    assert wanted <= set(cases())


@pytest.mark.parametrize(("name", "nodes"), cases())
def test_a_recipe_fits_the_hardware_that_it_states(name: str, nodes: int) -> None:
    found = prepare([f"recipe={name}", f"trainer.nodes={nodes}"])
    assert found.errors == []
    assert found.spec is not None
    assert found.hardware is not None
    result = estimate(found.config, trained_weights(found.spec, found.config), found.hardware)
    assert result.shortages == []
    assert result.memory.cache.sequences >= 8
