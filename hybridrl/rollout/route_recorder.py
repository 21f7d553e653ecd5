"""What a transformers decoder routes its tokens to, pass by pass: hooks before its layers' experts."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hybridrl.models.spec import MoeSpec
from hybridrl.rollout.routes import NO_EXPERT


class RouteRecorder:
    """Hooks on the decoder layers of one model, for the model's life.

    Raises ValueError where the layers that have experts are not those that `moe` names.
    """

    def __init__(self, layers: Iterable[nn.Module], moe: MoeSpec) -> None:
        self.moe = moe
        self._chosen: dict[int, Tensor] = {}
        hooked = [self._hook(index, layer) for index, layer in enumerate(layers)]
        if hooked != list(moe.layers):
            raise ValueError(f"the module has experts in layers {hooked}, the model's description in {moe.layers}")

    def take(self, rows: int, tokens: int) -> Tensor:
        """int16 [rows, tokens, layers, top-k] of the pass since the last call, `NO_EXPERT` in dense layers.

        Raises RuntimeError unless every MoE layer routed that many tokens.
        """
        wanted = {index for index, is_moe in enumerate(self.moe.layers) if is_moe}
        shapes = {index: tuple(chosen.shape) for index, chosen in self._chosen.items()}
        if shapes != dict.fromkeys(wanted, (rows * tokens, self.moe.top_k)):
            raise RuntimeError(f"a pass over {rows} × {tokens} tokens chose experts of shapes {shapes} by layer")
        first = next(iter(self._chosen.values()))
        taken = first.new_full((rows, tokens, len(self.moe.layers), self.moe.top_k), NO_EXPERT, dtype=torch.int16)
        for index, chosen in self._chosen.items():
            taken[:, :, index] = chosen.view(rows, tokens, -1)
        self._chosen.clear()
        return taken

    def _hook(self, index: int, layer: nn.Module) -> bool:
        experts = [module for name, module in layer.named_modules() if name.rpartition(".")[2] == "experts"]

        def keep(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            self._chosen[index] = arguments[1]  # hidden states, chosen experts, their weights

        for module in experts:
            module.register_forward_pre_hook(keep)
        return bool(experts)
