"""`python -m afdpatch`: the command line. The guard matters: vLLM's spawned children import this module again."""

import sys

from afdpatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
