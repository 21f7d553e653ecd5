"""What SGLang's layout refuses is found with all other mistakes, before any work."""

from itertools import product
from typing import Any

import pytest

from hybridrl.config.schema import Config, RolloutConfig
from hybridrl.config.validate.rollout import rollout_problems
from hybridrl.reshard.layouts.sglang import RolloutSizes
from hybridrl.reshard.layouts.sglang.slabs import ENGINES, problems
from tests.reshard.models import CONFIGS, weights

CHANGES: list[dict[str, Any]] = [{}, {"moe_intermediate_size": 20}, {"intermediate_size": 20}, {"mlp_bias": True}]
HEADS = {"mixtral": {"hidden_size": 32}}
"""Settings under which the heads' size is one that SGLang serves."""


@pytest.mark.parametrize("name", CONFIGS)
def test_what_the_engines_layout_refuses_is_a_mistake(name: str) -> None:
    refused = 0
    for changes, tp, dp, ep in product(CHANGES, (1, 2, 4, 8), (1, 2, 4), (1, 2, 8)):
        if tp % dp or tp % ep:
            continue
        try:
            spec = weights(name, **{**HEADS.get(name, {}), **changes}).spec
        except ValueError:
            continue
        found = problems(spec, RolloutSizes(world=8, tp=tp, dp=dp, ep=ep), 0)
        config = Config(rollout=RolloutConfig(engine="sglang", tp=tp, dp=dp, ep=ep))
        told = list(rollout_problems(config, 8, spec))
        refused += bool(found)
        assert bool(told) == bool(found), (changes, tp, dp, ep, found, told)
    assert refused or name not in ENGINES
