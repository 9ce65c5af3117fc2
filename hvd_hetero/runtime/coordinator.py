"""Decisions between steps: gathered numbers in, one plan and one compression factor out.

All ranks come here after the same steps. Rank 0 decides from what all reported, and every rank
applies what rank 0 said before the next backward pass: no rank chooses a collective by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from hvd_hetero.balance.stragglers import SlowRank, slow_ranks
from hvd_hetero.balance.timing import StepTiming, WindowTiming, summarise
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.environment import LOG
from hvd_hetero.exchange.collectives import Collectives
from hvd_hetero.planning.exchange_view import ExchangeView
from hvd_hetero.runtime.agreement import (
    Channel,
    CollectivesChannel,
    Message,
    MpiChannel,
    verify_alike,
)
from hvd_hetero.runtime.balancer import Balancer
from hvd_hetero.runtime.compression_control import CompressionControl
from hvd_hetero.runtime.drift import check_drift
from hvd_hetero.runtime.exchange_costs import ExchangeCosts
from hvd_hetero.runtime.exchanger import GradientExchanger, SparsityMode
from hvd_hetero.runtime.mpi import (
    EXPECTED_WITHOUT_MPI,
    install_abort_hook,
    mpi_is_running,
    world_communicator,
)
from hvd_hetero.runtime.overhead import Overhead, overhead_of
from hvd_hetero.runtime.replay import DecisionLog, Replay, load_replay
from hvd_hetero.runtime.timings import StepTimer
from hvd_hetero.telemetry.records import BucketLayout, ConfigurationRecord, WindowRecord
from hvd_hetero.telemetry.sink import JsonLinesSink

logger = logging.getLogger("hvd_hetero")

_RECORD_WINDOW_STEPS = 10
_SAME_STEPS = (
    "Ranks must freeze the same parameters and draw the same number of batches. Where the position "
    "in the loader differs, a rank has skipped a batch, or begun a pass over the loader that the "
    "others have not, as by next(iter(loader)) on one rank"
)


@dataclass(frozen=True)
class CoordinatorOptions:
    """What the user asked for, as far as decisions and records are concerned."""

    spec: Adaptive | None
    drift_check_steps: int | None
    log: str | None
    replay: str | None
    rank: int

    @property
    def log_path(self) -> str | None:
        """File of the records: the argument, else HVD_HETERO_LOG, else None."""
        return self.log or os.environ.get(LOG) or None


def open_channel(start: CollectivesChannel, prefix: str, timeout_seconds: float) -> Channel:
    """Return the channel of agreements: mpi4py if every rank can use it, else ``start``.

    Where MPI is up an uncaught exception is made to end the job on all ranks.
    """
    world, reason = world_communicator()
    if world is not None:
        install_abort_hook(world)
    reasons = [message["reason"] for message in start.allgather({"reason": reason}, "transport")]
    if any(one != "mpi4py" for one in reasons):
        others = sorted(set(reasons) - {"mpi4py"})
        expected = all(one in EXPECTED_WITHOUT_MPI for one in others)
        logger.log(
            logging.INFO if expected else logging.WARNING,
            "agreements travel over Horovod's collectives: %s",
            "; ".join(others),
        )
        return start
    logger.info("agreements travel over mpi4py")
    assert world is not None
    return MpiChannel(world.Dup(), prefix, timeout_seconds, mpi_is_running)


class Coordinator:
    """Counts steps, and at the end of every window lets all ranks agree on what comes next."""

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        channel: Channel,
        collectives: Collectives,
        optimizer: Any,
        exchanger: GradientExchanger,
        balancer: Balancer | None,
        timer: StepTimer,
        configuration: Mapping[str, Any],
        log_everywhere: bool,
        timeout_seconds: float,
    ) -> None:
        self._options = options
        self._channel = channel
        self._collectives = collectives
        self._optimizer = optimizer
        self._exchanger = exchanger
        self._balancer = balancer
        self._timer = timer
        self.steps = 0
        self._timings: dict[str, list[StepTiming]] = {}
        self._windows: dict[str, int] = {}
        self._bytes_at_record = (0, 0.0)
        self._gain: float | None = None
        self._rho: float | None = None
        self._plan_reason = ""
        self._changed: list[str] = []
        self._overhead = Overhead()
        self._expected_seconds: float | None = None
        self._slow: tuple[SlowRank, ...] = ()
        self._slow_told: set[tuple[int, str]] = set()
        if balancer is not None:
            self._open_window("balance", balancer.window_steps)
            self._plan_reason = balancer.plan.reason
        self._costs: ExchangeCosts | None = None
        learns = balancer is not None and balancer.learns
        adapts = options.spec is not None and options.spec.policy != "fixed"
        if collectives.size > 1 and options.replay is None and (learns or adapts):
            values_as = "float16" if options.spec is None else options.spec.values
            self._costs = ExchangeCosts(exchanger, collectives, values_as, timeout_seconds)
        self.control: CompressionControl | None = None
        if options.spec is not None and collectives.size > 1:
            if options.replay is None:
                self._timings["compression"] = []
            self.control = CompressionControl(
                options.spec,
                exchanger=exchanger,
                collectives=collectives,
                channel=channel,
                optimizer=optimizer,
                timeout_seconds=timeout_seconds,
                costs=self._costs if adapts else None,
                follows=options.replay is not None,
            )
        self._replay: Replay | None = None
        if options.replay is not None:
            self._replay = load_replay(
                options.replay,
                _configuration_record(configuration, exchanger),
                channel=channel,
                rank=options.rank,
                balancer=balancer,
            )
            self._apply(self._replay.begin())
            self._changed = []
        self._sink: JsonLinesSink | None = None
        self._decisions: DecisionLog | None = None
        if log_everywhere:
            windows = list(self._windows.values())
            windows += [] if options.spec is None else [options.spec.window]
            self._open_window("record", min(windows) if windows else _RECORD_WINDOW_STEPS)
            if options.rank == 0 and options.log_path is not None:
                self._sink = JsonLinesSink(options.log_path)
                self._sink.write(_configuration_record(configuration, exchanger))
                flush_steps = None if self.control is None else self.control.spec.flush_steps
                self._decisions = DecisionLog(self._sink, exchanger, balancer, flush_steps)
                self._decisions.begin(0, self._compression_reason())

    def record(self, timing: StepTiming) -> None:
        """Take the timing of a step into the windows that are open."""
        for timings in self._timings.values():
            timings.append(timing)

    def before_pass(self) -> None:
        """A backward pass begins; raises ConfigurationError where a replay waits for a state."""
        if self._replay is not None:
            self._replay.check_begun()

    def after_step(self) -> None:
        """Count an applied step; agree where a window ends. Blocks, on the main thread."""
        self.steps += 1
        self._agree_where_due()
        if self._decisions is not None:
            self._decisions.note(self.steps, self._compression_reason())

    def _agree_where_due(self) -> None:
        due = [name for name, steps in self._windows.items() if self.steps % steps == 0]
        if self.control is not None:
            with self._timer.waiting():
                if self.control.after_step(self.steps):
                    self._exchange_changes()
            if self.control.due(self.steps):
                due.append("compression")
        drift_steps = self._options.drift_check_steps
        check = drift_steps is not None and self.steps % drift_steps == 0
        if self._replay is not None and not due:
            self._apply(self._replay.after(self.steps))
        if not due and not check:
            return
        with self._timer.waiting():
            if due:
                self._agree(due)
            if check:
                check_drift(self._channel, self._optimizer, self.steps)

    @property
    def rank(self) -> int:
        return self._options.rank

    @property
    def ranks(self) -> int:
        return self._collectives.size

    def compression_state(self) -> dict[str, Any] | None:
        """Return the state of the compression policy; None without one."""
        return None if self.control is None else self.control.state_dict()

    def load_compression_state(
        self, state: Mapping[str, Any] | None, steps: int, same_ranks: bool
    ) -> None:
        """Count on from ``steps``, and let the policy go on from ``state``.

        Raises:
            ConfigurationError: the state does not fit these options, or not the recording that is
                replayed.
        """
        choice = {} if self._replay is None else self._replay.choice_at(steps)
        self.steps = steps
        self._timings = {name: [] for name in self._timings}
        self._bytes_at_record = (steps, self._exchanger.sent_bytes)
        if self.control is not None and state is not None:
            self.control.load_state_dict(state, steps, same_ranks)
        elif self.control is not None:
            self.control.go_on_from(steps)
        self._apply(choice)

    def state_loaded(self) -> None:
        """Everything goes on from a loaded state."""
        if self._replay is not None:
            for plan in self._replay.plans_until(self.steps):
                self._apply(plan)
            self._changed = []
        if self._decisions is not None:
            self._decisions.begin(self.steps, self._compression_reason())

    # ---- one agreement --------------------------------------------------------------------------

    def _agree(self, due: Sequence[str]) -> None:
        holding = (
            self._balancer.schedule.agreement() if self._balancer is not None else nullcontext()
        )
        with holding:
            with self._overhead.own():
                report = self._report(due)
            with self._overhead.waiting():
                reports = self._channel.allgather(report, "window")
            verify_alike([report["alike"] for report in reports], _SAME_STEPS)
            if self._replay is not None:
                self._apply(self._replay.after(self.steps))
            else:
                self._apply(self._agreed(due, reports))
        self._watch(reports, due[0])
        if self._sink is not None and "record" in due:
            self._sink.write(self._window_record(reports))
            self._changed = []
        if self._balancer is not None:
            self._expected_seconds = self._balancer.expected_seconds

    def _agreed(self, due: Sequence[str], reports: Sequence[Message]) -> Message:
        """Return what rank 0 decides from all reports."""
        sums = None
        if "compression" in due and self.control is not None:
            sums = self.control.collect()
        decision = None
        if self._options.rank == 0:
            with self._overhead.own():
                decision = self._decide(due, reports, sums)
        with self._overhead.waiting():
            return self._channel.broadcast(decision, "decision")

    def _report(self, due: Sequence[str]) -> Message:
        report: Message = {"timings": {}, "alike": {}}
        if "record" in due:
            report["overhead"] = self._overhead.take(self._timer.own_seconds)
        if self._costs is not None:
            report.update(self._costs.report())
        for name in due:
            timings, self._timings[name] = self._timings[name], []
            report["timings"][name] = summarise(timings).to_dict() if timings else None
        if self._balancer is not None:
            report.update(self._balancer.report())
            # A rank that skipped a batch would pair its gradients with the wrong ones for ever.
            position = self._balancer.position
            report["alike"][f"(pass, batch) of the loader after step {self.steps}"] = position
        if "compression" in due and self.control is not None:
            # A parameter frozen on one rank only holds back there what others have sent.
            report["alike"]["frozen parameters"] = self._exchanger.frozen_parameters()
        return report

    def _decide(
        self, due: Sequence[str], reports: Sequence[Message], sums: torch.Tensor | None
    ) -> Message:
        decision: Message = {}
        if self._costs is not None:
            self._costs.refine(reports)
        then = self._exchanger.mode
        if "compression" in due and self.control is not None:
            choice = decision["compression"] = self.control.decide(
                sums,
                _windows(reports, "compression"),
                1.0 if self._balancer is None else float(self._balancer.global_batch_size),
            )
            then = SparsityMode(choice["cf"], choice["strategy"], tuple(choice["entries"]))
        if "balance" in due and self._balancer is not None:
            decision["balance"] = self._balancer.decide(
                _windows(reports, "balance"),
                reports,
                self._exchanger.launch_shares(self._exchanger.mode),
                self._exchange_view(then),
            )
        return decision

    def _exchange_view(self, then: SparsityMode) -> ExchangeView:
        """Return how gradients travel now, and how they will."""
        now = self._exchanger.mode
        modelled = {}
        if self._costs is not None:
            modelled = {str(mode.option): self._costs.launch_seconds(mode) for mode in (now, then)}
        return ExchangeView(str(now.option), str(then.option), modelled)

    def _apply(self, decision: Message) -> None:
        if "balance" in decision and self._balancer is not None:
            self._plan_reason = decision["balance"]["reason"]
            if self._balancer.apply(decision["balance"]):
                self._changed.append("plan")
                self._timings = {name: [] for name in self._timings}
        if "compression" in decision and self.control is not None:
            choice = decision["compression"]
            self._gain, self._rho = choice["gain"], choice["rho"]
            if self.control.apply(choice):
                self._exchange_changes()

    # ---- records --------------------------------------------------------------------------------

    def _window_record(self, reports: Sequence[Message]) -> WindowRecord:
        windows = _windows(reports, "record")
        steps_before, bytes_before = self._bytes_at_record
        sent = self._exchanger.sent_bytes
        self._bytes_at_record = (self.steps, sent)
        steps = max(self.steps - steps_before, 1)
        plan = None if self._balancer is None else self._balancer.plan
        nan = float("nan")
        points = [None if w is None else w.typical for w in windows]

        def each(name: str) -> tuple[float, ...]:
            return tuple(nan if p is None else float(getattr(p, name)) for p in points)

        effect = None if self._balancer is None else self._balancer.effect
        return WindowRecord(
            step=self.steps,
            step_seconds=max((w.step_seconds for w in windows if w is not None), default=nan),
            compute_seconds=tuple(
                nan if p is None else p.done_seconds + p.compress_seconds for p in points
            ),
            wait_seconds=tuple(nan if w is None else w.wait_seconds for w in windows),
            input_seconds=each("input_seconds"),
            forward_seconds=each("forward_seconds"),
            backward_seconds=each("backward_seconds"),
            compress_seconds=each("compress_seconds"),
            slow_ranks=tuple(asdict(slow) for slow in self._slow),
            predicted_step_seconds=self._expected_seconds,
            step_seconds_before=None if effect is None else effect.before_seconds,
            overhead_seconds=overhead_of([r["overhead"] for r in reports]) / steps,
            local_batches=() if plan is None else plan.local_batches,
            global_batch_size=None if plan is None else plan.global_batch_size,
            cf=self._exchanger.mode.cf,
            gain=self._gain,
            rho=self._rho,
            nonfinite_steps=self._exchanger.nonfinite_steps,
            strategy=self._exchanger.take_strategy(),
            bytes_per_step=(sent - bytes_before) / steps,
            plan_version=0 if plan is None else plan.version,
            plan_reason=self._plan_reason,
            compression_reason=self._compression_reason(),
            changed=tuple(self._changed),
        )

    # ---- inside ---------------------------------------------------------------------------------

    def _watch(self, reports: Sequence[Message], window: str) -> None:
        """Say once which rank is slow, and in what, when two windows in a row agree on it."""
        before = {(slow.rank, slow.part) for slow in self._slow}
        windows = _windows(reports, window)
        self._slow = slow_ranks([None if w is None else w.typical for w in windows])
        for slow in self._slow:
            name = (slow.rank, slow.part)
            if name not in before or name in self._slow_told or self._options.rank != 0:
                continue
            self._slow_told.add(name)
            # A balancer gives a slow device less to do; a slow disk stays one.
            balanced = self._balancer is not None and slow.part != "input"
            logger.log(logging.INFO if balanced else logging.WARNING, "%s", slow)

    def _exchange_changes(self) -> None:
        """What was timed until now says nothing of the exchange to come."""
        self._changed.append("cf")
        self._timings.update({name: [] for name in self._timings if name != "record"})

    def _open_window(self, name: str, steps: int) -> None:
        self._windows[name] = steps
        self._timings[name] = []

    def _compression_reason(self) -> str:
        if self.control is not None:
            return self.control.reason
        return "not asked for" if self._options.spec is None else "one rank"


def _windows(reports: Sequence[Message], name: str) -> list[WindowTiming | None]:
    timings = [report["timings"].get(name) for report in reports]
    return [None if one is None else WindowTiming.from_dict(one) for one in timings]


def _configuration_record(
    configuration: Mapping[str, Any], exchanger: GradientExchanger
) -> ConfigurationRecord:
    versions = {"torch": str(torch.__version__)}
    for package in ("hvd-hetero", "horovod", "mpi4py", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ConfigurationRecord(
        versions=versions,
        ranks=int(configuration["ranks"]),
        options=dict(configuration),
        buckets=tuple(
            BucketLayout(
                dtype=str(bucket.dtype),
                device=str(bucket.members[0].parameter.device),
                elements=bucket.elements,
                parameters=tuple(member.name for member in bucket.members),
            )
            for bucket in exchanger.buckets
        ),
    )
