"""Decisions written down as they are applied, and a recorded run's applied again.

Rank 0 reads the file and every rank gets the whole schedule, so that all apply the same without
another word. Nothing that is measured decides anything in a replay.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hvd_hetero.data.schedule import Cursor
from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.plan import Plan
from hvd_hetero.runtime.agreement import Channel, Message
from hvd_hetero.runtime.balancer import Balancer
from hvd_hetero.runtime.exchanger import GradientExchanger, SparsityMode
from hvd_hetero.telemetry.records import (
    CompressionChoice,
    ConfigurationRecord,
    DecisionRecord,
)
from hvd_hetero.telemetry.replay import Recording, recorded_run
from hvd_hetero.telemetry.report import read_records
from hvd_hetero.telemetry.sink import JsonLinesSink

logger = logging.getLogger("hvd_hetero")

_PREFIX = "replayed: "
_FUSION = "HOROVOD_FUSION_THRESHOLD"


class Replay:
    """What a recording has for the steps of this job, as the messages by which it is applied."""

    def __init__(self, recording: Recording, path: str, rank: int) -> None:
        self._recording = recording
        self._path = path
        self._rank = rank
        self._begun = recording.begins == 0
        self._told = 1 if self._begun else 0  # decisions
        self._trained = False
        self._ended = False

    def begin(self) -> Message:
        """Return what is in force before the first step; nothing where a state is to be loaded."""
        return _message(self._recording.decisions[0]) if self._begun else {}

    def check_begun(self) -> None:
        """Raise ConfigurationError where the recorded run went on from a state not loaded here."""
        if not self._begun:
            raise ConfigurationError(
                f"replay={self._path!r}: the recorded run went on from a state saved after step "
                f"{self._recording.begins}: load it before the first step, by "
                "load_hetero_state_dict"
            )

    def after(self, step: int) -> Message:
        """Return what was decided after ``step``; raises like ``check_begun``."""
        self.check_begun()
        self._trained = True
        if step > self._recording.ends and not self._ended and self._rank == 0:
            self._ended = True
            logger.info(
                "replay: %s ends at step %d; the plan and the compression in force there stay",
                self._path,
                self._recording.ends,
            )
        return _message(self._recording.after(step))

    def choice_at(self, step: int) -> Message:
        """Return the compression in force for a job that goes on after ``step``.

        Raises:
            ConfigurationError: the recording begins later, or the job has trained already.
        """
        begins, told = self._recording.begins, self._recording.decisions[: self._told]
        why = ""
        if self._trained:
            why = "this job has trained already"
        elif step < begins:
            why = f"the recording begins at step {begins}"
        elif told and told[-1].step > step:
            why = "another one was loaded before"
        if why:
            raise ConfigurationError(
                f"replay={self._path!r}: a state saved after step {step} was loaded, but {why}: "
                f"load one state, of step {begins} or later, before the first step"
            )
        choice = self._recording.choice_at(step)
        return {} if choice is None else {"compression": _choice_message(choice)}

    def plans_until(self, step: int) -> list[Message]:
        """Return the plans that a job which goes on after ``step`` has yet to be told of."""
        known = self._recording.until(step)
        left, self._told, self._begun = known[self._told :], len(known), True
        return [{"balance": _plan_message(one)} for one in left if one.plan is not None]


def load_replay(
    path: str,
    here: ConfigurationRecord,
    *,
    channel: Channel,
    rank: int,
    balancer: Balancer | None,
) -> Replay:
    """Read ``path`` on rank 0, and have the balancer draw by it; on all ranks.

    here: the configuration of this job, on rank 0.

    Raises:
        ConfigurationError: no such file, no recorded run, or one that cannot be followed bit for
            bit here; the same on all ranks.
    """
    message = _read(path, here) if rank == 0 else None
    message = channel.broadcast(message, "replay")
    _raise(path, [message])
    recording = Recording.from_message(message)
    own: Message = {}
    if balancer is not None:
        try:
            balancer.follow(recording.plans)
        except ConfigurationError as error:
            own = {"error": str(error)}
    _raise(path, channel.allgather(own, "replay.plans"))
    if rank == 0:
        logger.info(
            "replay: %s, decisions after steps %d to %d; nothing is measured to decide by",
            path,
            recording.begins,
            recording.ends,
        )
        if here.ranks > 2 and os.environ.get(_FUSION) != "0":
            logger.warning(
                "replay: on %d ranks the order in which Horovod adds up depends on which tensors "
                "happen to travel together: for equal bits set %s=0 in both runs",
                here.ranks,
                _FUSION,
            )
    return Replay(recording, path, rank)


def _read(path: str, here: ConfigurationRecord) -> Message:
    try:
        return recorded_run(read_records(Path(path).expanduser()), here).to_message()
    except OSError as error:
        return {
            "error": f"cannot be read ({error.strerror or error}): give the file that the run to "
            "be repeated wrote by log=FILE, as rank 0 sees it"
        }
    except ValueError as error:  # no records, no decisions, or those of another configuration
        return {"error": str(error)}


def _raise(path: str, messages: list[Message]) -> None:
    for message in messages:
        if "error" in message:
            raise ConfigurationError(f"replay={path!r}: {message['error']}")


def _message(decision: DecisionRecord | None) -> Message:
    message: Message = {}
    if decision is not None and decision.plan is not None:
        message["balance"] = _plan_message(decision)
    if decision is not None and decision.compression is not None:
        message["compression"] = _choice_message(decision.compression)
    return message


def _plan_message(decision: DecisionRecord) -> Message:
    plan, effective = decision.plan, decision.effective
    if plan is None or effective is None:
        raise AssertionError("_plan_message: a decision without a plan")
    return {
        "plan": plan.to_dict(),
        "effective": list(effective),
        "reason": _replayed(plan.reason),
    }


def _choice_message(choice: CompressionChoice) -> Message:
    return {
        "cf": choice.cf,
        "strategy": choice.strategy,
        "entries": list(choice.entries),
        "sample": choice.sample,
        "reason": _replayed(choice.reason),
        "gain": None,
        "rho": None,
    }


def _replayed(reason: str) -> str:
    return _PREFIX + reason.removeprefix(_PREFIX)


class DecisionLog:
    """Writes a record after each step after which plan or compression are not what they were.

    ``flush_steps``: of the compression; None where nothing chooses.
    """

    def __init__(
        self,
        sink: JsonLinesSink,
        exchanger: GradientExchanger,
        balancer: Balancer | None,
        flush_steps: int | None,
    ) -> None:
        self._sink = sink
        self._exchanger = exchanger
        self._balancer = balancer
        self._flush_steps = flush_steps
        self._version: int | None = None
        self._mode: SparsityMode | None = None

    def begin(self, step: int, reason: str) -> None:
        """Write all that is in force: at the start of a job (0), or with a loaded state."""
        self._mode = None
        entries = [] if self._balancer is None else self._balancer.schedule.entries
        self._write(step, entries[0] if entries else None, self._changed_choice(reason), True)
        for entry in entries[1:]:  # agreed, but not in effect yet
            self._write(step, entry, None)

    def note(self, step: int, reason: str) -> None:
        """Write what has changed, if anything."""
        entry = None if self._balancer is None else self._balancer.schedule.entries[-1]
        if entry is not None and entry[1].version == self._version:
            entry = None
        choice = self._changed_choice(reason)
        if entry is not None or choice is not None:
            self._write(step, entry, choice)

    def _changed_choice(self, reason: str) -> CompressionChoice | None:
        mode = self._exchanger.mode
        if self._flush_steps is None or mode == self._mode:
            return None
        self._mode = mode
        return CompressionChoice(
            mode.cf, mode.strategy, mode.entries, mode.sample, self._flush_steps, reason
        )

    def _write(
        self,
        step: int,
        entry: tuple[Cursor, Plan] | None,
        choice: CompressionChoice | None,
        begins: bool = False,
    ) -> None:
        effective, plan = entry or (None, None)
        if plan is not None:
            self._version = plan.version
        name = self._exchanger.prefix
        self._sink.write(DecisionRecord(step, name, begins, plan, effective, choice))
