"""Parameters on the card.

`Module.to` and `param.data = ...` modify the existing parameter object, so that it keeps its class and attributes, and
tied weights stay tied. Torch does the same for devices with native tensors (`_has_compatible_shallow_copy_type`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from card_emulator.tensor import OWN_STATE, DeviceTensor


def _patched_new(original: Any) -> Any:
    """Create a parameter of the requested class. For a subclass of Parameter, torch would return a plain DeviceTensor,
    which lacks the subclass's __init__."""

    def __new__(cls: Any, data: Any = None, requires_grad: bool = True, **kwargs: Any) -> Any:
        if not isinstance(data, DeviceTensor) or cls is torch.nn.Parameter or kwargs:
            return original(cls, data, requires_grad, **kwargs)
        # Do not call __init__ here, because Python calls it next with the subclass's own arguments.
        return _on_the_card(cls, data, requires_grad)

    return staticmethod(__new__)


def _on_the_card(cls: type, data: DeviceTensor, requires_grad: bool) -> Any:
    kind: Any = DeviceTensor if cls is torch.nn.Parameter else _parameter_class(cls)
    parameter = DeviceTensor.__new__(kind, data.inner, data.memory, data.part)
    parameter._is_param = True
    return parameter.requires_grad_(requires_grad)


@functools.cache
def _parameter_class(cls: type) -> Any:
    body = {
        "__new__": DeviceTensor.__new__,
        "__torch_function__": torch._C._disabled_torch_function_impl,
        "_on_the_host": cls,
        **{name: DeviceTensor.__dict__[name] for name in ("__deepcopy__", "__repr__", "__reduce_ex__", "data")},
    }
    return type(cls)(cls.__name__, (cls, DeviceTensor), body)


def _become(parameter: Any, value: torch.Tensor) -> None:
    """Replace the contents of `parameter` with `value`, which may be on a different device and therefore be a different
    type of tensor."""
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        if isinstance(value, DeviceTensor):
            other = _on_the_card(type(parameter), value, parameter.requires_grad)
        else:
            cls = getattr(type(parameter), "_on_the_host", torch.nn.Parameter)
            other = torch.Tensor._make_subclass(cls, value, parameter.requires_grad)
    for name, attribute in vars(parameter).items():
        if name not in OWN_STATE:
            setattr(other, name, attribute)
    torch._C._swap_tensor_impl(parameter, other)
    for name in ("__class__", "__dict__"):
        mine, theirs = getattr(parameter, name), getattr(other, name)
        setattr(parameter, name, theirs)
        setattr(other, name, mine)


_data: Any = torch.Tensor.data


def _get_data(parameter: torch.Tensor) -> torch.Tensor:
    values: torch.Tensor = _data.__get__(parameter)
    return values


def _set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(value, DeviceTensor):
        _become(parameter, value)
    else:
        _data.__set__(parameter, value)


def install() -> None:
    setattr(torch.nn.Parameter, "__new__", _patched_new(torch.nn.Parameter.__new__))  # noqa: B010
    setattr(torch.nn.Parameter, "data", property(_get_data, _set_data))  # noqa: B010
    setattr(DeviceTensor, "leave", _become)  # noqa: B010
