"""Which sources are compiled, and what tells them from others. `deploy/compile.py` loads this file alone."""

from hashlib import sha256
from pathlib import Path
from typing import Final

#: Packages beside this one. All of their modules but the package itself are compiled.
PARTS: Final = ("core", "schedule")

#: Kept beside what was compiled: the digest of what it was made of.
STAMP: Final = "sources.sha256"


def sources(package: Path) -> list[Path]:
    """Return what is compiled of the package `memmgr` in this folder."""
    return [path for part in PARTS for path in sorted((package / part).glob("*.py")) if path.name != "__init__.py"]


def digest(package: Path) -> str:
    """Return what tells these sources from all others."""
    found = sha256()
    for path in sources(package):
        data = path.read_bytes()
        found.update(f"{path.parent.name}/{path.name} {len(data)}\n".encode() + data)
    return found.hexdigest()
