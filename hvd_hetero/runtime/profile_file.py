"""The file in which one job leaves to the next what it has learnt of the ranks' speed."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.plan import Plan
from hvd_hetero.planning.planner import PlannerConfig, PlannerState
from hvd_hetero.planning.profile import Profile, first_state
from hvd_hetero.runtime.agreement import Channel, Message
from hvd_hetero.runtime.clock import now_seconds

logger = logging.getLogger("hvd_hetero")

_LEAST_SECONDS_BETWEEN_WRITES = 10.0


class ProfileFile:
    """Read when a job begins, and written now and then; by rank 0 alone.

    Args:
        path: of the file; it need not exist, its folder must.
        channel: of all ranks; blocks.
        rank: this rank.

    Raises:
        ConfigurationError: on all ranks, when rank 0 cannot use the path.
    """

    def __init__(self, path: str | os.PathLike[str], channel: Channel, rank: int) -> None:
        self.path = Path(path)
        self._channel = channel
        self._rank = rank
        self._written_seconds: float | None = None
        hosts = channel.allgather({"host": socket.gethostname()}, "profile.hosts")
        self._hosts = [str(one["host"]) for one in hosts]

    def first_state(self, config: PlannerConfig) -> PlannerState:
        """Return the state in which all ranks begin; models on rank 0 only."""
        state = first_state(config, None)
        message: Message | None = None
        if self._rank == 0:
            message = {"error": ""}
            try:
                state = first_state(config, self._read())
            except ConfigurationError as error:
                message["error"] = str(error)
            message["plan"] = state.plan.to_dict()
        message = self._channel.broadcast(message, "profile")
        if message["error"]:
            raise ConfigurationError(str(message["error"]))
        return state if self._rank == 0 else PlannerState(Plan.from_dict(message["plan"]))

    def write(self, state: PlannerState) -> None:
        """Write what ``state`` has learnt, but not too often; a failure is logged, not raised."""
        now = now_seconds()
        last = self._written_seconds
        if last is not None and now - last < _LEAST_SECONDS_BETWEEN_WRITES:
            return
        self._written_seconds = now
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(json.dumps(Profile.of(self._hosts, state).to_dict()))
            beside.replace(self.path)  # a reader sees the old file or the new one
        except OSError as error:
            logger.warning("profile=%s could not be written: %s", self.path, error)

    def _read(self) -> Profile | None:
        if not self.path.parent.is_dir():
            raise ConfigurationError(
                f"profile={str(self.path)!r}: the folder {str(self.path.parent)!r} does not exist "
                "on the host of rank 0; create it, or give another path"
            )
        try:
            data = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"profile={str(self.path)!r}: cannot be read ({error}); delete it to learn anew"
            ) from error
        if not isinstance(data, Mapping):
            raise ConfigurationError(f"profile={str(self.path)!r}: holds no profile; delete it")
        try:
            profile = Profile.from_dict(data)
        except ConfigurationError as error:
            raise ConfigurationError(f"profile={str(self.path)!r}: {error}") from error
        own = profile.on(self._hosts)
        if own is None:
            logger.info("profile %s is of other hosts: speeds are learnt anew", self.path)
        return own
