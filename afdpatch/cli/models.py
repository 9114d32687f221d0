"""`afdpatch models`: what AFD serves and what it refuses, from the table that the code itself reads."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

DESCRIPTION = "Show the models that AFD serves and the features that it refuses. The servers read the same table."


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "models",
        help="models that AFD serves, features that it refuses",
        description=DESCRIPTION,
        epilog="Example: afdpatch models --format json",
    )
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print both tables; returns the exit code."""
    from afdpatch.patches.models import tables

    table = tables()
    if args.format == "json":
        print(
            json.dumps(
                {
                    "models": [asdict(row) for row in table.models.values()],
                    "refused": [asdict(row) for row in table.refused.values()],
                },
                indent=2,
            )
        )
        return 0
    models = [(row.architecture, ", ".join(row.dtypes), row.notes) for row in table.models.values()]
    refused = [(row.what, row.why) for row in table.refused.values()]
    if args.format == "markdown":
        print(_markdown(("model", "dtypes", "notes"), models))
        print(_markdown(("not supported yet", "because"), refused))
    else:
        _print_table("Models", ("model", "dtypes", "notes"), models)
        _print_table("Not supported yet, refused by name", ("feature", "because"), refused)
    return 0


def _markdown(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"


def _print_table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    view = Table(title=title, title_justify="left")
    for name in header:
        view.add_column(name)
    for row in rows:
        view.add_row(*row)
    Console().print(view)
