"""Build a target of the Dockerfile without a docker daemon or a registry, and use it (docs/how_to/containers.md).

python docker/replay.py cpu      build, run the demo's script, start the server, ask /health and /v1/completions
python docker/replay.py gaudi    build only: the same lines, on Debian with a CPU build of torch; not a Gaudi image
python docker/replay.py ascend   build only, on Debian without CANN; not an image for an NPU

buildah executes the Dockerfile as it stands (chroot isolation). Only the base image is another: debootstrap makes a
bare Debian 12 with its Python 3.11. Needs Debian or Ubuntu, root, buildah, debootstrap, curl and some 12 GB of disk.
pip is configured as it is here (`pip config list`): its file, and the folders it names, are mounted while commands
run and are not part of the image, which is checked at the end.
"""

import argparse
import configparser
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

REPOSITORY = Path(__file__).resolve().parents[1]
BASE_ARGUMENT = {"cpu": "CPU_IMAGE", "gaudi": "GAUDI_IMAGE", "ascend": "ASCEND_IMAGE"}
STAND_IN_TORCH = "2.13.0+cpu"
BUILD_SECONDS = 1800
READY_SECONDS = 300


def say(text: str) -> None:
    print(f"replay: {text}", flush=True)


class Replay:
    def __init__(self, target: str, work: Path) -> None:
        self.target, self.work = target, work
        self.image = f"localhost/vllm-gaudi-spec:{target}"
        self.storage = ["buildah", "--root", str(work / "store"), "--runroot", str(work / "run")]
        self.mounts = pip_mounts(work)

    def buildah(self, *arguments: str, seconds: float = 600) -> None:
        subprocess.run([*self.storage, *arguments], check=True, timeout=seconds)

    def read(self, *arguments: str) -> str:
        """What buildah, or the command that it runs, answers."""
        command = [*self.storage, *arguments]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=BUILD_SECONDS)
        return done.stdout.strip()

    # ---- the stand-in for the base image -------------------------------------------------------

    def base(self) -> str:
        """The image in the base image's place, made on first use."""
        debian, name = "localhost/stand-in:debian", f"localhost/stand-in:{self.target}"
        if not self.exists(debian):
            say("bare Debian with debootstrap")
            self.commit_debian(debian)
        if not self.exists(name):
            container = self.read("from", "--pull-never", debian)
            if self.target == "cpu":  # where the image of Docker's library has its interpreter
                self.buildah("run", "--isolation", "chroot", container, "--", "ln", "-s", "python3", "/usr/bin/python")
            elif self.target == "gaudi":
                say(f"torch {STAND_IN_TORCH} for that Debian")
                command = ["pip", "install", "--no-deps", "--break-system-packages", f"torch=={STAND_IN_TORCH}"]
                self.in_container(container, *command)
            self.read("commit", "--rm", container, name)
        return name

    def exists(self, image: str) -> bool:
        command = [*self.storage, "images", "--quiet", image]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    def commit_debian(self, name: str) -> None:
        root = self.work / "debian"
        shutil.rmtree(root, ignore_errors=True)
        wanted = "ca-certificates,python3,python3-venv,python3-pip"
        command = ["debootstrap", "--variant=minbase", f"--include={wanted}", "bookworm", str(root)]
        subprocess.run(command, check=True, timeout=BUILD_SECONDS, stdout=subprocess.DEVNULL)
        container = self.read("from", "scratch")
        self.buildah("add", "--quiet", container, str(root), "/")
        self.read("commit", "--rm", container, name)
        shutil.rmtree(root)

    # ---- build and run -------------------------------------------------------------------------

    def build(self) -> None:
        arguments = [f"{BASE_ARGUMENT[self.target]}={self.base()}"]
        if self.target == "gaudi":
            arguments.append(f"PT_VERSION={STAND_IN_TORCH.partition('+')[0]}")
        say(f"docker build --target {self.target} .")
        self.buildah(
            *("bud", "--isolation", "chroot", "--format", "docker", "--pull-never", "--target", self.target),
            *(f"--build-arg={argument}" for argument in arguments),
            *(f"--volume={mount}" for mount in self.mounts),
            *("--tag", self.image, str(REPOSITORY)),
            seconds=BUILD_SECONDS,
        )

    def run_arguments(self, container: str, *command: str, environment: dict[str, str] | None = None) -> list[str]:
        """`docker run` of this image, but for the entry point, which the caller puts in front."""
        variables = [f"--env={name}={value}" for name, value in (environment or {}).items()]
        mounts = [f"--volume={mount}" for mount in self.mounts]
        return ["run", "--isolation", "chroot", *variables, *mounts, container, "--", *command]

    def in_container(self, container: str, *command: str, **environment: str) -> None:
        self.buildah(*self.run_arguments(container, *command, environment=environment), seconds=BUILD_SECONDS)

    def configuration(self) -> dict:
        """What the image says about user, entry point and health check."""
        return json.loads(self.read("inspect", "--type", "image", self.image))["Docker"]["config"]

    def demo(self, container: str) -> None:
        say("the demo's script")
        script = ["python", "tests/full_tests/spec_decode.py", "--task", "ngram", "--output-len", "16"]
        script += ["--batch-size", "1", "--num-prompts", "4", "--num-speculative-tokens", "3"]
        self.in_container(container, *script, VLLM_LOGGING_LEVEL="WARNING")

    def serve(self, container: str) -> None:
        configuration, port = self.configuration(), free_port()
        model = self.read(
            *self.run_arguments(container, "python", "-m", "vllm_gaudi_spec.tools.demo_model")
        ).splitlines()[-1]
        entry = [*configuration["Entrypoint"], model, "--port", str(port), "--served-model-name", "demo"]
        say(f"the entry point: {' '.join(entry)}")
        where = {"HEALTH_URL": f"http://127.0.0.1:{port}/health"}
        check = configuration["Healthcheck"]["Test"]
        assert check[0] == "CMD", check
        check_health = [*self.storage, *self.run_arguments(container, *check[1:], environment=where)]
        with (self.work / "serve.log").open("w") as log:
            command = [*self.storage, *self.run_arguments(container, *entry)]
            server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while subprocess.run(check_health, capture_output=True, timeout=60).returncode != 0:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"replay: the server did not become healthy, see {self.work / 'serve.log'}")
                time.sleep(2)
            say("HEALTHCHECK passes")
            curl(f"http://127.0.0.1:{port}/health")
            request = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            curl(f"http://127.0.0.1:{port}/v1/completions", request)
            request |= {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1, "logprobs": 1}
            curl(f"http://127.0.0.1:{port}/v1/completions", request)
        finally:
            stop(server)

    def check_vllm(self, container: str) -> None:
        """What can be said of a card's image without the card: its torch, and on a Gaudi's that the command starts."""
        show = "import torch, vllm; print('torch', torch.__version__, torch.__file__, 'vllm', vllm.__version__)"
        # torch would load torch_npu, which needs CANN.
        self.in_container(container, "python", "-c", show, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        if self.target == "gaudi":  # transformers, which the command imports, loads torch_npu where it is installed
            self.in_container(container, *self.configuration()["Entrypoint"], "--help", VGS_DEVICE="cpu")

    def check_clean(self, container: str) -> None:
        """Nothing of this machine's pip configuration may have stayed in the image."""
        root = Path(self.read("mount", container))
        left = [mount.split(":")[1] for mount in self.mounts]
        left = [path for path in left if "ssl" not in path and holds_data(root / path.lstrip("/"))]
        self.read("unmount", container)
        if left:
            raise SystemExit(f"replay: these files of the host are in the image: {left}")
        say("no file of the host is in the image")

    def all(self) -> None:
        started = time.monotonic()
        self.build()
        say(f"built after {time.monotonic() - started:.0f} s")
        container = self.read("from", "--pull-never", self.image)
        try:
            self.check_clean(container)
            self.in_container(container, "id")
            if self.target == "cpu":
                self.demo(container)
                self.serve(container)
            else:
                self.check_vllm(container)
        finally:
            self.read("rm", container)
        say(f"{self.target} passed after {time.monotonic() - started:.0f} s")


# ---- pip as it is configured here -------------------------------------------------------------------


def pip_mounts(work: Path) -> list[str]:
    """Mounts that give pip in the container the configuration it has here."""
    settings, paths = {}, set()
    lines = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    for line in lines.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section == "global" or (section == ":env:" and option not in ("config-file", "cache-dir")):
            settings[option] = value.strip("'\"").replace("\\n", " ")
    for option, value in settings.items():
        for word in value.split():
            path = urlsplit(word).path if word.startswith("file://") else word
            if path.startswith("/"):
                # The pages of an index point to files beside it.
                paths.add(str(Path(path).parent) if option.endswith("index-url") else path)
    config = configparser.RawConfigParser()
    config["global"] = settings
    with (work / "pip.conf").open("w") as file:
        config.write(file)
    return [f"{work / 'pip.conf'}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(paths))]


def holds_data(path: Path) -> bool:
    """Mount points may stay, as empty files and folders."""
    if path.is_dir():
        return any(path.iterdir())
    return path.is_file() and path.stat().st_size > 0


# ---- the server ---------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def curl(url: str, request: dict | None = None) -> None:
    data = ["--header", "Content-Type: application/json", "--data", json.dumps(request)] if request else []
    command = ["curl", "--silent", "--show-error", "--fail", "--noproxy", "*", "--write-out", "%{http_code}"]
    done = subprocess.run([*command, *data, url], check=True, capture_output=True, text=True, timeout=120)
    say(f"{urlsplit(url).path}: {done.stdout}")


def stop(server: subprocess.Popen) -> None:
    """Ask the server to end, as `docker stop` does, and all that was started with it."""
    for number, seconds in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
        try:
            os.killpg(server.pid, number)
            server.wait(seconds)
            break
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", choices=sorted(BASE_ARGUMENT))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "vllm-gaudi-spec-replay")
    options = parser.parse_args()
    missing = [name for name in ("buildah", "debootstrap", "curl") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        say(f"this needs root{''.join(f', {name}' for name in missing)}")
        return 2
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        Replay(options.target, work).all()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        say(f"failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
