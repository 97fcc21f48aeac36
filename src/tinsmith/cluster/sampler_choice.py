"""What samples from a base model where the settings leave it open: the engine itself, or vLLM in turns with training.

An engine that is alone on one GPU uses vLLM if it is installed and supports the model. `tinsmith doctor` prints the
choice with its reason, and the engine logs both.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

from tinsmith.settings import Settings
from tinsmith.settings.environment import engine_environment

ASK_VLLM_S = 120.0
"""How long an import of vLLM may take."""

UNKNOWN_ARCH = "unknown"
ASK_VLLM = f"""
import importlib.util, sys
if importlib.util.find_spec("vllm"):
    from vllm import ModelRegistry, __version__
    print(__version__ if sys.argv[1] in ModelRegistry.get_supported_archs() else {UNKNOWN_ARCH!r})
"""


def choose_sampler(settings: Settings, arch: str, *, images: bool) -> tuple[str, str]:
    """What samples from a base model, and why. Imports torch if the number of GPUs decides."""
    if settings.sampler != "auto":
        return settings.sampler, "the settings say so"
    local_settings = [name for name in ("memory_budget", "kv_cache_bytes", "sampler_sequences", "sampler_step_tokens")
            if getattr(settings, name)]  # fmt: skip
    reasons = {
        "the engine is not one that trains adapters on one device": settings.resolved_backend != "torch",
        "device is 'cpu'": settings.device == "cpu",
        f"{settings.num_engines} engines for {len(settings.models)} models share this machine": (
            settings.num_engines * max(1, len(settings.models)) != 1
        ),
        "dedicated samplers do": settings.num_samplers > 0,
        "deterministic is for the engine's own": settings.deterministic,
        f"quantize is {settings.quantize!r}": settings.quantize != "off",
        f"{', '.join(local_settings)} is for the engine's own": bool(local_settings),
        "images need the engine's own": images,
    }
    if obstacle := next((reason for reason, holds in reasons.items() if holds), ""):
        return "local", obstacle
    import torch

    count = torch.cuda.device_count()
    count = min(count, 1) if ":" in settings.device else count
    if count != 1:
        return "local", f"there are {count} GPUs; vLLM samples on one" if count else "there is no GPU"
    python = settings.sampler_python or sys.executable
    if not (version := _vllm_of(python, arch)):
        return "local", f"{python} has no vLLM; install tinsmith[vllm], or name another in sampler_python"
    if version == UNKNOWN_ARCH:
        return "local", f"the vLLM of {python} does not support {arch}"
    return "vllm", f"vLLM {version} of {python} takes turns with training on the one GPU; --sampler local turns it off"


def _vllm_of(python: str, arch: str) -> str:
    """The version of an interpreter's vLLM, UNKNOWN_ARCH if that lacks the architecture, or empty without one."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        environment = {**engine_environment(), "VLLM_NO_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": ""}
        completed = subprocess.run(
            [python, "-c", ASK_VLLM, arch], capture_output=True, text=True, check=False, timeout=ASK_VLLM_S,
            env=environment,
        )  # fmt: skip
        words = completed.stdout.split()
        return words[-1] if completed.returncode == 0 and words else ""
    return ""
