"""A cluster of shaped links on one machine: hosts are network namespaces on a bridge."""

from benchmarks.lab.launch import LaunchError, run_ranks
from benchmarks.lab.network import Lab, LabError, why_not

__all__ = ["Lab", "LabError", "LaunchError", "run_ranks", "why_not"]
