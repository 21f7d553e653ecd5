"""What a reshard will do, in figures: by rank, in total, against the lower bound and against gathering."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.reshard.bounds import gather_bytes, lower_bound
from hybridrl.reshard.cost import Interconnect, gather_seconds, plan_seconds
from hybridrl.reshard.placement import Placement
from hybridrl.reshard.planner import Planner


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Bytes of one rank."""

    rank: int
    aliased_bytes: int
    copied_bytes: int
    received_bytes: int
    sent_bytes: int
    staging_peak_bytes: int
    destination_bytes: int
    lower_bound_bytes: int
    gather_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole reshard."""

    model_bytes: int
    """All tensors that the destination stores, in the source's dtypes."""
    plan_seconds: float
    """Time that one rank takes to plan, the survey of both layouts included."""
    rounds: int
    relay_rounds: int
    lower_bound_bytes: int
    """Of the rank that must receive most."""
    received_bytes_max: int
    gather_bytes: int
    """Received by the rank that receives most where every rank rebuilds the whole model."""
    predicted_seconds: float | None
    gather_predicted_seconds: float | None
    placement_saved_bytes: int
    placement: list[int]
    ranks: list[RankReport]

    def as_json(self) -> dict[str, Any]:
        """Plain data, for `json.dumps`."""
        return asdict(self)


def make_report(planner: Planner, seconds: float, placement: Placement, link: Interconnect | None) -> Report:
    """The figures of a planner's reshard; `seconds` is what planning took."""
    routes, world = planner.routes, planner.world
    kinds = [kind for kind, _ in routes.kinds]
    moved = routes.direct + routes.relayed
    bounds, gathered = lower_bound(kinds, world), gather_bytes(planner.source, kinds, world)
    ranks = []
    for rank in range(world):
        aliases = planner.aliases(rank)
        shared = sum(alias.nbytes - alias.padding_bytes for alias in aliases)
        ranks.append(
            RankReport(
                rank=rank,
                aliased_bytes=sum(alias.nbytes for alias in aliases),
                copied_bytes=int(routes.copied[rank]) - shared,
                received_bytes=int(moved[:, rank].sum()),
                sent_bytes=int(moved[rank].sum()),
                staging_peak_bytes=max(planner.direct.peak(rank), planner.relayed.peak(rank)),
                destination_bytes=planner.destination_bytes(rank),
                lower_bound_bytes=int(bounds[rank]),
                gather_bytes=int(gathered[rank]),
            )
        )
    model_bytes = sum(
        len(kind.tensors) * kind.tensors[0][1].size * ITEM_BYTES[kind.source_dtypes[0]] for kind in kinds if kind.needs
    )
    predicted = baseline = None
    if link is not None:
        copied = np.array([one.copied_bytes for one in ranks], np.int64)
        count = planner.direct.count + planner.relayed.count
        predicted = plan_seconds(link, routes.direct, routes.relayed, copied, count)
        baseline = gather_seconds(link, gathered, model_bytes, planner.bucket_bytes)
    return Report(
        model_bytes=model_bytes,
        plan_seconds=seconds,
        rounds=planner.direct.count,
        relay_rounds=planner.relayed.count,
        lower_bound_bytes=int(bounds.max()),
        received_bytes_max=max(one.received_bytes for one in ranks),
        gather_bytes=int(gathered.max()),
        predicted_seconds=predicted,
        gather_predicted_seconds=baseline,
        placement_saved_bytes=placement.saved_bytes,
        placement=list(placement.ranks),
        ranks=ranks,
    )


def draw_heat_map(traffic: npt.NDArray[np.int64], path: Path) -> None:
    """Writes a PNG of the bytes from each rank (rows) to each rank (columns)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(traffic / 1e9, cmap="viridis", interpolation="nearest")
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title("bytes moved between ranks")
    figure.colorbar(image, ax=axes, label="GB")
    FigureCanvasAgg(figure).print_png(str(path))
