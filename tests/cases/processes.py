"""Several Python processes that train together, as torchrun or a job scheduler would start them.

They stay, so that one start serves many tests: each waits for the next program, a function of the tests' module that
is called with the process's rank.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Together:
    """Processes that meet at a port of this machine.

    Args:
        elastic: Whether they look as if torchrun had started them; else only the variables that PyTorch needs are set.
    """

    def __init__(self, number: int, elastic: bool) -> None:
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(number)}
        if elastic:
            meet["TORCHELASTIC_RUN_ID"] = "test"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.outputs = [tempfile.TemporaryFile() for _ in range(number)]  # noqa: SIM115  # closed by `end`
        for rank, output in enumerate(self.outputs):
            here, there = Pipe()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "cases.processes", str(there.fileno())]
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=TESTS,
                    env=os.environ | meet | own,
                    pass_fds=[there.fileno()],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
            there.close()
            self.connections.append(here)

    def start(self, program: Callable[..., Any], *args: Any) -> None:
        for connection in self.connections:
            connection.send((program.__module__, program.__name__, args))

    def run(self, program: Callable[..., Any], *args: Any, seconds: float = 120) -> list[Any]:
        """What the program returns in each process."""
        self.start(program, *args)
        end = time.monotonic() + seconds
        results = []
        for rank, connection in enumerate(self.connections):
            try:
                assert connection.poll(max(0, end - time.monotonic())), f"process {rank} is late"
                results.append(torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False))
            except (AssertionError, EOFError, ConnectionError):
                self.end()
                raise AssertionError("\n".join(self.texts)) from None
        return results

    def wait(self, seconds: float) -> tuple[list[int], list[str]]:
        """Exit codes and outputs of processes that come to their end by themselves.

        Raises:
            TimeoutExpired: When one does not.
        """
        end = time.monotonic() + seconds
        try:
            codes = [process.wait(max(0, end - time.monotonic())) for process in self.processes]
        finally:
            self.end()
        return codes, self.texts

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        if not self.outputs[0].closed:
            self.texts = []
            for output in self.outputs:
                output.seek(0)
                self.texts.append(output.read().decode(errors="replace"))
                output.close()
        for connection in self.connections:
            connection.close()

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)


@contextmanager
def together(number: int = 2, *, elastic: bool = True) -> Iterator[Together]:
    processes = Together(number, elastic)
    try:
        yield processes
    finally:
        processes.end()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            module, name, args = connection.recv()
        except EOFError:
            return
        result = io.BytesIO()
        torch.save(getattr(import_module(module), name)(int(os.environ["RANK"]), *args), result)
        connection.send_bytes(result.getvalue())


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
