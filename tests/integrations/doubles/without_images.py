"""In the place of torchvision, which image processors take for granted: its builds do not go with torch's for a CPU.
No image comes here."""

import sys
import types


def replace_torchvision() -> None:
    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        parent, _, last = f"torchvision{name}".rpartition(".")
        module = sys.modules[f"torchvision{name}"] = types.ModuleType(f"torchvision{name}")
        module.__path__ = []
        if parent:
            setattr(sys.modules[parent], last, module)
