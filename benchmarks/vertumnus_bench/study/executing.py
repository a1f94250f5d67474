"""Simulates many points, in several processes; what comes of them does not depend on how many."""

import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from vertumnus_bench.figures import say
from vertumnus_bench.study.point import Point, Result, Setup
from vertumnus_bench.study.running import run_point
from vertumnus_bench.study.store import Store


class Executor:
    """``run(title, points)`` gives the result of each point, from the store where it is there."""

    def __init__(self, setup: Setup, store: Store, jobs: int) -> None:
        self._setup, self._store, self._jobs = setup, store, jobs

    def run(self, title: str, points: Iterable[Point]) -> dict[Point, Result]:
        """Raises ``StudyError`` for the first point that cannot be simulated; those that are done
        stay in the store."""
        wanted = list(dict.fromkeys(points))
        found = {point: self._store.get(point) for point in wanted}
        left = [point for point in wanted if found[point] is None]
        say(f"{title}: {len(wanted)} simulations, {len(wanted) - len(left)} of them done before")
        began_s = time.perf_counter()
        for done, (point, result) in enumerate(self._simulated(left), 1):
            self._store.put(point, result)
            found[point] = result
            spent_s = time.perf_counter() - began_s
            to_go_s = spent_s / done * (len(left) - done)
            say(
                f"{title}: {done}/{len(left)}, about {to_go_s / 60:.0f} min to go; {point}: mean "
                f"{result.row.mean_ms:,.0f} ms, {result.row.sim_requests_per_s:,.0f} requests/s"
            )
        return {point: result for point, result in found.items() if result is not None}

    def _simulated(self, points: Sequence[Point]) -> Iterator[tuple[Point, Result]]:
        # A process keeps the requests of its last workload and seed.
        points = sorted(points, key=lambda p: (p.workload, p.seed, p.phase_share))
        if self._jobs == 1 or len(points) < 2:
            for point in points:
                yield point, run_point(point, self._setup)
            return
        # Not forked: what a child does must not depend on what its parent did before.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(self._jobs, len(points)), context)
        try:
            futures = {pool.submit(run_point, point, self._setup): point for point in points}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)
