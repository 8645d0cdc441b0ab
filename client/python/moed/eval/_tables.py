"""Evaluations for people: a table that is Markdown as well."""
from __future__ import annotations

from typing import List, Optional, Sequence

from moed.eval.evaluate import Evaluation

_COLUMNS = ("checkpoint", "in process", "service", "difference", "bound", "mean dlogp", "max dlogp", "same token", "")


def table(rows: Sequence[Evaluation]) -> str:
    """One line an evaluation below a head: the perplexities, by how much they and the log-probabilities of tokens differ."""
    cells = [list(_COLUMNS)] + [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cells(row: Evaluation) -> List[str]:
    return [row.checkpoint, _number(row.reference_perplexity, ".4f"), f"{row.perplexity:.4f}",
            _number(row.difference_percent, "+.3f", " %"), f"{row.bound_percent:g} %", _number(row.mean_abs_dlogp, ".5f"),
            _number(row.max_abs_dlogp, ".4f"), _number(row.same_token_percent, ".2f", " %"), "ok" if row.passed else "FAILED"]


def _number(value: Optional[float], form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit
