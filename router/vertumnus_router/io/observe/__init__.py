"""What operators learn of requests after the fact: timeline, request log, traces."""
