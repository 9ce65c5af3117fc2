"""Profiles of a cluster: small TOML files with the speeds of ranks and what lies between them."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_hetero.balance.lines import Line, RankModel
from hvd_hetero.errors import ConfigurationError, check_float, check_int
from hvd_hetero.planning.what_if import (
    Cluster,
    ExchangeSeconds,
    Rank,
    RingNetwork,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_RANKS = 1_000_000  # a simulation holds some hundred bytes for each
_TOP_KEYS = ("global_batch_size", "granule", "ranks", "network")
_RANK_KEYS = (
    "count",
    "name",
    "seconds_per_sample",
    "fixed_seconds",
    "first_bucket_share",
    "min_local_batch",
    "max_local_batch",
)
_GIVEN_KEYS = ("overlapped_seconds", "final_seconds")
_RING_KEYS = ("gradient_bytes", "bandwidth_bits_per_second", "latency_seconds", "overlapped_share")


@dataclass(frozen=True)
class Profile:
    """What a profile says. global_batch_size, granule: None where it does not say."""

    cluster: Cluster
    global_batch_size: int | None
    granule: int | None


def read_text(path: str) -> str:
    """Return the text of a file the user has named; ConfigurationError when it has none."""
    try:
        # As records are read: a killed run may have cut a character in two.
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(
            f"FILE={path!r}: cannot be read ({error.strerror}); give a file that can be"
        ) from error
    if not text.strip():
        raise ConfigurationError(
            f"FILE={path!r}: is empty; give records of a run (log=FILE) or a profile of speeds "
            "(an example is in `hvd-hetero plan --help`)"
        )
    return text


def write_text(path: str, text: str) -> None:
    """Write what --json asks for; ``-`` is the standard output."""
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--json={path!r}: cannot be written ({error.strerror}); give a path in a folder "
            "that exists"
        ) from error


def parse_profile(text: str, name: str) -> Profile:
    """Return the profile in ``text``; ``name``, the file's, is for messages.

    Raises ConfigurationError, with the key, the value and the remedy, for anything else.
    """
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(
            f"FILE={name!r}: neither records of a run nor TOML ({error}); correct that place"
        ) from error
    try:
        return _profile(content)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def _profile(content: Mapping[str, Any]) -> Profile:
    _known(content, _TOP_KEYS, "")
    tables = content.get("ranks")
    if not isinstance(tables, list) or not tables:
        raise ConfigurationError(
            "ranks: missing; give a table [[ranks]] for each speed class, with count and "
            "seconds_per_sample"
        )
    ranks: list[Rank] = []
    for index, table in enumerate(tables):
        ranks += _ranks(table, f"ranks[{index}].", {rank.speed_class for rank in ranks})
        if len(ranks) > MOST_RANKS:
            raise ConfigurationError(
                f"ranks[{index}].count={table['count']}: more than {MOST_RANKS} ranks in all; "
                "give fewer"
            )
    return Profile(
        Cluster(tuple(ranks), _network(content.get("network", {}))),
        _optional_int(content, "", "global_batch_size"),
        _optional_int(content, "", "granule"),
    )


def _ranks(table: Any, where: str, names: Collection[str]) -> list[Rank]:
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{where[:-1]}={table!r}: write it as a table, [[ranks]]")
    _known(table, _RANK_KEYS, where)
    count = check_int(f"{where}count", table.get("count", 1), minimum=1, maximum=MOST_RANKS)
    name = table.get("name", f"class {len(names) + 1}")
    if not isinstance(name, str) or not name.strip() or name in names:
        raise ConfigurationError(
            f"{where}name={name!r}: give each speed class a name of its own, in quotes"
        )
    if "seconds_per_sample" not in table:
        raise ConfigurationError(
            f"{where}seconds_per_sample: missing; give the seconds of forward and backward per "
            "sample, such as 0.0011"
        )
    # No time at all for a sample would make every split as good as any other.
    slope = check_float(
        f"{where}seconds_per_sample",
        table["seconds_per_sample"],
        minimum=0.0,
        exclusive_minimum=True,
    )
    fixed = check_float(f"{where}fixed_seconds", table.get("fixed_seconds", 0.0), minimum=0.0)
    # Without one nothing of the exchange runs beside backward.
    share = check_float(
        f"{where}first_bucket_share",
        table.get("first_bucket_share", 1.0),
        minimum=0.0,
        maximum=1.0,
    )
    least = _optional_int(table, where, "min_local_batch") or 1
    most = _optional_int(table, where, "max_local_batch")
    if most is not None and most < least:
        raise ConfigurationError(
            f"{where}max_local_batch={most}: below min_local_batch={least}; raise it"
        )
    model = RankModel(ready=Line(share * slope, share * fixed), done=Line(slope, fixed))
    return [Rank(model, name, least, most)] * count


def _network(table: Any) -> ExchangeSeconds | RingNetwork:
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"network={table!r}: write it as a table, [network]")
    _known(table, (*_GIVEN_KEYS, *_RING_KEYS), "network.")
    given = [key for key in _GIVEN_KEYS if key in table]
    ring = [key for key in _RING_KEYS if key in table]
    if given and ring:
        raise ConfigurationError(
            f"network.{given[0]}={table[given[0]]!r} beside network.{ring[0]}: give either the "
            f"seconds ({', '.join(_GIVEN_KEYS)}) or what they follow from ({', '.join(_RING_KEYS)})"
        )
    values = {
        key: check_float(
            f"network.{key}",
            value,
            minimum=0.0,
            maximum=1.0 if key == "overlapped_share" else None,
            exclusive_minimum=key == "bandwidth_bits_per_second",
        )
        for key, value in table.items()
    }
    if not ring:
        return ExchangeSeconds(**values)
    for key in _RING_KEYS[:2]:
        if key not in values:
            raise ConfigurationError(f"network.{key}: missing beside network.{ring[0]}; give it")
    return RingNetwork(**values)


def _optional_int(table: Mapping[str, Any], where: str, key: str) -> int | None:
    return check_int(f"{where}{key}", table[key], minimum=1) if key in table else None


def _known(table: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    """Raise ConfigurationError, with the nearest known key, for a key that is not known."""
    for key, value in table.items():
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigurationError(
                f"{where}{key}={value!r}: no such key; {meant}known are {', '.join(keys)}"
            )
