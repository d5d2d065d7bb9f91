"""``python3 -m iserblk.cli``."""

import sys

try:
    from iserblk.cli.main import main
except ModuleNotFoundError as missing:
    if (missing.name or "").startswith("iserblk"):
        raise
    sys.exit(f"iserblk: the Python package {missing.name} is missing: run scripts/setup")

if __name__ == "__main__":
    main()
