"""What the model's sizes allow: layers by stages, heads by TP, experts by EP, intermediate sizes by TP and ETP.

The model is seen through protocols that `hybridrl.models.spec.ModelSpec` meets: configuration knows no models.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from hybridrl.config.schema import Config, ParallelConfig


class Moe(Protocol):
    """The experts of a model."""

    @property
    def num_experts(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def shared_ffn_size(self) -> int: ...
    @property
    def layers(self) -> Sequence[bool]: ...
    @property
    def correction_bias(self) -> bool: ...


class Model(Protocol):
    """The sizes of a decoder."""

    @property
    def family(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def output_bias(self) -> bool: ...
    @property
    def moe(self) -> Moe | None: ...
    @property
    def mla(self) -> Any: ...
    @property
    def rope_scaling(self) -> Mapping[str, Any] | None: ...


def model_problems(config: Config, spec: Model) -> Iterator[str]:
    """Mistakes that only the model's sizes show."""
    parallel, rollout = config.parallel, config.rollout
    yield from _layers(parallel, spec.num_layers)
    yield from head_problems("parallel.tp", parallel.tp, spec)
    if (spec.moe is None or not all(spec.moe.layers)) and spec.ffn_size % parallel.tp:
        yield f"parallel.tp={parallel.tp} does not divide the model's intermediate size of {spec.ffn_size}"
    yield from _experts(parallel, spec.moe)
    if config.model.router_bias_rate and not (spec.moe is not None and spec.moe.correction_bias):
        yield (
            f"model.router_bias_rate={config.model.router_bias_rate}, but the model's routers have no correction bias "
            "(DeepSeek-V3's and GLM-4.5's have); set it to 0"
        )
    longest = rollout.max_prompt_length + rollout.max_response_length
    if longest > spec.max_positions:
        yield (
            f"rollout.max_prompt_length={rollout.max_prompt_length} + rollout.max_response_length="
            f"{rollout.max_response_length} = {longest} tokens, but the model has {spec.max_positions} positions"
        )


def head_problems(key: str, tp: int, spec: Model) -> Iterator[str]:
    """Attention heads that cannot be spread over `tp` ranks; `key` names the size."""
    if spec.num_heads % tp:
        yield f"{key}={tp} does not divide the model's {spec.num_heads} attention heads"
    if spec.mla is None and spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        yield f"{key}={tp} is neither a divisor nor a multiple of the model's {spec.num_kv_heads} key-value heads"


def _layers(parallel: ParallelConfig, layers: int) -> Iterator[str]:
    """Megatron cuts the layers evenly but for a stated first and last stage; a remainder would be dropped."""
    pp, vpp, first, last = parallel.pp, parallel.vpp, parallel.first_stage_layers, parallel.last_stage_layers
    if pp == 1:
        return
    stated = {"first_stage_layers": first, "last_stage_layers": last}
    given = {k: v for k, v in stated.items() if v is not None}
    middle, stages = layers - sum(given.values()), pp - len(given)
    account = ", ".join([f"{layers} layers", f"parallel.pp={pp}", *(f"parallel.{k}={v}" for k, v in given.items())])
    if middle < 0 or bool(middle) != bool(stages):
        yield f"{account}: {middle} layers would be left for the {stages} other pipeline stages"
    elif stages and middle % stages:
        yield (
            f"{account}: {middle} layers do not divide into {stages} pipeline stages ({middle % stages} would be "
            "dropped); state parallel.first_stage_layers or parallel.last_stage_layers so that they do"
        )
    else:
        sizes = [*given.items(), *([("other stages", middle // stages)] if stages else [])]
        uneven = [f"{name}: {size}" for name, size in sizes if size % vpp]
        if uneven:
            yield f"{account}: layers a stage ({', '.join(uneven)}) are not a multiple of parallel.vpp={vpp} chunks"


def _experts(parallel: ParallelConfig, moe: Moe | None) -> Iterator[str]:
    if moe is None:
        for key in ("ep", "etp"):
            if (size := getattr(parallel, key)) > 1:
                yield f"parallel.{key}={size}, but the model has no experts; set parallel.{key}=1"
        return
    if moe.num_experts % parallel.ep:
        yield f"parallel.ep={parallel.ep} does not divide the model's {moe.num_experts} experts"
    if moe.ffn_size % parallel.etp:
        yield f"parallel.etp={parallel.etp} does not divide the experts' intermediate size of {moe.ffn_size}"
    if moe.shared_ffn_size % parallel.tp:
        yield f"parallel.tp={parallel.tp} does not divide the shared experts' size of {moe.shared_ffn_size}"
