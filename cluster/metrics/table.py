"""metrics_table: the catalogue as the table in docs/metrics.md.

python -m legato.cluster.metrics.table
"""

from __future__ import annotations

from legato.cluster.metrics.catalogue import METRICS


def metrics_table() -> str:
    """Markdown, one row a family."""
    rows = ["| name | kind | labels | what it tells |", "|---|---|---|---|"]
    for metric in METRICS:
        name = metric.sample_names[0] if metric.kind == "counter" else metric.name
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(metrics_table())
