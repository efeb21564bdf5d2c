"""``python -m holotrain``."""

import sys

from holotrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
