"""Work around CPUs that report AMX but do not allow it.

Some virtual machines list AMX among the features of their CPU but do not allow its instructions. The bfloat16 matrix
products of torch (through oneDNN) rely on the list, and the process dies with SIGILL. A child process tests this once
per machine and torch version. The remedy is to restrict oneDNN to older instructions; oneDNN reads that setting only
from the environment, and only before torch is imported. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from vitreous._support.files import write_whole

SETTING = "ONEDNN_MAX_CPU_ISA"
LOWERED = "AVX512_CORE_FP16"  # the newest instructions without AMX
REMEDY = f"{SETTING}={LOWERED}"
NOTICE = (
    f"this CPU reports AMX but does not allow it, so bfloat16 products would crash; using {REMEDY} "
    "(set it in your shell for your own programs)"
)
CRASHES, WORKS = b"crashes", b"works"
PRODUCT = """
import torch
for rows in (1, 64, 197):
    x, w = torch.ones(rows, 192, dtype=torch.bfloat16), torch.ones(768, 192, dtype=torch.bfloat16)
    assert torch.nn.functional.linear(x, w).sum() > 0 and torch.matmul(x, w.T).sum() > 0
"""


def work_around_amx() -> str | None:
    """Lower oneDNN's instruction set if AMX would crash; return a notice for the user, or None if nothing was changed.

    Call it before torch is imported. A setting made by the user is kept.
    """
    if SETTING in os.environ or not amx_crashes():
        return None
    os.environ[SETTING] = LOWERED
    return NOTICE


def amx_crashes() -> bool:
    """Whether a bfloat16 product kills the process on this CPU; always false if the CPU does not report AMX."""
    announced = cpu_features()
    if "amx" not in announced:
        return False
    note = verdict_file(announced)
    if note.is_file():
        return note.read_bytes() == CRASHES
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    child = subprocess.run([sys.executable, "-c", PRODUCT], env=environment, capture_output=True, check=False)
    crashes = child.returncode < 0  # ended by a signal; an ordinary error, such as a missing torch, does not count
    if child.returncode <= 0:
        with contextlib.suppress(OSError):  # without a writable folder, the next command tests again
            write_whole(note, CRASHES if crashes else WORKS)
    return crashes


def cpu_features() -> str:
    """The model and feature flags of the first CPU, as the kernel reports them; empty if it does not."""
    try:
        text = Path(os.environ.get("VITREOUS_CPUINFO", "/proc/cpuinfo")).read_text()
    except OSError:
        return ""
    return "\n".join(line for line in text.partition("\n\n")[0].splitlines() if line.startswith(("model", "flags")))


def verdict_file(announced: str) -> Path:
    """The file that caches the test result for this CPU, kernel and torch version."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = ""
    key = hashlib.sha256("\n".join([announced, platform.release(), version]).encode()).hexdigest()[:16]
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder) / "vitreous" / f"amx-{key}"
