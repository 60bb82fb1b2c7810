"""Dashboard and alert rules ask for what is exported, and the metrics' page names it all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_worker import FakeWorker
from prometheus_client.parser import text_string_to_metric_families as parse
from promql import selectors_of
from router_service import Service, ask, collect

from legato.cluster.metrics.catalogue import METRICS
from legato.cluster.metrics.exposition import exposition
from legato.cluster.metrics.table import metrics_table

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/legato.json").read_text())
RULES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus/legato-alerts.yml").read_text())
SCRAPE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
SCRAPERS_OWN = {"job", "instance"}
PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
# By sample name the labels that it may have.
EXPORTED = {
    name: {*metric.labels, *(["le"] if name.endswith("_bucket") else [])}
    for metric in METRICS
    for name in metric.sample_names
} | {name: set() for name in PROCESS}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def plain(query: str) -> str:
    """Grafana's variables replaced."""
    return query.replace("$__rate_interval", "5m").replace("$job", "legato")


def queries() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    return [plain(query) for query in found]


def wrong(query: str) -> list[str]:
    """What the query names that nobody exports."""
    selectors = selectors_of(query)
    found = [name for name in selectors.metrics if name not in EXPORTED]
    known = set().union(*(EXPORTED.get(name, set()) for name in selectors.metrics)) | SCRAPERS_OWN
    for name, labels in selectors.metrics.items():
        found += sorted(labels - EXPORTED.get(name, set()) - SCRAPERS_OWN)
    return found + sorted(selectors.groupings - known)


@pytest.mark.parametrize("query", queries())
def test_every_query_asks_for_what_is_exported(query: str) -> None:
    assert wrong(query) == []


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("legato_ready_x", ["legato_ready_x"]),
        ('sum by (worker) (rate(legato_requests_total{outcome="x"}[5m]))', ["worker"]),
        ('legato_requests_total{outcom="x"}', ["outcom"]),
        ("rate(legato_requests[5m])", ["legato_requests"]),
        ("histogram_quantile(0.9, sum by (le) (rate(legato_phase_seconds_sum[5m])))", ["le"]),
        ('legato_ready{job="x"} / on (worker) legato_ready', ["worker"]),
    ],
)
def test_a_wrong_query_is_found(query: str, found: list[str]) -> None:
    assert wrong(query) == found


@pytest.mark.parametrize(
    "query",
    [
        "sum(legato_ready",
        "legato_ready)",
        "legato_ready{job=}",
        "rat(legato_ready[5m])",
        "1 + 1",
        "a ? b",
    ],
)
def test_a_broken_query_is_found(query: str) -> None:
    with pytest.raises(ValueError, match=re.escape(query.split("(")[0][:3])):
        selectors_of(query)


def test_every_metric_of_our_own_is_on_the_dashboard() -> None:
    asked = {name for query in queries() for name in selectors_of(query).metrics}
    shown = {metric.name for metric in METRICS if asked & {*metric.sample_names}}
    ours = {metric.name for metric in METRICS if metric.name.startswith("legato_")}
    # The mean of an answer is what the conventions ask for; the gaps show more. Names are no value.
    assert ours - shown == {"legato_time_per_output_token_seconds", "legato_router_info"}


def test_the_dashboard_is_sound() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len({*ids})
    assert {v["name"] for v in DASHBOARD["templating"]["list"]} == {"datasource", "job"}
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not places & cells, f"{panel['title']} lies over another"
        places |= cells
    for panel in panels():
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(refs) == len({*refs})
        assert all('job="$job"' in target["expr"] for target in panel["targets"])


def test_every_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    names = [rule["alert"] for rule in rules]
    assert len(names) == len({*names})
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["alert"].startswith("Legato")


def test_the_scrape_configuration_names_the_rules_and_the_route() -> None:
    [job] = SCRAPE["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    folder = ROOT / "deploy/prometheus"
    assert [name for name in SCRAPE["rule_files"] if not (folder / name).exists()] == []


def test_the_page_has_the_table_of_the_code() -> None:
    assert metrics_table() in (ROOT / "docs/metrics.md").read_text(), (
        "write it anew: python -m legato.cluster.metrics.table"
    )


async def test_what_is_exported_is_what_the_catalogue_says() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        await collect(service, ask("hello", 5))
        body, _ = exposition(service.router)
    samples = [sample for family in parse(body.decode()) for sample in family.samples]
    told = [s for s in samples if not s.name.startswith("process_")]
    assert {s.name for s in told} <= EXPORTED.keys()
    for sample in told:
        assert {*sample.labels} == EXPORTED[sample.name]
    assert {s.name for s in samples} >= PROCESS
