"""Generate the Python stubs in sdk/loraport from protos/, or check that the committed ones are fresh.

`python scripts/gen_protos.py` writes; `python scripts/gen_protos.py --check` exits 1 when a stub differs.
"""

import argparse
import filecmp
import importlib.resources
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = ROOT / "sdk"


def generate(out: Path) -> list[Path]:
    """Write the stubs of every proto below `out`; returns their paths relative to it. Raises SystemExit on error."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{well_known}",
        f"-I{sysconfig.get_paths()['purelib']}",  # google/api/*.proto of googleapis-common-protos
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("gen_protos: protoc failed, see above")
    for path in out.rglob("*_pb2_grpc.py"):
        # A proto without a service yields a stub module without one: leave it out.
        if "class " not in path.read_text():
            path.unlink()
    return sorted(path.relative_to(out) for path in out.rglob("*_pb2*.py*") if "__pycache__" not in path.parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a committed stub is stale")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
        committed = sorted(
            path.relative_to(PACKAGE) for path in PACKAGE.rglob("*_pb2*.py*") if "__pycache__" not in path.parts
        )
        if options.check:
            stale = sorted(set(fresh) ^ set(committed)) + [
                path
                for path in sorted(set(fresh) & set(committed))
                if not filecmp.cmp(Path(scratch) / path, PACKAGE / path, shallow=False)
            ]
            for path in stale:
                print(f"stale stub: sdk/{path} (run `make protos`)", file=sys.stderr)
            return 1 if stale else 0
        for path in set(committed) - set(fresh):
            (PACKAGE / path).unlink()
        for path in fresh:
            target = PACKAGE / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((Path(scratch) / path).read_bytes())
            for folder in (target.parent, target.parent.parent):
                if folder != PACKAGE / "loraport":
                    (folder / "__init__.py").touch()
    print(f"gen_protos: {len(fresh)} files in sdk/loraport")
    return 0


if __name__ == "__main__":
    sys.exit(main())
