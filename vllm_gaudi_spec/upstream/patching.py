"""Functions for patching third-party code, used by upstream/ and integrations/."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal, get_args

_OURS = "_wrapped_by_gaudi_spec"


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` with a function that calls `wrapper(original, ...)`. Repeated calls have no effect."""
    original = getattr(owner, name)
    if hasattr(original, _OURS):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _OURS, True)
    setattr(owner, name, wrapped)


def patches(*targets: str) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """Return a decorator that turns a wrapper into a patch: a function without arguments that wraps each target.

    Args:
        targets: Functions or methods, as `module:function` or `module:Class.method`. Their modules are imported when
        the
            patch is applied.
    """

    def make_patch(wrapper: Callable[..., Any]) -> Callable[[], None]:
        @functools.wraps(wrapper)
        def patch() -> None:
            for target in targets:
                module, _, path = target.partition(":")
                owner, _, name = path.rpartition(".")
                found = import_module(module)
                wrap(getattr(found, owner) if owner else found, name, wrapper)

        return patch

    return make_patch


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def do_nothing(*args: object, **kwargs: object) -> None:
    """Do nothing. Patches replace other functions with this one."""


def raise_unchanged(kind: type[ValueError], config_class: Any) -> None:
    """Make the constructor of a pydantic dataclass raise errors of type `kind` unchanged.

    pydantic catches every ValueError raised in a `__post_init__` and raises a multi-line error instead. Call this
    function after `widen`, which replaces the constructor.
    """
    from pydantic import ValidationError

    def construct(original: Callable[..., None], config: Any, *args: Any, **named: Any) -> None:
        try:
            original(config, *args, **named)
        except ValidationError as report:
            causes = (details.get("ctx", {}).get("error") for details in report.errors())
            cause = next((cause for cause in causes if isinstance(cause, kind)), None)
            if cause is None:
                raise
            raise cause from None

    wrap(config_class, "__init__", construct)


def widen(config_class: Any, more_values: Mapping[str, tuple[str, ...]]) -> None:
    """Add values to fields of a pydantic dataclass that accept only fixed lists of values."""
    from pydantic.dataclasses import rebuild_dataclass

    fields, changed = config_class.__dataclass_fields__, False
    for name, more in more_values.items():
        values = get_args(fields[name].type)
        accepted = get_args(values[0]) or values  # the type of an optional field is the union of its values and None
        if not set(more) <= set(accepted):
            wider: Any = Literal[(*accepted, *more)]
            fields[name].type = wider if accepted is values else wider | None
            changed = True
    if changed:
        rebuild_dataclass(config_class, force=True)
