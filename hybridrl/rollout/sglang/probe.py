"""Where SGLang really puts each element: coded weights through its own loader and post-processing, looked up again.

What a module says of itself (`order_problems`) is what is known to change the order of parameters. This finds what is
not known: a kernel's packing or shuffle that came with another release or another device. It costs the loading of one
layer of each kind, once.
"""

from collections.abc import Mapping, Sequence

import torch

from hybridrl.models.weights import Tensor, WeightMap
from hybridrl.reshard.golden import box_slices
from hybridrl.reshard.layout import Layout

CODES = 128
"""Codes are whole numbers below this and above its negative, so that every floating dtype holds them exactly."""
NAMED = 5


@torch.no_grad()
def probe(model: torch.nn.Module, layout: Layout, parameters: Mapping[str, torch.Tensor], rank: int) -> list[str]:
    """Parameters that hold other elements than the layout says after a load, each in words; a few of many.

    Weights of the layers that are looked at are overwritten.

    Args:
        model: SGLang's, of this rank.
        layout: where its parameters are believed to hold what.
        parameters: this rank's, by the layout's names.
        rank: this rank of the world.
    """
    chosen = {tensor.name: number for number, tensor in enumerate(one_layer_of_each_kind(layout.weights))}
    device = next(iter(parameters.values())).device

    def code(name: str) -> torch.Tensor:
        return coded(layout.weights[name], chosen[name], device)

    model.load_weights((name, code(name)) for name in chosen)  # type: ignore[operator]
    for module in model.modules():
        process = getattr(getattr(module, "quant_method", None), "process_weights_after_loading", None)
        if process is not None:
            process(module)
    wrong = _changed(model, layout, parameters, rank)
    for piece in layout.pieces(rank):
        if piece.tensor not in chosen or piece.param in wrong:
            continue
        expected = code(piece.tensor)[box_slices(piece.box)]
        differs = int((parameters[piece.param][piece.slices].reshape(expected.shape) != expected).sum())
        if differs:
            text = f"{differs} of {expected.numel()} elements of {piece.tensor} lie elsewhere"
            wrong[piece.param] = f"{piece.param}: {text}"
    more = [f"and {len(wrong) - NAMED} more"] if len(wrong) > NAMED else []
    return [*list(wrong.values())[:NAMED], *more]


def _changed(
    model: torch.nn.Module, layout: Layout, parameters: Mapping[str, torch.Tensor], rank: int
) -> dict[str, str]:
    """Parameters that are others since the load, or have another shape."""
    live, wrong = dict(model.named_parameters(remove_duplicate=False)), {}
    for name, param in layout.params(rank).items():
        shape = tuple(parameters[name].shape)
        if live.get(name) is not parameters[name]:
            wrong[name] = f"{name}: was replaced by another parameter once it was loaded"
        elif shape != tuple(param.shape):
            wrong[name] = f"{name}: has shape {list(shape)} once it was loaded, expected {list(param.shape)}"
    return wrong


def one_layer_of_each_kind(weights: WeightMap) -> Sequence[Tensor]:
    """The tensors of the first layer that has just those roles, for each set of roles."""
    found: dict[frozenset[object], Sequence[Tensor]] = {}
    for layer, tensors in weights.by_layer.items():
        if layer is not None:
            found.setdefault(frozenset(tensor.role for tensor in tensors), tensors)
    return [tensor for tensors in found.values() for tensor in tensors]


def coded(tensor: Tensor, number: int, device: torch.device) -> torch.Tensor:
    """A tensor of codes in its own dtype: the same on every rank, and other ones for each `number` and place."""
    place = torch.arange(tensor.size, dtype=torch.int64, device=device)
    mixed = (place + number * 40503) * 2654435761 % 2**32  # Knuth's multiplicative hash
    codes = (mixed >> 16) % (2 * CODES - 1) - (CODES - 1)
    return codes.to(getattr(torch, tensor.dtype)).view(tensor.shape)
