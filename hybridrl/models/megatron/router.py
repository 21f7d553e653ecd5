"""Megatron's router with every family's choice of experts, a load-balancing loss over real tokens, and a correction
bias that no gradient moves."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from hybridrl.models.megatron import routing
from hybridrl.models.megatron.replay import Replay
from hybridrl.models.spec import MoeSpec


class Router(TopKRouter):
    """Megatron's parameters under Megatron's names; the choice of experts is `hybridrl.models.megatron.routing`'s.

    The load-balancing loss: with f_i the share of a micro-batch's T real tokens that chose expert i of E among its k,
    and P_i their mean probability of it, the micro-batch adds `moe_aux_loss_coeff`·T·E·Σ f_i·P_i (Fedus et al. 2021,
    equations 4 to 6): a coefficient over the tokens of the whole batch makes this a mean over tokens. Megatron
    multiplies by the tokens of a rank, which padding makes uneven over TP ranks, and divides by 0 where all of a
    micro-batch is padding.

    `expert_bias`, float32 `[experts]`, is a buffer: no gradient reaches it. `load` counts what `update_biases` needs
    and `load_metrics` tells. `replay`, where it is set, has the last word in the choice.
    """

    def __init__(self, *args: Any, moe: MoeSpec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.moe = moe
        self.balance: torch.Tensor | None = None
        """This rank's share of Σ T·E·Σ f_i·P_i over micro-batches since `take_balance`."""
        self.load: torch.Tensor | None = None
        """float32 [experts]: this rank's real tokens that chose each expert, in passes with gradients."""
        self.replay: Replay | None = None
        if moe.correction_bias:
            del self.expert_bias  # Megatron's is moved by Megatron's own rule
            zeros = torch.zeros(moe.num_experts, dtype=torch.float32, device=torch.cuda.current_device())
            self.register_buffer("expert_bias", zeros)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights `[tokens, experts]`, 0 where not chosen, and the bool map of the choice.

        Args:
            logits: `[s, b, experts]` float32.
            padding_mask: bool, as many positions, True at padding; it counts neither in the loss nor in the load.
        """
        experts = self.moe.num_experts
        logits = logits.reshape(-1, experts)
        chosen = self.choose(logits)
        probs = routing.spread(routing.weigh(logits, chosen, self.moe), chosen, experts)
        mapped = routing.as_map(chosen, experts)
        if self.training and torch.is_grad_enabled():
            real = None if padding_mask is None else ~padding_mask.reshape(-1, 1)
            counted = mapped if real is None else mapped & real
            load = counted.sum(0, dtype=torch.float32)
            self.load = load if self.load is None else self.load + load
            if self.is_aux_loss_enabled():
                scores = routing.shares(logits, self.moe)
                probs = self._balanced(probs, scores if real is None else scores * real, counted)
        return probs, mapped

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The experts of each token: `[tokens, experts]` → int64 `[tokens, k]`."""
        own = routing.choose(logits.detach(), self.moe, self.expert_bias)
        return own if self.replay is None else self.replay.settle(own)

    def _balanced(self, probs: torch.Tensor, scores: torch.Tensor, mapped: torch.Tensor) -> torch.Tensor:
        """`probs` with the loss attached; the scores [tokens, E] and the map of the choice are 0 at padding."""
        chosen = mapped.sum(0, dtype=torch.float32)
        dist.all_reduce(chosen, group=self.tp_cp_group)
        assignments = chosen.sum().clamp(min=1)  # k·T
        share = (scores.sum(0) * chosen).sum() * (self.moe.num_experts / assignments)
        self.balance = share.detach() if self.balance is None else self.balance + share.detach()
        return MoEAuxLossAutoScaler.apply(probs, self.get_aux_loss_coeff("aux_loss") * share)


def routers(chunks: Iterable[torch.nn.Module]) -> list[Router]:
    """The routers of these chunks, in layer order."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def take_balance(chunks: Iterable[torch.nn.Module], device: torch.device) -> torch.Tensor:
    """[2] float64: the balance of all routers of these chunks since the last call, and how many routers there are."""
    found = routers(chunks)
    total = torch.tensor([0.0, len(found)], dtype=torch.float64, device=device)
    for router in found:
        if router.balance is not None:
            total[0] += router.balance
        router.balance = None
    return total


def load_metrics(chunks: Iterable[torch.nn.Module], moe: MoeSpec, device: torch.device) -> dict[str, float]:
    """How evenly experts were loaded in the passes with gradients since `update_biases`, over all ranks. Collective.

    Of each layer's load by expert: `moe/load_max` the largest over the mean, of the worst layer, and
    `moe/load_max_mean` of an average one; `moe/load_entropy` the entropy over its maximum, mean over layers;
    `moe/idle_experts` how many experts of all layers no token chose. Empty where nothing was counted.
    """
    loads = torch.zeros(len(moe.layers), moe.num_experts, device=device)
    for router in routers(chunks):
        if router.load is not None:
            loads[router.layer_number - 1] += router.load
    dist.all_reduce(loads)  # ranks that hold a layer alike count its tokens alike: shares stay as they are
    loads = loads[list(moe.layers)].double()
    if not bool(loads.sum(-1).all()):
        return {}
    shares = loads / loads.sum(-1, keepdim=True)
    peak = shares.amax(-1) * moe.num_experts
    entropy = -torch.special.xlogy(shares, shares).sum(-1) / math.log(max(2, moe.num_experts))
    return {
        "moe/load_max": float(peak.max()),
        "moe/load_max_mean": float(peak.mean()),
        "moe/load_entropy": float(entropy.mean()),
        "moe/idle_experts": float((shares == 0).sum()),
    }


@torch.no_grad()
def update_biases(chunks: Iterable[torch.nn.Module], rate: float) -> None:
    """Moves each correction bias by `rate` towards an even load: up where an expert had less than the mean of a layer,
    down where it had more (Wang et al. 2024, algorithm 1; DeepSeek-V3, section 2.1.2).

    The load is that of all real tokens since the last call, of all ranks that hold the layer: every replica's bias
    moves alike. Collective over the ranks of a pipeline stage; with a rate of 0 it only forgets the load.
    """
    for router in routers(chunks):
        load, router.load = router.load, None
        if rate == 0 or not router.moe.correction_bias:
            continue
        load = torch.zeros_like(router.expert_bias) if load is None else load
        dist.all_reduce(load, group=router.tp_dp_cp_group)
        router.expert_bias += rate * torch.sign(load.mean() - load)
