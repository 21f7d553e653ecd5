"""Bugs of megatron-core 0.16 on any device: two without Transformer Engine, one without Transformer Engine and Apex."""

from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.parallel.compat.registry import patch


@patch(
    where="RouterGatingLinearFunction (transformer/moe/moe_utils.py)",
    reason="NameError: name 'te_general_gemm' is not defined; it is bound only where Transformer Engine is installed",
    general=True,
)
def router_without_te() -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@patch(
    where="MultiLatentAttention.__init__ (transformer/multi_latent_attention.py)",
    reason="TypeError: isinstance() arg 2 must be a type; without Transformer Engine its classes are mocks",
    general=True,
)
def latent_attention_without_te() -> None:
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


@patch(
    where="DistributedOptimizer.load_state_dict, _set_main_param_and_optimizer_states (optimizer/distrib_optimizer.py)",
    reason=(
        "with torch's AdamW a checkpoint does not load: KeyError 'step'; and all parameters would share one step "
        "tensor, which AdamW advances once for each of them: silently wrong"
    ),
    general=True,
)
def torch_adam_checkpoints() -> None:
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:  # their fused Adam keeps its step in the parameter group
        return
    optimizer_class = distrib_optimizer.DistributedOptimizer
    set_states, load = optimizer_class._set_main_param_and_optimizer_states, optimizer_class.load_state_dict

    def set_states_and_step(self: Any, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        missing = {"step": state["step"]} if "step" in state and "step" not in tensors else {}
        set_states(self, model_param, {**tensors, **missing})

    def load_with_own_steps(self: Any, state_dict: Mapping[str, Any]) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    optimizer_class._set_main_param_and_optimizer_states = set_states_and_step
    optimizer_class.load_state_dict = load_with_own_steps
