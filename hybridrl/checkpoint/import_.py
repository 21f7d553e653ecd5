"""From a Hugging Face folder to a checkpoint of weights alone, which a run of any layout starts from:

python -m hybridrl.checkpoint.import_ path/to/model imported
torchrun --nproc-per-node 2 -m hybridrl.train … trainer.resume=imported checkpoint.load=weights

One process reads and writes one tensor at a time; under torchrun the ranks share them out.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.parallel import compat  # isort: skip - must precede megatron.core

from hybridrl.checkpoint.huggingface_import import file_problems, new_tensors, tied_problems
from hybridrl.checkpoint.manifest import CheckpointError, folder_of
from hybridrl.checkpoint.safetensors_folder import DTYPES, SafetensorsFolder
from hybridrl.checkpoint.save import Saver
from hybridrl.checkpoint.shards import Model
from hybridrl.config.schema import CheckpointConfig
from hybridrl.files import cache_folder
from hybridrl.models import builtin
from hybridrl.models.families import UnsupportedModelError, load_spec, weight_map
from hybridrl.models.weights import WeightMap
from hybridrl.parallel import groups
from hybridrl.reshard.golden_checks import WeightError, agree
from hybridrl.reshard.layouts.huggingface import HuggingFaceLayout

STEP = 0
"""Of the checkpoint that is made: no step was done."""


def import_problems(files: SafetensorsFolder, weights: WeightMap) -> list[str]:
    """Every reason why the files are not the model's weights: names, shapes, dtypes, a tied head that differs."""
    found = files.problems + file_problems(files, weights)
    found += [f"tensor {name} is missing from the files" for name in sorted(new_tensors(files, weights))]
    found += [
        f"tensor {t.name} is {files.tensors[t.name].dtype}; expected one of {', '.join(DTYPES.values())}"
        for t in weights
        if t.name in files.tensors and files.tensors[t.name].dtype not in DTYPES.values()
    ]
    return found or tied_problems(files, weights)


def import_checkpoint(source: Path, out: Path, model: str = "policy") -> Path:
    """Makes the checkpoint `out/step-00000000` of the folder's weights, each in the dtype of its file.

    Tensors are mapped from the files, not loaded. Every rank of the world calls it; each writes its share. Returns the
    checkpoint's folder.

    Raises WeightError on every rank with every problem before anything is written, CheckpointError where it cannot be
    written.
    """
    rank = dist.get_rank()
    files, weights = SafetensorsFolder(source), weight_map(load_spec(source))
    taken = [f"{out} is there already: choose another name or remove it"] if rank == 0 and _holds_something(out) else []
    agree(f"{source} cannot be imported", taken + import_problems(files, weights))
    mapped = {t.name: files.read(t.name) for t in weights}
    layout = HuggingFaceLayout(weights, range(dist.get_world_size()))
    saver = Saver(out, CheckpointConfig(asynchronous=False, retries=0), rank, print)
    saver.start(STEP, [Model(model, layout, rank, lambda: mapped)], ({}, {}), None)
    return folder_of(out, STEP)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.checkpoint.import_",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="a Hugging Face folder with safetensors, or builtin:<name>")
    parser.add_argument("out", type=Path, nargs="?", help="the folder to make; without it the source is only checked")
    given = parser.parse_args(arguments)
    try:
        source = builtin.resolve(given.source, cache_folder())
        if given.out is None:
            return _check(source)
        own = not dist.is_initialized()
        if own:
            groups.start_world(torch.device("cpu"))
        compat.install()
        try:
            folder = import_checkpoint(source, given.out)
            first = dist.get_rank() == 0
        finally:
            if own:
                dist.destroy_process_group()
    except (CheckpointError, WeightError, UnsupportedModelError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if first:
        print(f"{folder} holds the weights of {source}: trainer.resume={given.out} checkpoint.load=weights")
    return 0


def _holds_something(out: Path) -> bool:
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def _check(source: Path) -> int:
    files, weights = SafetensorsFolder(source), weight_map(load_spec(source))
    if problems := import_problems(files, weights):
        raise WeightError(f"{source} cannot be imported", problems)
    print(f"{source} can be imported: {len(weights):,} tensors of {sum(t.size for t in weights):,} elements")
    return 0


if __name__ == "__main__":
    sys.exit(main())
