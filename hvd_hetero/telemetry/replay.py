"""A recorded run as a schedule: which plan applies to which draw, which choice after which step.

Pure: records in, schedule out. Rank 0 reads the file; the others get ``to_message``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.plan import Plan
from hvd_hetero.telemetry.records import (
    BucketLayout,
    CompressionChoice,
    ConfigurationRecord,
    DecisionRecord,
    Record,
    WindowRecord,
    parse_line,
)
from hvd_hetero.telemetry.report import last_run

# Options that change what is computed; the others only change how decisions are come to, or when.
_ALIKE = (
    "backward_passes_per_step",
    "op",
    "loss_reduction",
    "loss_divided_by_passes",
    "local_clip_norm",
    "grad_scaler",
    "sparse_as_dense",
)
_BALANCER_ALIKE = (
    "global_batch_size",
    "min_local_batch",
    "max_local_batch",
    "fixed_local_batches",
    "seed",
)
_UNCOMPRESSED = "no compression"


@dataclass(frozen=True)
class Recording:
    """The decisions of one run in the order of their steps; the first holds all that was in force.

    ``ends``: the last step of which anything is recorded.

    Raises ConfigurationError for decisions that are no run: none, a first one that does not begin
    it, steps or plans that do not rise.
    """

    decisions: tuple[DecisionRecord, ...]
    ends: int

    def __post_init__(self) -> None:
        if not self.decisions or not self.decisions[0].begins:
            raise ConfigurationError("its decisions do not begin where the run does")
        steps = [decision.step for decision in self.decisions]
        plans = [decision for decision in self.decisions if decision.plan is not None]
        versions = [one.plan.version for one in plans if one.plan is not None]
        cursors = [one.effective for one in plans if one.effective is not None]
        # A state may hold several plans: of which all but one were not in effect yet.
        begun = next((i for i, step in enumerate(steps) if step > steps[0]), len(steps))
        if sorted(set(steps)) != steps[begun - 1 :] or sorted(set(versions)) != versions:
            raise ConfigurationError(
                f"its decisions are those of no single run: after the steps {_short(steps)}, with "
                f"the plans {_short(versions)}"
            )
        if sorted(cursors) != cursors:
            raise ConfigurationError(f"its plans apply from {_short(cursors)}, not in this order")

    @property
    def begins(self) -> int:
        """The step at which the recorded run began: 0, or that of the state it went on from."""
        return self.decisions[0].step

    @property
    def balanced(self) -> bool:
        """Whether there are plans."""
        return self.decisions[0].plan is not None

    @property
    def compressed(self) -> bool:
        """Whether there are choices of compression."""
        return self.decisions[0].compression is not None

    @property
    def plans(self) -> tuple[tuple[tuple[int, int], Plan], ...]:
        """All plans with the cursors from which they apply, in order."""
        return tuple(
            (one.effective, one.plan)
            for one in self.decisions
            if one.plan is not None and one.effective is not None
        )

    def after(self, step: int) -> DecisionRecord | None:
        """Return what was decided after ``step``, other than at the beginning; None for nothing."""
        for decision in self.decisions[1:]:
            if decision.step == step:
                return decision
        return None

    def until(self, step: int) -> tuple[DecisionRecord, ...]:
        """Return all that was decided up to and including ``step``, the beginning first."""
        return tuple(one for one in self.decisions if one.step <= step)

    def choice_at(self, step: int) -> CompressionChoice | None:
        """Return the choice of compression in force after ``step``."""
        choices = [one.compression for one in self.until(step) if one.compression is not None]
        return choices[-1] if choices else None

    def to_message(self) -> dict[str, Any]:
        """Return JSON values; ``from_message`` undoes it."""
        return {"decisions": [one.to_json() for one in self.decisions], "ends": self.ends}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Recording:
        """Build from what ``to_message`` gave."""
        records = [parse_line(line) for line in message["decisions"]]
        decisions = tuple(one for one in records if isinstance(one, DecisionRecord))
        return cls(decisions, int(message["ends"]))


def recorded_run(records: Iterable[Record], here: ConfigurationRecord) -> Recording:
    """Return the decisions of the last run in ``records``, for a run configured as ``here``.

    Where that run had loaded a state, they are those since then.

    Raises:
        ConfigurationError: there are no decisions, or the run here could not follow them bit for
            bit; the message says what differs, not in which file.
    """
    run = last_run(records)
    configuration = next((one for one in run if isinstance(one, ConfigurationRecord)), None)
    decisions = [one for one in run if isinstance(one, DecisionRecord)]
    if configuration is None or not decisions:
        raise ConfigurationError(
            "it holds no decisions: give the file that a run with log=FILE has written, with this "
            "version of hvd_hetero, a balancer or a compression that chooses"
        )
    names = {one.optimizer for one in decisions}
    if len(names) > 1:
        raise ConfigurationError(
            f"it holds the decisions of {len(names)} optimizers in turn: record each of them to a "
            "log of its own"
        )
    _check_alike(configuration, here)
    starts = [i for i, one in enumerate(run) if isinstance(one, DecisionRecord) and one.begins]
    since = run[starts[-1] :] if starts else run
    recording = Recording(
        tuple(one for one in since if isinstance(one, DecisionRecord)),
        max(one.step for one in since if isinstance(one, WindowRecord | DecisionRecord)),
    )
    _check_plans(recording, here)
    return recording


def _check_alike(recorded: ConfigurationRecord, here: ConfigurationRecord) -> None:
    if recorded.ranks != here.ranks:
        raise ConfigurationError(
            f"recorded with {recorded.ranks} ranks, this job has {here.ranks}: start as many"
        )
    then, now = recorded.options, here.options
    _same("compression", _compression(then), _compression(now))
    _same("balancer", _given(then), _given(now))
    balancer_then, balancer_now = _options(then, "balancer"), _options(now, "balancer")
    for name in _BALANCER_ALIKE:
        _same(name, balancer_then.get(name), balancer_now.get(name))
    for name in _ALIKE:
        _same(name, then.get(name), now.get(name))
    if len(recorded.buckets) != len(here.buckets):
        raise ConfigurationError(
            f"recorded with {len(recorded.buckets)} buckets, here there are {len(here.buckets)}: "
            f"use the same model and bucket_bytes={then.get('bucket_bytes')!r}"
        )
    for index, (one, other) in enumerate(zip(recorded.buckets, here.buckets, strict=True)):
        if _bucket(one) != _bucket(other):
            raise ConfigurationError(
                f"bucket {index} was recorded as {_described(one)}, here it is "
                f"{_described(other)}: use the same model and "
                f"bucket_bytes={then.get('bucket_bytes')!r}"
            )


def _options(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = options.get(name)
    if not isinstance(value, Mapping | None):
        raise ConfigurationError(f"{name}={value!r} was recorded: the file was changed")
    return value or {}


def _check_entries(choice: CompressionChoice, here: ConfigurationRecord) -> None:
    """Buckets that join later may have more entries than there are buckets at the start."""
    for index, (k, bucket) in enumerate(zip(choice.entries, here.buckets, strict=False)):
        if not 1 <= k <= bucket.elements:
            raise ConfigurationError(
                f"{k} entries of bucket {index}, which has {bucket.elements}: the file was changed"
            )


def _check_plans(recording: Recording, here: ConfigurationRecord) -> None:
    asked = _options(here.options, "balancer")
    if bool(asked) != recording.balanced:
        raise ConfigurationError("it has a balancer without plans, or plans without a balancer")
    chooses = isinstance(here.options.get("compression"), Mapping) and here.ranks > 1
    if chooses != recording.compressed:
        raise ConfigurationError("it has compression without choices, or choices without it")
    for _, plan in recording.plans:
        if (plan.ranks, plan.global_batch_size) != (here.ranks, asked["global_batch_size"]):
            raise ConfigurationError(
                f"plan {plan.version} has local batches {_short(list(plan.local_batches))}, which "
                f"are none of {here.ranks} ranks and global_batch_size="
                f"{asked['global_batch_size']}: the file was changed"
            )
    for decision in recording.decisions:
        if decision.compression is not None:
            _check_entries(decision.compression, here)


def _same(name: str, recorded: Any, here: Any) -> None:
    if recorded == here:
        return
    if isinstance(recorded, Mapping) and isinstance(here, Mapping):
        for option in [*recorded, *here]:
            _same(f"{name}: {option}", recorded.get(option), here.get(option))
    raise ConfigurationError(
        f"{name} was recorded as {_short(recorded)}, here it is {_short(here)}: use the same "
        "options as the recorded run"
    )


def _compression(options: Mapping[str, Any]) -> Any:
    given = options.get("compression")
    return _UNCOMPRESSED if given == "NoneCompressor" else given


def _given(options: Mapping[str, Any]) -> str:
    return "none" if options.get("balancer") is None else "one"


def _bucket(layout: BucketLayout) -> tuple[Any, ...]:
    kind = layout.device.split(":")[0]  # cuda:0 and cuda:1 compute alike
    return layout.dtype, kind, layout.elements, layout.parameters


def _described(layout: BucketLayout) -> str:
    return (
        f"{layout.elements} x {layout.dtype} on {layout.device} ({_short(list(layout.parameters))})"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
