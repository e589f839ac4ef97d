"""The agent's own metrics in Prometheus' text format, under Istio's exact names.

prometheus_client appends `_total` to every counter; Istio's names (`istio_agent_xds_proxy_requests`, ...) do not all end
so, and the DNS server counts some 100,000 times a second, where a lock per increment shows. So counters are plain
integers here, and this module writes the exposition.

Source of names: istio/istio: pilot/cmd/pilot-agent/metrics/metrics.go, pkg/istio-agent/metrics/metrics.go,
pkg/dns/client/monitoring.go, security/pkg/nodeagent/cache/monitoring.go, security/pkg/monitoring/monitoring.go.
"""

from __future__ import annotations

import bisect
import gc
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

PREFIX = "istio_agent_"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _text(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


class Counter:
    """A counter without labels: add to `value`."""

    __slots__ = ("help", "name", "value")
    kind = "counter"

    def __init__(self, name: str, help_text: str) -> None:
        self.name, self.help, self.value = name, help_text, 0.0

    def samples(self) -> Iterator[tuple[str, str, float]]:
        yield self.name, "", self.value


class Gauge(Counter):
    """A gauge; `function`, if set, gives the value when scraped (None: no sample)."""

    __slots__ = ("function",)
    kind = "gauge"

    def __init__(self, name: str, help_text: str, function: Callable[[], float | None] | None = None) -> None:
        super().__init__(name, help_text)
        self.function = function

    def samples(self) -> Iterator[tuple[str, str, float]]:
        value = self.value if self.function is None else self.function()
        if value is not None:
            yield self.name, "", value


class Labelled:
    """Counters or gauges by one label's value; a series appears with its first use."""

    __slots__ = ("functions", "help", "kind", "label", "name", "values")

    def __init__(self, name: str, help_text: str, label: str, kind: str = "counter") -> None:
        self.name, self.help, self.label, self.kind = name, help_text, label, kind
        self.values: dict[str, float] = {}
        self.functions: dict[str, Callable[[], float]] = {}

    def add(self, label: str, amount: float = 1) -> None:
        self.values[label] = self.values.get(label, 0) + amount

    def set(self, label: str, value: float) -> None:
        self.values[label] = value

    def set_function(self, label: str, function: Callable[[], float]) -> None:
        """The series' value is computed when it is scraped."""
        self.functions[label] = function

    def samples(self) -> Iterator[tuple[str, str, float]]:
        values = {**self.values, **{label: function() for label, function in self.functions.items()}}
        for value in sorted(values):
            yield self.name, f'{{{self.label}="{_escape(value)}"}}', values[value]


class Histogram:
    """A histogram with fixed upper bounds."""

    __slots__ = ("bounds", "counts", "help", "name", "sum")
    kind = "histogram"

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help_text, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self) -> Iterator[tuple[str, str, float]]:
        total = 0
        for bound, count in zip((*map(_text, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f"{self.name}_bucket", f'{{le="{bound}"}}', total
        yield f"{self.name}_sum", "", self.sum
        yield f"{self.name}_count", "", total


Metric = Counter | Gauge | Labelled | Histogram
M = TypeVar("M", Counter, Gauge, Labelled, Histogram)


class Metrics:
    """Every metric of one agent."""

    def __init__(self) -> None:
        self._all: list[Metric] = []
        self.started = time.monotonic()
        self.startup_duration_seconds = self._gauge(
            "startup_duration_seconds", "The time from the process starting to being marked ready."
        )
        self.scrapes_total = self._counter("scrapes_total", "The total number of scrapes.")
        self.scrape_failures_total = self._labelled(
            "scrape_failures_total", "The total number of failed scrapes.", "type"
        )
        self.istiod_connection_failures = self._counter(
            "istiod_connection_failures", "The total number of connection failures to Istiod"
        )
        self.istiod_connection_terminations = self._labelled(
            "istiod_connection_terminations", "The total number of connection errors to Istiod", "type"
        )
        self.envoy_connection_terminations = self._labelled(
            "envoy_connection_terminations", "The total number of connection errors from envoy", "type"
        )
        self.xds_proxy_requests = self._counter("xds_proxy_requests", "The total number of Xds Proxy Requests")
        self.xds_proxy_responses = self._counter("xds_proxy_responses", "The total number of Xds Proxy Responses")
        self.dns_requests_total = self._counter("dns_requests_total", "Total number of DNS requests.")
        self.dns_upstream_requests_total = self._counter(
            "dns_upstream_requests_total", "Total number of DNS requests forwarded to upstream."
        )
        self.dns_upstream_failures_total = self._counter(
            "dns_upstream_failures_total", "Total number of DNS requests failed to forward to upstream."
        )
        self.dns_upstream_request_duration_seconds = self._add(
            Histogram(
                PREFIX + "dns_upstream_request_duration_seconds",
                "Total time in seconds Istio takes to get DNS response from upstream.",
                (0.001, 0.005, 0.01, 0.1, 1, 5),
            )
        )
        self.dns_malformed_total = self._counter("dns_malformed_total", "DNS packets that were dropped as malformed.")
        self.outgoing_latency = self._labelled(
            "outgoing_latency",
            "The latency of outgoing requests (e.g. to a token exchange server, CA, etc.) in milliseconds.",
            "request_type",
        )
        self.num_outgoing_requests = self._labelled(
            "num_outgoing_requests",
            "Number of total outgoing requests (e.g. to a token exchange server, CA, etc.)",
            "request_type",
        )
        self.num_failed_outgoing_requests = self._labelled(
            "num_failed_outgoing_requests",
            "Number of failed outgoing requests (e.g. to a token exchange server, CA, etc.)",
            "request_type",
        )
        self.num_outgoing_retries = self._labelled(
            "num_outgoing_retries",
            "Number of outgoing retry requests (e.g. to a token exchange server, CA, etc.)",
            "request_type",
        )
        self.num_file_watcher_failures_total = self._counter(
            "num_file_watcher_failures_total", "Number of times file watcher failed to add watchers"
        )
        self.num_file_secret_failures_total = self._counter(
            "num_file_secret_failures_total", "Number of times secret generation failed for files"
        )
        self.wasm_cache_entries = self._gauge("wasm_cache_entries", "number of Wasm remote fetch cache entries.")
        self.wasm_cache_lookup_count = self._labelled(
            "wasm_cache_lookup_count", "number of Wasm remote fetch cache lookups.", "hit"
        )
        self.wasm_remote_fetch_count = self._labelled(
            "wasm_remote_fetch_count",
            "number of Wasm remote fetches and results, including success, download failure, and checksum mismatch.",
            "result",
        )
        self.wasm_config_conversion_count = self._labelled(
            "wasm_config_conversion_count",
            "number of Wasm config conversions and results, including success, no remote load, marshal failure, remote fetch"
            " failure, miss remote fetch hint.",
            "result",
        )
        self.wasm_config_conversion_duration = self._add(
            Histogram(
                PREFIX + "wasm_config_conversion_duration",
                "Total time in milliseconds istio-agent spends on converting remote load in Wasm config.",
                [2.0**n for n in range(15)],
            )
        )
        self.cert_expiry_seconds = self._labelled(
            "cert_expiry_seconds",
            "The time remaining, in seconds, before the certificate chain will expire. A negative value indicates the cert is expired.",
            "resource_name",
            kind="gauge",
        )
        self.pilot_total_xds_rejects = self._labelled(
            "pilot_total_xds_rejects", "Total number of XDS responses from pilot rejected by proxy.", "type"
        )
        self.pilot_xds_recv_max = self._gauge("pilot_xds_recv_max", "The max size of received xds requests in bytes.")

        self.pilot_xds_send_time = self._add(
            Histogram(
                PREFIX + "pilot_xds_send_time",
                "Total time in seconds the agent takes to send generated configuration.",
                (0.01, 0.1, 1, 3, 5, 10, 20, 30),
            )
        )
        self.pilot_xds_expired_nonce = self._labelled(
            "pilot_xds_expired_nonce", "Total number of XDS requests with an expired nonce.", "type"
        )

    def _add(self, metric: M) -> M:
        self._all.append(metric)
        return metric

    def _counter(self, name: str, help_text: str) -> Counter:
        return self._add(Counter(PREFIX + name, help_text))

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return self._add(Gauge(PREFIX + name, help_text))

    def _labelled(self, name: str, help_text: str, label: str, kind: str = "counter") -> Labelled:
        return self._add(Labelled(PREFIX + name, help_text, label, kind))

    def render(self) -> str:
        """The exposition in text format 0.0.4."""
        lines: list[str] = []
        for metric in (*self._all, *_runtime_metrics()):
            samples = [f"{name}{labels} {_text(value)}" for name, labels, value in metric.samples()]
            if samples:
                lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *samples]
        return "\n".join(lines) + "\n"


def _runtime_metrics() -> Iterator[Metric]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    values: list[tuple[type[Counter], str, str, float]] = [
        (
            Counter,
            PREFIX + "process_cpu_seconds_total",
            "Total user and system CPU time spent in seconds.",
            usage.ru_utime + usage.ru_stime,
        ),
        (Gauge, PREFIX + "process_open_fds", "Number of open file descriptors.", len(os.listdir("/proc/self/fd"))),
        (
            Gauge,
            PREFIX + "process_max_fds",
            "Maximum number of open file descriptors.",
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ),
    ]
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    page = os.sysconf("SC_PAGE_SIZE")
    ticks = os.sysconf("SC_CLK_TCK")
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / ticks
    values += [
        (Gauge, PREFIX + "process_virtual_memory_bytes", "Virtual memory size in bytes.", int(fields[20])),
        (Gauge, PREFIX + "process_resident_memory_bytes", "Resident memory size in bytes.", int(fields[21]) * page),
        (
            Gauge,
            PREFIX + "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            time.time() - since_boot,
        ),
        (
            Counter,
            PREFIX + "python_gc_collections_total",
            "Collections of the garbage collector.",
            sum(item["collections"] for item in gc.get_stats()),
        ),
    ]
    for kind, name, help_text, value in values:
        metric = kind(name, help_text)
        metric.value = float(value)
        yield metric
    info = Labelled(PREFIX + "python_info", "Python platform information.", "version", kind="gauge")
    info.set(platform.python_version(), 1)
    yield info
