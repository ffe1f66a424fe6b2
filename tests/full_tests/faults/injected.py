"""Faults that are put into a server's own processes: code that vLLM loads as a plugin, armed by a file."""

from pathlib import Path

_BEFORE_EVERY_CALL = """
import functools, pathlib

def register():
    from {module} import {owner}
    original = {owner}.{method}
    if hasattr(original, "injected"):
        return

    @functools.wraps(original)
    def injected(self, *args, **named):
        if pathlib.Path({armed!r}).exists():
            {statement}
        return original(self, *args, **named)

    injected.injected = True
    {owner}.{method} = injected
"""


class Injected:
    """`statement` runs before each call of `module`'s `owner.method` in every process of a server, once armed."""

    def __init__(self, folder: Path, target: str, statement: str) -> None:
        module, owner, method = target.rsplit(".", 2)
        self._armed = folder / "armed"
        package = folder / "injected_fault-1.0.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: injected-fault\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text("[vllm.general_plugins]\ninjected_fault = injected_fault:register\n")
        names = dict(module=module, owner=owner, method=method, armed=str(self._armed), statement=statement)
        (folder / "injected_fault.py").write_text(_BEFORE_EVERY_CALL.format(**names))
        self._folder = folder

    def environment(self, inherited: str | None) -> dict[str, str]:
        """`inherited`: PYTHONPATH as it is."""
        return {"PYTHONPATH": ":".join(filter(None, [str(self._folder), inherited]))}

    def arm(self) -> None:
        self._armed.touch()
