"""Everything that makes a configuration impossible, found before anything is started. Pure: no torch, no processes."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from itertools import chain

from hybridrl.config.schema import Config
from hybridrl.config.strict import Problem, untainted
from hybridrl.config.validate.batches import batch_problems
from hybridrl.config.validate.bounds import get, value_problems
from hybridrl.config.validate.checkpoint import checkpoint_problems
from hybridrl.config.validate.evaluation import evaluation_problems
from hybridrl.config.validate.inputs import input_problems
from hybridrl.config.validate.learning import learning_problems
from hybridrl.config.validate.memory import memory_problems
from hybridrl.config.validate.model import Model, model_problems
from hybridrl.config.validate.objectives import objective_problems
from hybridrl.config.validate.ranks import rank_problems
from hybridrl.config.validate.rollout import rollout_problems

__all__ = ["Model", "validate"]


def validate(
    config: Config,
    spec: Model | None = None,
    world: int | None = None,
    *,
    local_world: int | None = None,
    device: str | None = None,
    names: Mapping[str, Iterable[str]] | None = None,
    files: bool = True,
) -> list[str]:
    """Every mistake, each naming its keys, what was found and what was expected; empty where the run is possible.

    `spec` is the model's sizes (checks that need them are left out without), `world` and `local_world` the ranks that
    were started (None: as the configuration states), `device` `cpu` or `cuda` (None: only what `trainer.device` says),
    `names` the registered names of keys that take one (`algorithm.advantage`). `files=False` leaves out what depends
    on this machine: files and installed packages.
    """
    wrong = list(value_problems(config, {key: sorted(known) for key, known in (names or {}).items()}))
    sane = _with_defaults(config, wrong)
    stated = sane.trainer.nodes * sane.trainer.ranks_per_node
    found = chain(
        rank_problems(sane, world, local_world, spec),
        batch_problems(sane, stated),
        rollout_problems(sane, stated, spec),
        objective_problems(sane, spec),
        learning_problems(sane),
        memory_problems(sane, device),
        model_problems(sane, spec) if spec is not None else (),
        checkpoint_problems(sane, files),
        input_problems(sane, files),
        evaluation_problems(sane, files),
    )
    return [p.text for p in wrong] + untainted(list(found), wrong)


def _with_defaults(config: Config, wrong: list[Problem]) -> Config:
    """A copy in which the wrong values are the schema's own, so that the other checks can go on."""
    sane, default = deepcopy(config), Config()
    for key in (key for problem in wrong for key in problem.keys if "[" not in key):
        section, _, name = key.rpartition(".")
        setattr(get(sane, section), name, get(default, key))
    return sane
