"""Megatron's router with a load-balancing loss over real tokens, of micro-batches that may hold padding alone."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter


class Router(TopKRouter):
    """The same choice of experts and the same parameters; the load-balancing loss is taken otherwise.

    With f_i the share of a micro-batch's T real tokens that chose expert i of E among its k, and P_i their mean
    probability of it, the micro-batch adds `moe_aux_loss_coeff`·T·E·Σ f_i·P_i (Fedus et al. 2021, equations 4 to 6):
    a coefficient over the tokens of the whole batch makes this a mean over tokens. Megatron multiplies by the tokens
    of a rank, which padding makes uneven over TP ranks, and divides by 0 where all of a micro-batch is padding.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.balance: torch.Tensor | None = None
        """This rank's share of Σ T·E·Σ f_i·P_i over micro-batches since `take_balance`."""

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """`probs` with the loss attached; the scores [tokens, E] and the map of the choice are 0 at padding."""
        chosen = routing_map.sum(0, dtype=torch.float32)
        dist.all_reduce(chosen, group=self.tp_cp_group)
        assignments = chosen.sum().clamp(min=1)  # k·T
        share = (scores_for_aux_loss.sum(0) * chosen).sum() * (self.config.num_moe_experts / assignments)
        self.balance = share.detach() if self.balance is None else self.balance + share.detach()
        return MoEAuxLossAutoScaler.apply(probs, self.get_aux_loss_coeff("aux_loss") * share)


def take_balance(chunks: Iterable[torch.nn.Module], device: torch.device) -> torch.Tensor:
    """[2] float64: the balance of all routers of these chunks since the last call, and how many routers there are."""
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
    total = torch.tensor([0.0, len(routers)], dtype=torch.float64, device=device)
    for router in routers:
        if router.balance is not None:
            total[0] += router.balance
        router.balance = None
    return total
