"""Counts how much of a mapped file is in memory."""

import re
from pathlib import Path


def mapped_bytes(file: Path) -> int:
    """How much of the file this process has in memory, as the kernel counts it."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith(str(file))
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
