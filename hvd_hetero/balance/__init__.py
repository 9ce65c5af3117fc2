"""Balance: which local batch makes all ranks finish together.

Pure functions over frozen dataclasses (numpy only): no clock, no Horovod, no global state.

- ``timing``: step timings of one rank -> robust summary of a window.
- ``perf_model``: windows of one rank -> two lines, seconds over local batch size.
- ``optperf``: the lines of all ranks -> the split of the global batch with the shortest step.
- ``real_optimum``: the same in real numbers, a lower bound of it.
"""
