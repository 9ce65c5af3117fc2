"""Hosts as network namespaces: a bridge, one veth pair a host, links shaped by tbf, CPU shares.

Everything carries the lab's name, so that two labs with different names and address ranges can
run side by side, and whatever a killed run has left is found and removed at the next start.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "sysctl")
AGENT = Path(__file__).resolve().parent / "agent.sh"
# A burst passes unshaped: few packets where a host sends, more where what was shaped arrives.
_SENDING_BURST, _ARRIVING_BURST = "5kb", "32kb"
# The same on every machine, and no slow start anew after each pause of computing.
_TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
_CGROUP_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
_SHARE_PERIOD_MICROSECONDS = 10_000


class LabError(RuntimeError):
    """The lab cannot be set up; says why."""


def why_not() -> str:
    """Say why there can be no lab on this machine; empty when there can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} (iproute2, util-linux)"
    probe = f"labprobe{os.getpid()}"
    made = _try("ip", "netns", "add", probe)
    _try("ip", "netns", "del", probe)
    return "" if made else "network namespaces are not allowed here"


class Lab:
    """A context manager: hosts 1..n, each with an address, up to ``__exit__``.

    Args:
        hosts: their number.
        rate: of every link, each way, in tc's words ("200mbit").
        name: of this lab: a letter, then letters or digits, at most 8.
        subnet: the first three octets of the addresses.
        cpu_shares: of each host, in cores; none for no limit. Without a cgroup that can be
            written this raises LabError.

    Raises LabError when another process runs a lab of that name, or a command fails.
    """

    def __init__(
        self,
        hosts: int,
        rate: str = "200mbit",
        *,
        name: str = "hetlab",
        subnet: str = "10.98.0",
        cpu_shares: Sequence[float] = (),
    ) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]{0,7}", name) or name[-1].isdigit():
            raise LabError(f"lab name {name!r}: letters, at most 8, no digit at the end")
        if not re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", subnet):
            raise LabError(f"lab subnet {subnet!r}: three octets, such as 10.98.0")
        if not 1 <= hosts <= 250:
            raise LabError(f"{hosts} hosts: a lab has 1 to 250")
        if cpu_shares and len(cpu_shares) != hosts:
            raise LabError(f"{len(cpu_shares)} CPU shares for {hosts} hosts")
        self.hosts = hosts
        self.name = name
        self.subnet = subnet
        self.gateway = f"{subnet}.254"
        self._rate = rate
        self._shares = tuple(cpu_shares)
        self._lock: TextIO | None = None
        self._signals: dict[int, object] = {}

    def address(self, host: int) -> str:
        """Return the address of a host, counted from 1."""
        return f"{self.subnet}.{host}"

    def __enter__(self) -> Lab:
        self._take_lock()
        # An ended benchmark must not leave its network behind: end by an exception.
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._signals[number] = signal.signal(number, _exit_by)
        try:
            remove(self.name)
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with _uninterrupted():
            remove(self.name)
        for number, handler in self._signals.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._signals.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def set_rate(self, rate: str) -> None:
        """Shape every link anew, at once, both ways."""
        self._rate = rate
        for host in range(1, self.hosts + 1):
            space, outer = f"{self.name}{host}", f"{self.name}v{host}"
            _do("ip", "netns", "exec", space, *_shape("eth0", rate, _SENDING_BURST))
            _do(*_shape(outer, rate, _ARRIVING_BURST))

    def _take_lock(self) -> None:
        lock = open(f"/run/{self.name}.lab.lock", "a+")  # noqa: SIM115 - held while the lab is up
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise LabError(
                f"a lab named {self.name!r} is in use by another process: give this one another "
                "name and another subnet"
            ) from error
        self._lock = lock

    def _build(self) -> None:
        bridge = f"{self.name}br"
        _do("ip", "link", "add", bridge, "type", "bridge")
        _do("ip", "addr", "add", f"{self.gateway}/24", "dev", bridge)
        _do("ip", "link", "set", bridge, "up")
        for host in range(1, self.hosts + 1):
            space, outer = f"{self.name}{host}", f"{self.name}v{host}"
            _do("ip", "netns", "add", space)
            _do("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _do("ip", "link", "set", outer, "master", bridge, "up")
            _do("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _do("ip", "-n", space, "link", "set", "eth0", "up")
            _do("ip", "-n", space, "link", "set", "lo", "up")
            for key, value in _TCP.items():
                _do("ip", "netns", "exec", space, "sysctl", "-qw", f"net.ipv4.{key}={value}")
        known = [f"{self.address(host)} {self.name}{host}" for host in range(1, self.hosts + 1)]
        _hosts_file(self.name).write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        self.set_rate(self._rate)
        for host, share in enumerate(self._shares, start=1):
            limit_cpu(f"{self.name}{host}", share)


def remove(name: str) -> None:
    """Remove what a lab of that name has set up, processes in its namespaces included."""
    spaces = [line.split()[0] for line in _output("ip", "netns", "list").splitlines() if line]
    for space in spaces:
        if re.fullmatch(rf"{name}\d+", space):
            for pid in _output("ip", "netns", "pids", space).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _try("ip", "netns", "del", space)
    for link in re.findall(rf"^\d+: ({name}(?:br|v\d+))[@:]", _output("ip", "-o", "link"), re.M):
        _try("ip", "link", "del", link)
    _hosts_file(name).unlink(missing_ok=True)
    for root in _CGROUP_ROOTS:
        for group in root.glob(f"{name}[0-9]*"):
            with suppress(OSError):
                group.rmdir()


def _hosts_file(name: str) -> Path:
    return Path(f"/run/{name}.lab.hosts")


def limit_cpu(group: str, share: float) -> None:
    """Give the CPU cgroup of a host ("hetlab1") ``share`` cores; a rank on it may call it too."""
    quota = int(share * _SHARE_PERIOD_MICROSECONDS)
    first, second = (root / group for root in _CGROUP_ROOTS)
    try:
        if first.parent.is_dir():
            first.mkdir(exist_ok=True)
            (first / "cpu.cfs_period_us").write_text(str(_SHARE_PERIOD_MICROSECONDS))
            (first / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (second.parent / "cgroup.subtree_control").write_text("+cpu")
            second.mkdir(exist_ok=True)
            (second / "cpu.max").write_text(f"{quota} {_SHARE_PERIOD_MICROSECONDS}")
    except OSError as error:
        raise LabError(f"no CPU shares without a cgroup that can be written: {error}") from error


def _shape(device: str, rate: str, burst: str) -> tuple[str, ...]:
    shape = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
    return ("tc", "qdisc", "replace", "dev", device, *shape)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _try(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def _exit_by(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until cleaning up is done."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
