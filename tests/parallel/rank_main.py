"""Runs a script, or one function of it, as one rank and records how that ended.

Started by ``launch.py`` as ``python rank_main.py REQUEST.json``; not a test. The record of rank r
is ``rank-<r>.json`` in the folder named by RECORD_DIRECTORY_VARIABLE. It is written twice: with
``"state": "started"`` before the script runs, so that a rank which is killed stays visible, and at
the end.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

RECORD_DIRECTORY_VARIABLE = "TEST_LAUNCH_RECORDS"
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def launched_rank(environment: dict[str, str]) -> int:
    """The rank that the launcher gave this process, read before Horovod is up."""
    for name in RANK_VARIABLES:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    raise RuntimeError(f"no launcher has set any of {', '.join(RANK_VARIABLES)}")


class Tee:
    """A text stream that also keeps a copy in a file; everything else is the stream's own."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        self._copy.flush()
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._copy.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Record:
    """This rank's file; replaced in one move, so that a reader never sees half of it."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / f"rank-{rank}.json"
        self._fields: dict[str, Any] = {"rank": rank, "pid": os.getpid()}

    def write(self, **fields: Any) -> None:
        self._fields.update(fields)
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(self._fields))
        partial.replace(self._path)


def exit_code_of(error: SystemExit) -> int:
    """The status with which Python ends for ``error`` (None is 0, a text is 1)."""
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def call(request: dict[str, Any]) -> Any:
    """Do what the request asks: a whole script, a script's function or a module's function."""
    function = request.get("function")
    if request.get("script") is None:
        assert function is not None
        return getattr(importlib.import_module(request["module"]), function)(**request["kwargs"])
    if function is None:
        # Run as __main__, and found again by that name by workers that are spawned.
        sys.argv = [request["script"], *request["args"]]
        sys.path[0] = str(Path(request["script"]).parent)
        runpy.run_path(request["script"], run_name="__main__")
        return None
    namespace = runpy.run_path(request["script"], run_name="rank_script")
    return namespace[function](**request["kwargs"])


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    directory = Path(os.environ[RECORD_DIRECTORY_VARIABLE])
    rank = launched_rank(dict(os.environ))
    record = Record(directory, rank)
    record.write(state="started")
    faulthandler.enable()
    for name in ("stdout", "stderr"):
        copy = open(directory / f"rank-{rank}.{name}", "w", encoding="utf-8")  # noqa: SIM115
        setattr(sys, name, Tee(getattr(sys, name), copy))
    try:
        result = call(request)
        json.dumps(result)
    except SystemExit as error:
        record.write(state="ended", exit_code=exit_code_of(error), result=None)
        raise
    except BaseException:
        # Recorded, then raised on: the script's own sys.excepthook must see it as usual.
        record.write(state="ended", exit_code=1, traceback=traceback.format_exc())
        raise
    record.write(state="ended", exit_code=0, result=result)


if __name__ == "__main__":
    main()
