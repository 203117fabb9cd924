"""Say in one line what is missing, before `make setup` spends minutes."""

import sys


def main() -> int:
    if sys.version_info < (3, 11):
        found = ".".join(map(str, sys.version_info[:3]))
        print(
            f"loraport needs Python 3.11 or newer, this is {found}; run `make setup PYTHON=python3.11`", file=sys.stderr
        )
        return 2
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        print("Python's venv module is missing; on Debian or Ubuntu: apt-get install python3-venv", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
