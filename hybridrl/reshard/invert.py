"""The way back."""

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.survey import PlanError


def invert(plan: Plan) -> Plan:
    """The plan by which the same rank takes part in bringing every source parameter back from the destination's.

    It is minimal by itself: a source element that the rank still has as a destination element moves nowhere. What it
    restores is bit for bit what the source held, except for padding, which becomes zero.

    Raises PlanError, naming each tensor, where the destination does not hold all of the source: tensors that it omits,
    or holds in a narrower dtype.
    """
    return invert_planner(plan.planner).plan(plan.rank)


def invert_planner(planner: Planner) -> Planner:
    """The planner of the way back; made once, it serves all ranks."""
    narrowed = [
        f"{tensor.name} is held as {source} and would come back from {destination}"
        for kind, _ in planner.routes.kinds
        for source in set(kind.source_dtypes)
        for destination in [max(kind.destination_dtypes, key=ITEM_BYTES.__getitem__, default=source)]
        if not _widens(source, destination)
        for _, tensor in kind.tensors
    ]
    if narrowed:
        raise PlanError(narrowed)
    return planner.inverse()


def _widens(source: str, destination: str) -> bool:
    """Whether every value of one dtype is a value of the other."""
    return source == destination or (ITEM_BYTES[source] < ITEM_BYTES[destination] and destination == "float32")
