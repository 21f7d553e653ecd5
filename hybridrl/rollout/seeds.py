"""Where randomness comes from: one seed a sample, and one uniform number a token.

Nothing here reads or moves a global random state, so what a sample draws depends on its seed alone: not on the rank,
the batch or the order in which samples are generated.
"""

import struct
from hashlib import blake2b

import numpy as np

SEED_BITS = 63
_BLOCK = 256  # uniforms drawn at a time


def sample_seed(run_seed: int, step: int, prompt_id: int, index: int) -> int:
    """The seed of sample `index` of a prompt in a step of a run: 63 bits, alike on every rank and in every rerun.

    A hash rather than a sum, so that neighbouring steps, prompts and samples share no seeds: `seed + index` would give
    sample 1 of seed 0 and sample 0 of seed 1 the same tokens.

    Raises ValueError where an argument does not fit 64 signed bits.
    """
    try:
        key = struct.pack("<4q", run_seed, step, prompt_id, index)
    except struct.error as error:
        raise ValueError(
            f"seed {run_seed}, step {step}, prompt {prompt_id}, sample {index}: each must be an integer of 64 bits"
        ) from error
    digest = blake2b(key, digest_size=8, person=b"sample").digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


class UniformStream:
    """Uniform numbers in [0, 1), one for each token of a sample: `stream[i]` depends on the seed and on `i` alone.

    So a sample that is resumed at token i, or generated in another batch, draws what it would have drawn. Blocks of
    numbers come from Philox (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3), keyed by the seed and
    counted by the block.
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 1 << SEED_BITS:
            raise ValueError(f"a sample's seed is {seed}; it must be in [0, 2^{SEED_BITS})")
        self._seed = seed
        self._block = -1
        self._values: list[float] = []

    def __getitem__(self, position: int) -> float:
        """The uniform number, a float64 of 53 random bits, of token `position` of the response."""
        block, offset = divmod(position, _BLOCK)
        if block != self._block:
            philox = np.random.Philox(key=self._seed, counter=[0, block, 0, 0])
            self._values = np.random.Generator(philox).random(_BLOCK).tolist()
            self._block = block
        return self._values[offset]
