"""Rewards: judges, the pool that runs them, and the scoring of samples."""
