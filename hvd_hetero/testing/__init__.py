"""For tests: ranks as threads of one process, with delays and failures on cue."""
