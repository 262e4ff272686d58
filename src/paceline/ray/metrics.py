"""The metrics of all replicas as one page, with a label that says whose each is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class _Pages(Collector):
    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                empty = Metric(family.name, family.documentation, family.type)
                merged = families.setdefault(family.name, empty)
                for sample in family.samples:
                    labels = {**sample.labels, LABEL: replica}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()


def merged(pages: Mapping[str, str]) -> bytes:
    """
    Args:
        pages: in Prometheus' text format, by replica.
    """
    registry = CollectorRegistry()
    registry.register(_Pages(pages))
    return generate_latest(registry)
