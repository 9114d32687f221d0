"""`python -m afdpatch`: the command line. The guard matters: vLLM's spawned children import this module again."""

import sys

if __name__ == "__main__":
    try:
        from afdpatch.cli import main

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
