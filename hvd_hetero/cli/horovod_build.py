"""Gets the Horovod wheel that fits this Python, from the cache or by building it; installs it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hvd_hetero.cli import build_recipe as recipe
from hvd_hetero.cli.mpi import Mpi
from hvd_hetero.cli.processes import InstallError, pip, run_lines

Say = Callable[[str], None]

_CHECK = """
import json, horovod, horovod.torch as hvd
print(json.dumps({"version": horovod.__version__, "mpi": bool(hvd.mpi_built()),
                  "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built())}))
"""
_TORCH = """
import json, torch
print(json.dumps([torch.__version__, torch.__config__.show()]))
"""


@dataclass(frozen=True)
class Paths:
    """Where things are kept between calls."""

    wheels: Path
    log: Path

    @staticmethod
    def of_user() -> Paths:
        """Below XDG_CACHE_HOME, by default ~/.cache."""
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = Path(base) / "hvd_hetero"
        return Paths(root / "wheels", root / "horovod-build.log")


def find_target(options: recipe.BuildOptions, mpi: Mpi | None) -> recipe.BuildTarget:
    """What has to be built for this Python and the torch installed in it."""
    status, lines = run_lines([sys.executable, "-c", _TORCH])
    if status != 0:
        if any("No module named 'torch'" in line for line in lines):
            raise InstallError(
                "torch is not installed, and Horovod is built against it: "
                "run `pip install torch==2.13.0` first"
            )
        raise InstallError(
            f"torch cannot be imported ({lines[-1].strip()}): install it anew, "
            "for example `pip install --force-reinstall torch==2.13.0`"
        )
    version, configuration = json.loads(lines[-1])
    python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    standard = recipe.cxx_standard(version, configuration)
    return recipe.BuildTarget(version, python, standard, options, mpi, sys.prefix)


def check_tools(target: recipe.BuildTarget) -> None:
    """InstallError with the remedy when a tool that the build needs is missing or too old."""
    compiler = os.environ.get("CXX") or next(
        (name for name in ("c++", "g++", "clang++") if shutil.which(name)), None
    )
    install = "install one (on Debian: `apt-get install g++ make`)"
    if compiler is None or shutil.which(compiler.split()[0]) is None:
        named = f"CXX={compiler} is no program" if compiler else "no C++ compiler is on PATH"
        raise InstallError(f"{named}, and Horovod has to be compiled: {install}")
    if shutil.which("make") is None:
        raise InstallError(f"make is not on PATH, and Horovod's build needs it: {install}")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise InstallError(
            f"{header} is missing: install this Python's headers (on Debian: python3-dev)"
        )
    standard = f"-std=c++{target.cxx_standard}"
    with tempfile.TemporaryDirectory(prefix="hvd-hetero-") as folder:
        source = Path(folder) / "try.cc"
        source.write_text("#include <vector>\nint main() { return 0; }\n")
        command = [*compiler.split(), standard, "-c", str(source), "-o", f"{folder}/try.o"]
        status, lines = run_lines(command)
    if status != 0:
        reason = recipe.first_errors(lines, most=1)[0].strip() if lines else "no reason given"
        raise InstallError(
            f"{compiler} cannot compile with {standard}, which torch {target.torch} asks for "
            f"({reason}): install a newer compiler, or set CXX to one"
        )


def default_jobs() -> int:
    """Compilers at once: one a core, each with the 2 GB that torch's headers take."""
    cores = len(os.sched_getaffinity(0))
    try:
        available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    except OSError:
        available = None
    memory_limit = int(available[1]) // 2_000_000 if available else cores
    return max(1, min(cores, memory_limit))


def cached_wheel(paths: Paths, target: recipe.BuildTarget) -> Path | None:
    """The wheel of an earlier build for the same target."""
    return next((paths.wheels / target.key()).glob("horovod-*.whl"), None)


def store_wheel(paths: Paths, target: recipe.BuildTarget, wheel: Path) -> Path:
    """Put a wheel into the cache in one move; OSError when there is no room for it."""
    paths.wheels.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=paths.wheels))
    final = paths.wheels / target.key()
    try:
        shutil.copy2(wheel, partial)
        (partial / "target.json").write_text(json.dumps(asdict(target), indent=1))
        if not final.exists():
            partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final / wheel.name


def install_missing(requirements: dict[str, str], *, purpose: str) -> None:
    """Install those of ``requirements`` (name -> requirement) that are not there."""
    missing = []
    for name, requirement in requirements.items():
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement)
    if missing:
        pip(["install", "-q", *missing], purpose=purpose)


def find_cmake() -> str:
    """A cmake from 3.13 up to, and without, 4: this Python's, the system's, else PyPI's."""
    beside = str(Path(sys.executable).parent)
    for folder in (beside, os.environ.get("PATH", "")):
        found = shutil.which("cmake", path=folder)
        if found and _cmake_fits(found):
            return found
    pip(["install", "-q", "cmake>=3.13,<4"], purpose="installing cmake")
    found = shutil.which("cmake", path=beside) or shutil.which("cmake")
    if found is None or not _cmake_fits(found):
        raise InstallError(
            "cmake was installed but is not on PATH: use a virtual environment, or install "
            "a cmake from 3.13 up to 3.31"
        )
    return found


def _cmake_fits(program: str) -> bool:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    match = re.search(r"version (\d+)\.(\d+)", done.stdout)
    return match is not None and (3, 13) <= (int(match[1]), int(match[2])) < (4, 0)


def build_wheel(
    target: recipe.BuildTarget, folder: Path, *, jobs: int, log: Path, say: Say, on_line: Say
) -> Path:
    """Download, patch and compile Horovod below ``folder``; returns the wheel's path.

    Raises InstallError when it fails, after ``say`` has shown the compiler's first error.
    """
    packages = {name: name for name in (*recipe.BUILD_PACKAGES, *recipe.RUN_PACKAGES)}
    install_missing(packages, purpose="installing what Horovod's build needs")
    cmake = find_cmake()
    source = _download_source(folder)
    for name in recipe.CMAKE_FILES:
        file = source / name
        file.write_text(recipe.raise_standard(file.read_text(), target.cxx_standard))

    tools = folder / "tools"
    tools.mkdir()
    wrapper = tools / "cmake"
    wrapper.write_text(recipe.cmake_wrapper(cmake, target.mpi))
    wrapper.chmod(0o755)
    first = [str(Path(target.mpi.compiler).parent)] if target.mpi else []
    folders = os.pathsep.join([*first, str(Path(sys.executable).parent)])
    environment = recipe.build_environment(
        os.environ, target, cmake=str(wrapper), jobs=jobs, folders=folders
    )
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    command += ["--no-cache-dir", "-w", str(folder / "wheel"), str(source)]
    status, lines = run_lines(command, on_line=on_line, environment=environment)
    wheel = next((folder / "wheel").glob("horovod-*.whl"), None)
    if status == 0 and wheel is not None:
        return wheel
    for line in recipe.first_errors(lines):
        say(line)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(lines))
        say(f"the whole output of the build: {log}")
    except OSError:
        pass  # no room for the log must not hide why the build failed
    raise InstallError(recipe.explain_build_failure(lines, target.torch))


def _download_source(folder: Path) -> Path:
    arguments = ["download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", "horovod"]
    arguments += ["-d", str(folder), f"horovod=={recipe.HOROVOD_VERSION}"]
    pip(arguments, purpose=f"downloading the source of Horovod {recipe.HOROVOD_VERSION}")
    archive = next(folder.glob("horovod-*.tar.gz"))
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)
    return folder / f"horovod-{recipe.HOROVOD_VERSION}"


def install_wheel(wheel: Path, target: recipe.BuildTarget) -> None:
    """Install a wheel and try it; takes it out again, and raises InstallError, when it fails."""
    install_missing(
        {name: name for name in recipe.RUN_PACKAGES}, purpose="installing what Horovod needs"
    )
    _record().unlink(missing_ok=True)
    pip(
        ["install", "-q", "--no-deps", "--force-reinstall", str(wheel)],
        purpose="installing Horovod",
    )
    problem = check_installed(target)
    if problem:
        pip(["uninstall", "-q", "-y", "horovod"], purpose="taking Horovod out again")
        raise InstallError(f"the Horovod that was built does not work and was removed: {problem}")
    try:
        _record().parent.mkdir(parents=True, exist_ok=True)
        _record().write_text(json.dumps({"key": target.key(), "target": asdict(target)}))
    except OSError:
        pass  # it only saves the next call a reinstallation


def is_installed(target: recipe.BuildTarget) -> bool:
    """Whether exactly this build is installed, by our own record, and works."""
    try:
        recorded = json.loads(_record().read_text())["key"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(recorded == target.key()) and check_installed(target) is None


def check_installed(target: recipe.BuildTarget) -> str | None:
    """Import Horovod in a child process; what is wrong with it, or None."""
    status, lines = run_lines([sys.executable, "-c", _CHECK])
    if status != 0:
        return lines[-1].strip() if lines else f"its import ended with status {status}"
    built = json.loads(lines[-1])
    wanted = {"mpi": target.mpi is not None, "gloo": True, "nccl": target.options.nccl}
    for part, asked in wanted.items():
        if asked and not built[part]:
            return f"it was to be built with {part}, and is not"
    if built["version"] != target.horovod:
        return f"it is version {built['version']}, not {target.horovod}"
    return None


def _record() -> Path:
    return Path(sys.prefix) / "share" / "hvd_hetero" / "horovod.json"
