"""``python3 -m iserblk.cli``."""

from iserblk.cli.main import main

if __name__ == "__main__":
    main()
