"""Other layouts on the same ranks: which of them fit, and which makes the shortest step.

Training and rollout are judged apart, since neither one's seconds depend on the other's sizes; the best pairs are then
planned whole, with their switches.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from hybridrl.config.schema import Config
from hybridrl.config.validate import validate
from hybridrl.planning.activations import activations
from hybridrl.planning.advice import Changes, attempt, changed
from hybridrl.planning.cache import kv_cache
from hybridrl.planning.compute import step_seconds
from hybridrl.planning.estimate import Estimate
from hybridrl.planning.layouts import Layouts, training_shard
from hybridrl.planning.memory import trained

POWERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Choice:
    """A layout that fits."""

    changes: Changes
    estimate: Estimate


def search(found: Estimate) -> list[Choice]:
    """The layouts that fit, the shortest step first, `plan.search_results` of them at most."""
    results = found.config.plan.search_results
    training = sorted(_training(found), key=lambda one: one[0])[: 2 * results]
    rollout = sorted(_best(_rollout(found)), key=lambda one: one[0])[: 2 * results]
    pairs = sorted(
        ((a + b, changes | others) for (a, changes), (b, others) in product(training, rollout)), key=lambda one: one[0]
    )
    choices: list[Choice] = []
    for _, changes in pairs[: 4 * results]:
        one = attempt(found, changes)
        if one is not None and one.fits:
            choices.append(Choice(changes, one))
        if len(choices) == results + results // 2:
            break
    return sorted(choices, key=lambda choice: choice.estimate.step.total)[:results]


def _training(found: Estimate) -> Iterator[tuple[float, Changes]]:
    """Seconds of scoring and updating, for each layout whose update fits the device."""
    spec, world = found.layouts.spec, found.layouts.world
    node = found.config.trainer.ranks_per_node
    experts = [n for n in POWERS if spec.moe and spec.moe.num_experts % n == 0] or [1]
    for tp, cp, pp, ep, etp in product(POWERS, (1, 2, 4), POWERS, experts, (1, 2, 4)):
        if tp > node or world % (tp * cp * pp) or world % (ep * etp * pp) or pp > spec.num_layers or etp > tp:
            continue
        sizes = {"tp": tp, "cp": cp, "pp": pp, "vpp": 1, "ep": ep, "etp": etp}
        changes: Changes = {f"parallel.{key}": size for key, size in sizes.items()} | _uneven(spec.num_layers, pp)
        config = changed(found.config, changes)
        if validate(config, spec, files=False):
            continue
        layouts = Layouts(config, found.layouts.weights, found.layouts.transformer_engine)
        if _update_bytes(config, layouts) <= found.hardware.memory_bytes:
            step = step_seconds(config, layouts, found.hardware, found.memory.cache, 0.0)
            yield step.logprob + step.update + step.communication, changes


def _uneven(layers: int, pp: int) -> Changes:
    """Stages that do not divide the layers: the last has fewer."""
    if pp == 1 or layers % pp == 0:
        return {"parallel.first_stage_layers": None, "parallel.last_stage_layers": None}
    return {
        "parallel.first_stage_layers": None,
        "parallel.last_stage_layers": max(1, layers - (pp - 1) * -(-layers // pp)),
    }


def _update_bytes(config: Config, layouts: Layouts) -> int:
    """Of the fullest stage."""
    most = 0
    for rank in layouts.stage_ranks():
        own = trained(config, layouts, training_shard(layouts, rank))
        stage = layouts.sizes.coordinates(rank).pp
        kept = activations(config, layouts.spec, stage, fused=layouts.transformer_engine).total
        most = max(most, own.parameters + own.gradients + own.optimizer + kept)
    return most


def _best(engines: Iterable[tuple[float, Changes]]) -> Iterable[tuple[float, Changes]]:
    """Of engines that differ only in EP, and are as fast, the one with the largest: it moves whole experts."""
    best: dict[tuple[object, ...], tuple[float, Changes]] = {}
    for seconds, changes in engines:  # EP ascends
        key = tuple(size for name, size in changes.items() if name != "rollout.ep")
        if key not in best or seconds <= best[key][0]:
            best[key] = (seconds, changes)
    return best.values()


def _rollout(found: Estimate) -> Iterator[tuple[float, Changes]]:
    """Seconds of generation, for each engine whose weights and one sample fit the device."""
    if found.reshard is None or found.config.rollout.engine == "transformers":
        yield found.step.prefill + found.step.decode, {}
        return
    spec, world = found.layouts.spec, found.layouts.world
    for tp, dp, ep in product(POWERS, POWERS, POWERS):
        if world % tp or tp % dp or tp % ep or (dp > 1 and spec.mla is None) or (spec.moe is None and ep > 1):
            continue
        changes: Changes = {"rollout.tp": tp, "rollout.dp": dp, "rollout.ep": ep}
        config = changed(found.config, changes)
        if validate(config, spec, files=False):
            continue
        layouts = Layouts(config, found.layouts.weights, found.layouts.transformer_engine)
        engine = sum(param.nbytes for param in layouts.rollout.params(0).values())
        cache = kv_cache(config, layouts, max(0, found.hardware.memory_bytes - engine))
        if cache.sequences:
            step = step_seconds(config, layouts, found.hardware, cache, 0.0)
            yield step.prefill + step.decode, changes
