"""Stand-ins for packages that exist for CUDA only; this folder is a path entry, see `hybridrl.rollout.sglang.cpu`."""
