"""The lab: hosts that are apart, links that are shaped, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lab import Lab, LabError, LaunchError, run_ranks, why_not
from benchmarks.lab.network import AGENT

REPOSITORY = Path(__file__).resolve().parents[3]
NAME, SUBNET = "labtest", "10.97.61"

needs_lab = pytest.mark.skipif(bool(why_not()), reason=why_not())


def left_of(name: str) -> str:
    """What a lab of that name has on this machine."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    return " ".join(re.findall(rf"\b{name}\w*", spaces + links))


def runs(pid: str) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def on_host(lab: Lab, host: int, line: str) -> str:
    command = [str(AGENT), lab.name, str(host), line]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@needs_lab
def test_hosts_have_their_own_address_and_name_and_reach_each_other() -> None:
    with Lab(2, "50mbit", name=NAME, subnet=SUBNET) as lab:
        assert lab.address(2) in on_host(lab, 2, "ip -4 addr show eth0")
        assert on_host(lab, 2, "hostname") == f"{NAME}2"
        assert lab.address(1) in on_host(lab, 2, f"getent hosts {NAME}1")
        counters = on_host(lab, 1, "grep -c eth0 /proc/self/net/dev")
        assert counters == "1"
        shape = on_host(lab, 1, "tc qdisc show dev eth0")
        assert "tbf" in shape
        assert "50Mbit" in shape
        lab.set_rate("1gbit")
        assert "1Gbit" in on_host(lab, 1, "tc qdisc show dev eth0")
    assert left_of(NAME) == ""


@needs_lab
def test_bytes_take_as_long_as_the_rate_says() -> None:
    """2 MB at 40 Mbit/s: 0.4 s."""
    receive = (
        "import socket,time; s=socket.create_server(('', 7000)); c,_=s.accept(); n=0; t=0\n"
        "while True:\n"
        "    d=c.recv(1<<16); t=t or time.time(); n+=len(d)\n"
        "    if not d: break\n"
        "print(time.time()-t, n)"
    )
    send = (
        "import socket,time\n"
        "while True:\n"
        "    try: s=socket.create_connection(('{address}', 7000)); break\n"
        "    except OSError: time.sleep(0.05)\n"
        "s.sendall(bytes(2000000)); s.close()"
    )
    with Lab(2, "40mbit", name=NAME, subnet=SUBNET) as lab:
        receiver = subprocess.Popen(
            [str(AGENT), lab.name, "1", f'{sys.executable} -c "{receive}"'],
            stdout=subprocess.PIPE,
            text=True,
        )
        line = send.format(address=lab.address(1))
        on_host(lab, 2, f'{sys.executable} -c "{line}"')
        seconds, received = receiver.communicate(timeout=20)[0].split()
    assert int(received) == 2_000_000
    assert 0.35 < float(seconds) < 0.9


@needs_lab
def test_two_labs_side_by_side_but_not_two_of_one_name() -> None:
    with Lab(1, name=NAME, subnet=SUBNET) as one:
        with Lab(1, name="labother", subnet="10.97.62") as two:
            assert on_host(one, 1, "hostname") != on_host(two, 1, "hostname")
        assert left_of("labother") == ""
        assert left_of(NAME) != ""
        with pytest.raises(LabError, match="in use"), Lab(1, name=NAME, subnet=SUBNET):
            pass
        assert on_host(one, 1, "hostname") == f"{NAME}1", "the first one was taken down"


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_kill(number: signal.Signals) -> None:
    """SIGTERM cleans up itself; what SIGKILL leaves, the next start does, processes included."""
    code = (
        "from benchmarks.lab import Lab, run_ranks\n"
        f"with Lab(1, name={NAME!r}, subnet={SUBNET!r}) as lab:\n"
        "    print('up', flush=True)\n"
        "    run_ranks(['sleep', '60'], 1, lab=lab)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    end = time.monotonic() + 10
    inside = ""
    while not inside and time.monotonic() < end:
        inside = subprocess.run(
            ["ip", "netns", "pids", f"{NAME}1"], capture_output=True, text=True
        ).stdout
        time.sleep(0.05)
    assert inside
    process.send_signal(number)
    process.wait(timeout=20)
    if number == signal.SIGTERM:
        assert left_of(NAME) == ""
    with Lab(1, name=NAME, subnet=SUBNET):
        end = time.monotonic() + 5
        while any(runs(pid) for pid in inside.split()):
            assert time.monotonic() < end
            time.sleep(0.05)
    assert left_of(NAME) == ""


@needs_lab
def test_a_failing_rank_ends_the_job_with_its_output() -> None:
    code = (
        "import os, sys, time\n"
        "if os.environ['HOROVOD_RANK'] == '1': sys.exit('what went wrong')\n"
        "time.sleep(60)"
    )
    start = time.monotonic()
    with (
        pytest.raises(LaunchError, match="what went wrong"),
        Lab(2, name=NAME, subnet=SUBNET) as lab,
    ):
        run_ranks([sys.executable, "-c", code], 2, lab=lab)
    assert time.monotonic() - start < 20
    assert left_of(NAME) == ""


def test_ranks_without_a_lab() -> None:
    code = "import os; print(os.environ['HOROVOD_RANK'], os.environ['HOROVOD_SIZE'])"
    output = run_ranks([sys.executable, "-c", code], 2)
    assert output.splitlines() == ["0 2", "1 2"]
    with pytest.raises(LaunchError, match="did not end in time"):
        run_ranks(["sleep", "20"], 1, timeout_seconds=0.3)


def test_why_there_is_no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "not root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no ip, tc" in why_not()


@pytest.mark.parametrize(
    "options",
    [{"name": "a-b"}, {"name": "waytoolong"}, {"name": "lab1"}, {"subnet": "10.1"}, {"hosts": 0}],
)
def test_malformed(options: dict[str, object]) -> None:
    with pytest.raises(LabError):
        Lab(**({"hosts": 1} | options))  # type: ignore[arg-type]
    with pytest.raises(LabError, match="CPU shares"):
        Lab(2, cpu_shares=[0.5])
