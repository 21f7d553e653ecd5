"""Proof, before anything moves, that a plan writes each destination element once and that the ranks' plans fit."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from hashlib import blake2b

import torch.distributed as dist

from hybridrl.models.weights import Box, Param
from hybridrl.reshard.boxes import overlapping
from hybridrl.reshard.plan import Plan, View


def coverage_problems(plan: Plan, params: Mapping[str, Param]) -> list[str]:
    """Destination parameters of which an element is written twice, or not at all, or that the plan writes outside of.

    Args:
        params: the rank's destination parameters; empty off the destination's ranks.
    """
    boxes: dict[str, list[Box]] = defaultdict(list)
    for alias in plan.aliases:
        boxes[alias.destination].append(Box.whole(params[alias.destination].shape))
    for view in _written(plan):
        boxes[view.param].append(Box(view.offset, tuple(s.stop for s in view.slices)))
    found = [f"{name} is written and is no parameter of rank {plan.rank}" for name in boxes if name not in params]
    for name, param in params.items():
        own, whole = boxes[name], Box.whole(param.shape)
        outside = next((box for box in own if not whole.contains(box)), None)
        clash = overlapping(own)
        written = sum(box.size for box in own)
        if outside is not None:
            found.append(f"{name} is written at {outside}, outside of its shape {list(param.shape)}")
        elif clash is not None:
            found.append(f"{name} is written twice, at {clash[0]} and at {clash[1]}")
        elif written != param.size:
            found.append(f"{name}: {written} of its {param.size} elements are written")
    return found


def _written(plan: Plan) -> Iterator[View]:
    yield from (copy.destination for copy in (*plan.copies, *plan.echoes))
    yield from plan.fills
    yield from (segment.view for r in plan.rounds for message in r.receives for segment in message.segments)


def peer_problems(plan: Plan) -> list[str]:
    """Where what this rank would send is not what a peer expects, or the other way round. Collective.

    Ranks plan alone, so that they agree only if their layouts, versions and settings are the same: here they compare.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    mine = (_survey_digest(plan), _digests(plan, sending=True), _digests(plan, sending=False))
    told = [mine] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    rank = dist.get_rank()
    others = [peer for peer, (survey, _, _) in enumerate(told) if survey != mine[0]]
    if others:
        return [f"ranks {others} planned another reshard: give all ranks the same layouts, bucket_bytes and code"]
    found = []
    for peer, (_, sends, receives) in enumerate(told):
        if sends.get(rank) != mine[2].get(peer):
            found.append(f"what rank {peer} sends is not what is expected from it")
        if receives.get(rank) != mine[1].get(peer):
            found.append(f"what rank {peer} expects is not what is sent to it")
    return found


def _survey_digest(plan: Plan) -> str:
    """Of what all ranks compute alike: who sends how much to whom, in how many rounds."""
    planner = plan.planner
    digest = blake2b(digest_size=16)
    digest.update(repr((len(plan.rounds), [r.relay for r in plan.rounds], plan.bucket_bytes, planner.world)).encode())
    digest.update(repr((planner.item_bytes, planner.ranks_per_node, planner.alias)).encode())
    for traffic in (planner.routes.direct, planner.routes.relayed):
        digest.update(traffic.tobytes())
    return digest.hexdigest()


def _digests(plan: Plan, *, sending: bool) -> dict[int, str]:
    """By peer, of all messages to it or from it: rounds, sizes, and dtypes of their segments."""
    digests: dict[int, blake2b] = {}
    for number, one in enumerate(plan.rounds):
        for message in one.sends if sending else one.receives:
            digest = digests.setdefault(message.peer, blake2b(digest_size=16))
            digest.update(
                repr((number, message.nbytes, [(s.wire_dtype, s.view.size) for s in message.segments])).encode()
            )
    return {peer: digest.hexdigest() for peer, digest in digests.items()}
