"""Shows a result as a table, JSON or YAML."""

import argparse
from collections.abc import Callable
from typing import Any


def show(arguments: argparse.Namespace, value: Any, render: Callable[[], str]) -> None:
    if arguments.output == "table":
        print(render())
        return
    from everstep_kubectl import documents

    print(documents.write(value, arguments.output))
