"""The shell: the only folder that imports Horovod or mpi4py, reads clocks and waits."""
