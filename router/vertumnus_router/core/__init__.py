"""Pure policy: ``ControlPlane.on_event(event, now) -> effects``. No I/O, no clock, no threads."""
