"""The results of the self-test."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from vllm_gaudi_spec.environment import SELF_TEST

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"

# Features that rely on some of the checks and that users can disable.
ASYNC_SCHEDULING = "async scheduling"
SPECULATION = "speculation"
KV_IN_FP8 = "KV in FP8"
KV_FROM_FREE_MEMORY = "a KV cache sized by free memory"


class SelfTestError(RuntimeError):
    """Raised if checks have failed. The message states in one line what was measured and which features to disable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    name: str
    status: str
    detail: str
    """The measured values, or the reason why nothing was measured."""
    advice: str
    """The features to disable if the check failed, or empty if it did not fail."""
    needed_by: str
    """The feature that requires the check, or empty if nothing can be served without it."""
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
        return self._with_status(FAILED)

    @property
    def seconds(self) -> float:
        return sum(check.seconds for check in self.checks)

    def passed(self, name: str) -> bool:
        return next(check for check in self.checks if check.name == name).status == PASSED

    def list_fatal(self, features: Collection[str]) -> tuple[CheckResult, ...]:
        """Return the failed checks that an engine with these features requires."""
        return tuple(check for check in self.failed if not check.needed_by or check.needed_by in features)

    def refuse(self, features: Collection[str]) -> None:
        """Raise SelfTestError if an engine with these features would produce wrong results."""
        if fatal := self.list_fatal(features):
            raise SelfTestError(
                f"The self-test of {self.device} failed. {' '.join(f'{check}.' for check in fatal)} "
                f"Set {SELF_TEST.name}=0 to skip the self-test."
            )

    def summarize(self) -> str:
        """Return a summary for the log, in one line."""
        passed = f"{len(self._with_status(PASSED))} checks passed in {self.seconds:.1f} s"
        return "; ".join(
            [passed, *(f"{check.name} not checked: {check.detail}" for check in self._with_status(NOT_CHECKED))]
        )

    def as_json(self) -> dict[str, Any]:
        """Return the results for `gaudi-spec selftest --json`."""
        return {**asdict(self), "passed": not self.failed, "seconds": self.seconds}

    def _with_status(self, status: str) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.status == status)
