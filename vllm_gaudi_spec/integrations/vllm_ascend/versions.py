"""Releases of vllm-ascend and vLLM that the integration supports and is tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

VLLM_ASCEND = "0.23.0.post1"
VLLM = "0.23.0"


def explain_unsupported() -> str | None:
    """Return the reason why the installed releases are not supported, or None if they are."""
    import vllm

    found = {"vllm-ascend": _vllm_ascend(), "vLLM": vllm.__version__}
    # The part after the plus sign identifies a build of a release, such as vLLM's builds for other platforms.
    if {name: text.split("+")[0] for name, text in found.items()} == {"vllm-ascend": VLLM_ASCEND, "vLLM": VLLM}:
        return None
    return (
        f"Method universal_draft works with vllm-ascend {VLLM_ASCEND} and vLLM {VLLM}; installed are "
        f"{' and '.join(f'{name} {text}' for name, text in found.items())}. Install that pair, or use another "
        f"method in --speculative-config."
    )


def _vllm_ascend() -> str:
    try:
        return version("vllm-ascend")
    except PackageNotFoundError:  # a source folder on the Python path that was not installed
        return "of an unknown version"
