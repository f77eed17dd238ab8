"""kilburn/v1 is what `make proto` makes of protos/."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Files of messages alone: empty gRPC modules are not kept.
UNKEPT = {f"{part}_pb2_grpc.{ending}" for part in ("engine", "journal", "ranks") for ending in ("py", "pyi")}


def test_generated_code_is_current(tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'protos'}"),
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
            *(str(path) for path in sorted((ROOT / "protos").rglob("*.proto"))),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    made = {path.name: path.read_text() for path in (tmp_path / "kilburn" / "v1").iterdir() if path.name not in UNKEPT}
    kept = {path.name: path.read_text() for path in (ROOT / "kilburn" / "v1").glob("*_pb2*.py*")}
    assert made.keys() == kept.keys()
    stale = [name for name in made if made[name] != kept[name]]
    assert not stale, "run `make proto`"
