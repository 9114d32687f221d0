#!/usr/bin/env python3
"""Makes a git history of a package's Python files from its wheels: one commit for each folder that a release changes.

    .ci/wheel_history.py REPO WHEEL...

REPO is made anew (bare); the wheels come in the order of the history. The first is one commit. Each release gets a tag.
For `afdpatch bisect` where there is no clone of the package's repository.
"""

import subprocess
import sys
import zipfile
from pathlib import Path


def main(arguments):
    """Makes the repository that the first argument names."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    repo = Path(arguments[0])
    subprocess.run(["git", "init", "--quiet", "--bare", str(repo)], check=True)
    stream = subprocess.Popen(["git", "-C", str(repo), "fast-import", "--quiet"], stdin=subprocess.PIPE)
    out = stream.stdin
    before, mark, when = {}, 0, 1_700_000_000
    for wheel in arguments[1:]:
        with zipfile.ZipFile(wheel) as archive:
            version = Path(wheel).name.split("-")[1]
            after = {
                name: archive.read(name)
                for name in archive.namelist()
                if name.endswith(".py") and "_version" not in name
            }
        groups = {}
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                groups.setdefault("everything" if not before else "/".join(name.split("/")[:-1][:3]), []).append(name)
        for group, names in groups.items():
            mark, when = mark + 1, when + 3600
            message = f"{version}: {group}".encode()
            out.write(
                b"commit refs/heads/main\nmark :%d\ncommitter History <history@example.invalid> %d +0000\n"
                % (mark, when)
            )
            out.write(b"data %d\n%s\n" % (len(message), message))
            for name in names:
                if name in after:
                    out.write(b"M 100644 inline %s\ndata %d\n%s\n" % (name.encode(), len(after[name]), after[name]))
                else:
                    out.write(b"D %s\n" % name.encode())
        out.write(b"reset refs/tags/v%s\nfrom :%d\n\n" % (version.encode(), mark))
        before = after
    out.close()
    return stream.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
