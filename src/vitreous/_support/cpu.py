"""Work around CPUs that announce AMX and then forbid it.

Some virtual machines list AMX among the features of their CPU but do not allow its instructions. The bfloat16 products
of torch (through oneDNN) trust the list, and the process dies with SIGILL. A child process finds out whether that
happens here, once for each machine and version of torch. The remedy is to make oneDNN use older instructions; it takes
that setting from the environment only, and only before torch is imported. Nothing here imports torch.
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
    f"this CPU announces AMX but forbids it, so bfloat16 products would crash; using {REMEDY} "
    "(set it in your shell for programs of your own)"
)
CRASHES, WORKS = b"crashes", b"works"
PRODUCT = """
import torch
for rows in (1, 64, 197):
    x, w = torch.ones(rows, 192, dtype=torch.bfloat16), torch.ones(768, 192, dtype=torch.bfloat16)
    assert torch.nn.functional.linear(x, w).sum() > 0 and torch.matmul(x, w.T).sum() > 0
"""


def work_around_amx() -> str | None:
    """Lower oneDNN's instruction set where AMX would crash; return a notice for the user, or None if nothing was done.

    It has to be called before torch is imported. A setting of the user's own is left alone.
    """
    if SETTING in os.environ or not amx_crashes():
        return None
    os.environ[SETTING] = LOWERED
    return NOTICE


def amx_crashes() -> bool:
    """Whether a bfloat16 product kills the process on this CPU; always false where AMX is not announced."""
    announced = cpu_features()
    if "amx" not in announced:
        return False
    note = verdict_file(announced)
    if note.is_file():
        return note.read_bytes() == CRASHES
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    child = subprocess.run([sys.executable, "-c", PRODUCT], env=environment, capture_output=True, check=False)
    crashes = child.returncode < 0  # ended by a signal; an ordinary error, such as a missing torch, is another story
    if child.returncode <= 0:
        with contextlib.suppress(OSError):  # without a writable folder, the next command finds it out again
            write_whole(note, CRASHES if crashes else WORKS)
    return crashes


def cpu_features() -> str:
    """What the kernel says about the first CPU; empty where it does not say."""
    try:
        text = Path(os.environ.get("VITREOUS_CPUINFO", "/proc/cpuinfo")).read_text()
    except OSError:
        return ""
    return "\n".join(line for line in text.partition("\n\n")[0].splitlines() if line.startswith(("model", "flags")))


def verdict_file(announced: str) -> Path:
    """Where the verdict for this CPU, kernel and version of torch is kept."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = ""
    key = hashlib.sha256("\n".join([announced, platform.release(), version]).encode()).hexdigest()[:16]
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder) / "vitreous" / f"amx-{key}"
