"""The records of a run, one JSON object a line.

Every line has ``kind`` and ``schema``, the version of this format. Numbers are plain JSON; NaN and
infinity are written as null, and a null where a number is needed is read as NaN.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from hvd_hetero.errors import ConfigurationError, HeteroError
from hvd_hetero.planning.plan import Plan

SCHEMA = 1
"""Version of the line format; raised when a field changes its meaning or goes away."""


class RecordError(HeteroError, ValueError):
    """A record has a field that cannot be used, or a line is no record."""


@dataclass(frozen=True)
class BucketLayout:
    """One gradient bucket: its type, its place, its length and the parameters in it, in order."""

    dtype: str
    device: str
    elements: int
    parameters: tuple[str, ...]

    def __post_init__(self) -> None:
        _convert(self, _BUCKET_FIELDS)


@dataclass(frozen=True)
class ConfigurationRecord:
    """First record of a run: what runs where.

    ``versions`` by package name; ``options`` as given by the user, by name, with any values JSON
    can hold (others become their ``str``); ``buckets`` in the order of their exchange.
    """

    kind: ClassVar[str] = "configuration"

    versions: Mapping[str, str]
    ranks: int
    options: Mapping[str, Any]
    buckets: tuple[BucketLayout, ...] = ()

    def __post_init__(self) -> None:
        _convert(self, _CONFIGURATION_FIELDS)

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the line end."""
        return _to_json(self)


@dataclass(frozen=True)
class WindowRecord:
    """One measuring window, seen over all ranks.

    ``step`` is the step at which the window ended. ``step_seconds`` is the time of a step,
    ``compute_seconds`` and ``wait_seconds`` of every rank, in rank order, its own work in a step
    and its waiting for others. ``bytes_per_step`` is what a rank sends in a step.
    ``local_batches`` (samples, in rank order) and ``global_batch_size`` are those of the plan:
    empty and None without a balancer. ``cf`` is the compression factor, None when dense; ``gain``
    the compression gain and ``rho`` the residual ratio, None when not measured;
    ``nonfinite_steps`` counts, from the start, steps in which some rank's gradient was not finite
    (residuals stay as they were). The reasons say why the plan and the
    compression are as they are, ``changed`` names what changes after this window.
    ``input_seconds``, ``forward_seconds``, ``backward_seconds`` and ``compress_seconds`` are the
    parts of ``compute_seconds`` in every rank (empty: not measured), forward with the update.
    ``slow_ranks``, the slowest first: of each its ``rank``, the ``part`` of its work it is slow in
    (input, forward, backward), and the ``ratio`` of its seconds to the median for the same batch.
    ``predicted_step_seconds`` is what was expected of this window when it began,
    ``step_seconds_before`` a step under the plan before the newest; ``overhead_seconds`` what
    measuring, agreeing and planning cost in a step.
    """

    kind: ClassVar[str] = "window"

    step: int
    step_seconds: float
    compute_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    local_batches: tuple[int, ...]
    global_batch_size: int | None
    cf: float | None
    gain: float | None
    strategy: str
    bytes_per_step: float
    plan_version: int = 0
    plan_reason: str = ""
    compression_reason: str = ""
    changed: tuple[str, ...] = ()
    rho: float | None = None
    nonfinite_steps: int = 0
    input_seconds: tuple[float, ...] = ()
    forward_seconds: tuple[float, ...] = ()
    backward_seconds: tuple[float, ...] = ()
    compress_seconds: tuple[float, ...] = ()
    slow_ranks: tuple[Mapping[str, Any], ...] = ()
    predicted_step_seconds: float | None = None
    step_seconds_before: float | None = None
    overhead_seconds: float | None = None

    def __post_init__(self) -> None:
        _convert(self, _WINDOW_FIELDS)
        ranks = len(self.compute_seconds)
        for name in _PER_RANK:
            entries = len(getattr(self, name))
            if entries != ranks and (entries or name == "wait_seconds"):
                raise RecordError(
                    f"{self.kind} record: compute_seconds and {name} have {ranks} and {entries} "
                    "entries: give one for each rank"
                )

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the line end."""
        return _to_json(self)


@dataclass(frozen=True)
class CompressionChoice:
    """How steps compress: all of it that changes a bit of what is exchanged.

    ``entries`` is k of each bucket, ``sample`` whether samples of gradients are taken (a dense step
    then goes through buckets), ``flush_steps`` over how many steps a change to dense sends what
    was held back.
    """

    cf: float | None
    strategy: str
    entries: tuple[int, ...]
    sample: bool
    flush_steps: int
    reason: str

    def __post_init__(self) -> None:
        _convert(self, _CHOICE_FIELDS)
        if self.strategy not in _STRATEGIES or min(self.entries, default=0) < 0:
            raise RecordError(
                f"strategy={self.strategy!r}, entries={self.entries}: expected one of "
                f"{', '.join(_STRATEGIES)}, and whole numbers from 0 on"
            )


@dataclass(frozen=True)
class DecisionRecord:
    """What was applied after ``step`` and was not in force before; what ``replay`` runs again.

    ``optimizer`` tells the optimizers of one job apart. ``plan`` applies from ``effective`` on, the
    pass over the loader and the global batch within it, both from 0; both are None where the plan
    stays, ``compression`` where that does. ``begins``: here a job begins (step 0), or goes on from
    a loaded state: plan and compression are all that is in force, changed or not; None where there
    is no balancer, or nothing that chooses.
    """

    kind: ClassVar[str] = "decision"

    step: int
    optimizer: str
    begins: bool
    plan: Plan | None
    effective: tuple[int, int] | None
    compression: CompressionChoice | None

    def __post_init__(self) -> None:
        _convert(self, _DECISION_FIELDS)
        if (self.plan is None) != (self.effective is None):
            raise RecordError(f"{self.kind} record: plan and effective go together: give both")

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the line end."""
        return _to_json(self)


Record = ConfigurationRecord | WindowRecord | DecisionRecord


def parse_line(line: str) -> Record:
    """Return the record on one line. Fields that are not known are ignored.

    Raises RecordError for a line that is not a JSON object, a kind or a schema version that is
    not known, and a field that is missing or of the wrong type.
    """
    try:
        content = json.loads(line)
    except ValueError as error:
        raise RecordError(f"not a line of JSON ({error}): {_excerpt(line)}") from error
    if not isinstance(content, dict):
        raise RecordError(f"a JSON object was expected: {_excerpt(line)}")
    schema = content.get("schema")
    if schema != SCHEMA:
        raise RecordError(
            f"schema={schema!r}: this version reads schema {SCHEMA}; use the hvd_hetero that wrote "
            f"the file: {_excerpt(line)}"
        )
    record_type = _RECORD_TYPES.get(content.get("kind", ""))
    if record_type is None:
        allowed = ", ".join(repr(kind) for kind in _RECORD_TYPES)
        raise RecordError(
            f"kind={content.get('kind')!r}: must be one of {allowed}: {_excerpt(line)}"
        )
    names = [field.name for field in fields(record_type)]
    names = [name for name in names if name in content or name not in _ADDED_LATER]
    missing = [name for name in names if name not in content]
    if missing:
        raise RecordError(f"{record_type.kind} record without {', '.join(missing)}")
    return record_type(**{name: content[name] for name in names})


def plain(value: Any) -> Any:
    """Return ``value`` as what JSON can hold: NaN and infinity as None, unknown types as str."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, Plan):
        return value.to_dict()
    if isinstance(value, BucketLayout | CompressionChoice):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, set | frozenset):
        return [plain(entry) for entry in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value)


def _to_json(record: Record) -> str:
    content: dict[str, Any] = {"kind": record.kind, "schema": SCHEMA}
    content.update((field.name, plain(getattr(record, field.name))) for field in fields(record))
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


def _excerpt(line: str) -> str:
    return repr(line if len(line) <= 80 else line[:77] + "...")


# One converter for each field: it returns the value in its own type, or raises TypeError.


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError("a whole number")
    return int(value)


def _float(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError("a number or null")
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text")
    return value


def _optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _known(value: Any) -> float | None:
    """A number, or None where there is none: absent, NaN and infinity are the same."""
    number = _float(value)
    return number if math.isfinite(number) else None


def _tuple(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def converted(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise TypeError("a list")
        return tuple(convert(entry) for entry in value)

    return converted


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("an object with names and values")
    copy: dict[str, Any] = plain(value)
    return copy


def _versions(value: Any) -> dict[str, str]:
    return {name: str(version) for name, version in _mapping(value).items()}


def _bucket(value: Any) -> BucketLayout:
    if isinstance(value, BucketLayout):
        return value
    if not isinstance(value, Mapping) or not _BUCKET_FIELDS.keys() <= value.keys():
        raise TypeError(f"an object with {', '.join(_BUCKET_FIELDS)}")
    return BucketLayout(**{name: value[name] for name in _BUCKET_FIELDS})


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def _plan(value: Any) -> Plan:
    if isinstance(value, Plan):
        return value
    if not isinstance(value, Mapping):
        raise TypeError("a plan")
    try:
        return Plan.from_dict(value)
    except ConfigurationError as error:
        raise TypeError(f"a plan ({error})") from error


def _cursor(value: Any) -> tuple[int, int]:
    place = _tuple(_int)(value)
    if len(place) != 2 or min(place) < 0:
        raise TypeError("two whole numbers from 0 on, the pass and the batch")
    return place[0], place[1]


def _choice(value: Any) -> CompressionChoice:
    if isinstance(value, CompressionChoice):
        return value
    if not isinstance(value, Mapping) or not _CHOICE_FIELDS.keys() <= value.keys():
        raise TypeError(f"an object with {', '.join(_CHOICE_FIELDS)}")
    return CompressionChoice(**{name: value[name] for name in _CHOICE_FIELDS})


def _convert(record: Any, converters: Mapping[str, Callable[[Any], Any]]) -> None:
    for name, convert in converters.items():
        value = getattr(record, name)
        try:
            object.__setattr__(record, name, convert(value))
        except TypeError as error:
            raise RecordError(
                f"{type(record).__name__}: {name}={value!r}: must be {error}"
            ) from error


_BUCKET_FIELDS = {"dtype": _str, "device": _str, "elements": _int, "parameters": _tuple(_str)}
_CONFIGURATION_FIELDS = {
    "versions": _versions,
    "ranks": _int,
    "options": _mapping,
    "buckets": _tuple(_bucket),
}
_WINDOW_FIELDS = {
    "step": _int,
    "step_seconds": _float,
    "compute_seconds": _tuple(_float),
    "wait_seconds": _tuple(_float),
    "local_batches": _tuple(_int),
    "global_batch_size": _optional(_int),
    "cf": _known,
    "gain": _known,
    "strategy": _str,
    "bytes_per_step": _float,
    "plan_version": _int,
    "plan_reason": _str,
    "compression_reason": _str,
    "changed": _tuple(_str),
    "rho": _known,
    "nonfinite_steps": _int,
    "input_seconds": _tuple(_float),
    "forward_seconds": _tuple(_float),
    "backward_seconds": _tuple(_float),
    "compress_seconds": _tuple(_float),
    "slow_ranks": _tuple(_mapping),
    "predicted_step_seconds": _known,
    "step_seconds_before": _known,
    "overhead_seconds": _known,
}
_PER_RANK = (
    "wait_seconds",
    "local_batches",
    "input_seconds",
    "forward_seconds",
    "backward_seconds",
    "compress_seconds",
)
_STRATEGIES = ("dense", "allgather", "shared-index")
_CHOICE_FIELDS = {
    "cf": _known,
    "strategy": _str,
    "entries": _tuple(_int),
    "sample": _bool,
    "flush_steps": _int,
    "reason": _str,
}
_DECISION_FIELDS = {
    "step": _int,
    "optimizer": _str,
    "begins": _bool,
    "plan": _optional(_plan),
    "effective": _optional(_cursor),
    "compression": _optional(_choice),
}
# Of the same schema: lines without them are read, with the defaults.
_ADDED_LATER = (
    "rho",
    "nonfinite_steps",
    "input_seconds",
    "forward_seconds",
    "backward_seconds",
    "compress_seconds",
    "slow_ranks",
    "predicted_step_seconds",
    "step_seconds_before",
    "overhead_seconds",
)
_RECORD_TYPES: dict[str, type[ConfigurationRecord] | type[WindowRecord] | type[DecisionRecord]] = {
    ConfigurationRecord.kind: ConfigurationRecord,
    WindowRecord.kind: WindowRecord,
    DecisionRecord.kind: DecisionRecord,
}
