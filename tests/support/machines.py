"""Machines on one machine: namespaces of Linux, joined by a switch from which a test can unplug them."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence

import psutil

NETWORK = "10.231.87"
_SWITCH = "vgs-switch"
_INIT = """
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs tmpfs /dev/shm
hostname {}
echo up
exec sleep infinity
"""


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        # Leftovers of an earlier run are a failure, not a lack of permission.
        error = RuntimeError if "File exists" in done.stderr else OSError
        raise error(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Machine:
    """A network, processes, a host name, shared memory, and files of Ray that no other machine sees.

    The checkout, the environment and models are files that all machines have.
    """

    def __init__(self, number: int, stack: contextlib.ExitStack) -> None:
        """
        Args:
            stack: Gets a callback for each part of the machine that must be removed.
        """
        self.name, self.address, self._port = f"vgs-{number}", f"{NETWORK}.{number}", f"vgs-port-{number}"
        _ip("netns", "add", self.name)
        stack.callback(_ip, "netns", "delete", self.name)
        _ip("link", "add", self._port, "master", _SWITCH, "type", "veth", "peer", "name", "lan0", "netns", self.name)
        stack.callback(_ip, "link", "delete", self._port)
        _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "lan0")
        for interface in ("lo", "lan0"):
            _ip("-n", self.name, "link", "set", interface, "up")
        self.plug(True)
        self.boot()
        stack.callback(self.die)

    def boot(self) -> None:
        new = ["--mount", "--mount-proc", "--ipc", "--uts", "--pid", "--fork", "--kill-child"]
        command = ["ip", "netns", "exec", self.name, "unshare", *new, "sh", "-ec", _INIT.format(self.name)]
        self._power = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._power.stdout is not None
        if self._power.stdout.readline() != "up\n":
            raise OSError(f"{' '.join(command)}: exit code {self._power.wait()}")
        [self._init] = psutil.Process(self._power.pid).children()

    def command(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this machine, in the same folder."""
        inside = ["--net", "--mount", "--ipc", "--uts", "--pid", f"--wd={os.getcwd()}"]
        return ["nsenter", f"--target={self._init.pid}", *inside, *command]

    def processes(self) -> list[psutil.Process]:
        space = os.readlink(f"/proc/{self._init.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    found.append(process)
        return found

    def send(self, what: signal.Signals) -> None:
        """Send a signal to all processes but the first."""
        for process in self.processes():
            if process != self._init:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(what)

    def die(self) -> None:
        """Kill all processes at once. The network stays, and its peers are told that connections are closed."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._init.kill()
        self._power.wait()

    def plug(self, plugged: bool) -> None:
        """Plug the cable into the switch, or pull it out. Packets are then lost, and nobody is told."""
        _ip("link", "set", self._port, "up" if plugged else "down")


@contextlib.contextmanager
def machines(count: int) -> Iterator[Sequence[Machine]]:
    """Machines that reach each other and this one, and nothing else. Raises `OSError` where they are not permitted."""
    _ip("link", "add", _SWITCH, "type", "bridge")
    with contextlib.ExitStack() as stack:
        stack.callback(_ip, "link", "delete", _SWITCH)
        _ip("address", "add", f"{NETWORK}.254/24", "dev", _SWITCH)
        _ip("link", "set", _SWITCH, "up")
        yield [Machine(number, stack) for number in range(1, count + 1)]
