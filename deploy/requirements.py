"""Prints the requirements of some of pyproject.toml's extras, one a line, for `pip install -r`.

An image installs these before it sees the source, so that a change of the source rebuilds one small layer and not torch.
Knows pyproject.toml; asks nobody, installs nothing.

    python requirements.py pyproject.toml            what every process needs
    python requirements.py pyproject.toml gateway    that, and the extra's
    python requirements.py pyproject.toml --build    what building the wheel needs
"""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_BUILD: Final = "--build"


def requirements(pyproject: str, wanted: Sequence[str]) -> list[str]:
    """Return the requirements of the text of a pyproject.toml: the project's own, then those of each wanted extra.

    Raises:
        ValueError: there is no such extra, or it names the project itself, which would need the source.
    """
    table = tomllib.loads(pyproject)
    if list(wanted) == [_BUILD]:
        return list(table["build-system"]["requires"])
    project = table["project"]
    extras = project["optional-dependencies"]
    lines = list(project["dependencies"])
    for extra in wanted:
        if extra not in extras:
            raise ValueError(f"pyproject.toml has no extra {extra!r}; it has {', '.join(sorted(extras))}")
        lines += extras[extra]
    own = [line for line in lines if line.partition("[")[0].strip() == project["name"]]
    if own:
        raise ValueError(f"{own[0]} names the project itself; name the extras that it stands for")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the requirements that the command line asks for."""
    path, *wanted = arguments
    try:
        lines = requirements(Path(path).read_text(encoding="utf-8"), wanted)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
