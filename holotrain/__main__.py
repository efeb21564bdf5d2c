"""``python -m holotrain``."""

import os
import sys

if __name__ == "__main__":
    # python -m looks in the working directory first, so that each module that is missing would be taken from there.
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]

    from holotrain.cli import main

    sys.exit(main())
