"""Operations that torch dispatches."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    """Records them within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    @property
    def names(self) -> list[str]:
        return [operation.overloadpacket.__name__ for operation in self.operations]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(operation)
        return operation(*args, **(kwargs or {}))
