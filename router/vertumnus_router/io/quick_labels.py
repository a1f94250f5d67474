"""Prometheus metrics whose children are found at once: to look one up checks, copies and locks,
which takes longer than to count, and every request does it several times."""

from typing import Any

import prometheus_client


class Counter(prometheus_client.Counter):
    def labels(self, *labelvalues: Any, **labelkwargs: Any) -> Any:
        child = self._metrics.get(labelvalues)
        return super().labels(*labelvalues, **labelkwargs) if child is None else child


class Histogram(prometheus_client.Histogram):
    def labels(self, *labelvalues: Any, **labelkwargs: Any) -> Any:
        child = self._metrics.get(labelvalues)
        return super().labels(*labelvalues, **labelkwargs) if child is None else child
