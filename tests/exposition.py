"""A page of metrics, read with Prometheus's own parser."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


class Exposed:
    """One page, as text and by family."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(text):
            # The parser strips `_total`; Prometheus and Lisa's list do not.
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert name not in self.families, f"{name} comes twice"
            self.families[name] = family

    def value(self, name: str, **labels: str) -> float | None:
        """One sample's value; None if missing."""
        found = [value for known, value in self.samples(name) if known == labels]
        assert len(found) < 2, f"{name} {labels} comes {len(found)} times"
        return found[0] if found else None

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples with at least these labels."""
        return sum(v for known, v in self.samples(name) if labels.items() <= known.items())

    def samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """All samples of a name, such as `x_total` or `y_bucket`."""
        for family in self.families.values():
            for sample in family.samples:
                if sample.name == name:
                    yield sample.labels, sample.value

    def labels(self, name: str) -> set[tuple[str, ...]]:
        """The label sets of a family's samples, sorted, without `le`."""
        return {
            tuple(sorted(sample.labels.keys() - {"le"})) for sample in self.families[name].samples
        }
