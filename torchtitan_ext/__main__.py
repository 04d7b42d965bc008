"""``python -m torchtitan_ext``, the same as ``torchtitan-ext``."""

from torchtitan_ext.cli.app import main

if __name__ == "__main__":
    main()
