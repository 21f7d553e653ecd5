"""`python -m hybridrl.reshard.explain`: what a reshard will move, before anything runs and without a GPU.

python -m hybridrl.reshard.explain --model qwen3_30b_a3b --world 8 --train tp=4,ep=8 --rollout tp=8,ep=8
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config.folders import CONF
from hybridrl.models.families import load_spec, spec_from_config, weight_map
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.cost import Interconnect
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.placement import Placement, place
from hybridrl.reshard.planner import DEFAULT_BUCKET_BYTES, Planner
from hybridrl.reshard.report import Report, draw_heat_map, make_report

TRAIN_KEYS = ("tp", "cp", "pp", "vpp", "ep", "etp", "first", "last", "world")
ROLLOUT_KEYS = ("tp", "dp", "ep", "moe_dp", "moe_dense_tp", "dp_lm_head", "whole_shared_experts")
OTHER_ROLLOUT_KEYS = ("fused_shared", "world", "start")
SHOWN_RANKS = 32


def parse_sizes(text: str, keys: Sequence[str]) -> dict[str, int]:
    """`tp=4,ep=8` as a mapping. Raises ValueError for an unknown key or a value that is no whole number."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in keys:
            raise ValueError(f"{key!r} in {text!r} is none of {', '.join(keys)}")
        if not value.isdecimal():
            raise ValueError(f"{part!r} in {text!r}: give a whole number")
        found[key] = int(value)
    return found


def find_model(name: str) -> ModelSpec:
    """The model of a file in `conf/model/`, or of a Hugging Face folder."""
    if Path(name).is_dir():
        return load_spec(name)
    return spec_from_config(read_conf("model", name, "config"))


def find_interconnect(name: str) -> Interconnect:
    """The figures of a file in `conf/interconnect/`."""
    return Interconnect(name=name, **read_conf("interconnect", name, "interconnect"))


def read_conf(group: str, name: str, key: str) -> Mapping[str, Any]:
    """What `conf/GROUP/NAME.yaml` holds under `key`. Raises ValueError for a file that is not there, or lacks it."""
    path = CONF / group / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (CONF / group).glob("*.yaml")))
        raise ValueError(f"{name!r} is no folder and not in conf/{group}, which has {known}")
    content: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if key not in content:
        raise ValueError(f"conf/{group}/{name}.yaml has no `{key}`")
    found: Mapping[str, Any] = content[key]
    return found


def train_layout(spec: ModelSpec, world: int, sizes: Mapping[str, int], *, engine_order: bool = True) -> MegatronLayout:
    """The training layout, in the engine's order or Megatron's own.

    Layers that `pp` does not divide go to the stages evenly but for the last, which has less; `first=` and `last=` say
    otherwise.
    """
    own = {key: sizes[key] for key in ("tp", "cp", "pp", "ep", "etp") if key in sizes}
    pp, first, last = sizes.get("pp", 1), sizes.get("first"), sizes.get("last")
    if first is None and last is None and spec.num_layers % pp:
        last = spec.num_layers - (pp - 1) * -(-spec.num_layers // pp)
        if last < 1:
            raise ValueError(f"{spec.num_layers} layers on pp={pp} stages: say first= and last= layers")
    return MegatronLayout(
        weight_map(spec),
        ParallelSizes(world=sizes.get("world", world), **own),
        vpp=sizes.get("vpp", 1),
        first_stage_layers=first,
        last_stage_layers=last,
        transformer_engine=True,
        engine_order=engine_order,
    )


def rollout_layout(layout: MegatronLayout, world: int, sizes: Mapping[str, int], *, mtp: bool) -> SGLangLayout:
    """The engine's layout; `start` is its first rank, where it does not share the training world's ranks."""
    own: dict[str, Any] = {key: sizes[key] for key in ROLLOUT_KEYS if key in sizes}
    for flag in ("dp_lm_head", "whole_shared_experts"):
        own[flag] = bool(own.get(flag, 0))
    start, count = sizes.get("start", 0), sizes.get("world", world)
    return SGLangLayout(
        layout.weights,
        RolloutSizes(world=count, **own),
        ranks=range(start, start + count),
        mtp=mtp,
        fused_shared=sizes.get("fused_shared", 0),
    )


def explain(options: argparse.Namespace) -> tuple[Planner, Report]:
    """Plans what the options say and reports on it. Raises ValueError for options that make no reshard."""
    spec = replace(find_model(options.model), dtype=options.dtype, mtp_layers=0)
    order = options.parameter_layout == "engine"
    source = train_layout(spec, options.world, parse_sizes(options.train, TRAIN_KEYS), engine_order=order)
    sizes = parse_sizes(options.rollout, (*ROLLOUT_KEYS, *OTHER_ROLLOUT_KEYS))
    destination = rollout_layout(source, options.world, sizes, mtp=False)
    link = find_interconnect(options.interconnect) if options.interconnect else None
    ranks_per_node = options.ranks_per_node or (link.ranks_per_node if link else None)
    if link is not None and options.ranks_per_node:
        link = replace(link, ranks_per_node=options.ranks_per_node)
    placement = Placement(tuple(destination.slots), 0, 0)
    if options.placement == "auto":
        placement = place(source, destination, ranks_per_node)
        destination = destination.with_ranks(placement.ranks)
    start = time.perf_counter()
    planner = Planner(source, destination, bucket_bytes=options.bucket, ranks_per_node=ranks_per_node)
    planner.plan(destination.ranks[0])
    return planner, make_report(planner, time.perf_counter() - start, placement, link)


def render(report: Report) -> str:
    """The report as text."""
    head = ("rank", "aliased", "copied", "received", "sent", "staging", "destination")
    lines = ["  ".join(f"{name:>11}" for name in head) + "   (MB)"]
    for one in report.ranks[:SHOWN_RANKS]:
        values = (
            one.aliased_bytes,
            one.copied_bytes,
            one.received_bytes,
            one.sent_bytes,
            one.staging_peak_bytes,
            one.destination_bytes,
        )
        lines.append("  ".join([f"{one.rank:>11}", *(f"{value / 1e6:>11,.1f}" for value in values)]))
    if len(report.ranks) > SHOWN_RANKS:
        lines.append(f"  … and {len(report.ranks) - SHOWN_RANKS} more ranks (--json has all)")
    bound = f"lower bound {report.lower_bound_bytes / 1e6:,.1f}"
    lines += [
        "",
        f"model            {report.model_bytes / 1e9:,.2f} GB",
        f"received, most   {report.received_bytes_max / 1e6:,.1f} MB ({bound})",
        f"gathering        {report.gather_bytes / 1e6:,.1f} MB",
        f"rounds           {report.rounds} and {report.relay_rounds} of relays",
        f"planned in       {report.plan_seconds:.2f} s",
    ]
    if report.placement_saved_bytes:
        lines.append(
            f"placement saves  {report.placement_saved_bytes / 1e6:,.1f} MB over all ranks: {report.placement}"
        )
    if report.predicted_seconds is not None and report.gather_predicted_seconds is not None:
        times = f"{report.predicted_seconds:.4f} s, gathering {report.gather_predicted_seconds:.4f} s"
        lines.append(f"predicted        {times} (nominal bandwidths)")
    return "\n".join(lines)


def notes(spec: ModelSpec, parameter_layout: str) -> list[str]:
    """What the figures alone do not say: what the engine's parameter layout leaves in Megatron's own, and what the
    engine derives from its parameters."""
    if spec.mla is None:
        return []
    absorbed = (
        "latent attention: the absorbed projections, w_kc and w_vc, are views of the engine's kv_b_proj. They take no "
        "bytes, and nothing has to be rebuilt after a sync"
    )
    if parameter_layout != "engine" or spec.mla.q_lora_rank is None:
        return [absorbed]
    return [
        absorbed,
        "latent attention: the projections down, linear_q_down_proj and linear_kv_down_proj, stay in Megatron's layout "
        "in both parameter layouts. The engine has the two as one tensor, so they are never shared",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hybridrl.reshard.explain", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a name in conf/model, or a Hugging Face folder")
    parser.add_argument("--world", type=int, required=True, help="ranks")
    parser.add_argument("--train", default="", metavar="tp=4,ep=8", help=f"training sizes: {', '.join(TRAIN_KEYS)}")
    parser.add_argument(
        "--parameter-layout", default="engine", choices=("engine", "megatron"), help="model.parameter_layout"
    )
    keys = ", ".join((*ROLLOUT_KEYS, *OTHER_ROLLOUT_KEYS))
    parser.add_argument("--rollout", default="", metavar="tp=8,ep=8", help=f"the engine's sizes: {keys}")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--bucket", type=int, default=DEFAULT_BUCKET_BYTES, help="most bytes staged in a direction")
    parser.add_argument("--ranks-per-node", type=int, help="default: the interconnect's, else all ranks on one node")
    parser.add_argument("--interconnect", help="a name in conf/interconnect; predicts times")
    parser.add_argument("--placement", default="identity", choices=("identity", "auto"))
    parser.add_argument("--json", type=Path, help="writes the report there")
    parser.add_argument("--heat-map", type=Path, help="writes a PNG of the bytes between every two ranks there")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        planner, report = explain(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(render(report))
    for note in notes(planner.source.weights.spec, options.parameter_layout):
        print(f"\n{note}")
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    if options.heat_map is not None:
        draw_heat_map(planner.routes.direct + planner.routes.relayed, options.heat_map)
    return 0


if __name__ == "__main__":
    sys.exit(main())
