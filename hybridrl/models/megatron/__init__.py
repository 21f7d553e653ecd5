"""Models as Megatron-core builds them: everything under `hybridrl.models` that imports Megatron.

Importing this package imports `hybridrl.parallel.compat`, which must come before Megatron.
"""

from hybridrl.parallel import compat as compat
