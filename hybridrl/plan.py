"""The dry run: `python -m hybridrl.plan recipe=grpo_qwen3_30b_a3b trainer.nodes=4`, on any machine, without weights.

Exit status: 0 the recipe fits its hardware, 2 its configuration cannot run, 3 it does not fit.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.compose import compose_all
from hybridrl.config.save import without_secrets
from hybridrl.config.schema import Config
from hybridrl.config.validate import validate
from hybridrl.config.validate.bounds import CHOICES
from hybridrl.files import file_aside, standing, takes_files
from hybridrl.models.spec import ModelSpec
from hybridrl.planning.advice import nearest
from hybridrl.planning.estimate import Estimate, estimate
from hybridrl.planning.facts import find_spec
from hybridrl.planning.hardware import Hardware, find_hardware
from hybridrl.planning.layouts import trained_weights
from hybridrl.planning.page import write_page
from hybridrl.planning.report import as_json, failed, render
from hybridrl.planning.search import search
from hybridrl.registered import NAMES

FITS, WRONG, TOO_LARGE = 0, 2, 3


@dataclass(frozen=True)
class Prepared:
    """A configuration with all that is needed to reckon with it; the rest is unknown where `errors` has any."""

    config: Config
    spec: ModelSpec | None
    hardware: Hardware | None
    errors: list[str]


def prepare(overrides: Sequence[str], config_dir: str | None = None) -> Prepared:
    """Composes and judges a configuration, without looking at this machine's files but for the model's own."""
    found = compose_all(overrides, config_dir)
    config, errors = found.config, [problem.text for problem in found.problems]
    spec: ModelSpec | None = None
    try:
        spec = find_spec(config) if found.whole else None
    except (ValueError, OSError) as error:
        errors += found.untainted([str(error)])
    errors += found.untainted(validate(config, spec, files=False, names=NAMES))
    known = config.plan.hardware in CHOICES["plan.hardware"]
    hardware = find_hardware(config.plan.hardware) if known else None
    if hardware is not None and config.trainer.ranks_per_node > hardware.link.ranks_per_node:
        errors.append(
            f"trainer.ranks_per_node={config.trainer.ranks_per_node}: a node of plan.hardware={hardware.name} has "
            f"{hardware.link.ranks_per_node} devices"
        )
    return Prepared(config, spec, hardware, errors)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hybridrl.plan", description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for hybridrl.train")
    parser.add_argument("--config-dir", help="folder with recipes of your own (DIR/recipe/NAME.yaml)")
    parser.add_argument("--json", type=Path, help="writes all figures there")
    parser.add_argument("--html", type=Path, help="writes a page with plots there")
    parser.add_argument("--cpu", action="store_true", help="reckon with the modules that run on CPUs")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if options.config_dir is not None and not Path(options.config_dir).is_dir():
        parser.error(f"--config-dir={options.config_dir}: no such folder")
    for name in ("json", "html"):
        if (path := getattr(options, name)) is not None and not _writable(path):
            parser.error(f"--{name}={path}: cannot be written; expected the name of a file in a folder of yours")
    prepared = prepare(options.overrides, options.config_dir)
    found: Estimate | None = None
    errors = list(prepared.errors)
    if not errors and prepared.spec is not None and prepared.hardware is not None:
        weights = trained_weights(prepared.spec, prepared.config)
        try:
            found = estimate(prepared.config, weights, prepared.hardware, cuda=not options.cpu)
        except ValueError as error:
            errors.append(str(error))
    if found is None:
        count = "1 mistake" if len(errors) == 1 else f"{len(errors)} mistakes"
        print("\n".join([f"{count} in the configuration:", *(f"  - {text}" for text in errors)]))
        _write_json(options.json, failed(errors))
        return WRONG
    advice = None if found.fits else nearest(found)
    choices = search(found) if prepared.config.plan.search else []
    print(render(found, advice, choices))
    _write_json(options.json, as_json(found, advice, choices))
    if options.html is not None:
        write_page(options.html, " ".join(map(_shown, options.overrides)), found, advice, choices)
    return FITS if found.fits else TOO_LARGE


def _writable(path: Path) -> bool:
    """Whether a file can be made there, with the folders above it that are missing."""
    return not path.is_dir() and takes_files(standing(path.absolute().parent))


def _shown(override: str) -> str:
    """An override as a page shows it, without secrets; of a section only that it is set."""
    key, separator, value = override.partition("=")
    name = key.rpartition(".")[2]
    return f"{key}{separator}{'{…}' if '{' in value else without_secrets({name: value})[name]}"


def _write_json(path: Path | None, content: object) -> None:
    if path is not None:
        with file_aside(path) as aside:
            aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
