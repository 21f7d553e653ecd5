"""What leaves the device when the other phase has it, and where it goes."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class MemoryConfig:
    """What leaves the device when the other phase has it, and where it goes.

    A place is `host` (RAM, page-locked where CUDA is), `disk` (a file that is mapped into memory), `none` (it stays on
    the device) or `auto`: what fits beside the rollout stays, the rest goes to `memory.arena`.
    """

    parameters: str = "keep"
    """The training copy of the parameters during a rollout: `keep` it, `offload` what the engine does not share to
    `memory.arena`, or `single`: it is resharded into the engine's layout and back, and never there twice."""
    optimizer: str = "auto"
    """Master weights and moments during a rollout: a place."""
    gradients: str = "release"
    """Gradient buffers during a rollout: `release` their memory, or `keep` it."""
    reference: str = "auto"
    """A reference model while it does not score: a place."""
    critic: str = "auto"
    """A critic, with its optimizer state, during a rollout: a place."""
    arena: str = "host"
    """Where `auto` puts what does not fit: `host` or `disk`."""
    arena_dir: str | None = None
    """Folder of the files of `disk`, best on a local NVMe drive; each rank makes one file, which goes with the run.
    None: `arena` in the run folder."""
    device_bytes: int | None = None
    """Device memory that `auto` reckons with; None: all of a GPU's, less `memory.margin_bytes`. On a CPU, whose memory
    is the host's, nothing is won by moving to `host`, and None keeps everything."""
    margin_bytes: int = 2 * 2**30
    """Device memory that `auto` leaves free for activations, communication buffers and fragmentation."""
    prefetch: bool = True
    """Optimizer state starts back when an update's forward pass does; false: after its last backward pass, so that it
    and activations are never on the device together."""
    verify: bool = False
    """Compare checksums of what left the device and what came back."""
    trace: bool = True
    """Write the bytes of each owner at every change of phase to `memory.jsonl`, and their plot to `memory.png`."""
