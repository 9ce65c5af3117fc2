"""The file to which the records of a run go."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.telemetry.records import Record

_logger = logging.getLogger(__name__)


class JsonLinesSink:
    """Appends records to a UTF-8 file, one JSON object a line, readable while the run goes on.

    Folders above the file are made, an older file is continued. Raises ConfigurationError when the
    file cannot be opened for writing. An error later on (a full disk) is logged once and ends the
    recording, not the training: a rank that stopped alone would leave the others waiting.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigurationError(
                f"log={path!r}: must be the path of a file (option log, or HVD_HETERO_LOG)"
            )
        self.path = Path(path).expanduser()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut_short = _ends_within_a_line(self.path)
            # Names of files may hold bytes that are no UTF-8: escaped, not an error.
            self._file = self.path.open(
                "a", encoding="utf-8", errors="backslashreplace", newline="\n"
            )
            if cut_short:
                self._file.write("\n")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"log={str(path)!r}: cannot be written ({error}): set the option log, or the "
                "environment variable HVD_HETERO_LOG, to a file in a folder you can write to"
            ) from error

    def write(self, record: Record) -> None:
        """Append ``record`` and hand it to the operating system. Does nothing once closed."""
        if self._file.closed:
            return
        try:
            self._file.write(record.to_json() + "\n")
            self._file.flush()
        except OSError as error:
            _logger.error("recording to %s ends here, it cannot be written: %s", self.path, error)
            self.close()

    def close(self) -> None:
        """Close the file; may be called again."""
        try:
            self._file.close()
        except OSError as error:
            _logger.error("the end of %s may be missing: %s", self.path, error)

    def __enter__(self) -> JsonLinesSink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _ends_within_a_line(path: Path) -> bool:
    """True if an earlier run was killed while it wrote its last line."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
