"""What a self-test found."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from vllm_gaudi_spec.environment import SELF_TEST

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"

# What a check may be needed by, and what can be switched off.
ASYNC_SCHEDULING = "async scheduling"
SPECULATION = "speculation"
KV_IN_FP8 = "KV in FP8"
KV_FROM_FREE_MEMORY = "a KV cache of the memory that is free"


class SelfTestError(RuntimeError):
    """One line: each check that failed, what was measured, and what to switch off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    name: str
    status: str
    detail: str
    """What was measured, or why nothing was."""
    advice: str
    """Of a failed check, what to switch off; else empty."""
    needed_by: str
    """The feature that needs it; empty where nothing can be served without it."""
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}; {self.advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    device: str
    mode: str
    dtype: str
    checks: tuple[CheckResult, ...]

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return self._of(FAILED)

    @property
    def seconds(self) -> float:
        return sum(check.seconds for check in self.checks)

    def passed(self, name: str) -> bool:
        """Whether that check ran and found nothing wrong."""
        return next(check for check in self.checks if check.name == name).status == PASSED

    def fatal(self, features: Collection[str]) -> tuple[CheckResult, ...]:
        """Failed checks that an engine with these features needs."""
        return tuple(check for check in self.failed if not check.needed_by or check.needed_by in features)

    def refuse(self, features: Collection[str]) -> None:
        """Raise where an engine with these features would not be right."""
        if fatal := self.fatal(features):
            raise SelfTestError(
                f"The self-test of {self.device} failed. {' '.join(f'{check}.' for check in fatal)} "
                f"{SELF_TEST.name}=0 skips the self-test."
            )

    def summary(self) -> str:
        passed = f"{len(self._of(PASSED))} checks passed in {self.seconds:.1f} s"
        return "; ".join([passed, *(f"{check.name} not checked: {check.detail}" for check in self._of(NOT_CHECKED))])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": not self.failed, "seconds": self.seconds}

    def _of(self, status: str) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.status == status)
