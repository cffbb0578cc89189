"""All benchmarks, one after the other, each in a process of its own: a table, JSON, and the tables in README.md.

    python benchmarks/run.py [name ...]

Says plainly what misses its target; the exit status is 1 then. Without names all are run, and README.md is written.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
from common import RESULTS, Row, quiet, show

BENCHMARKS = {
    "scheduling": "How busy devices are",
    "overhead": "Overhead on one virtual device",
    "two_devices": "Two devices on two cores, against other ways to use them",
    "optimizer": "The optimizer step",
    "memory": "Host memory",
    "device_memory": "Memory of devices, counted",
    "growth": "What grows with the model",
    "steady": "A late step by an early one, a slow step beside the computation",
    "schedules": "Every schedule by its simulation",
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000"}
"""One thread for each device, and none that spins while a neighbour needs the core."""
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- tables: written by run.py -->", "<!-- end of tables -->"


def machine() -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB of memory, no GPU; Python {platform.python_version()},"
        f" torch {torch.__version__}"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def run(name: str) -> list[Row] | None:
    """Runs one in a process of its own. None if it failed."""
    command = [sys.executable, __file__, "--alone", name]
    if subprocess.run(command, env=os.environ | ENVIRONMENT).returncode:
        return None
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())
    return [Row(**{key: value for key, value in row.items() if key != "holds"}) for row in rows]


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| what | target | measured | compared with | |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row.what} | {row.bar} | {row.shown} | {row.peer} | {row.verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="which; by default all")
    parser.add_argument("--alone", choices=BENCHMARKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        quiet()
        show(BENCHMARKS[options.alone], import_module(options.alone).measure(), f"{options.alone}.json")
        return
    names = options.names or list(BENCHMARKS)
    found = {name: run(name) for name in names}
    missed = [f"{name}: {row.what}" for name, rows in found.items() for row in rows or () if not row.holds]
    failed = [name for name, rows in found.items() if rows is None]
    print(f"\n{machine()}\n")
    print("\n".join(f"MISSED  {each}" for each in missed) if missed else "Nothing misses its target.")
    if failed:
        print(f"FAILED  {', '.join(failed)}")
    elif not options.names:
        tables = "\n\n".join(f"### {BENCHMARKS[name]}\n\n{markdown(rows or [])}" for name, rows in found.items())
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n\n{machine()}.\n\n{tables}\n\n{END}{rest.partition(END)[2]}")
    sys.exit(bool(missed or failed))


if __name__ == "__main__":
    main()
