"""Seconds of the collectives of training, which what the floating-point operations take does not include.

Bytes that a rank receives, over nominal bandwidths, none hidden behind computation. A rank of a group has as much from
each of its peers, over the node's links from those of its node and over the network from the others.

With sequence parallelism a block gathers its input over TP and scatters its output (Korthikanti et al. 2022, section
4.2); tokens go to their experts over EP and come back; keys and values are gathered over CP; a stage hands its output
on; gradients are reduced in float32 and parameters gathered over the replicas (Rajbhandari et al. 2020, section 5).
"""

from dataclasses import dataclass

from hybridrl.config.batch import batch_arithmetic
from hybridrl.config.schema import Config
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import ITEM_BYTES, WeightMap
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.planning.hardware import Hardware
from hybridrl.planning.work import parameters_met
from hybridrl.reshard.cost import Interconnect

GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Group:
    """Ranks `first, first + stride, …` of a collective."""

    size: int
    stride: int

    def seconds(self, nbytes: float, link: Interconnect) -> float:
        """Of a rank that receives `nbytes` from each peer."""
        near = min(self.size, max(1, link.ranks_per_node // self.stride))
        return link.seconds(node=(near - 1) * nbytes, network=(self.size - near) * nbytes, device=0, rounds=0)


def communication_seconds(
    config: Config, weights: WeightMap, sizes: ParallelSizes, hardware: Hardware, *, tokens: float, forwards: int
) -> float:
    """Of a step that trains on `tokens` tokens once an epoch, and scores them `forwards` times without gradients."""
    recomputed = config.model.recompute == "full"
    passes = forwards + config.trainer.update_epochs * (2 + recomputed)
    forward = _forward(config, weights.spec, sizes, hardware.link, tokens / (sizes.dp * sizes.cp))
    updates = batch_arithmetic(config, sizes.world).updates
    return passes * forward + updates * _update(config, weights, sizes, hardware.link)


def _forward(config: Config, spec: ModelSpec, sizes: ParallelSizes, link: Interconnect, tokens: float) -> float:
    """Of a forward pass in which each TP group has so many tokens; a backward pass has the same."""
    item = ITEM_BYTES[config.model.dtype]
    hidden = tokens * spec.hidden_size * item
    own = hidden / sizes.tp
    block = 2 * Group(sizes.tp, 1).seconds(own, link)
    width = 2 * spec.num_kv_heads * spec.head_dim
    if spec.mla is not None:
        mla = spec.mla
        width = spec.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    attention = block + Group(sizes.cp, sizes.tp).seconds(tokens * item * width / sizes.tp, link)
    experts = 0.0
    if spec.moe is not None:
        routed = spec.moe.top_k * own
        experts = 2 * Group(sizes.ep, sizes.etp).seconds(routed / sizes.ep, link)
        experts += 2 * Group(sizes.etp, 1).seconds(routed, link)
        experts += block * bool(spec.moe.shared_ffn_size)
    sparse = sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))
    layers = spec.num_layers * attention + sparse * experts + (spec.num_layers - sparse) * block
    handed_on = config.parallel.vpp * Group(2, sizes.stage).seconds(own, link) if sizes.pp > 1 else 0.0
    return layers / sizes.pp + handed_on


def _update(config: Config, weights: WeightMap, sizes: ParallelSizes, link: Interconnect) -> float:
    """Gradients and parameters of one update."""
    dense, experts = parameters_met(weights)
    nbytes = (GRADIENT_BYTES + ITEM_BYTES[config.model.dtype]) / sizes.pp
    replicas = Group(sizes.dp * sizes.cp, sizes.tp)
    expert_replicas = Group(sizes.edp, sizes.etp * sizes.ep)
    return replicas.seconds(nbytes * dense / sizes.tp / replicas.size, link) + expert_replicas.seconds(
        nbytes * experts / (sizes.etp * sizes.ep) / expert_replicas.size, link
    )
