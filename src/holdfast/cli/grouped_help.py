"""Help of a command with many options: one section for each ``rich_help_panel``, in plain lines like all other help.

typer draws panels only where rich formats the whole help. Here all help is plain, so that it can be read in a pipe and
in any width; the sections are written by ``GroupedCommand``.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class GroupedCommand(TyperCommand):
    """A command whose options are listed by panel; those without a panel come last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then a section of options for each panel in order of appearance."""
        sections: dict[str, list[tuple[str, str]]] = {}
        others: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            panel = getattr(param, "rich_help_panel", None)
            if param.param_type_name == "argument":
                panel = "Arguments"
            if (record := param.get_help_record(ctx)) is not None:
                (sections.setdefault(panel, []) if panel else others).append(record)
        rest = "Other options" if sections.keys() - {"Arguments"} else "Options"
        for title, records in (*sections.items(), (rest, others)):
            with formatter.section(title):
                formatter.write_dl(records)
