"""One text for Prometheus of those of all replicas."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_OF_THE_FRONT = "lowbit:http_"


def merged(front: str, replicas: Mapping[str, str]) -> str:
    """front: its own text, of which HTTP's metrics are taken. replicas: by name, what each tells:
    the rest, with the label `replica`."""
    families: dict[str, Metric] = {}
    for family in text_string_to_metric_families(front):
        if family.name.startswith(_OF_THE_FRONT):
            families[family.name] = family
    for name, text in sorted(replicas.items()):
        for family in text_string_to_metric_families(text):
            if family.name.startswith(_OF_THE_FRONT):
                continue
            whole = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "replica": name}
                whole.add_sample(sample.name, labels, sample.value)
    registry = CollectorRegistry()
    registry.register(_Given(list(families.values())))
    return generate_latest(registry).decode()


class _Given(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
