"""`greensched doctor`: whether a pool can be opened here, and if not, what to do.

Imports only the standard library, and everything else inside a check, so that it also runs if
a package is missing or broken. It creates no context and allocates nothing on a device.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec

#: The packages that parts of greensched require: module, requirement. `pyproject.toml` requires
#: them, but an installation may lack them.
PACKAGES = {
    "cuda.bindings": "cuda-bindings>=13,<14",
    "anyio": "anyio>=4.5",
    "numpy": "numpy>=1.26",
    "click": "click>=8.1",
    "rich": "rich>=13",
}
#: Libraries that have integrations.
LIBRARIES = (
    "cuda-core", "cupy-cuda13x", "fastapi", "matplotlib", "numba-cuda", "ray", "torch", "trio",
    "uvloop", "warp-lang",
)  # fmt: skip
#: Environment variables that affect CUDA or greensched, and what each of them means.
VARIABLES = {
    "GREENSCHED_DRIVER": "the driver of every pool that names none",
    "CUDA_VISIBLE_DEVICES": "the only devices that this process sees",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues of a context",
    "CUDA_MODULE_LOADING": "when kernels are loaded",
    "CUDA_MPS_PIPE_DIRECTORY": "this process is a client of MPS if its server runs",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "MPS limits SMs, and can widen a partition",
}
#: The fields that nvidia-smi reports for each GPU. Source: `nvidia-smi --help-query-gpu`.
GPU_FIELDS = (
    "index", "clocks.sm", "clocks.max.sm", "power.draw", "power.limit",
    "clocks_event_reasons.active", "compute_mode", "mig.mode.current",
)  # fmt: skip
PROCESS_FIELDS = "pid", "process_name", "used_gpu_memory"
#: Why clocks are below their maximum. Source: nvml.h, nvmlClocksEventReason*. An idle GPU, or
#: clocks that an administrator set, cause no warning.
SLOWDOWNS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result.

    Attributes:
        section: The subject, such as `driver`.
        name: What was checked.
        status: `ok`; `note`, neither good nor bad; `warning`, works with a limit; `error`, no pool
            can be opened.
        text: The result.
        remedy: What to do; empty if nothing needs to be done.
    """

    section: str
    name: str
    status: str
    text: str
    remedy: str = ""


def main(spec: str | None, *, as_json: bool) -> int:
    """Print the findings; return 1 if one of them prevents opening a pool."""
    findings = diagnose(spec)
    can_open = all(finding.status != ERROR for finding in findings)
    if as_json:
        answer = {"ok": can_open, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(answer, indent=1))
    else:
        _print(findings)
        print(f"\nA pool can{'' if can_open else 'not'} be opened here.")
    return 0 if can_open else 1


def diagnose(spec: str | None = None) -> list[Finding]:
    """Check everything that a pool needs. Takes up to 20 s if nvidia-smi does not answer.

    Args:
        spec: The driver, as for `Pool(driver=...)`.
    """
    sections: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("environment", _environment),
        ("packages", _packages),
        ("driver", lambda: _driver(spec)),
    )
    findings: list[Finding] = []
    for section, check in sections:
        try:
            findings += check()
        except Exception as error:  # a broken package can raise anything
            findings.append(Finding(section, section, ERROR, _described(error)))
    return findings


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# -- the environment ----------------------------------------------------------------------------


def _environment() -> Iterator[Finding]:
    yield _greensched()
    version = platform.python_version()
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        text = f"{version}, free-threaded and without the GIL"
        yield Finding("environment", "python", WARNING, text, "greensched was not tested so")
    else:
        yield Finding("environment", "python", OK, version)
    system = sys.platform == "linux"
    remedy = "" if system else "a GPU needs Linux; simulated devices may work"
    yield Finding("environment", "system", OK if system else WARNING, platform.platform(), remedy)
    for name, meaning in VARIABLES.items():
        value = os.environ.get(name)
        if value is not None:
            yield _variable(name, value, meaning)


def _greensched() -> Finding:
    spec = find_spec("greensched.device.tickets")
    origin = spec.origin if spec is not None else None
    build = "compiled" if origin is not None and not origin.endswith(".py") else "plain Python"
    try:
        version = metadata.version("greensched")
    except metadata.PackageNotFoundError:
        text = f"runs from its sources, {build}"
        return Finding("environment", "greensched", NOTE, text, "to install it: pip install .")
    return Finding("environment", "greensched", OK, f"{version}, {build}")


def _variable(name: str, value: str, meaning: str) -> Finding:
    if name == "CUDA_VISIBLE_DEVICES" and value in ("", "-1"):
        return Finding("environment", name, WARNING, f"{value!r} hides every GPU", f"unset {name}")
    if name == "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" and value != "100":
        return Finding("environment", name, WARNING, f"{value}: {meaning}", f"unset {name}")
    return Finding("environment", name, NOTE, f"{value}: {meaning}")


def _packages() -> Iterator[Finding]:
    for module, requirement in PACKAGES.items():
        name = re.split("[<>=]", requirement)[0]
        try:
            importlib.import_module(module)
            version = metadata.version(name)
            if _meets(version, requirement):
                yield Finding("packages", name, OK, version)
            else:
                remedy = f"pip install '{requirement}'"
                yield Finding("packages", name, WARNING, f"{version} is not supported", remedy)
        except Exception as error:  # a broken package can raise anything
            # Simulated devices need no cuda-bindings, and programs no click. The driver's check
            # says whether a pool can be opened.
            status = ERROR if name in ("anyio", "numpy") else WARNING
            remedy = f"pip install '{requirement}'"
            yield Finding("packages", name, status, _described(error), remedy)
    names = []
    for name in LIBRARIES:
        try:
            names.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    yield Finding("packages", "libraries", NOTE, ", ".join(names) or "none that greensched knows")


def _meets(version: str, requirement: str) -> bool:
    """Say whether a version is within the bounds of a requirement."""
    found = _release(version)
    bounds = re.findall(r"(>=|<)([\d.]+)", requirement)
    return all((found >= _release(bound)) == (sign == ">=") for sign, bound in bounds)


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"^[\d.]+", version)[0].split(".") if part]


# -- the driver and its devices -----------------------------------------------------------------


def _driver(spec: str | None) -> Iterator[Finding]:
    from greensched import driver as drivers
    from greensched import errors
    from greensched.cli import facts

    try:
        driver = drivers.open(spec)
        driver.initialise()
    except errors.DriverUnavailable as error:
        remedy = "to run without a GPU: GREENSCHED_DRIVER=simulated:h200"
        yield Finding("driver", "driver", ERROR, error.problem, remedy)
        return
    except errors.InvalidRequest as error:
        yield Finding("driver", "driver", ERROR, str(error))
        return
    driver_facts = facts.of_driver(driver)
    yield Finding("driver", "driver", OK, f"{driver_facts['name']}, CUDA {driver_facts['cuda']}")
    yield from _features(driver_facts["features"])
    if driver.needs_binary:
        yield _compiler()
    devices = [facts.of_device(driver, ordinal) for ordinal in range(driver.device_count())]
    pools = _pools([device["uuid"] for device in devices]) if driver.needs_binary else {}
    for device in devices:
        yield from _device(device)
        if device["device"] in pools:
            yield pools[device["device"]]
    if driver.name == "cuda":
        yield from _gpus()
        yield from _processes()


def _features(supported: dict[str, bool]) -> Iterator[Finding]:
    from greensched.typing import Feature

    present = [feature.value for feature in Feature if supported[feature.name.lower()]]
    missing = [feature.value for feature in Feature if not supported[feature.name.lower()]]
    if present:
        yield Finding("driver", "supported", OK, ", ".join(present))
    if missing:
        remedy = "a newer driver and newer cuda-bindings have them; a pool does without"
        yield Finding("driver", "not supported", NOTE, ", ".join(missing), remedy)


def _compiler() -> Finding:
    from greensched.driver import nvrtc
    from greensched.errors import DriverUnavailable

    try:
        version = ".".join(map(str, nvrtc.version()))
    except DriverUnavailable as error:
        return Finding("driver", "compiler", WARNING, error.problem)
    return Finding("driver", "compiler", OK, f"NVRTC {version}")


def _device(device: dict[str, object]) -> Iterator[Finding]:
    section = f"device {device['device']}"
    gib = int(str(device["memory_bytes"])) / 2**30
    text = (
        f"{device['name']}, {device['sms']} SMs, {gib:.0f} GiB, {device['arch']}, {device['uuid']}"
    )
    yield Finding(section, "device", OK, text)
    for name in ("coscheduled", "fine"):
        cells = device[name]
        assert isinstance(cells, dict)
        text = f"{cells['cells']} cells of {cells['sms_each']} SMs, {cells['sms_over']} SMs over"
        yield Finding(section, name, OK, text)
    queues = device["workqueues"]
    if isinstance(queues, dict):
        text = f"{queues['scope']}, {queues['concurrency']} streams at once"
        yield Finding(section, "work queues", OK, text)
    else:
        text = "shared by all partitions: Pool(workqueues=...) needs CUDA 13.1"
        yield Finding(section, "work queues", NOTE, text)


def _pools(uuids: list[str]) -> dict[int, Finding]:
    """Name the process whose pool has a device, for each device that has one."""
    from greensched.leasing import process

    holders = {i: process.other_holder(uuid) for i, uuid in enumerate(uuids)}
    free = [i for i, holder in holders.items() if holder is None]
    remedy = f"Pool({free}) has the free ones" if free else "share that pool, or end the process"
    return {
        i: Finding(
            f"device {i}",
            "pool",
            WARNING if free else ERROR,
            f"process {holder or '(unknown)'} has a pool on this device",
            remedy,
        )
        for i, holder in holders.items()
        if holder is not None
    }


# -- what nvidia-smi says -----------------------------------------------------------------------


def query(what: str, fields: tuple[str, ...], *options: str) -> list[dict[str, str]]:
    """Run nvidia-smi; return the fields of each row. Blocks, for 10 s at most.

    Raises:
        OSError, subprocess.SubprocessError: It is not installed, or failed.
    """
    asked = f"--query-{what}={','.join(fields)}"
    command = ["nvidia-smi", asked, "--format=csv,noheader,nounits", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=False)) for row in rows if len(row) >= len(fields)]


def _gpus() -> Iterator[Finding]:
    try:
        gpus = query("gpu", GPU_FIELDS)
    except (OSError, subprocess.SubprocessError) as error:
        text = f"clocks, power and modes are unknown: {_described(error)}"
        yield Finding("gpu", "nvidia-smi", NOTE, text)
        return
    for gpu in gpus:
        section = f"gpu {gpu['index']}"
        active = gpu["clocks_event_reasons.active"]
        bits = int(active, 16) if active.startswith("0x") else 0
        slow = [name for bit, name in SLOWDOWNS.items() if bits & bit]
        text = f"{gpu['clocks.sm']} of {gpu['clocks.max.sm']} MHz"
        if slow:
            text += f", held back by: {', '.join(slow)}"
        yield Finding(section, "clocks", WARNING if slow else OK, text)
        yield Finding(section, "power", OK, f"{gpu['power.draw']} of {gpu['power.limit']} W")
        yield from _modes(section, gpu)


def _modes(section: str, gpu: dict[str, str]) -> Iterator[Finding]:
    mode = gpu["compute_mode"]
    if mode == "Prohibited":
        remedy = f"nvidia-smi -i {gpu['index']} -c DEFAULT"
        yield Finding(section, "compute mode", ERROR, mode, remedy)
    else:
        yield Finding(section, "compute mode", OK, mode)
    if gpu["mig.mode.current"] == "Enabled":
        text = "MIG is enabled: a pool splits one instance, not the whole GPU"
        yield Finding(section, "MIG", WARNING, text)


def _processes() -> Iterator[Finding]:
    """Name the other processes on the GPUs, which may have pools of their own."""
    try:
        processes = query("compute-apps", PROCESS_FIELDS)
    except (OSError, subprocess.SubprocessError):
        return  # `_gpus` reports it
    for process in processes:
        text = f"{process['process_name']}, {process['used_gpu_memory']} MiB"
        remedy = "partitions do not hold across processes: one pool per GPU"
        yield Finding("gpu", f"process {process['pid']}", WARNING, text, remedy)
    if not processes:
        yield Finding("gpu", "processes", OK, "no other process on the GPUs")


# -- painting -----------------------------------------------------------------------------------

_STYLES = {OK: "green", NOTE: "dim", WARNING: "yellow", ERROR: "bold red"}


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    paint = _painter()
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            paint(section, "", "")
        paint(
            f"  {finding.status:<7}  ",
            _STYLES[finding.status],
            f"{finding.name:<{width}}  {finding.text}",
        )
        if finding.remedy:
            paint(f"  {'':<7}  {'':<{width}}  ", "", f"-> {finding.remedy}")


def _painter() -> Callable[[str, str, str], None]:
    """Return a function that prints a line with a styled beginning; plain without rich."""

    def plain(begin: str, _style: str, rest: str) -> None:
        print(begin + rest)

    if not sys.stdout.isatty():
        return plain
    try:
        from rich.console import Console
        from rich.text import Text
    except Exception:  # a broken package can raise anything
        return plain
    console = Console()

    def painted(begin: str, style: str, rest: str) -> None:
        console.print(Text.assemble((begin, style), rest), soft_wrap=True)

    return painted
