"""The nearest change that makes a recipe fit: the first of a list, from the cheapest to the dearest."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from typing import Any

from hybridrl.config.schema import Config
from hybridrl.config.validate import validate
from hybridrl.planning.estimate import Estimate, estimate

Changes = dict[str, Any]


@dataclass(frozen=True)
class Advice:
    """Overrides that make it fit, and what becomes of the step."""

    changes: Changes
    estimate: Estimate

    def __str__(self) -> str:
        return " ".join(f"{key}={_shown(value)}" for key, value in self.changes.items())


def nearest(found: Estimate) -> Advice | None:
    """The first of the candidates under which the recipe fits; None where none does."""
    for changes in _candidates(found):
        one = attempt(found, changes)
        if one is not None and one.fits:
            return Advice(changes, one)
    return None


def attempt(found: Estimate, changes: Changes) -> Estimate | None:
    """The estimate with these changes; None where the configuration cannot run at all."""
    config = changed(found.config, changes)
    if validate(config, found.layouts.spec, files=False):
        return None
    try:
        return estimate(config, found.layouts.weights, found.hardware, cuda=found.layouts.transformer_engine)
    except ValueError:
        return None


def changed(config: Config, changes: Changes) -> Config:
    """A copy with these values."""
    config = deepcopy(config)
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        setattr(reduce(getattr, section.split("."), config), name, value)
    if "parallel.tp" in changes:
        config.parallel.sequence_parallel = config.parallel.tp > 1
    return config


def _candidates(found: Estimate) -> Iterator[Changes]:
    """Settings that cost little come first, then smaller batches at a time, more sharding, and more nodes."""
    config = found.config
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    if config.rollout.sglang.kv_tokens is not None and found.memory.cache.tokens >= longest:
        yield {"rollout.sglang.kv_tokens": found.memory.cache.tokens}
    frugal: Changes = {}
    for key, value in _frugal(config):
        yield {key: value}
        frugal[key] = value
    yield frugal
    tokens = config.trainer.max_tokens_per_micro_batch
    while tokens // 2 * config.parallel.cp >= longest:
        tokens //= 2
        yield {**frugal, "trainer.max_tokens_per_micro_batch": tokens}
    small = {**frugal, "trainer.max_tokens_per_micro_batch": tokens}
    for key, shards in _sharding(config):
        yield {**small, key: shards}
    for factor in (2, 4, 8):
        nodes = config.trainer.nodes * factor
        yield {**frugal, "trainer.nodes": nodes}
        for key, shards in _sharding(config):
            yield {**frugal, "trainer.nodes": nodes, key: shards}


def _frugal(config: Config) -> Iterator[tuple[str, Any]]:
    wanted = {
        "memory.gradients": "release",
        "memory.parameters": "single",
        "model.recompute": "full",
    }
    if config.memory.optimizer == "none":
        yield "memory.optimizer", "host"
    if config.algorithm.kl.where != "none" and config.memory.reference == "none":
        yield "memory.reference", "host"
    for key, value in wanted.items():
        section, _, name = key.partition(".")
        if getattr(getattr(config, section), name) != value:
            yield key, value


def _sharding(config: Config) -> Iterator[tuple[str, int]]:
    parallel = config.parallel
    for key in ("ep", "tp", "pp"):
        for factor in (2, 4):
            yield f"parallel.{key}", getattr(parallel, key) * factor
    for factor in (2, 4):
        yield "rollout.tp", config.rollout.tp * factor


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
