"""Tell the rank runtime that what happened to the tree so far has been handed to subscribers."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def tell_published(result: None, publisher: Any) -> None:
    seams.rank.on_events_published()


PATCH = Patch(
    id="events-published",
    target="sglang.srt.managers.scheduler_components.kv_events_publisher."
    "SchedulerKvEventsPublisher.publish_kv_events",
    kind=Kind.AFTER,
    hook=tell_published,
    processes=(Process.RANK,),
    why="who asks a rank to delete a block says which batches of events it has seen; the rank "
    "must count them alike",
    upstream="batches are counted by the publisher's thread, later",
    remove_when="the tree has a version that its events carry",
    signature=("self",),
    fingerprint="ac07b39e4177bd21",
)
