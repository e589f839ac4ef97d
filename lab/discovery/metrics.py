"""Discovery's own numbers, under istiod's names.

Counters are plain integers: prometheus_client would append ``_total``, which istiod's names do not have. It writes the
exposition when it is asked for, and is imported only then.
Source of names: istio/istio: pilot/pkg/xds/monitoring.go, pilot/pkg/model/push_context.go, security/pkg/server/ca/monitoring.go.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

_BUCKETS = (0.01, 0.1, 0.5, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0)

HELP = {
    "pilot_info": "Pilot version and build information.",
    "pilot_xds": "Number of endpoints connected to this pilot using XDS.",
    "pilot_services": "Total services known to pilot.",
    "pilot_xds_pushes": "Pilot build and send errors for lds, rds, cds and eds.",
    "pilot_total_xds_rejects": "Total number of XDS responses from pilot rejected by proxy.",
    "pilot_push_triggers": "Total number of times a push was triggered, labeled by reason for the push.",
    "pilot_inbound_updates": "Total number of updates received by pilot.",
    "pilot_debounce_time": "Delay in seconds between the first config enters debouncing and the merged push.",
    "pilot_pushcontext_init_seconds": "Total time in seconds Pilot takes to init pushContext.",
    "pilot_xds_push_time": "Total time in seconds Pilot takes to push lds, rds, cds and eds.",
    "pilot_proxy_convergence_time": "Delay in seconds between config change and a proxy having acknowledged all of it.",
    "citadel_server_csr_count": "The number of CSRs received by Citadel server.",
    "citadel_server_success_cert_issuance_count": "The number of certificates issuances that have succeeded.",
    "citadel_server_authentication_failure_count": "The number of authentication failures.",
    "citadel_server_csr_sign_err_count": "The number of errors occurred when signing the CSR.",
}

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Cumulative buckets in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(_BUCKETS, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> Iterator[tuple[str, int]]:
        total = 0
        for bound, count in zip((*(str(b) for b in _BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            yield bound, total


class Metrics:
    """All numbers of one discovery server."""

    def __init__(self) -> None:
        self.counters: dict[str, dict[Labels, int]] = {}
        self.gauges: dict[str, dict[Labels, float]] = {}
        self.histograms: dict[str, Histogram] = {}

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        series = self.counters.setdefault(name, {})
        key = tuple(sorted(labels.items()))
        series[key] = series.get(key, 0) + amount

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.gauges.setdefault(name, {})[tuple(sorted(labels.items()))] = value

    def observe(self, name: str, seconds: float) -> None:
        self.histograms.setdefault(name, Histogram()).observe(seconds)

    def collect(self) -> Iterator[Any]:
        """Metric families for prometheus_client."""
        from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, UntypedMetricFamily

        for family, tables in ((UntypedMetricFamily, self.counters), (GaugeMetricFamily, self.gauges)):
            for name, series in tables.items():
                metric = family(name, HELP.get(name, name))
                for labels, value in series.items():
                    metric.add_sample(name, dict(labels), value)
                yield metric
        for name, histogram in self.histograms.items():
            yield HistogramMetricFamily(
                name, HELP.get(name, name), buckets=list(histogram.cumulative()), sum_value=histogram.sum
            )

    def exposition(self) -> bytes:
        """The text format, as ``/metrics`` serves it."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        out: bytes = generate_latest(registry)
        return out
