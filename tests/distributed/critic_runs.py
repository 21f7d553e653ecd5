"""What the tests of models with a scalar head run on ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.checkpoint.huggingface_export import export_weights
from hybridrl.config.critic import critic_config
from hybridrl.data.demonstrations import Demonstration
from hybridrl.data.preferences import Pair
from hybridrl.models.families import load_spec, with_scalar_head
from hybridrl.parallel import groups
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.training.actor import Actor
from hybridrl.training.critic import Critic, RewardModel, make_critic
from hybridrl.training.frozen import FrozenRewardModel
from hybridrl.training.losses import make_loss
from hybridrl.training.preference import ScoredPairs, pair_rows, scored_row
from hybridrl.training.rows import Row
from hybridrl.training.value import Value
from tests.distributed.actor_runs import make_config, make_rows, whole_tensors, with_old_log_probs

HEAD = "output_layer.weight"


def make_sizes(config: Any) -> ParallelSizes:
    parallel, world = config.parallel, torch.distributed.get_world_size()
    return ParallelSizes(world=world, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, ep=parallel.ep, etp=parallel.etp)


def make(kind: type[Any], folder: Any, **options: dict[str, Any]) -> Any:
    """A model whose new head is not 0, so that its layers have a gradient; the same on all ranks."""
    config = make_config(torch.distributed.get_world_size(), **options)
    sizes = make_sizes(config)
    groups.initialize(sizes, vpp=config.parallel.vpp)
    spec = with_scalar_head(load_spec(folder))
    frozen = kind is FrozenRewardModel
    model = kind(config, spec, sizes, folder=folder, **({} if frozen else {"total_updates": 10}))
    fill_head(model)
    return model


def fill_head(model: Any) -> None:
    for name, tensor in model.tensors().items():
        if name.endswith(HEAD) and tensor.shape[0] == 1 and not bool(tensor.any()):
            values = 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
            with torch.no_grad():
                tensor.copy_(values)


def returns_for(rows: list[Row]) -> list[Row]:
    rng = np.random.default_rng(8)
    return [row.with_fields(**{k: rng.normal(size=len(row)) for k in ("returns", "values")}) for row in rows]


def make_pairs(vocab: int = 50) -> list[Pair]:
    rng = np.random.default_rng(3)

    def response(length: int) -> Demonstration:
        return Demonstration(tuple(int(t) for t in rng.integers(0, vocab, length)), (False,) + (True,) * (length - 1))

    return [Pair(response(a), response(b), 0.25) for a, b in ((6, 4), (3, 8), (5, 5))]


def value_updates(folder: Any, steps: int, clip: float | None = 0.5, **options: dict[str, Any]) -> dict[str, Any]:
    """Values of a batch, metrics of updates on it, first gradient and last weights."""
    return _updates(make(Critic, folder, **options), returns_for(make_rows()), Value(clip=clip), steps)


def pair_updates(folder: Any, steps: int, **options: dict[str, Any]) -> dict[str, Any]:
    """The same of a reward model on pairs."""
    rows = pair_rows(make_pairs(), scored=True)
    return _updates(make(RewardModel, folder, **options), rows, ScoredPairs(count=3), steps)


def _updates(model: Any, rows: list[Row], loss: Any, steps: int) -> dict[str, Any]:
    values = model.values(rows) if isinstance(model, Critic) else [model.scores_of_rows(rows)]
    found: dict[str, Any] = {"values": values, "metrics": []}
    for step in range(steps):
        found["metrics"].append(model.update(rows, loss))
        if step == 0:
            found["gradients"] = whole_tensors(model, "gradients")
    return found | {"weights": whole_tensors(model, "weights")}


def new_critic(folder: Any, **options: dict[str, Any]) -> tuple[bool, float, float]:
    """Of a critic over a language model: whether all values are 0, and its learning rate and the policy's."""
    config = make_config(torch.distributed.get_world_size(), **options)
    sizes = make_sizes(config)
    groups.initialize(sizes)
    critic = make_critic(config, with_scalar_head(load_spec(folder)), sizes, folder=folder, total_updates=10)
    rows = returns_for(make_rows())
    zero = all(not values.any() for values in critic.values(rows))
    return zero, critic.update(rows, Value(clip=None))["lr"], critic_config(config).optimizer.lr


def beside_an_actor(folder: Any, steps: int, **options: dict[str, Any]) -> dict[str, Any]:
    """As `value_updates`, of a critic in a layout of its own, between updates of an actor, whose log-probs come too."""
    config = make_config(torch.distributed.get_world_size(), **options)
    sizes = make_sizes(config)
    groups.initialize(sizes)
    spec = load_spec(folder)
    actor = Actor(config, spec, sizes, folder=folder, total_updates=10)
    critic = make_critic(config, with_scalar_head(spec), sizes, folder=folder, total_updates=10)
    fill_head(critic)
    rows, loss = with_old_log_probs(returns_for(make_rows()), actor), make_loss(config.algorithm, 16)
    found: dict[str, Any] = {"values": critic.values(rows), "metrics": [], "actor": []}
    for _ in range(steps):
        found["actor"].append(actor.update(rows, loss))
        found["metrics"].append(critic.update(rows, Value(clip=0.5)))
    return found | {"log_probs": actor.log_probs(rows), "sizes": critic.layout.sizes}


def export_and_read(folder: Path, out: Path, **options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """A reward model's scores of sequences, and those of the model that it was exported to and read from again."""
    model = make(RewardModel, folder, **options)
    rows = [scored_row(i, sequence) for i, sequence in enumerate(SEQUENCES)]
    before = model.scores_of_rows(rows).tolist()
    export_weights(out, model.layout, model.tensors(), torch.distributed.get_rank(), source=folder)
    spec = load_spec(out)
    assert spec.scalar_head
    again = FrozenRewardModel(model.config, spec, make_sizes(model.config), folder=out)
    return before, again.scores_of_rows(rows).tolist()


SEQUENCES = [(4, 7, 9, 12, 3), (5, 6), (8, 8, 20, 21, 22, 23, 40)]
