"""What the configuration knows of the registered functions is what they say of themselves."""

import pytest

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.policy_losses import POLICY_LOSSES
from hybridrl.config.compose import compose
from hybridrl.config.folders import RECIPES
from hybridrl.config.validate.algorithm import OWN, USERS

REGISTRIES = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES}
PARAMETERS = {
    "covariance.coef": "covariance_coef",
    **{f"covariance.{k}": "selected" for k in ("fraction", "low", "high")},
}


@pytest.mark.parametrize("option", USERS)
def test_the_users_of_an_option_are_those_that_take_it(option: str) -> None:
    kind, users = USERS[option]
    registry, parameter = REGISTRIES[kind], PARAMETERS.get(option, option)
    takers = {name for name in OWN[kind] if parameter in registry.wants(name)}
    if option in ("covariance.low", "covariance.high"):
        takers -= {"kl_cov"}  # it selects the highest
    assert set(users) == takers


@pytest.mark.parametrize("kind", OWN)
def test_our_own_functions_are_registered(kind: str) -> None:
    assert set(OWN[kind]) <= set(REGISTRIES[kind])


def test_every_function_has_a_recipe_and_every_recipe_of_them_a_line() -> None:
    configs = {path.stem: compose([f"recipe={path.stem}"]) for path in RECIPES.glob("*_tiny_moe.yaml")}
    own = {name: config.algorithm for name, config in configs.items() if config.algorithm.name == "grpo"}
    for kind, names in OWN.items():
        assert {getattr(algorithm, kind) for algorithm in own.values()} >= set(names), kind
    table = (RECIPES / "README.md").read_text()
    assert [name for name in own if f"`{name}`" not in table] == []
