"""Make the project's virtual environment: complete, pinned, and only when something changed.

    python3 requirements/environment.py [--venv .venv]

Run by `make env`. What it does is in environment_steps.py; here is what any Python can read, also 2.7 and 3.6.
"""

import os
import sys

if sys.version_info < (3, 8):  # noqa: UP036 (it is for those Pythons)
    sys.stderr.write(
        "error: expected Python 3.10 to 3.13 (vLLM 0.30.0's range), found "
        + sys.version.split()[0]
        + " at "
        + sys.executable
        + "; name one: make env PYTHON=/path/to/python3.12\n"
    )
    sys.exit(2)

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from environment_steps import main

if __name__ == "__main__":
    sys.exit(main())
