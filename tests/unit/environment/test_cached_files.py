"""Nobody else says where our files lie or what is read: links, pipes and folders that everybody may write to."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8_calibration.writing import write_files
from vllm_gaudi_spec.environment import cached_files
from vllm_gaudi_spec.environment.cached_files import UntrustedCacheError
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.tools import demo_model


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return cached_files.make_folder(tmp_path / "cache")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """What a link points to: content that must be neither read nor changed."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "file").write_bytes(b"theirs")
    return folder


@pytest.mark.parametrize("target", ["file", "missing"])
def test_link_instead_of_file_is_refused(target: str, cache: Path, elsewhere: Path) -> None:
    """Not read; a write takes its place and leaves alone what it points to."""
    (cache / "file").symlink_to(elsewhere / target)
    with pytest.raises(UntrustedCacheError, match="symbolic link"):
        cached_files.read(cache / "file", 100)
    cached_files.write(cache / "file", b"ours")
    assert not (cache / "file").is_symlink()
    assert cached_files.read(cache / "file", 100) == b"ours"
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == {"file": b"theirs"}


@pytest.mark.parametrize("target", ["elsewhere", "missing"])
def test_link_instead_of_folder_is_refused(target: str, tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / target)
    with pytest.raises(OSError):
        cached_files.write(tmp_path / "cache" / "file", b"ours")
    with pytest.raises(OSError):
        cached_files.read(tmp_path / "cache" / "file", 100)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == {"file": b"theirs"}
    assert not (tmp_path / "missing").exists()


def test_world_writable_folder_is_refused(cache: Path) -> None:
    cached_files.write(cache / "file", b"ours")
    cache.chmod(0o777)
    for attempt in (lambda: cached_files.read(cache / "file", 100), lambda: cached_files.write(cache / "file", b"")):
        with pytest.raises(UntrustedCacheError, match="chmod o-w"):
            attempt()
    assert (cache / "file").read_bytes() == b"ours"


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /tmp is: what lies there is ours only if we made it."""
    tmp_path.chmod(0o1777)
    made = cached_files.make_folder(tmp_path / "cache")
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(cached_files.os, "geteuid", lambda: somebody_else)
    if os.getuid() == 0:
        cached_files.make_folder(made)  # what root made is trusted by everybody, as in an image
        os.chown(made, somebody_else + 1, -1)
    with pytest.raises(UntrustedCacheError, match="another user"):
        cached_files.make_folder(tmp_path / "cache")


def test_folder_is_not_world_writable_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = cached_files.make_folder(tmp_path / "cache")
    finally:
        os.umask(before)
    assert not made.stat().st_mode & stat.S_IWOTH


def make_open_file(path: Path) -> None:
    path.write_bytes(b"theirs")
    path.chmod(0o666)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, make_open_file])
def test_special_files_are_refused(make: Callable[[Path], None], cache: Path) -> None:
    """A pipe would be waited for."""
    make(cache / "file")
    with pytest.raises(OSError):
        cached_files.read(cache / "file", 100)


def plant_link(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "config.json")
    (folder / "config.json").symlink_to(folder.parent / "config.json")


def move_away(folder: Path) -> None:
    folder.rename(folder.parent / "moved")
    folder.symlink_to(folder.parent / "moved")


def plant_manifest(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / demo_model.MANIFEST).write_text(content)


SOUND = {"format": demo_model.FORMAT, "gguf_sha256": demo_model.GGUF_SHA256}


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "pytorch_model.bin").write_text("a pickle"),
        plant_link,
        move_away,
        plant_manifest("[" * 10_000),
        plant_manifest(json.dumps(SOUND | {"files": {"config.json": 3, "model.safetensors": None}})),
        plant_manifest(json.dumps(SOUND | {"files": {"../../etc/passwd": {"size": 1}}})),
        plant_manifest(" " * 100_000),
    ],
)
def test_modified_demo_model_is_rebuilt(change: Callable[[Path], object], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    demo_model.write_manifest(folder)
    assert demo_model.damaged_files(folder) == []
    change(folder)
    assert demo_model.damaged_files(folder)


def measured(largest: float) -> files.Record:
    node = files.Node([np.full((1, 1), largest, np.float32)])
    return files.Record(0, 1, files.MEASURED, {"linear": node}, ["linear"])


@pytest.mark.parametrize("ending", [".json", ".npz", "_mod_list.json"])
def test_measurements_are_not_read_through_a_link_out_of_their_folder(
    ending: str, tmp_path: Path, elsewhere: Path
) -> None:
    stem = write_files(tmp_path / "measured" / "inc", measured(1.0))
    assert files.read(stem).looked_at == ["linear"]
    place = Path(f"{stem}{ending}")
    inside = place.rename(place.parent / "other name")
    place.symlink_to(inside)
    assert files.read(stem).looked_at == ["linear"]
    place.unlink()
    place.symlink_to(inside.rename(elsewhere / "measured"))
    with pytest.raises(files.QuantFilesError, match="link that points out of its folder"):
        files.read(stem)


def test_full_disk_leaves_older_measurements_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file can be made on a full disk, and nothing can be written to it: the kernel itself says so."""
    stem = write_files(tmp_path / "measured" / "inc", measured(1.0))
    before = {file.name: file.read_bytes() for file in stem.parent.iterdir()}
    open_file = os.open

    def open_on_full_disk(path: Any, flags: int, *mode: int, **named: Any) -> int:
        descriptor = open_file(path, flags, *mode, **named)
        if not flags & os.O_EXCL:
            return descriptor
        os.close(descriptor)
        return open_file("/dev/full", os.O_WRONLY)

    monkeypatch.setattr(os, "open", open_on_full_disk)
    with pytest.raises(files.QuantFilesError, match=r"cannot be written: No space left on device"):
        write_files(tmp_path / "measured" / "inc", measured(2.0))
    assert {file.name: file.read_bytes() for file in stem.parent.iterdir()} == before
