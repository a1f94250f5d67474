"""``docs/metrics.md`` and the dashboard name the metrics that there are, no others and all."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families
from vertumnus_router.core.config import ControllerConfig, PolicyConfig
from vertumnus_router.io.metric_help import HELP
from vertumnus_router.io.metrics import RouterMetrics

from tests.router.io.chat_cases import SMOL, write_model
from tests.router.io.fake_decode import FakeDecode, Rooms, prefill_pool
from tests.router.io.harness import Running, run, running, until

DOCS = Path(__file__).parents[3] / "docs"
PROCESS = ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds")
#: name: (type, labels)
Metrics = dict[str, tuple[str, frozenset[str]]]


def documented() -> Metrics:
    row = re.compile(r"^\| `(vertumnus_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
    return {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in row.findall((DOCS / "metrics.md").read_text())
    }


def counted() -> Metrics:
    """What the router counts itself."""
    found: Metrics = {}
    for metric in vars(RouterMetrics()).values():
        if isinstance(metric, MetricWrapperBase):
            name = metric._name + ("_total" if metric._type == "counter" else "")
            found[name] = metric._type, frozenset(metric._labelnames)
    return found


def exposed(text: str) -> Metrics:
    """What a scrape shows of what is read at that moment."""
    found: Metrics = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            ours = sample.name.startswith("vertumnus_") and not sample.name.endswith("_created")
            if ours and family.type in ("gauge", "counter"):
                found[sample.name] = family.type, frozenset(sample.labels)
    return found


async def scrape(it: Running) -> str:
    async with it.client.get("/metrics") as response:
        return await response.text()


def live(folder: Path) -> Metrics:
    """Of a router that has one of everything."""
    found: Metrics = {}
    policy = PolicyConfig(
        queue_timeout_s=2.0, controller=ControllerConfig(mode="observe", window_s=0.2)
    )

    async def scenario() -> None:
        rooms = Rooms()
        tokenizer = str(write_model(folder, SMOL))
        async with (
            prefill_pool(rooms, 2, "1x2", tokenizer_path=tokenizer) as pool,
            FakeDecode(rooms) as decode,
            running(pool.url, decode_urls=(decode.url,), policy=policy) as it,
        ):
            pool.ranks[0].load = pool.ranks[1].load = {"kv_used_tokens": 9}
            await it.ready()
            await until(lambda: it.router.core.decodes(), "the decode server")
            while not it.router.core.corrections():  # the report of a prefill may come too late
                async with await it.chat(stream=True) as response:
                    await response.read()
            await until(lambda: it.router.core.controller.decisions, "a decision")
            found.update(exposed(await scrape(it)))

    run(scenario())
    return found


def test_every_metric_is_documented_with_its_type_and_labels(tmp_path: Path) -> None:
    there = live(tmp_path)
    assert set(HELP) <= set(there), "described, and not there"
    there |= counted()
    told = documented()
    missing = {name: facts for name, facts in there.items() if name not in told}
    assert not missing, "add these to docs/metrics.md"
    assert not set(told) - set(there), "docs/metrics.md has metrics that are not there"
    labels = {name: facts for name, facts in there.items() if told[name] != facts}
    assert not labels, "docs/metrics.md has other types or labels"


def test_what_is_read_at_scrape_time_is_described(tmp_path: Path) -> None:
    read = set(live(tmp_path)) - set(counted())
    assert read == set(HELP), "metric_help.py and live_metrics.py do not agree"


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DOCS / "grafana" / "vertumnus.json").read_text()))


def series() -> dict[str, frozenset[str]]:
    """The labels of everything that can be asked for, by name."""
    found = dict.fromkeys(PROCESS, frozenset[str]())
    for name, (kind, labels) in documented().items():
        for end in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found[name + end] = labels | {"le"} if end == "_bucket" else labels
    return found


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are() -> None:
    known, board = series(), dashboard()
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(targets) > 15
    variables = [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    for expression in [target["expr"] for target in targets] + variables:
        names = set(re.findall(r"\b(?:vertumnus|process)_\w+", expression))
        assert names and names <= set(known), expression
        labels = set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', expression))
        for by in re.findall(r"by \(([^)]*)\)", expression):
            labels |= set(by.split(", "))
        assert labels <= {"instance"}.union(*(known[name] for name in names)), expression
        assert expression.count("(") == expression.count(")"), expression
        assert ("histogram_quantile" in expression) == ("le" in labels), expression


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    """The parts of its schema without which the import fails or panels lie over each other."""
    board = dashboard()
    assert board["schemaVersion"] >= 36
    assert board["title"] and board["uid"] and board["id"] is None
    assert board["templating"]["list"][0]["type"] == "datasource", "the others refer to it"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["title"] and panel["description"]
            refs = [target["refId"] for target in panel["targets"]]
            assert refs and len(set(refs)) == len(refs)
            assert panel["fieldConfig"]["defaults"]["unit"]
