"""One copy of the weights in a world of one rank; see tests/distributed/test_single.py for many."""

import pytest

from hybridrl.memory.region import region_bytes
from hybridrl.memory.single import SingleWeights, WeightsStateError, Where
from hybridrl.models.families import weight_map
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.aliasing import adopt_data
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.transformers import TransformersLayout
from tests.reshard.poison import poison_region
from tests.reshard.programs import like
from tests.reshard.simulated import MOE


@pytest.mark.parametrize("back", [False, True])
def test_weights_are_lost_to_whatever_ends_a_switch_half_way(back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt is no error that ranks agree on, and whoever handles it must not save what is left."""
    weights = weight_map(MOE)
    training = MegatronLayout(weights, ParallelSizes(world=1), vocab_multiple=64, dtype="float32")
    engine = TransformersLayout(weights, (0,), dtype="float32")
    region = poison_region(region_bytes(param.nbytes for param in training.params(0).values()))
    region.commit()
    trained = {name: region.take(t.shape, t.dtype).zero_() for name, t in like(training, 0).items()}
    served = like(engine, 0)
    single = SingleWeights(
        training, trained, region, engine, served, 0, adopt=adopt_data(served), make_region=poison_region
    )
    if back:
        single.to_rollout(0)

    def interrupted(start: int, stop: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(region if back else single.engine_region, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        single.to_training() if back else single.to_rollout(0)
    assert single.where is Where.NOWHERE
    with pytest.raises(WeightsStateError, match="they were lost when weights 0 were half-way"):
        single.wait()
